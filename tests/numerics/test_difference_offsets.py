"""Moments far from zero: what the chunks of a tensor differ by is less than their means round."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from tensortap.numerics import difference
from tensortap.numerics.native import core
from tensortap.numerics.native_difference import NativeDifference


def exact(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[float, float]:
    """Correlation and the reference's standard deviation, in rational arithmetic."""
    left = [Fraction(value) for value in reference.tolist()]
    right = [Fraction(value) for value in candidate.tolist()]
    count = len(left)
    middle, other = sum(left) / count, sum(right) / count
    own = sum((x - middle) ** 2 for x in left)
    theirs = sum((y - other) ** 2 for y in right)
    both = sum((x - middle) * (y - other) for x, y in zip(left, right, strict=True))
    correlation = float(both) / math.sqrt(float(own)) / math.sqrt(float(theirs))
    return correlation, math.sqrt(float(own) / count)


@pytest.mark.parametrize("offset", [1e6, 1e9, 1e12])
@pytest.mark.parametrize("count", [100, 1030, 5001])
def test_std_and_correlation_keep_their_digits(
    offset: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, dtype=torch.float64, generator=generator)
    y = x + 1e-3 * torch.randn(count, dtype=torch.float64, generator=generator)
    x, y = x + offset, y + offset
    correlation, std = exact(x, y)
    for isa in range(-1, len(core.isas()) if core is not None else 0):
        monkeypatch.setattr(NativeDifference, "isa", isa)
        found = difference(x, y)
        assert found.correlation == pytest.approx(correlation, rel=0, abs=1e-12)
        assert found.reference_std == pytest.approx(std, rel=1e-12)


def test_integers_near_the_end_of_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5000, generator=generator) * 1000).long() + 2**52
    y = x + torch.randint(-9, 9, (5000,), generator=generator)
    assert difference(x, y).correlation == pytest.approx(exact(x, y)[0], rel=0, abs=1e-12)
