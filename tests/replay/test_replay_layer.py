"""One live layer on its recorded inputs: alone, or put inside a run of the whole model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tap
from support import Net
from tensortap.demo import BUG_LAYER, build
from tensortap.errors import OptionError, RecordingError, SelectionError, TargetError

Recorded = Callable[..., tap.Recording]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tap.Recording:
    """The demo in fp32 with all layers of two blocks, two batches."""
    target = build(seq_len=8, samples=2)
    path = tmp_path_factory.mktemp("replay") / "fp32"
    layers = ["embedding", "blocks.{0,4}", "blocks.{0,4}.**", "final_norm", "head", "all"]
    with tap.record(target.model, path, layers=layers, inputs=True) as rec:
        for batch in target.batches:
            target(batch)
            rec.step()
    return tap.open(path)


def test_the_same_model_returns_the_same(demo: tap.Recording) -> None:
    target = build(seq_len=8, samples=2)
    for layer in ("embedding", "blocks.0.attention", "blocks.4", "final_norm", "head", ""):
        found = tap.replay(demo, layer, target.model)
        assert found
        assert found.verdict == "identical"
        assert found.how == "alone"
        assert found.moments == 2
        assert not found.notes
    assert found.sentence == f"(root) returns the same bits as in {demo.path} in 2 calls."


def test_the_layer_with_the_bug_differs_and_its_neighbours_do_not(demo: tap.Recording) -> None:
    target = build(mode="bug", seq_len=8, samples=2)
    for layer in ("blocks.4.mlp.up", "blocks.0", "blocks.4.attention"):
        assert tap.replay(demo, layer, target).verdict == "identical"
    for layer in (BUG_LAYER, "blocks.4.mlp", "blocks.4"):
        found = tap.replay(demo, layer, target)
        assert not found
        assert found.verdict == "diverged"
    found = tap.replay(demo, BUG_LAYER, target)
    assert found.error == pytest.approx(0.02, rel=1e-3)
    assert found.floor is not None and found.floor < 1e-6
    assert found.causes[0].kind == "factor"
    assert "1.02" in found.sentence
    assert "does not return what" in found.sentence
    assert str(found).rstrip().endswith(found.sentence)
    assert found.to_dict()["causes"][0]["kind"] == "factor"
    assert tap.replay(demo, BUG_LAYER, target, batch=1, call=0).moments == 1


@pytest.mark.parametrize("mode", ["bf16", "fp16", "fp64", "int8"])
def test_another_precision_is_within(demo: tap.Recording, mode: str) -> None:
    target = build(mode=mode, seq_len=8, samples=2)
    for layer in ("blocks.4", "blocks.4.norm1", "blocks.4.mlp.down", "final_norm"):
        found = tap.replay(demo, layer, target)
        assert found.verdict in ("within", "identical" if mode == "int8" else "within"), layer
        assert found.how == "alone"
    names = {"bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
    if mode in names:
        assert f"cast from float32 to {names[mode]}" in found.notes[0]
        assert found.row.input_verdict == "within"
        assert found.row.candidate_type == "RMSNorm"


class Scaled(nn.Module):
    """Takes a number that no recording holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.inner(x) * scale


class Flagged(Scaled):
    """Takes a flag that a call may leave out."""

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:  # type: ignore[override]
        return self.inner(x) * (2.0 if twice else 1.0)


