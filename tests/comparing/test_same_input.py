"""Whether two runs were given the same inputs, also where one was given them cast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensortap as tap
from tensortap.recording.reader import Recording

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def run(folder: Path, x: torch.Tensor, *more: torch.Tensor) -> Recording:
    class Sum(torch.nn.Module):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return torch.stack([arg.float().sum() for arg in args])

    model = Sum()
    with tap.record(model, folder, layers="all"):
        model(x, *more)
    return tap.open(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_same_numbers_in_another_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    ids = torch.arange(3)
    result = tap.compare(run(tmp_path / "a", X, ids), run(tmp_path / "b", X.to(dtype), ids))
    assert result.same_input is True
    assert not [row for row in result.environment if row.name == "inputs"]
    result = tap.compare(run(tmp_path / "c", X.to(dtype), ids), run(tmp_path / "d", X, ids))
    assert result.same_input is True


def test_other_numbers_in_another_dtype(tmp_path: Path) -> None:
    other = X.clone()
    other[0, 0] += 0.1
    result = tap.compare(run(tmp_path / "a", X), run(tmp_path / "b", other.bfloat16()))
    assert result.same_input is False


def test_numbers_that_only_round_to_the_same(tmp_path: Path) -> None:
    """In one dtype a bit is a bit: rounding is looked at only where a cast was."""
    other = X * (1 + 2**-22)
    assert torch.equal(other.bfloat16(), X.bfloat16()) and not torch.equal(other, X)
    assert tap.compare(run(tmp_path / "a", X), run(tmp_path / "b", other)).same_input is False


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_other_ids_beside_the_same_numbers(tmp_path: Path, half: torch.dtype) -> None:
    left = run(tmp_path / "a", X, torch.arange(3))
    right = run(tmp_path / "b", X.to(half), torch.arange(1, 4))
    assert tap.compare(left, right).same_input is False


def test_neither_is_narrower(tmp_path: Path) -> None:
    left, right = run(tmp_path / "a", X.half()), run(tmp_path / "b", X.bfloat16())
    assert tap.compare(left, right).same_input is False


def test_ids_alone_have_nothing_to_round(tmp_path: Path) -> None:
    inputs = run(tmp_path / "a", torch.arange(3)).manifest.inputs
    assert (inputs["floats"], inputs["rounded"]) == ([], {})
