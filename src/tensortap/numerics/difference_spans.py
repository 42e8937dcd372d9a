"""From partial sums over the spans of two tensors to one row: the last step of a device's pass.

A span's sums of squares are about its own mean. Joined they are about one of the spans' means, of
which each span's is off by little, so that nothing large cancels and a constant keeps no spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.numerics.difference_row import State

__all__ = ["joined"]

Column = NDArray[np.float64]


class _Side(NamedTuple):
    """One side of the pairs, or their difference: how far each span is from the first."""

    mean: float
    squares: float
    away: Column
    rest: float


def joined(spans: Mapping[str, Column], count: int, *, same_dtype: bool) -> State:
    """The row of `count` pairs from the columns of their spans (`PARTIAL`, by name)."""
    finite = float(spans["finite"].sum())
    row = State(
        count=float(count),
        finite=finite,
        agreeing=float(spans["agreeing"].sum()),
        disagreeing=float(spans["disagreeing"].sum()),
        mismatched=float(spans["mismatched"].sum()),
        identical=float(same_dtype and not spans["differing"].any()),
    )
    if not finite:
        return row
    some = spans["finite"] > 0
    part = {name: column[some] for name, column in spans.items()}
    n = part["finite"]
    r, d, c = (_side(n, part[f"{side}_mean"], part[f"{side}_m2"]) for side in "rdc")
    rd, rc = _together(n, part["rd"], r, d), _together(n, part["rc"], r, c)
    r_l2, d_l2, c_l2 = (math.sqrt(side.squares + finite * side.mean**2) for side in (r, d, c))
    at = int(part["max_abs"].argmax())
    return row._replace(
        d_mean=d.mean,
        d_std=math.sqrt(d.squares / finite),
        d_mae=float(part["d_abs"].sum()) / finite,
        d_l2=d_l2,
        max_abs=float(part["max_abs"][at]),
        max_abs_at=float(part["max_abs_at"][at]),
        max_abs_reference=float(part["max_abs_reference"][at]),
        max_abs_candidate=float(part["max_abs_candidate"][at]),
        ref_mean=r.mean,
        ref_std=math.sqrt(r.squares / finite),
        ref_l2=r_l2,
        ref_mae=float(part["r_abs"].sum()) / finite,
        cand_mean=c.mean,
        cand_std=math.sqrt(c.squares / finite),
        cand_l2=c_l2,
        cos_rd=_over(rd + finite * r.mean * d.mean, r_l2, d_l2),
        corr_rd=_over(rd, math.sqrt(r.squares), math.sqrt(d.squares)),
        max_relative=float(part["max_relative"].max()),
        mean_relative=float(part["relative"].sum()) / finite,
        cos_rc=_over(float(part["r_dot_c"].sum()), r_l2, c_l2),
        corr_rc=_over(rc, math.sqrt(r.squares), math.sqrt(c.squares)),
    )


def _side(n: Column, means: Column, squares: Column) -> _Side:
    total = n.sum()
    away = means - means[0]
    rest = float((n * away).sum() / total)
    spread = float(squares.sum() + (n * away * away).sum() - total * rest * rest)
    return _Side(float(means[0]) + rest, max(0.0, spread), away, rest)


def _together(n: Column, products: Column, x: _Side, y: _Side) -> float:
    return float(products.sum() + (n * x.away * y.away).sum() - n.sum() * x.rest * y.rest)


def _over(dot: float, one: float, two: float) -> float:
    return dot / one / two if one and two else 0.0