class Counting(Scaled):
    """Remembers how often it was called."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.calls += 1
        return self.inner(x) * self.calls


class Around(nn.Module):
    def __init__(self, layer: nn.Module, *extra: Any, **named: Any) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layer = layer
        self.extra, self.named = extra, named

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.first(x), *self.extra, **self.named)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_what_takes_more_than_tensors_runs_inside_the_model(recorded: Recorded) -> None:
    torch.manual_seed(0)
    model = Around(Scaled(), 3.0)
    run = recorded(model, X, inputs=True)
    with pytest.raises(TargetError, match="cannot be called on its recorded tensors alone"):
        tap.replay(run, "layer", model)
    found = tap.replay(run, "layer", model, X)
    assert found.how == "inside"
    assert found.verdict == "identical"
    assert "run inside the model" in found.sentence
    assert "with the recorded tensors put at the layer" in found.notes[0]
    with torch.no_grad():
        model.first.weight.mul_(2)  # what comes in is the recording's, whatever runs before
    assert tap.replay(run, "layer", model, X).verdict == "identical"
    with torch.no_grad():
        model.layer.inner.weight.mul_(1.1)
    with pytest.raises(TargetError, match="The model failed in batch 0: RuntimeError"):
        tap.replay(run, "layer", model, X[:, :5])
    assert not model.layer._forward_hooks
    assert not model.layer._forward_pre_hooks
    bad = tap.replay(run, "layer", tap.Target(model, X))
    assert bad.verdict == "diverged"
    assert bad.how == "inside"


def test_a_flag_that_was_not_recorded_is_no_divergence(recorded: Recorded) -> None:
    model = Around(Flagged(), twice=True)
    run = recorded(model, X, inputs=True)
    found = tap.replay(run, "layer", model, X)
    assert found.verdict == "identical"
    assert found.how == "inside"
    assert "(twice)" in found.notes[0]
    alone = tap.replay(run, "layer", model)
    assert alone.verdict == "diverged"
    assert "give the model's inputs" in alone.notes[0]
    failing = tap.replay(run, "layer", model, X[:, :5])
    assert failing.verdict == "diverged"
    assert "inside the model it could not run" in failing.notes[0]


def test_a_state_is_kept_as_in_the_whole_run(tmp_path: Path) -> None:
    class Looped(Around):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.layer(self.first(x))
            return x

    model = Looped(Counting())
    with tap.record(copy.deepcopy(model), tmp_path / "run", layers="all", inputs=True) as rec:
        rec.run(X)
    found = tap.replay(tmp_path / "run", "layer", model, X)
    assert found.moments == 3
    assert found.verdict == "identical"
    assert model.layer.calls == 0
    # One call out of three, in whose place the layer has been called twice before.
    third = tap.replay(tmp_path / "run", "layer", model, X, call=2)
    assert third.verdict == "identical"
    assert third.how == "inside"
    assert "keeps a state" in third.notes[0]


def test_generation_with_a_cache_runs_inside(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(6).view(1, 6)

    def generate(model: Any, batch: Any) -> Any:
        return model.generate(
            *batch.args, min_new_tokens=3, max_new_tokens=3, do_sample=False, pad_token_id=0
        )

    target = tap.Target(model, ids, run=generate)
    with tap.record(model, tmp_path / "run", layers="all", inputs=True):
        target(target.batches[0])
    for layer in ("model.layers.1", "model.layers.1.self_attn"):
        found = tap.replay(tmp_path / "run", layer, target)
        assert found.moments == 3
        assert found.verdict == "identical"
        assert found.how == "inside"
    mlp = tap.replay(tmp_path / "run", "model.layers.1.mlp", target)
    assert (mlp.verdict, mlp.how, mlp.moments) == ("identical", "alone", 3)
    half = copy.deepcopy(model).to(torch.bfloat16)
    found = tap.replay(tmp_path / "run", "model.layers.1", tap.Target(half, ids, run=generate))
    assert found.verdict == "within"


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) + mask).softmax(-1)


def test_a_mask_at_the_limit_of_its_dtype_stays_finite(recorded: Recorded) -> None:
    model = Masked()
    mask = torch.full((6, 6), torch.finfo(torch.float32).min)
    mask[:3] = 0  # rows in which everything is hidden become NaN once the mask is infinite
    run = recorded(model, torch.randn(6, 6), mask, inputs=True)
    for dtype in (torch.float16, torch.bfloat16):
        found = tap.replay(run, "", copy.deepcopy(model).to(dtype))
        assert found.verdict == "within"


def test_the_model_is_left_as_it_was(recorded: Recorded) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(True))
    model.train()
    seen: list[str] = []
    model[1].register_forward_hook(lambda *_: seen.append("hook"))
    run = recorded(model, X, inputs=True)
    state = copy.deepcopy(model.state_dict())
    hooks = {name: dict(m._forward_hooks) for name, m in model.named_modules()}
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    found = tap.replay(run, "", model, X)
    assert any("dropout makes its output random" in note for note in found.notes)
    for layer in ("0", "1", "3"):
        assert tap.replay(run, layer, model, X).verdict == "identical"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert hooks == {name: dict(m._forward_hooks) for name, m in model.named_modules()}
    assert attributes == {name: set(vars(m)) for name, m in model.named_modules()}
    assert model.training
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]
    assert np.random.get_state()[1].tolist() == numbers[2]


def test_names_behind_wrappers_are_found(net: Net, ids: Any, recorded: Recorded) -> None:
    run = recorded(net, ids, inputs=True)
    wrapped = nn.Module()
    wrapped.module = net
    assert tap.replay(run, "blocks.1.up", wrapped).verdict == "identical"
    compiled = torch.compile(net, backend="eager")
    assert tap.replay(run, "blocks.1.up", compiled).verdict == "identical"


def test_every_output_is_compared(recorded: Recorded) -> None:
    model = nn.LSTM(8, 4, batch_first=True)
    run = recorded(model, X[None], inputs=True)
    found = tap.replay(run, "", model)
    assert found.same
    assert [part.leaf for part in found.row.parts] == ["[0]", "[1][0]", "[1][1]"]


class TestTrouble:
    def test_what_was_not_recorded_is_said(self, net: Net, ids: Any, recorded: Recorded) -> None:
        with pytest.raises(RecordingError, match=r"--inputs --layers 'blocks\.1\.up'"):
            tap.replay(recorded(net, ids), "blocks.1.up", net)
        slim = recorded(net, ids, inputs=True, keep="summary")
        with pytest.raises(RecordingError, match="summaries alone"):
            tap.replay(slim, "blocks.1.up", net)
        deaf = recorded(net, ids, inputs=True, outputs=False)
        with pytest.raises(RecordingError, match="no outputs of layer"):
            tap.replay(deaf, "blocks.1.up", net)

    def test_layers_and_moments_that_are_not_there(
        self, net: Net, ids: Any, recorded: Recorded
    ) -> None:
        run = recorded(net, ids, inputs=True)
        with pytest.raises(SelectionError, match=r"Did you mean 'blocks\.1\.up'"):
            tap.replay(run, "blocks.1.upp", net)
        with pytest.raises(OptionError, match="There is no batch 3 here"):
            tap.replay(run, "blocks.1.up", net, batch=3)
        with pytest.raises(SelectionError, match=r"has no layer 'blocks\.2\.up'"):
            tap.replay(run, "blocks.2.up", Net(blocks=2))

    def test_models_that_do_not_fit(self, recorded: Recorded) -> None:
        run = recorded(Around(Scaled(), 3.0), X, inputs=True)
        with pytest.raises(TargetError, match="does not fit the live call"):
            tap.replay(run, "layer", Around(Scaled(), 3.0), X[:2])
        with pytest.raises(OptionError, match="A Target brings its own inputs"):
            tap.replay(run, "layer", tap.Target(Around(Scaled(), 3.0), X), X)
        with pytest.raises(OptionError, match=r"needs the eager torch\.nn\.Module"):
            tap.replay(run, "layer", "model")  # type: ignore[arg-type]
        plain = recorded(nn.Linear(8, 8), X, inputs=True)
        found = tap.replay(plain, "", nn.Linear(8, 3))
        assert found.verdict == "incomparable"
        assert "cannot be compared" in found.sentence
        assert not found

    def test_a_target_with_too_few_batches(self, tmp_path: Path) -> None:
        model = Around(Scaled(), 3.0)
        with tap.record(model, tmp_path / "run", layers="all", inputs=True) as rec:
            for _ in range(2):
                model(X)
                rec.step()
        with pytest.raises(TargetError, match="only 1 batches"):
            tap.replay(tmp_path / "run", "layer", model, X)
        assert tap.replay(tmp_path / "run", "layer", model, [X, X]).moments == 2
        assert tap.replay(tmp_path / "run", "layer", model, X, batch=0).moments == 1


class Remembering(Scaled):
    """Keeps a state in a buffer over batches, and takes a number that no recording holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * scale * self.calls


