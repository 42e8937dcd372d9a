"""Two training runs: when they part, epoch by epoch, by tensors and by summaries."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.comparing.summaries import judge_rows, judge_summaries
from tensortap.errors import ComparisonError
from tensortap.numerics import summarize
from tensortap.numerics.summary import COLUMNS, WIDTH, Summary
from tensortap.recording.schema import Manifest, Site, Structure
from tensortap.recording.series import merge_rows
from tensortap.recording.writer import Writer

AT = {name: number for number, name in enumerate(COLUMNS)}
PORTS = ("output", "grad_output", "param", "grad_param", "update")


def raw(scale: float, count: int = 64, nan: int = 0) -> np.ndarray:
    row = np.zeros(WIDTH)
    row[AT["count"]], row[AT["nan"]] = count, nan
    row[AT["std"]], row[AT["min"]], row[AT["max"]] = scale, -3 * scale, 3 * scale
    row[AT["absmax"]], row[AT["l2"]] = 3 * scale, scale * (count - nan) ** 0.5
    return row


def watched(path: Path, steps: range, *, blocks: int = 3, parts_at: int | None = None) -> Path:
    """A watched run of summaries; from `parts_at` on, block 1 and those behind it are larger."""
    names = tuple(f"blocks.{k}" for k in range(blocks))
    selection = {"keep": "summary", "watch": {"every": 1}}
    writer = Writer(str(path), Manifest(selection=selection, structure=Structure(names)))
    order = 0
    loss = writer.site(Site("loss", "scalar", dtype="float64"))
    for step in steps:
        for port in PORTS:
            leaf = "" if port.endswith("output") else ".weight"
            for k, name in enumerate(names):
                off = parts_at is not None and step >= parts_at and k >= 1
                scale = (1 + k) * (1.5 if off else 1.0)
                site = writer.site(Site(name, port, leaf, None, "Block", (8, 8), "float32"))
                writer.summary_line(site, (order, step // 10, step, 0), raw(scale))
                order += 1
        writer.summary_line(loss, (order, step // 10, step, 0), raw(1.0, 1))
        order += 1
    writer.close()
    return path


def trained(path: Path, *, epochs: int = 3, batches: int = 2, parts_at: tuple[int, int]) -> Path:
    """What a Monitor keeps: tensors of a few epochs and batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tap.record(model, path, layers="leaves") as recorder:
        for epoch in range(epochs):
            for batch in range(batches):
                recorder.moment(epoch=epoch, batch=batch)
                x = torch.full((2, 4), 0.1 * (1 + batch))
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if (epoch, batch) == parts_at:
                    with torch.no_grad():
                        model[2].weight.mul_(1.5)
    return path


def test_the_step_at_which_two_watched_runs_part_is_said(tmp_path: Path) -> None:
    a = watched(tmp_path / "a", range(30))
    b = watched(tmp_path / "b", range(30), parts_at=17)
    result = tap.compare(a, b)
    first = result.first_divergence
    assert not result and first is not None
    assert (first.layer, first.first_moment) == ("blocks.1", (1, 17, 0))
    assert first.first_part is not None and first.first_part.port == "output"
    assert "The runs part at epoch 1, batch 17: the 17 steps before it agree, of 30" in str(result)
    data = result.to_dict()
    assert data["first_divergence"]["moment"] == [1, 17, 0]
    rows = [(e.epoch, e.steps, e.layers, e.diverged, e.first_layer, e.first) for e in result.epochs]
    assert rows == [
        (0, 10, 4, 0, None, None),
        (1, 10, 4, 2, "blocks.1", (1, 17, 0)),
        (2, 10, 4, 2, "blocks.1", (2, 20, 0)),
    ]
    assert result.epochs[0].error == 0
    assert result.epochs[1].error == pytest.approx(0.5)
    assert data["epochs"][1]["first_layer"] == "blocks.1"
    assert "first to diverge" in str(result)
    assert "Epoch by epoch" in result.to_html()


def test_two_monitored_runs_are_compared_epoch_by_epoch(tmp_path: Path) -> None:
    a = trained(tmp_path / "a", parts_at=(-1, -1))
    b = trained(tmp_path / "b", parts_at=(1, 0))
    result = tap.compare(a, b)
    first = result.first_divergence
    assert first is not None
    assert (first.layer, first.first_moment) == ("2", (1, 1, 0))
    assert [epoch.diverged > 0 for epoch in result.epochs] == [False, True, True]
    # Behind it the gradient is another one, so in the next epoch the first layer is off too.
    assert (result.epochs[1].first_layer, result.epochs[2].first_layer) == ("2", "0")
    assert "the 3 steps before it agree, of 6" in result.sentence
    assert tap.compare(a, a).epochs[2].error == 0


def test_runs_of_other_lengths_compare_what_both_have(tmp_path: Path) -> None:
    a = watched(tmp_path / "a", range(30))
    b = watched(tmp_path / "b", range(20))
    result = tap.compare(a, b)
    assert result.same
    assert [epoch.epoch for epoch in result.epochs] == [0, 1]
    assert any(
        "20 steps are in both runs; only in the reference: 10 steps from epoch 2, batch 20 to "
        "epoch 2, batch 29" in note
        for note in result.notes
    )
    note = result["blocks.0"].note
    assert note.startswith("output, grad_output, param, grad_param, update at epoch 2, batch 20")
    assert note.endswith("and 7 more")
    long = tap.compare(a, watched(tmp_path / "short", range(5)))["blocks.0"].note
    assert "at 25 moments, batch 5 to epoch 2, batch 29, only in the reference" in long
    sparse = watched(tmp_path / "c", range(0, 30, 3))
    assert tap.compare(a, sparse).epochs[0].steps == 4


