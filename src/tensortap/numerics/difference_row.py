"""The raw numbers of a difference, as a row of float64, and how two rows become one.

Norms, means and angles stand here rather than sums: nothing is squared that could overflow, and a
small number is never the difference of two large ones. Rows merge in any order and any split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["EMPTY", "STATE", "State", "merge_rows", "tolerances"]


class State(NamedTuple):
    """One row. d is candidate - reference; all but the first five columns are over finite pairs.

    With no finite pair, norms and angles are 0 and what else is undefined is NaN. `max_abs_at`
    counts numbers from the start of the row's stream: the first of equals, -1 for none. `cos_*` is
    the cosine of the angle between two vectors, `corr_*` the same about their means: 0 where a
    norm is 0.
    """

    count: float = 0.0  # type: ignore[assignment]  # which hides tuple.count
    finite: float = 0.0
    agreeing: float = 0.0
    disagreeing: float = 0.0
    mismatched: float = 0.0
    identical: float = 1.0
    d_mean: float = math.nan
    d_std: float = math.nan
    d_mae: float = math.nan
    d_l2: float = 0.0
    max_abs: float = math.nan
    max_abs_at: float = -1.0
    max_abs_reference: float = math.nan
    max_abs_candidate: float = math.nan
    ref_mean: float = math.nan
    ref_std: float = math.nan
    ref_l2: float = 0.0
    ref_mae: float = math.nan
    cand_mean: float = math.nan
    cand_std: float = math.nan
    cand_l2: float = 0.0
    cos_rd: float = 0.0
    corr_rd: float = 0.0
    max_relative: float = math.nan
    mean_relative: float = math.nan
    cos_rc: float = 0.0
    corr_rc: float = 0.0


STATE: tuple[str, ...] = State._fields
EMPTY = State()


def merge_rows(first: Sequence[float], second: Sequence[float]) -> State:
    """The row of both streams, one behind the other."""
    a, b = State(*first), State(*second)
    counts = {name: getattr(a, name) + getattr(b, name) for name in STATE[:5]}
    counts["identical"] = min(a.identical, b.identical)
    if not b.finite:
        return a._replace(**counts)
    if not a.finite:
        at = b.max_abs_at + a.count if b.max_abs_at >= 0 else -1.0
        return b._replace(**counts, max_abs_at=at)
    return State(**counts, **_moments(a, b), **_largest(a, b))


def _largest(a: State, b: State) -> dict[str, float]:
    best, shift = (b, a.count) if b.max_abs > a.max_abs else (a, 0.0)
    return {
        "max_abs": best.max_abs,
        "max_abs_at": best.max_abs_at + shift,
        "max_abs_reference": best.max_abs_reference,
        "max_abs_candidate": best.max_abs_candidate,
        "max_relative": max(a.max_relative, b.max_relative),
    }


def _moments(a: State, b: State) -> dict[str, float]:
    total = a.finite + b.finite
    shares = a.finite / total, b.finite / total
    merged: dict[str, float] = {}
    spread: dict[str, tuple[float, float, float]] = {}
    length: dict[str, tuple[float, float]] = {}
    for side in ("d", "ref", "cand"):
        means = getattr(a, f"{side}_mean"), getattr(b, f"{side}_mean")
        stds = getattr(a, f"{side}_std"), getattr(b, f"{side}_std")
        norms = getattr(a, f"{side}_l2"), getattr(b, f"{side}_l2")
        half = means[1] / 2 - means[0] / 2  # halves, since the difference itself may overflow
        between = half * (2 * math.sqrt(shares[0] * shares[1]))
        parts = stds[0] * math.sqrt(shares[0]), stds[1] * math.sqrt(shares[1]), between
        std, norm = math.hypot(*parts), math.hypot(*norms)
        merged |= {f"{side}_mean": _mean(means, shares), f"{side}_std": std, f"{side}_l2": norm}
        spread[side] = _over(parts[0], std), _over(parts[1], std), _over(between, std)
        length[side] = _over(norms[0], norm), _over(norms[1], norm)
    for name in ("d_mae", "ref_mae", "mean_relative"):
        merged[name] = getattr(a, name) * shares[0] + getattr(b, name) * shares[1]
    for pair, x, y in (("rd", "ref", "d"), ("rc", "ref", "cand")):
        cosines = getattr(a, f"cos_{pair}"), getattr(b, f"cos_{pair}"), 1.0
        correlations = getattr(a, f"corr_{pair}"), getattr(b, f"corr_{pair}"), 1.0
        merged[f"cos_{pair}"] = _dot(cosines, length[x], length[y])
        merged[f"corr_{pair}"] = _dot(correlations, spread[x], spread[y])
    return merged


def _mean(means: tuple[float, float], shares: tuple[float, float]) -> float:
    """From the larger part, so that a small one cannot disturb its digits."""
    (one, other), share = means, shares[1]
    if shares[0] < shares[1]:
        one, other, share = other, one, shares[0]
    return one + 2 * ((other / 2 - one / 2) * share)


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _dot(angles: Sequence[float], x: Sequence[float], y: Sequence[float]) -> float:
    return math.fsum(a * p * q for a, p, q in zip(angles, x, y, strict=False))


def tolerances(reference: torch.dtype, candidate: torch.dtype) -> tuple[float, float]:
    """The default rtol and atol of a pair: the looser of the two dtypes."""
    found = [_tolerance(dtype) for dtype in (reference, candidate)]
    return max(rtol for rtol, _ in found), max(atol for _, atol in found)


@cache
def _tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """As torch.testing has them. For 8-bit floats, where it has none, rtol is the format's step."""
    import torch

    known = {
        torch.float16: (1e-3, 1e-5),
        torch.bfloat16: (1.6e-2, 1e-5),
        torch.float32: (1.3e-6, 1e-5),
        torch.float64: (1e-7, 1e-7),
        torch.complex32: (1e-3, 1e-5),
        torch.complex64: (1.3e-6, 1e-5),
        torch.complex128: (1e-7, 1e-7),
    }
    if dtype in known:
        return known[dtype]
    if dtype.is_floating_point:
        return float(torch.finfo(dtype).eps), 1e-5
    return 0.0, 0.0
