"""The ruler: which side is nearer to a run in higher precision, and by how much."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from schemas import validate
from support import Net
from tensortap.demo import build

Recorded = Callable[..., tap.Recording]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demo in every mode."""
    folder = tmp_path_factory.mktemp("truth")
    made = {}
    for mode in ("fp64", "fp32", "bf16", "int8", "bug"):
        target = build(mode=mode, seq_len=16)
        batch = target.batches[0]
        made[mode] = str(folder / mode)
        layers = ["embedding", "blocks", "final_norm"]
        with tap.record(target.model, made[mode], layers=layers, inputs=True) as rec:
            target.model(*batch.args, **batch.kwargs)
        assert rec.failure is None
    return made


def relative(truth: torch.Tensor, other: torch.Tensor) -> float:
    truth, other = truth.double(), other.double()
    return float((other - truth).norm() / truth.norm())


def test_every_layer_has_the_errors_of_both_sides(runs: dict[str, str]) -> None:
    result = tap.compare(runs["fp32"], runs["bf16"], truth=runs["fp64"])
    sides = [tap.open(runs[mode]) for mode in ("fp64", "fp32", "bf16")]
    for row in result.layers:
        true, ours, theirs = (side[row.layer].output for side in sides)
        assert row.reference_error == pytest.approx(relative(true, ours), rel=1e-9)
        assert row.candidate_error == pytest.approx(relative(true, theirs), rel=1e-9)
        assert row.nearer == "reference"
    assert "the reference is nearer at 10 of 10 layers" in result.sentence
    assert not result.warnings
    validate(result.to_dict(), "comparison")
    assert "nearer to truth" in str(result)


def test_a_worse_reference_is_found(runs: dict[str, str]) -> None:
    result = tap.compare(runs["bug"], runs["fp32"], truth=runs["fp64"])
    assert result.first_divergence is not None
    assert result.first_divergence.layer == "blocks.4"
    said = "the candidate is nearer at 5 of 10 layers: the reference may be the worse side"
    assert f"Against the truth {runs['fp64']} {said} (first at blocks.4, " in result.sentence
    good = tap.compare(runs["fp32"], runs["bug"], truth=runs["fp64"])
    assert "the reference is nearer at 5 of 10 layers (first at blocks.4" in good.sentence
    assert "worse" not in good.sentence
    even = good["blocks.1"]
    assert even.nearer is None
    assert even.reference_error == even.candidate_error > 0


def test_a_truth_of_sixteen_bit_runs(runs: dict[str, str]) -> None:
    """fp32 is a truth for bf16 and int8; the int8 model keeps its embedding in float32."""
    result = tap.compare(runs["bf16"], runs["int8"], truth=runs["fp32"])
    assert not result.warnings
    assert result["embedding"].nearer == "candidate"
    assert result["embedding"].candidate_error == 0
    assert {row.nearer for row in result.layers[1:]} <= {"reference", "candidate", None}
    assert not any(math.isnan(row.reference_error) for row in result.layers)


@pytest.mark.parametrize(
    ("reference", "candidate", "truth", "side"),
    [
        ("bf16", "bug", "fp32", "the candidate (float32)"),
        ("fp64", "fp32", "bf16", "the reference (float64) and the candidate (float32)"),
    ],
)
def test_a_truth_that_is_no_more_precise_is_warned_about(
    runs: dict[str, str], reference: str, candidate: str, truth: str, side: str
) -> None:
    told = tap.compare(runs[reference], runs[candidate], truth=runs[truth]).warnings
    assert any(f"no more precisely than {side}" in text for text in told)


def test_nothing_is_said_of_summaries(net: Net, ids: Any, recorded: Recorded) -> None:
    truth = recorded(copy.deepcopy(net).double(), ids)
    slim = recorded(net, ids, keep="summary")
    result = tap.compare(slim, recorded(net, ids), truth=truth)
    assert all(math.isnan(row.reference_error) and row.nearer is None for row in result.layers)
    assert "nothing can be said: no layer has its tensors on all three sides" in result.sentence
    assert result.to_dict()["layers"][0]["reference_error"] is None
    some = recorded(copy.deepcopy(net).double(), ids, layers=["blocks.0.up"])
    part = tap.compare(recorded(net, ids), recorded(net, ids), truth=some)
    assert "both sides are equally near at 1 layer; unknown at" in part.sentence


def test_a_side_with_nan_is_the_farther_one(recorded: Recorded) -> None:
    x = torch.linspace(-1, 1, 64).view(4, 16)
    good = nn.Linear(16, 16)
    bad = copy.deepcopy(good)
    with torch.no_grad():
        bad.weight[3, 3] = math.nan
    truth = recorded(copy.deepcopy(good).double(), x.double())
    row = tap.compare(recorded(bad, x), recorded(good, x), truth=truth).layers[0]
    assert row.nearer == "candidate"
    assert row.reference_error == math.inf
    assert row.to_dict()["reference_error"] == "inf"


