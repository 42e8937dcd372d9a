"""The Trainer callback under the real Trainer: a tiny model made here, no network."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import tensortap as tap

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tensortap.monitoring.integrations import TapTrainerCallback  # noqa: E402

STEPS = 4


@pytest.fixture(autouse=True)
def state_of_our_own() -> Iterator[None]:
    """Both libraries keep their settings in the process and in its environment."""
    state = pytest.importorskip("accelerate.state").AcceleratorState
    with mock.patch.dict(os.environ):
        state._reset_state(reset_partial_state=True)
        yield
    state._reset_state(reset_partial_state=True)


def tiny() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.0,
    )
    return transformers.LlamaForCausalLM(config)


class Data(torch.utils.data.Dataset[Any]):
    """Eight rows; reading one of them may fail."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.rows = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(1))
        self.fail_at = fail_at

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.fail_at:
            raise RuntimeError("row 5 is cursed")
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Sequential(transformers.Trainer):
    """Without shuffling, so that a batch is known by its position."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(dataset or self.train_dataset)


class Norms(transformers.TrainerCallback):
    """Writes down the gradients that the optimizer really sees."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        grads = [p.grad.norm() for p in kwargs["model"].parameters() if p.grad is not None]
        self.norms.append(torch.stack(grads).norm().item())


