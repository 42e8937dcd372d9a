"""Recordings of every released format stay readable, value for value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tap

SAMPLES = sorted((Path(__file__).parent / "data").glob("format-*"))


def test_there_is_a_sample_of_every_format() -> None:
    from tensortap.recording.schema import FORMAT

    assert [path.name for path in SAMPLES] == [f"format-{n}" for n in range(1, FORMAT + 1)]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_an_old_recording_reads_as_it_was_written(path: Path) -> None:
    run = tap.open(path)
    assert (run.status, run.manifest.mode) == ("complete", "sample")
    assert run.layers == ["0", "1", "2", ""]
    assert run.steps == [(0, 0), (0, 1)]
    torch.manual_seed(0)
    linear = nn.Linear(4, 6)
    for record in run["0"].port("output"):
        x = torch.arange(8.0).view(2, 4) + record.batch
        expected = linear(x).detach()
        torch.testing.assert_close(record.tensor(), expected)
        assert record.summary.mean == pytest.approx(record.tensor().double().mean().item())
        assert record.summary.histogram is not None
    masks = [r for r in run["2"].records if r.leaf == "[1]['mask']"]
    assert [r.dtype for r in masks] == ["bool", "bool"]
    assert run["2"].first("output").dtype == "bfloat16"
    assert run["1"].grad_output.shape == (2, 6)