def test_no_step_in_common_is_a_sentence(tmp_path: Path) -> None:
    a = watched(tmp_path / "a", range(5))
    b = watched(tmp_path / "b", range(40, 45))
    with pytest.raises(ComparisonError, match=r"no step in common.*5 steps from batch 0"):
        tap.compare(a, b)


def test_a_parameter_that_differs_before_any_output_is_the_first(tmp_path: Path) -> None:
    """Looked at behind the step, so an output of the same step comes before it."""
    runs = []
    for name, off in (("a", False), ("b", True)):
        writer = Writer(str(tmp_path / name), Manifest(selection={"keep": "summary"}))
        for step in range(3):
            moment = (10 * step, 0, step, 0)
            later = off and step >= 1
            output = writer.site(Site("x", "output", "", None, "Linear", (8, 8), "float32"))
            writer.summary_line(output, moment, raw(2.0 if later and step == 2 else 1.0))
            param = writer.site(Site("x", "param", ".weight", None, "Linear", (8,), "float32"))
            writer.summary_line(param, (10 * step + 1, 0, step, 0), raw(1.1 if later else 1.0))
        writer.close()
        runs.append(tmp_path / name)
    result = tap.compare(*runs)
    first = result.first_divergence
    assert first is not None and first.first_part is not None
    assert (first.first_part.port, first.first_moment) == ("param", (0, 1, 0))
    assert "a parameter" in result.sentence
    assert "param: at batch 1" in result.sentence


def test_a_single_epoch_has_no_table_and_a_single_step_no_sentence(tmp_path: Path) -> None:
    a = watched(tmp_path / "a", range(1))
    b = watched(tmp_path / "b", range(1), parts_at=0)
    result = tap.compare(a, b)
    assert "The runs part" not in result.sentence
    assert "first to diverge" not in str(result)
    assert "Epoch by epoch" not in result.to_html()
    assert len(result.epochs) == 1


def test_judging_many_rows_says_what_judging_one_says() -> None:
    torch.manual_seed(0)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for scale in (0.0, 1e-7, 1e-3, 0.1):
        x = torch.randn(50)
        pairs.append((x, x * (1 + scale)))
        pairs.append((x, x + scale))
        pairs.append((x, torch.where(x == x.max(), x * (1 + scale), x)))
    nan = torch.full((5,), float("nan"))
    zero = torch.zeros(5)
    pairs += [(nan, nan), (zero, zero), (zero, zero + 1e-9), (zero + 1, nan), (zero, zero[:4])]
    ours, theirs = ([summarize(t) for t in side] for side in zip(*pairs, strict=True))
    limit = 1e-4
    for left, right in zip(ours, theirs, strict=True):
        rows = [np.array([side.to_row()]) for side in (left, right)]
        judged = judge_rows(rows[0], rows[1], limit)
        verdict, why = judge_summaries(left, right, limit)
        assert ("diverged" if judged.diverged[0] else "within", judged.why) == (verdict, why)
    tables = [np.array([summary.to_row() for summary in side]) for side in (ours, theirs)]
    whole = judge_rows(tables[0], tables[1], limit)
    each = [judge_summaries(*pair, limit)[0] == "diverged" for pair in zip(ours, theirs)]  # noqa: B905
    assert whole.diverged.tolist() == each
    assert 0 < sum(each) < len(each)


def test_merging_many_rows_is_merging_one_by_one() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(n) * 10.0**n + n for n in (1, 4, 9, 2)]
    tensors += [torch.tensor([float("nan"), 1.0]), torch.tensor([3e38, -3e38]), torch.zeros(3)]
    parts = [summarize(tensor) for tensor in tensors]
    one = parts[0]
    for part in parts[1:]:
        one = one.merge(part)
    many = merge_rows(np.array([part.to_row() for part in parts]))
    assert many.to_row()[:7] == one.to_row()[:7]
    assert many.first == one.first
    np.testing.assert_allclose(many.to_row()[7:13], one.to_row()[7:13], rtol=1e-9)
    nothing = merge_rows(np.array([summarize(torch.full((2,), float("nan"))).to_row()] * 2))
    assert isinstance(nothing, Summary)
    assert nothing.nan == 4 and np.isnan(nothing.mean) and nothing.l2 == 0


def test_thousands_of_steps_compare_in_seconds(tmp_path: Path) -> None:
    a = watched(tmp_path / "a", range(500), blocks=12)
    b = watched(tmp_path / "b", range(500), blocks=12, parts_at=400)
    start = time.process_time()
    result = tap.compare(a, b)
    seconds = time.process_time() - start
    assert result.first_divergence is not None
    assert result.first_divergence.first_moment == (40, 400, 0)
    assert seconds < 5, f"{seconds:.1f} s for 60000 summaries"  # one by one they took 5 s and more