class Turned(nn.Module):
    """A convolution whose output may have its channels last."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.turn = Turn() if last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.turn(self.conv(x))


class Turn(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1)


@pytest.mark.parametrize("truth_last", [False, True])
@pytest.mark.parametrize("bad", ["reference", "candidate"])
def test_layouts_are_brought_together(bad: str, truth_last: bool, recorded: Recorded) -> None:
    """The candidate has channels last; the truth lies as the one or as the other."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 7)
    first, last = Turned(False), Turned(True)
    last.load_state_dict(first.state_dict())
    true = copy.deepcopy(last if truth_last else first).double()
    with torch.no_grad():
        (first if bad == "reference" else last).conv.weight.mul_(1.01)
    left, right = (recorded(model, x, layers=[""]) for model in (first, last))
    truth = recorded(true, x.double(), layers=[""])
    row = tap.compare(left, right, truth=truth).layers[0]
    assert row.transform
    assert row.nearer == ("candidate" if bad == "reference" else "reference")
    errors = row.reference_error, row.candidate_error
    assert min(errors) < 1e-6
    assert max(errors) > 1e-3


def test_other_batches_are_brought_together(net: Net, off: Net, recorded: Recorded) -> None:
    ids = torch.arange(24).view(4, 6) % 12
    truth = recorded(copy.deepcopy(net).double(), ids)

    def halves(model: Net, path: Path) -> tap.Recording:
        with tap.record(model, path, layers="all") as rec:
            for half in ids.split(2):
                model(half)
                rec.step()
        return tap.open(path)

    folder = Path(truth.path).parent
    clean, wrong = halves(net, folder / "clean"), halves(off, folder / "wrong")
    row = tap.compare(wrong, recorded(net, ids), truth=truth)["blocks.1.up"]
    assert row.nearer == "candidate"
    row = tap.compare(wrong, clean, truth=truth)["blocks.1.up"]
    assert row.nearer == "candidate"
    assert row.candidate_error < 1e-6 < row.reference_error


@pytest.fixture
def off(net: Net) -> Net:
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.blocks[1].up.weight.mul_(1.05)
    return other


def test_a_truth_may_have_the_candidates_names(net: Net, off: Net, recorded: Recorded) -> None:
    class Other(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.first, self.second = inner.blocks[0].up, inner.blocks[1].up

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x))[..., : self.second.in_features])

    class Own(Other):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__(inner)
            self.a, self.b = self.first, self.second
            del self.first, self.second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x))[..., : self.b.in_features])

    width = net.blocks[0].up.in_features
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    left, right = recorded(Own(off), x, layers="leaves"), recorded(Other(net), x, layers="leaves")
    truth = recorded(Other(copy.deepcopy(net)).double(), x.double(), layers="leaves")
    maps = ["a=>first", "b=>second"]
    result = tap.compare(left, right, truth=truth, map=maps)
    assert result["a"].nearer is None and result["a"].reference_error < 1e-6
    assert result["b"].nearer == "candidate"


def test_cast_inputs_are_no_other_inputs(recorded: Recorded) -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    runs = {
        dtype: recorded(copy.deepcopy(model).to(dtype), x.to(dtype), inputs=True)
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    bf16, fp32, fp64 = runs.values()
    assert not tap.compare(bf16, fp32, truth=fp64).warnings
    other = recorded(copy.deepcopy(model).double(), 2 * x.double(), inputs=True)
    told = tap.compare(bf16, fp32, truth=other).warnings
    assert any("was given other inputs" in text for text in told)


@pytest.mark.parametrize("hole", [math.nan, math.inf])
def test_a_truth_with_holes_measures_the_rest(hole: float, recorded: Recorded) -> None:
    torch.manual_seed(0)
    good, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    bad, true = copy.deepcopy(good), copy.deepcopy(good).double()
    with torch.no_grad():
        bad[0].weight.mul_(1.1)
        true[0].bias[3] = hole
        true[1].bias.fill_(hole)
    runs = [recorded(good, x), recorded(bad, x), recorded(true, x.double())]
    result = tap.compare(runs[0], runs[1], truth=runs[2])
    first, second = result["0"], result["1"]
    assert first.nearer == "reference"
    assert first.reference_error < 1e-6 < first.candidate_error < 1
    assert second.nearer is None and math.isnan(second.reference_error)
    said = [text for text in result.warnings if "itself has NaN" in text]
    first_hole = "0" if math.isnan(hole) else "1"  # infinity less infinity
    assert len(said) == 1 and f"(first at {first_hole})" in said[0]
    validate(result.to_dict(), "comparison")
