"""Percentiles of |d|: which order statistics they need, and what a histogram knows of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tensortap.numerics.histogram import Histogram

__all__ = ["PERCENTS", "from_histogram", "interpolated", "merge_histograms", "ranks", "weighted"]

PERCENTS: tuple[int, ...] = (50, 90, 95, 99)


def ranks(count: int) -> tuple[int, ...]:
    """The ranks (from 0, ascending) that the percentiles of so many values rest on."""
    wanted: set[int] = set()
    for percent in PERCENTS if count else ():
        below = math.floor(percent / 100 * (count - 1))
        wanted |= {below, min(below + 1, count - 1)}
    return tuple(sorted(wanted))


def interpolated(values: Sequence[float], count: int) -> dict[int, float]:
    """The percentiles from the values at `ranks(count)`, as torch.quantile and numpy have them."""
    if not count:
        return dict.fromkeys(PERCENTS, math.nan)
    known = dict(zip(ranks(count), map(float, values), strict=True))
    result = {}
    for percent in PERCENTS:
        position = percent / 100 * (count - 1)
        below = math.floor(position)
        share = position - below
        low, high = known[below], known[min(below + 1, count - 1)]
        step = high - low
        # From the nearer end, as they do, so that not even the last bit differs.
        value = low + step * share if share < 0.5 else high - step * (1 - share)
        result[percent] = value if low != high else low
    return result


def weighted(histogram: Histogram, finite: int) -> Histogram:
    """The histogram of a sample, blown up to the number of values that it stands for."""
    total = histogram.total
    if total == finite or not total:
        return histogram
    cumulative = np.rint(np.cumsum(histogram.counts) * (finite / total)).astype(np.int64)
    cumulative[-1] = finite
    return Histogram(np.diff(np.minimum(cumulative, finite), prepend=0))


def merge_histograms(
    first: Histogram | None, first_finite: int, second: Histogram | None, second_finite: int
) -> Histogram | None:
    """Both together, each with the weight of what it stands for."""
    if first is None or second is None:
        return None
    return weighted(first, first_finite).merge(weighted(second, second_finite))


def from_histogram(histogram: Histogram, largest: float) -> dict[int, float]:
    """The percentiles to within a bucket; `largest` is the exact maximum."""
    smallest_bucket = float(histogram.edges()[1][0])
    found = {p: histogram.quantile(p / 100, hi=largest) for p in PERCENTS}
    # The lowest bucket holds zero and what float32 can hardly tell from it.
    return {p: 0.0 if value < smallest_bucket else value for p, value in found.items()}
