"""Comparing while running says what comparing two recordings afterwards says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import BUGS, Bug, make_inputs, make_model, plant
from torch import Tensor, nn

import tensortap as tap

Run = Callable[..., Any]


def same_answer(live: tap.Comparison, after: tap.Comparison) -> None:
    """Every row of both: verdicts, origins, inputs, and the numbers behind them."""
    assert [row.layer for row in live.layers] == [row.layer for row in after.layers]
    for ours, theirs in zip(live.layers, after.layers, strict=True):
        for name in ("candidate_layer", "matched_by", "verdict", "input_verdict", "origin"):
            assert getattr(ours, name) == getattr(theirs, name), (ours.layer, name)
        assert ours.error == pytest.approx(theirs.error, rel=1e-6, nan_ok=True)
        assert (ours.floor or 0) == pytest.approx(theirs.floor or 0, rel=1e-6)
        assert ours.hints == theirs.hints
        assert ours.why == theirs.why
        assert [cause.text for cause in ours.causes] == [cause.text for cause in theirs.causes]
        assert [(p.port, p.leaf, p.verdict, p.moments) for p in ours.parts] == [
            (p.port, p.leaf, p.verdict, p.moments) for p in theirs.parts
        ]
        main, other = ours.main, theirs.main
        assert (main is None) == (other is None)
        if main is not None and other is not None:
            assert main.diverged_at == other.diverged_at
            assert main.max_abs_moment == other.max_abs_moment
            assert main.worst_moment == other.worst_moment
    assert live.counts == after.counts
    first, expected = live.first_divergence, after.first_divergence
    assert (first and first.layer) == (expected and expected.layer)
    assert live.sentence == after.sentence
    assert live.floor == after.floor
    assert (live.same_input, live.environment) == (after.same_input, after.environment)
    assert len(live.notes) == len(after.notes)


def named(bugs: list[Bug]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bug", bugs, ids=lambda bug: bug.name.replace(" ", "-"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A recording of the model before a bug is planted: one for all bugs."""

    @cache
    def record(dtype: torch.dtype, inputs: bool, count: int) -> Path:
        path = tmp_path_factory.mktemp("sound") / "run"
        model = make_model().to(dtype)
        with torch.no_grad(), tap.record(model, path, layers="all", inputs=inputs) as rec:
            for seed in range(count):
                model(make_inputs(seed))
                rec.step()
        return path

    return record


@named(list(BUGS))
def test_planted_bugs_in_fp32(bug: Bug, run: Run, sound: Callable[..., Path]) -> None:
    ids, reference = make_inputs(), sound(torch.float32, inputs=True, count=1)
    broken = plant(make_model(), bug)
    live = run(broken, ids, layers="all", inputs=True, against=reference)
    full = run(broken, ids, layers="all", inputs=True)
    same_answer(live.comparison, tap.compare(reference, full.path))
    assert live.comparison.first_divergence is not None
    assert live.comparison.first_divergence.layer == bug.layer


@named([bug for bug in BUGS if bug.in_bf16][::3])
@pytest.mark.parametrize("inputs", [True, False])
def test_planted_bugs_in_bf16_over_several_batches(
    bug: Bug, inputs: bool, run: Run, sound: Callable[..., Path]
) -> None:
    batches = [make_inputs(seed) for seed in range(3)]
    options = {"layers": "all", "inputs": inputs}
    reference = sound(torch.float32, inputs=inputs, count=3)
    floor = sound(torch.bfloat16, inputs=inputs, count=3)
    broken = plant(make_model().to(torch.bfloat16), bug)
    live = run(broken, *batches, against=reference, floor=floor, **options)
    full = run(broken, *batches, **options)
    same_answer(live.comparison, tap.compare(reference, full.path, floor=floor))
    estimated = run(broken, *batches, against=reference, **options)
    same_answer(estimated.comparison, tap.compare(reference, full.path))


