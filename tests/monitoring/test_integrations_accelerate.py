"""The tracker and the sink under a real Accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tensortap as tap
from support import Net

accelerate = pytest.importorskip("accelerate")

from tensortap.errors import OptionError  # noqa: E402
from tensortap.monitoring.integrations import AccelerateSink, TapTracker  # noqa: E402


@pytest.fixture(autouse=True)
def state_of_our_own() -> Iterator[None]:
    """Both libraries keep their settings in the process and in its environment."""
    state = pytest.importorskip("accelerate.state").AcceleratorState
    with mock.patch.dict(os.environ):
        state._reset_state(reset_partial_state=True)
        yield
    state._reset_state(reset_partial_state=True)


def records(run: tap.Recording, **wanted: str) -> list[tap.Record]:
    return [r for r in run.records if all(getattr(r, k) == v for k, v in wanted.items())]


def hooks(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def made(log_with: Any, **options: Any) -> Any:
    return accelerate.Accelerator(
        cpu=True, log_with=log_with, gradient_accumulation_steps=2, **options
    )


def train(accelerator: Any, model: Any, epochs: int = 2, fail: bool = False) -> list[float]:
    """Two steps an epoch, of two micro-batches; the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randint(0, 16, (8, 4), generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    losses = []
    torch.manual_seed(2)
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
                if accelerator.sync_gradients:
                    losses.append(loss.item())
                    accelerator.log({"loss": loss.item()}, step=len(losses))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if fail:
            raise RuntimeError("cursed")
    return losses


def net() -> Net:
    torch.manual_seed(0)
    return Net(blocks=2)


def test_the_tracker_is_a_watch(tmp_path) -> None:
    model, plain = net(), net()
    before = hooks(model)
    tracker = TapTracker(model, tmp_path / "run", every=1)
    accelerator = made(tracker)
    accelerator.init_trackers("project", config={"lr": 0.1})
    assert accelerator.get_tracker("tensortap", unwrap=True) is tracker.tracker
    losses = train(accelerator, model)
    accelerator.end_training()
    assert train(made(None), plain) == losses
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert hooks(model) == before

    run = tap.open(tmp_path / "run")
    assert run.status == "complete"
    assert "Configuration: lr=0.1." in run.manifest.notes
    found = records(run, layer="blocks.1", port="output")
    assert [(r.batch, r.call) for r in found] == [(s, c) for s in range(4) for c in range(2)]
    kept = records(run, layer="loss", port="scalar")
    assert [r.batch for r in kept] == [0, 1, 2, 3]
    assert [r.summary.mean for r in kept] == pytest.approx(losses)


def test_the_model_may_come_later_and_epochs_are_told(tmp_path) -> None:
    tracker = TapTracker(path=tmp_path / "run", every=1)
    accelerator = made(tracker)
    accelerator.init_trackers("project")
    with pytest.raises(OptionError, match=r"tracker\.start\(model\)"):
        accelerator.log({"loss": 1.0})
    model = net()
    tracker.start(model)
    tracker.epoch(3)
    train(accelerator, model, epochs=1)
    accelerator.end_training()
    found = records(tap.open(tmp_path / "run"), layer="blocks.0", port="output")
    assert {r.epoch for r in found} == {3}


def test_an_exception_closes_inside_with(tmp_path) -> None:
    model = net()
    before = hooks(model)
    tracker = TapTracker(model, tmp_path / "run", every=1)
    accelerator = made(tracker)
    accelerator.init_trackers("project")
    with pytest.raises(RuntimeError, match="cursed"), tracker:
        train(accelerator, model, fail=True)
    assert hooks(model) == before
    run = tap.open(tmp_path / "run")
    assert run.status == "failed"
    assert run.manifest.failure == "training raised RuntimeError: cursed"


def test_words_are_left_out_and_said(tmp_path) -> None:
    tracker = TapTracker(net(), tmp_path / "run", every=1)
    accelerator = made(tracker)
    accelerator.init_trackers("project")
    with pytest.warns(tap.TapWarning, match="'stage' is str"):
        accelerator.log({"stage": "warmup"})
    accelerator.end_training()


class Listening(accelerate.tracking.GeneralTracker):
    """A tracker of some user's own."""

    name = "mine"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.got: list[tuple[dict[str, Any], int | None]] = []

    @property
    def tracker(self) -> Any:
        return self.got

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.got.append((values, step))


def test_numbers_go_to_the_other_trackers(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, mine = net(), Listening()
    tracker = TapTracker(model, tmp_path / "run", every=2)
    accelerator = made([tracker, mine, "tensorboard"], project_dir=tmp_path)
    tracker.companion.options["sinks"] = AccelerateSink(accelerator)
    accelerator.init_trackers("project")
    train(accelerator, model)
    accelerator.end_training()

    own = [(values, step) for values, step in mine.got if "loss" not in values]
    assert [step for _, step in own] == [0, 2]
    assert own[0][0]["tensortap/output/blocks.0/nan"] == 0
    assert "tensortap/loss" not in own[0][0]  # it has had that, from accelerator.log
    assert len(mine.got) == 2 + 4
    (file,) = (p for p in Path(tmp_path / "project").glob("events.out.*"))
    events = EventAccumulator(str(file))
    events.Reload()
    assert [e.step for e in events.Scalars("tensortap/grad_norm")] == [0, 2]
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4]


def test_wandb_keeps_the_users_steps(tmp_path, monkeypatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    model = net()
    accelerator = made("wandb")
    accelerator.init_trackers("project")
    run = accelerator.get_tracker("wandb", unwrap=True)
    try:
        with tap.watch(model, tmp_path / "run", every=1, sinks=AccelerateSink(accelerator)) as w:
            train(accelerator, model, epochs=1)
            w.flush()
            assert run.step == 2  # the step that the loop logged last
        accelerator.log({"done": 1.0}, step=3)
        assert run.summary["loss"] > 0
        assert run.summary["tensortap/output/blocks.0/nan"] == 0
        assert run.summary["tensortap/step"] in (0, 1)
    finally:
        accelerator.end_training()
        wandb.teardown()
