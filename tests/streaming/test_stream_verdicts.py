"""Comparing while running says what comparing two recordings afterwards says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tap

sys.path.insert(0, str(Path(__file__).parents[1] / "comparing"))

from planted import BUGS, Bug, make_inputs, make_model, plant  # noqa: E402

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Record a model on some batches; the recorder, closed."""
    count = 0

    def record(model: nn.Module, *batches: Any, **options: Any) -> tap.Recorder:
        nonlocal count
        count += 1
        with torch.no_grad(), tap.record(model, tmp_path / str(count), **options) as rec:
            for batch in batches:
                model(batch)
                rec.step()
        assert rec.failure is None
        return rec

    return record


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
    assert live.notes == after.notes


def named(bugs: list[Bug]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bug", bugs, ids=lambda bug: bug.name.replace(" ", "-"))


@named(list(BUGS))
def test_planted_bugs_in_fp32(bug: Bug, run: Run) -> None:
    model, ids = make_model(), make_inputs()
    broken = plant(model, bug)
    reference = run(model, ids, layers="all", inputs=True)
    live = run(broken, ids, layers="all", inputs=True, against=reference.path)
    full = run(broken, ids, layers="all", inputs=True)
    same_answer(live.comparison, tap.compare(reference.path, full.path))
    assert live.comparison.first_divergence is not None
    assert live.comparison.first_divergence.layer == bug.layer


@named([bug for bug in BUGS if bug.in_bf16][::3])
@pytest.mark.parametrize("inputs", [True, False])
def test_planted_bugs_in_bf16_over_several_batches(bug: Bug, inputs: bool, run: Run) -> None:
    batches = [make_inputs(seed) for seed in range(3)]
    options = {"layers": "all", "inputs": inputs}
    reference = run(make_model(), *batches, **options)
    half = make_model().to(torch.bfloat16)
    floor = run(half, *batches, **options)
    broken = plant(half, bug)
    live = run(broken, *batches, against=reference.path, floor=floor.path, **options)
    full = run(broken, *batches, **options)
    after = tap.compare(reference.path, full.path, floor=floor.path)
    same_answer(live.comparison, after)
    estimated = run(broken, *batches, against=reference.path, **options)
    same_answer(estimated.comparison, tap.compare(reference.path, full.path))
