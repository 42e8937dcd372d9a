"""A histogram whose grid never depends on the data, so that any two can be added.

The bucket of a value is the top 13 bits of it as float32: sign, exponent, and four bits of
mantissa. That is 16 buckets an octave over the whole range, a relative width of at most 1/16, and
no pass to find a range first. Values a float32 cannot hold fall into the outermost bucket, or into
the ones around zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.errors import OptionError

__all__ = ["BUCKETS", "Histogram"]

BUCKETS = 8192
_SIGN = BUCKETS // 2


@cache
def _bounds() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The lower and upper bound of each bucket, by index."""
    magnitudes = np.arange(_SIGN + 1, dtype=np.uint32) << np.uint32(19)
    magnitudes[_SIGN] = 0x7F800000  # the exponent of Inf and NaN: never counted
    with np.errstate(invalid="ignore"):
        edges = magnitudes.view(np.float32).astype(np.float64)
    edges[~np.isfinite(edges)] = float(2.0**128)
    lower = np.concatenate([edges[:-1], -edges[1:]])
    upper = np.concatenate([edges[1:], -edges[:-1]])
    upper[_SIGN] = 0.0
    for bound in (lower, upper):
        bound.setflags(write=False)
    return lower, upper


@cache
def _ascending() -> NDArray[np.intp]:
    """Bucket indices in the order of their values: the negative half runs backwards."""
    return np.concatenate([np.arange(BUCKETS - 1, _SIGN - 1, -1), np.arange(_SIGN)])


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of the finite values on the fixed signed-log2 grid."""

    counts: NDArray[np.int64] = field(repr=False)

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts, dtype=np.int64)
        if counts.shape != (BUCKETS,):
            raise OptionError(
                f"A histogram has {BUCKETS} counts, but got an array of shape {counts.shape}."
            )
        if counts is self.counts and counts.flags.writeable:
            counts = counts.copy()
        counts.setflags(write=False)
        object.__setattr__(self, "counts", counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return bool(np.array_equal(self.counts, other.counts))

    def __hash__(self) -> int:
        return hash(self.counts.tobytes())

    def __repr__(self) -> str:
        return f"Histogram(total={self.total}, buckets={int(np.count_nonzero(self.counts))})"

    @property
    def total(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())

    @classmethod
    def from_sparse(cls, indices: Sequence[int] | NDArray[Any], counts: Any) -> Histogram:
        """The inverse of `sparse`."""
        where = np.asarray(indices, dtype=np.int64)
        if where.size and not (where.min() >= 0 and where.max() < BUCKETS):
            raise OptionError(
                f"Histogram buckets are numbered 0 to {BUCKETS - 1}, "
                f"but got indices from {where.min()} to {where.max()}."
            )
        dense = np.zeros(BUCKETS, dtype=np.int64)
        np.add.at(dense, where, np.asarray(counts, dtype=np.int64))
        return cls(dense)

    def sparse(self) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """The indices of the buckets that hold something, and their counts."""
        where = np.flatnonzero(self.counts)
        return where.astype(np.uint16), self.counts[where]

    def edges(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Lower and upper bounds of all buckets, by index (negative values: second half)."""
        return _bounds()

    def buckets(
        self,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """Lower bounds, upper bounds and counts of the filled buckets, by ascending value."""
        order = _ascending()
        order = order[self.counts[order] > 0]
        lower, upper = _bounds()
        return lower[order], upper[order], self.counts[order]

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of both sets of values together."""
        return Histogram(self.counts + other.counts)

    def quantile(self, q: float, lo: float = -np.inf, hi: float = np.inf) -> float:
        """The q-quantile, to within a bucket; NaN when nothing was counted.

        `lo` and `hi` are the known minimum and maximum: they make the ends exact and keep
        the outermost buckets from reaching past the data.
        """
        if not 0.0 <= q <= 1.0:
            raise OptionError(f"A quantile lies between 0 and 1, but got {q!r}.")
        lower, upper, counts = self.buckets()
        if not counts.size:
            return float("nan")
        cumulative = np.cumsum(counts)
        last = int(cumulative[-1]) - 1

        def order_statistic(rank: int) -> float:
            if rank <= 0 and np.isfinite(lo):
                return lo
            if rank >= last and np.isfinite(hi):
                return hi
            at = int(np.searchsorted(cumulative, rank, side="right"))
            inside = (rank - (cumulative[at] - counts[at]) + 0.5) / counts[at]
            value = float(lower[at] + (upper[at] - lower[at]) * inside)
            return min(max(value, lo), hi)

        position = q * last
        below = int(np.floor(position))
        share = position - below
        value = order_statistic(below)
        if share:
            value += (order_statistic(below + 1) - value) * share
        return float(value)