class Awkward(nn.Module):
    """A layer that is called twice, tuples, keyword arguments, None and in-place operations."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(8, 8)
        self.pair = Pair(gain)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.shared(x))
        first, (second, _) = self.pair(x, scale=torch.tensor(2.0))
        first += 1  # what the pair returned is written to afterwards
        return self.last(self.relu(first) + second)


class Pair(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, tuple[Tensor, None]]:
        y = x * scale
        x.mul_(3)  # and what it was given, before it ends
        return y * self.gain, (y - 1, None)


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize("gain", [1.0, 1.01])
def test_tuples_calls_and_in_place_operations(gain: float, inputs: bool, run: Run) -> None:
    batches = [torch.randn(5, 8, generator=torch.Generator().manual_seed(s)) for s in range(2)]
    options = {"layers": "all", "inputs": inputs}
    reference = run(Awkward(), *batches, **options)
    live = run(Awkward(gain), *batches, against=reference.path, **options)
    full = run(Awkward(gain), *batches, **options)
    same_answer(live.comparison, tap.compare(reference.path, full.path))
    first = live.comparison.first_divergence
    assert (first is None) if gain == 1 else (first is not None and first.layer == "pair")
    if first is None:
        return
    pair, expected = tap.open(live.path)["pair"], tap.open(full.path)["pair"]
    for record in pair.port("output"):
        same = [
            r for r in expected.port("output") if (r.leaf, r.batch) == (record.leaf, record.batch)
        ]
        assert torch.equal(record.tensor(), same[0].tensor())
    given = {record.leaf for record in pair.port("input") if record.stored}
    assert given == {"[0]", "['scale']"}  # held before the layer wrote to it
    source = run(Awkward(gain), *batches, layers="all", inputs=True)
    whole = tap.open(source.path)["pair"].first("input").tensor()
    assert torch.equal(pair.first("input").tensor(), whole)


def test_rules_presets_maps_and_prefixes(run: Run) -> None:
    model, ids = make_model(), make_inputs()
    gain = next(bug for bug in BUGS if bug.name == "2 % gain")
    broken = plant(model, gain)
    reference = run(model, ids, layers="blocks", inputs=True)
    full = run(broken, ids, layers="blocks", inputs=True)
    for options in (
        {"rules": [r"blocks\..*: max_abs < 100"]},
        {"rules": [r"blocks\..*: p99 < 1e-9"]},
        {"preset": "documents"},
        {"map": [r"blocks\.(\d)=>blocks.\1"]},
    ):
        live = run(broken, ids, layers="blocks", inputs=True, against=reference.path, **options)
        same_answer(live.comparison, tap.compare(reference.path, full.path, **options))
    wrapped = nn.Module()
    wrapped.module = broken
    wrapped.forward = broken.__call__  # type: ignore[method-assign]
    live = run(wrapped, ids, layers="blocks", inputs=True, against=reference.path)
    assert {row.matched_by for row in live.comparison.layers} == {"normalised"}
    assert live.comparison.first_divergence.layer == gain.block


def test_a_reference_of_summaries_is_judged_by_summaries(run: Run) -> None:
    model, ids = make_model(), make_inputs()
    broken = plant(model, next(bug for bug in BUGS if bug.name == "dropped bias"))
    reference = run(model, ids, layers="all", keep="summary")
    live = run(broken, ids, layers="all", against=reference.path)
    full = run(broken, ids, layers="all")
    same_answer(live.comparison, tap.compare(reference.path, full.path))
    assert live.comparison.first_divergence is not None
    assert all(row.by_summaries for row in live.comparison.compared)


def test_gradients(run: Run, tmp_path) -> None:
    model, ids = make_model(), make_inputs()

    def trained(name: str, gain: float, **options: Any) -> tap.Recorder:
        with tap.record(
            model, tmp_path / name, layers="blocks", inputs=True, grads=True, **options
        ) as rec:
            (model(ids).square().mean() * gain).backward()
            model.zero_grad()
        return rec

    trained("a", 1.0)
    live = trained("b", 1.5, against=tmp_path / "a")
    trained("c", 1.5)
    after = tap.compare(tmp_path / "a", tmp_path / "c")
    assert [(row.layer, row.verdict, row.origin) for row in live.comparison.layers] == [
        (row.layer, row.verdict, row.origin) for row in after.layers
    ]
    first = live.comparison.first_divergence
    assert after.first_divergence is not None
    assert first.layer == after.first_divergence.layer
    assert first is not None and first.main is not None and first.main.port.startswith("grad")
    kept = [r for r in tap.open(tmp_path / "b").records if r.stored]
    assert {r.port for r in kept} >= {"grad_output", "grad_input"}


def renamed(model: nn.Module, names: dict[str, str]) -> nn.Module:
    """The same model whose parts go by other names; its forward finds them by the old ones."""
    for module in list(model.modules()):
        for old, new in names.items():
            if old in module._modules:
                inner = dict(module._modules)
                module._modules.clear()
                module._modules.update({new if k == old else k: v for k, v in inner.items()})
                vars(module)[old] = inner[old]
    return model


def test_layers_by_other_names_are_paired_by_their_place(run: Run) -> None:
    ids, bug = make_inputs(), next(bug for bug in BUGS if bug.name == "2 % gain")
    reference = run(make_model(), ids, layers="all", inputs=True)
    other = renamed(plant(make_model(), bug), {"blocks": "layers", "attention": "attn"})
    live = run(other, ids, layers="all", inputs=True, against=reference.path, stop=True)
    first = live.comparison.first_divergence
    assert first is not None and first.layer == bug.layer
    assert first.matched_by == "structure" and live.comparison.warnings == ()
    assert live.stopped == bug.layer.replace("blocks", "layers").replace("attention", "attn")


class Chain(nn.Module):
    """Layers of one type, which nothing but their names tells apart."""

    def __init__(self, names: list[str], gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in names:
            self.add_module(name, nn.Linear(8, 8))
        self.add_module("last", nn.Linear(8, 4))
        with torch.no_grad():
            self.get_submodule(names[0]).weight.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


def test_few_pairs_are_a_warning_and_do_not_stop_the_model(run: Run) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    reference = run(Chain(list("abcdef")), x, layers="leaves")
    live = run(Chain(list("uvwxyz"), 1.1), x, layers="leaves", against=reference.path, stop=True)
    assert live.comparison.counts["missing"] == 12
    (warning,) = live.comparison.warnings
    assert "Only 1 of 7 layers pair" in warning and "--map" in warning
    assert live.stopped is None and any("not stopped" in note for note in live.notes)
    pairs = [f"{a}=>{b}" for a, b in zip("abcdef", "uvwxyz", strict=True)]
    live = run(
        Chain(list("uvwxyz"), 1.1), x, layers="leaves", against=reference.path, stop=True, map=pairs
    )
    assert live.stopped == "u" and live.comparison.warnings == ()


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([2, 2, 2], [6]), ([6], [2, 2, 2]), ([2, 4], [3, 3]), ([4, 2], [4, 1, 1])],
)
def test_samples_in_other_batches(
    ours: list[int], theirs: list[int], inputs: bool, run: Run
) -> None:
    samples = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    options = {"layers": "all", "inputs": inputs}
    reference = run(Chain(["a", "b"]), *samples.split(ours), layers="all", inputs=True)
    good = run(Chain(["a", "b"]), *samples.split(theirs), against=reference.path, **options)
    assert good.comparison.same and "missing" not in good.comparison.counts
    gaps = [p.port for row in good.comparison.layers for p in row.parts if p.verdict == "missing"]
    assert set(gaps) <= (set() if inputs else {"input"})
    assert "sample by sample" in " ".join(good.comparison.notes)
    broken, wrong = Chain(["a", "b"]), broken_at(samples[4])
    broken.b.register_forward_hook(wrong)
    bad = run(broken, *samples.split(theirs), against=reference.path, **options)
    first = bad.comparison.first_divergence
    assert first is not None and first.layer == "b"
    assert first.difference is not None and first.difference.count == 48
    kept = [r for r in tap.open(bad.path)["b"].records if r.stored and r.port == "input"]
    assert len(kept) >= 1 and first.origin == "made here"


def broken_at(sample: Tensor) -> Callable[..., Tensor]:
    """A hook that spoils the output of one sample, known by what went into the model."""
    torch.manual_seed(0)
    first = Chain(["a", "b"]).a
    with torch.no_grad():
        known = first(sample)

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        same = (args[0] - known).abs().amax(-1, keepdim=True) < 1e-5
        return output * torch.where(same, 1.5, 1.0)

    return hook


def test_samples_that_one_run_alone_has_are_said(run: Run) -> None:
    samples = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    reference = run(Chain(["a"]), *samples.split([2, 2, 2]), layers="leaves")
    few = run(Chain(["a"]), samples[:3], layers="leaves", against=reference.path).comparison
    assert "1 of 2 samples of batch 1 only in the reference" in few["a"].note
    assert "batch 2 only in the reference" in few["a"].note
    more = torch.cat([samples, samples[:2] + 1])
    many = run(Chain(["a"]), more, layers="leaves", against=reference.path).comparison
    assert "samples 6..7 of batch 0 only in the candidate" in many["a"].note