def trainer(folder: Path, model: Any, *callbacks: Any, data: Any = None, **options: Any) -> Any:
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        **options,
    }
    args = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    made = Sequential(
        model=model,
        args=args,
        train_dataset=data or Data(),
        eval_dataset=Data(),
        callbacks=list(callbacks),
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def train(run: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        run.train(**options)


def records(run: tap.Recording, **wanted: str) -> list[tap.Record]:
    return [r for r in run.records if all(getattr(r, k) == v for k, v in wanted.items())]


def hooks(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def test_it_watches_a_training(tmp_path) -> None:
    model, plain = tiny(), tiny()
    before = hooks(model)
    callback = TapTrainerCallback(tmp_path / "run", every=1)
    train(trainer(tmp_path, model, callback, eval_strategy="steps", eval_steps=1, max_steps=6))
    train(trainer(tmp_path, plain, eval_strategy="steps", eval_steps=1, max_steps=6))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert hooks(model) == before
    assert callback.watcher.failure is None

    run = tap.open(tmp_path / "run")
    assert run.status == "complete"
    # 8 rows, one a batch, two batches a step: 4 steps an epoch; evaluation is not among them.
    for port in ("output", "grad_output"):
        found = records(run, layer="model.layers.1", port=port)
        assert sorted((r.epoch, r.batch, r.call) for r in found) == [
            (step // 4, step, call) for step in range(6) for call in range(2)
        ]


def test_gradients_are_those_that_the_optimizer_sees(tmp_path) -> None:
    norms = Norms()
    callback = TapTrainerCallback(tmp_path / "run", every=1)
    train(trainer(tmp_path, tiny(), callback, norms, max_grad_norm=0.1))
    run = tap.open(tmp_path / "run")
    found = [
        math.hypot(*(r.summary.l2 for r in records(run, port="grad_param") if r.batch == step))
        for step in range(STEPS)
    ]
    assert norms.norms == pytest.approx([0.1] * STEPS, rel=1e-3)  # clipped
    assert found == pytest.approx(norms.norms, rel=1e-5)


def test_a_compiled_model_in_half_precision_is_heard(tmp_path) -> None:
    norms, model, plain = Norms(), tiny(), tiny()
    options = {
        "torch_compile": True,
        "torch_compile_backend": "aot_eager",
        "bf16": True,
        "max_steps": 2,
    }
    callback = TapTrainerCallback(tmp_path / "run", every=1)
    train(trainer(tmp_path, model, callback, norms, **options))
    train(trainer(tmp_path, plain, **options))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    run = tap.open(tmp_path / "run")
    for port in ("output", "grad_output"):
        found = records(run, layer="model.layers.1", port=port)
        assert [(r.batch, r.call) for r in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = [
        math.hypot(*(r.summary.l2 for r in records(run, port="grad_param") if r.batch == step))
        for step in range(2)
    ]
    assert found == pytest.approx(norms.norms, rel=1e-5)


def test_what_is_logged_stands_at_the_step_it_is_of(tmp_path) -> None:
    run = trainer(tmp_path, tiny(), TapTrainerCallback(tmp_path / "run", every=1))
    train(run)
    said = {entry["step"] - 1: entry["loss"] for entry in run.state.log_history if "loss" in entry}
    recording = tap.open(tmp_path / "run")
    kept = {r.batch: r.summary.mean for r in records(recording, layer="loss", port="scalar")}
    assert kept == pytest.approx(said) and set(kept) == {0, 1, 2, 3}
    rates = records(recording, layer="learning_rate", port="scalar")
    assert len(rates) == 4
    assert not records(recording, layer="epoch")


def test_what_is_logged_between_written_steps_is_not_lost(tmp_path) -> None:
    run = trainer(tmp_path, tiny(), TapTrainerCallback(tmp_path / "run", every=3), logging_steps=2)
    train(run)
    recording = tap.open(tmp_path / "run")
    kept = {r.batch: r.summary.mean for r in records(recording, layer="loss", port="scalar")}
    said = {entry["step"]: entry["loss"] for entry in run.state.log_history if "loss" in entry}
    assert kept == pytest.approx({1: said[2], 3: said[4]})


def test_sinks_get_our_norm_and_the_trainers(tmp_path) -> None:
    got: list[Any] = []
    callback = TapTrainerCallback(
        tmp_path / "run", every=1, sinks=lambda values, step: got.append(values)
    )
    train(trainer(tmp_path, tiny(), callback, max_grad_norm=0.1))
    assert got[1]["grad_norm"] == pytest.approx(0.1, rel=1e-3)  # after clipping
    assert got[1]["scalar/grad_norm"] > 0.2  # before
    assert got[1]["loss"] > 0
    assert got[1]["output/model.layers.0/nan"] == 0


def test_an_exception_closes_inside_with(tmp_path) -> None:
    model = tiny()
    before = hooks(model)
    callback = TapTrainerCallback(tmp_path / "run", every=1)
    run = trainer(tmp_path, model, callback, data=Data(fail_at=5))
    with pytest.raises(RuntimeError, match="cursed"), callback:
        train(run)
    assert hooks(model) == before
    recording = tap.open(tmp_path / "run")
    assert recording.status == "failed"
    assert recording.manifest.failure == "training raised RuntimeError: row 5 is cursed"
    assert {r.batch for r in records(recording, port="grad_param")} == {0, 1}


def test_a_run_that_broke_off_is_closed_by_the_next(tmp_path) -> None:
    model = tiny()
    before = hooks(model)
    callback = TapTrainerCallback(tmp_path / "run", every=1)
    with pytest.raises(RuntimeError, match="cursed"):
        train(trainer(tmp_path, model, callback, data=Data(fail_at=5)))
    train(trainer(tmp_path, model, callback))
    assert hooks(model) == before
    first, second = tap.open(tmp_path / "run"), tap.open(tmp_path / "run-2")
    assert (first.status, second.status) == ("failed", "complete")
    assert first.manifest.failure == "training broke off and began anew"


def test_a_resumed_training_counts_on(tmp_path) -> None:
    train(trainer(tmp_path, tiny(), max_steps=2, save_strategy="steps", save_steps=2))
    callback = TapTrainerCallback(tmp_path / "run", every=1)
    run = trainer(tmp_path, tiny(), callback, max_steps=5)
    train(run, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    found = records(tap.open(tmp_path / "run"), layer="model.layers.0", port="output")
    assert [(r.epoch, r.batch) for r in found if r.call == 0] == [(0, 2), (0, 3), (1, 4)]


def test_a_monitor_goes_along(tmp_path) -> None:
    model = tiny()
    before = hooks(model)
    layers = {"model.layers.0": None, "model.layers.1": {"record_type": "epoch_full"}}
    monitor = tap.Monitor(model, layers, [1], str(tmp_path / "seen"), batch_indices=[3])
    run = trainer(
        tmp_path,
        model,
        TapTrainerCallback(monitor=monitor),
        max_steps=-1,
        num_train_epochs=2,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
    )
    train(run)
    assert hooks(model) == before and monitor.closed
    seen = tap.open(tmp_path / "seen")
    # The loader's batches one by one, two a step; evaluation is not heard.
    assert [(r.epoch, r.batch) for r in records(seen, layer="model.layers.0")] == [(1, 3)]
    full = records(seen, layer="model.layers.1")
    assert [(r.epoch, r.batch, r.call) for r in full] == [(1, b, 0) for b in range(8)]


def test_a_monitor_knows_the_batches_of_a_resumed_epoch(tmp_path) -> None:
    train(trainer(tmp_path, tiny(), max_steps=2, save_strategy="steps", save_steps=2))
    model = tiny()
    layers = {"model.layers.0": {"record_type": "epoch_full"}}
    monitor = tap.Monitor(model, layers, [0], str(tmp_path / "seen"))
    run = trainer(tmp_path, model, TapTrainerCallback(monitor=monitor))
    train(run, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert [r.batch for r in tap.open(tmp_path / "seen").records] == [4, 5, 6, 7]