def test_a_state_goes_on_from_batch_to_batch(tmp_path: Path) -> None:
    model, batches = Around(Remembering(), 3.0), [X, X + 1, X - 1]
    with tap.record(copy.deepcopy(model), tmp_path / "run", layers="all", inputs=True) as rec:
        for batch in batches:
            rec.run(batch)
            rec.step()
    target = tap.Target(model, batches)
    whole = tap.replay(tmp_path / "run", "layer", target)
    assert whole.how == "inside" and whole.moments == 3
    assert whole.verdict == "identical"
    assert tap.replay(tmp_path / "run", "layer", target, batch=2).verdict == "identical"
    assert model.layer.calls == 0


def test_calls_of_which_there_are_no_tensors_are_left_out(tmp_path: Path) -> None:
    def record(name: str, gain: float, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        model = Around(nn.Linear(8, 8))
        steps: list[int] = []

        def late(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            steps.append(1)
            return output * gain if len(steps) == 2 else output

        model.layer.register_forward_hook(late)
        with tap.record(model, tmp_path / name, layers="all", inputs=True, **options) as rec:
            for _ in range(3):
                model(X)
                rec.step()
        return model

    good = record("a", 1.0)
    record("b", 1.5, against=tmp_path / "a")
    found = tap.replay(tmp_path / "b", "layer", good)
    assert found.verdict == "diverged" and found.moments == 1
    assert any("2 calls are summaries alone" in note for note in found.notes)
    assert tap.replay(tmp_path / "b", "layer", good, batch=1).moments == 1
    with pytest.raises(RecordingError, match=r"made against .*a, and keeps what differs"):
        tap.replay(tmp_path / "b", "layer", good, batch=0)


def test_a_layer_is_named_by_a_string(demo: tap.Recording) -> None:
    with pytest.raises(OptionError, match="layer must be the name of one layer, got 3"):
        tap.replay(demo, 3, build().model)  # type: ignore[arg-type]
