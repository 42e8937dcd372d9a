"""`compare` from end to end, on recordings of small models."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from support import Net
from tensortap.errors import ComparisonError, OptionError, SelectionError

Recorded = Callable[..., tap.Recording]


@pytest.fixture
def off(net: Net) -> Net:
    """The same net with one gain off by two per cent, in the middle."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.blocks[1].up.weight.mul_(1.02)
        other.blocks[1].up.bias.mul_(1.02)
    return other


def test_a_model_against_itself_is_identical(net: Net, ids: Any, recorded: Recorded) -> None:
    left, right = recorded(net, ids), recorded(net, ids)
    result = tap.compare(left.path, right)
    assert result.same
    assert bool(result)
    assert result.first_divergence is None
    assert {row.verdict for row in result.layers} == {"identical"}
    assert [row.layer for row in result.layers] == left.layers
    assert {row.matched_by for row in result.layers} == {"name"}
    assert result.same_input is True
    assert result.sentence == f"Identical: all {len(left)} compared layers have the same bits."


def test_the_first_divergence_and_who_made_it(
    net: Net, off: Net, ids: Any, recorded: Recorded
) -> None:
    left, right = recorded(net, ids, inputs=True), recorded(off, ids, inputs=True)
    result = tap.compare(left, right)
    assert not result
    first = result.first_divergence
    assert first is not None
    assert (first.layer, first.origin) == ("blocks.1.up", "made here")
    assert first.input_verdict == "identical"
    assert first.error == pytest.approx(0.02, rel=1e-3)
    assert result["blocks.1.act"].origin == "inherited"
    assert result["blocks.0"].verdict == "identical"
    assert result.sentence.startswith("First divergence at blocks.1.up (made here, ")


def test_without_inputs_the_origin_is_unknown(
    net: Net, off: Net, ids: Any, recorded: Recorded
) -> None:
    first = tap.compare(recorded(net, ids), recorded(off, ids)).first_divergence
    assert first is not None
    assert (first.layer, first.origin, first.input_verdict) == ("blocks.1.up", "unknown", None)


def test_a_row_holds_every_metric_of_its_worst_output(
    net: Net, off: Net, ids: Any, recorded: Recorded
) -> None:
    left, right = recorded(net, ids), recorded(off, ids)
    row = tap.compare(left, right)["blocks.1"]
    d = tap.difference(left["blocks.1"].output, right["blocks.1"].output)
    assert row.difference == d
    data = json.loads(tap.compare(left, right).to_json())
    (flat,) = (item for item in data["layers"] if item["layer"] == "blocks.1")
    assert flat["mse"] == d.mse
    assert flat["max_abs_index"] == list(d.max_abs_index or ())
    assert data["first_divergence"]["layer"] == "blocks.1.up"
    assert data["same"] is False


def test_a_candidate_at_the_floor_is_within_whatever_its_error(
    net: Net, ids: Any, recorded: Recorded
) -> None:
    """Two noisy runs, each far beyond any tolerance, are as far from the reference as the other."""
    left = recorded(net, ids)
    runs = []
    for seed in (1, 2):
        noisy = copy.deepcopy(net)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in noisy.parameters():
                p.add_(0.05 * p.abs().mean() * torch.randn(p.shape, generator=generator))
        runs.append(recorded(noisy, ids))
    alone = tap.compare(left, runs[0])
    assert not alone.same
    assert "estimated" in alone.floor
    beside = tap.compare(left, runs[0], floor=runs[1])
    assert beside.same, beside.sentence
    assert "measured" in beside.floor
    ratios = [row.floor_ratio for row in beside.layers if row.floor_ratio is not None]
    assert ratios
    assert max(ratios) < 3


def test_far_above_a_measured_floor_is_diverged(
    net: Net, off: Net, ids: Any, recorded: Recorded
) -> None:
    left, repeat, right = recorded(net, ids), recorded(net, ids), recorded(off, ids)
    first = tap.compare(left, right, floor=repeat).first_divergence
    assert first is not None
    assert first.layer == "blocks.1.up"
    assert first.floor_ratio is not None
    assert first.floor_ratio > 1000


