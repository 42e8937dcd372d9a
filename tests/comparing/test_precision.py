"""The estimate of what rounding does, where no floor run was given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.comparing.precision import estimated_floor, precision_of


def test_the_coarser_side_sets_the_estimate() -> None:
    fine = estimated_floor(("float32", "float32"), (None, None), 1)
    mixed = estimated_floor(("float32", "bfloat16"), (None, None), 1)
    assert mixed == estimated_floor(("bfloat16", "bfloat16"), (None, None), 1)
    assert fine < 1e-6 < 1e-3 < mixed < 1e-2
    # Weights in int8 mean quantised arithmetic, whatever the outputs are stored in.
    assert estimated_floor(("float32", "float32"), ("float32", "int8"), 1) > 1e-3


def test_it_grows_with_the_depth_as_independent_errors_do() -> None:
    def at(depth: int) -> float:
        return estimated_floor(("bfloat16", "bfloat16"), (None, None), depth)

    assert at(1) < at(10) < at(100)
    assert at(10_000) / at(100) < 10


def test_integers_do_not_round() -> None:
    assert estimated_floor(("int64", "int64"), ("float32", "float32"), 5) == 0.0


def test_a_recording_says_its_precision(tmp_path: Path) -> None:
    model = nn.Linear(8, 8).bfloat16()
    model.scale = nn.Parameter(torch.ones(1))  # a few float32 parameters do not make it float32
    with tap.record(model, tmp_path / "r", layers="all"):
        model(torch.ones(1, 8).bfloat16())
    assert precision_of(tap.open(tmp_path / "r")) == "bfloat16"


@pytest.mark.parametrize(
    ("device", "setting", "expected"),
    [
        ("cuda:0", "highest", "float32"),
        ("cuda:0", "ieee", "float32"),
        ("cuda:0", "high", "tf32"),
        ("cuda:0", "tf32", "tf32"),  # as torch's newer setting says it
        ("cpu", "tf32", "float32"),
    ],
)
def test_float32_matrices_of_a_gpu_may_be_tf32(
    tmp_path: Path, device: str, setting: str, expected: str
) -> None:
    model = nn.Linear(8, 8)
    with tap.record(model, tmp_path / "r", layers="all"):
        model(torch.ones(1, 8))
    manifest = tmp_path / "r" / "recording.json"
    data = json.loads(manifest.read_text())
    data["device"] = device
    data["environment"]["float32_matmul_precision"] = setting
    manifest.write_text(json.dumps(data))
    assert precision_of(tap.open(tmp_path / "r")) == expected