def test_rules_overrule_and_presets_judge(net: Net, off: Net, ids: Any, recorded: Recorded) -> None:
    left, right = recorded(net, ids), recorded(off, ids)
    assert tap.compare(left, right, rules=[".*: cosine > 0.99"]).same
    strict = tap.compare(left, right, rules=["head: max_abs < 1e-9", ".*: error < 0.5"])
    assert strict.first_divergence is not None
    assert strict.first_divergence.layer == "head"
    assert "max_abs < 1e-09 does not hold" in strict.first_divergence.why
    assert tap.compare(left, right, preset="documents").same
    assert not tap.compare(left, right, preset="device").same
    with pytest.raises(OptionError, match="matches none"):
        tap.compare(left, right, rules=["nowhere: mse < 1"])


def test_one_bad_token_in_a_good_layer_diverges_and_is_named(recorded: Recorded) -> None:
    class Pass(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    torch.manual_seed(0)
    x = torch.randn(1, 400, 64)
    y = x * (1 + 3e-7 * torch.randn(x.shape))
    y[0, 399] *= 1.001
    result = tap.compare(recorded(Pass(), x), recorded(Pass(), y))
    (row,) = result.layers
    assert row.verdict == "diverged"
    assert row.error < 1e-4
    assert row.hints[0].startswith("token 399: ")


def test_nan_in_one_element_diverges_and_is_named(recorded: Recorded) -> None:
    x = torch.ones(1, 6, 8)
    y = x.clone()
    y[0, 2, 5] = float("nan")
    model = nn.Identity()
    row = tap.compare(recorded(model, x), recorded(model, y)).layers[0]
    assert row.verdict == "diverged"
    assert "1 of 48 pairs disagree about NaN or Inf" in row.why
    assert row.hints == ("NaN or Inf at token 2, channel 5",)
    both = tap.compare(recorded(model, y), recorded(model, y * 1.0))
    assert both.same


def test_every_moment_is_judged(net: Net, recorded: Recorded) -> None:
    """A batch that is bad among good ones is found, though all together look well."""
    model = nn.Linear(4, 4)
    batches = [torch.randn(3, 4) for _ in range(40)]
    spoiled = [b.clone() for b in batches]
    spoiled[17][2] += 1e-3

    def run(inputs: list[torch.Tensor]) -> tap.Recording:
        return recorded(model, call=lambda: [model(b) for b in inputs])

    row = tap.compare(run(batches), run(spoiled)).layers[0]
    assert row.verdict == "diverged"
    assert row.parts[0].worst_moment == (0, 0, 17)
    assert row.parts[0].max_abs_moment == (0, 0, 17)
    assert row.difference is not None
    assert row.difference.max_abs_index is not None
    assert row.difference.max_abs_index[0] == 2
    assert row.difference.count == 40 * 12
    assert row.difference.percentiles_exact
    assert "call 17" in row.why


def test_a_rule_on_percentiles_holds_for_each_moment(recorded: Recorded) -> None:
    model = nn.Identity()
    torch.manual_seed(0)
    batches = [torch.randn(8, 16) for _ in range(3)]
    noisy = [batch + 1e-2 * torch.randn(8, 16) for batch in batches]

    def run(inputs: list[torch.Tensor]) -> tap.Recording:
        return recorded(model, call=lambda: [model(b) for b in inputs])

    left, right = run(batches), run(noisy)
    assert tap.compare(left, right, rules=[".*: p99 < 0.1"]).same
    row = tap.compare(left, right, rules=[".*: p99 < 0.001"]).layers[0]
    assert row.verdict == "diverged"
    assert "p99 < 0.001 does not hold (got 0.0" in row.why


def test_different_inputs_are_a_warning(net: Net, ids: Any, recorded: Recorded) -> None:
    result = tap.compare(recorded(net, ids), recorded(net, ids + 1))
    assert result.same_input is False
    assert "different inputs" in result.warnings[0]
    assert result.environment[0].name == "inputs"


def test_the_same_inputs_after_a_cast_are_the_same(recorded: Recorded) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    left = recorded(model, x, inputs=True)
    result = tap.compare(left, recorded(model.bfloat16(), x.bfloat16(), inputs=True))
    assert result.same_input is True
    assert result.warnings == ()
    near = (x * 1.0001).half()  # no cast of x, but what the layers were given agrees
    result = tap.compare(left, recorded(model.half(), near, inputs=True))
    assert result.same_input is True
    assert "not the same bytes" in result.notes[0]


def test_where_the_floor_run_is_silent_is_said(net: Net, ids: Any, recorded: Recorded) -> None:
    left, right = recorded(net, ids), recorded(copy.deepcopy(net).bfloat16(), ids)
    floor = recorded(copy.deepcopy(net).bfloat16(), ids, layers="blocks")
    result = tap.compare(left, right, floor=floor)
    assert any("lacks 19 of 22 layers" in note for note in result.notes), result.notes
    assert result["blocks.0"].floor_ratio == 1.0


def test_the_environment_lists_what_differs(net: Net, ids: Any, recorded: Recorded) -> None:
    left = recorded(net, ids)
    wide = copy.deepcopy(net).double()
    result = tap.compare(left, recorded(wide, ids))
    names = {item.name: (item.reference, item.candidate) for item in result.environment}
    count = sum(p.numel() for p in net.parameters())
    assert names["target.dtypes"] == (f"float32 {count}", f"float64 {count}")
    assert "torch" not in names
    assert "seed" not in names  # torch's own, or the same
    assert "created" not in names


def test_missing_layers_are_rows_and_leave_same_true(
    net: Net, ids: Any, recorded: Recorded
) -> None:
    left, right = recorded(net, ids), recorded(net, ids, layers="leaves")
    result = tap.compare(left, right)
    missing = {row.layer: row.note for row in result.layers if row.verdict == "missing"}
    assert "blocks.0" in missing
    assert missing["blocks.0"] == "missing in the candidate"
    assert result.same
    assert "are missing on one side" in result.sentence
    turned = tap.compare(right, left)
    assert any(row.note == "missing in the reference" for row in turned.layers)


def test_layers_chooses(net: Net, ids: Any, recorded: Recorded) -> None:
    left, right = recorded(net, ids), recorded(net, ids)
    result = tap.compare(left, right, layers="blocks.*")
    assert [row.layer for row in result.layers] == ["blocks.0", "blocks.1", "blocks.2"]
    with pytest.raises(SelectionError, match="block"):
        tap.compare(left, right, layers="blokcs.*")


def test_summaries_alone_compare_as_far_as_they_go(
    net: Net, off: Net, ids: Any, recorded: Recorded
) -> None:
    whole = recorded(net, ids)
    slim = recorded(net, ids, keep="summary")
    for result in (tap.compare(whole, slim), tap.compare(slim, slim)):
        assert result.same
        assert {row.verdict for row in result.layers} == {"within"}
        assert all("not which elements differ" in row.why for row in result.layers)
        assert all(row.difference is None for row in result.layers)
    bad = tap.compare(slim, recorded(off, ids, keep="summary"))
    assert bad.first_divergence is not None
    assert bad.first_divergence.layer == "blocks.1.up"


def test_a_truth_says_which_side_is_nearer(
    net: Net, off: Net, ids: Any, recorded: Recorded
) -> None:
    truth = recorded(copy.deepcopy(net).double(), ids)
    good, bad = recorded(net, ids), recorded(off, ids)
    row = tap.compare(bad, good, truth=truth)["blocks.1.up"]
    assert row.verdict == "diverged"
    assert row.parts[0].nearer == "candidate"
    assert "the candidate is nearer to the truth" in row.hints
    assert tap.compare(good, bad, truth=truth)["blocks.1.up"].parts[0].nearer == "reference"


def test_gradients_diverge_in_the_order_of_the_backward_pass(
    net: Net, ids: Any, recorded: Recorded
) -> None:
    def run(model: Net, scale: float) -> tap.Recording:
        def call() -> None:
            model.zero_grad()
            (model(ids).sum() * scale).backward()

        return recorded(model, call=call, grads=True)

    result = tap.compare(run(net, 1.0), run(net, 1.5))
    assert result.first_divergence is not None
    assert result.first_divergence.layer in ("head", "")  # the last layers are first in backward
    outputs = [p for row in result.layers for p in row.parts if p.port == "output"]
    assert {part.verdict for part in outputs} == {"identical"}


def test_unrelated_models_are_said_with_their_number(
    recorded: Recorded, net: Net, ids: Any
) -> None:
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
    with pytest.raises(ComparisonError, match="nothing was compared"):
        tap.compare(recorded(net, ids, layers="leaves"), recorded(other, torch.ones(1, 3)))


def test_a_recording_that_was_not_closed_needs_partial(
    net: Net, ids: Any, recorded: Recorded
) -> None:
    left, right = recorded(net, ids), recorded(net, ids)
    path = Path(right.path) / "recording.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "status": "recording"}))
    with pytest.raises(ComparisonError, match=r"was not closed.*--partial"):
        tap.compare(left, right.path)
    assert tap.compare(left, right.path, partial=True).same


def test_integers_must_be_equal(recorded: Recorded) -> None:
    class Ids(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model, x = Ids(), torch.arange(100)
    assert tap.compare(recorded(model, x), recorded(model, x)).same
    y = x.clone()
    y[5] += 1
    row = tap.compare(recorded(model, x), recorded(model, y)).layers[0]
    assert row.verdict == "diverged"
    assert "1 of 100 elements differ" in row.why


def test_shapes_that_do_not_fit_are_incomparable_not_skipped(recorded: Recorded) -> None:
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a = nn.Identity()
            self.b = nn.Linear(4, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    x = torch.randn(3, 4)
    options = {"layers": "leaves"}
    result = tap.compare(recorded(Two(5), x, **options), recorded(Two(7), x, **options))
    assert result["b"].verdict == "diverged"  # the same inputs, and all before it agree
    assert "[3, 5]" in result["b"].why
    assert "[3, 7]" in result["b"].why
    result = tap.compare(recorded(Two(5), x, **options), recorded(Two(7), x + 1, **options))
    assert result["b"].verdict == "incomparable"  # it was given something else
    assert not result.same
    alone = {"layers": ["b"]}
    with pytest.raises(ComparisonError, match="could be compared"):
        tap.compare(recorded(Two(5), x, **alone), recorded(Two(7), x + 1, **alone))


def test_a_preset_that_fails_a_layer_within_its_limits_says_by_which_rule(
    tmp_path: Path,
) -> None:
    """One token is wholly wrong in a large tensor: the limits hold, and hide it."""

    class Given(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

    torch.manual_seed(0)
    values = torch.randn(4, 512, 16)
    wrong = values.clone()
    wrong[2, 100] = torch.randn(16)
    for name, given in (("left", values), ("right", wrong)):
        with tap.record(Given(), tmp_path / name, layers="all") as rec:
            rec.run(given)
    result = tap.compare(tmp_path / "left", tmp_path / "right", preset="documents")
    (row,) = result.layers
    assert row.difference is not None and row.difference.mse < 1e-2
    assert row.verdict == "diverged"
    assert row.why.startswith("fulfils the documents' grades: MSE < 1e-2 and correlation > 0.99,")
    assert "single places do not agree, which limits on the whole tensor hide: token" in row.why


def test_a_note_of_both_recordings_is_said_once(tmp_path: Path) -> None:
    for name in ("left", "right"):
        with tap.record(torch.nn.Linear(2, 2).eval(), tmp_path / name, layers="all") as rec:
            rec.run(torch.ones(1, 2))
            rec.tap.notes += ["Both say this.", "Both say this.", f"This is of the {name}."]
    notes = tap.compare(tmp_path / "left", tmp_path / "right").notes
    both = [note for note in notes if note.endswith("Both say this.")]
    assert both == [f"{tmp_path / 'left'} and {tmp_path / 'right'}: Both say this."]
    assert f"{tmp_path / 'right'}: This is of the right." in notes
