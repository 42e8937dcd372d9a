"""The summary of a tensor: what it holds, and how two of them become one.

A backend hands over a raw row of float64 (`COLUMNS`, then the first values); `Summary` is the same
with names. Keeping mean, std and l2 rather than sums makes merging safe: nothing is squared that
could overflow, and no large numbers are subtracted to get a small one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensortap.errors import OptionError
from tensortap.numerics.histogram import Histogram

__all__ = ["COLUMNS", "COUNTS", "FIRST", "WIDTH", "Summary"]

COLUMNS: tuple[str, ...] = (
    "count",
    "nan",
    "posinf",
    "neginf",
    "zeros",
    "subnormal",
    "saturated",
    "mean",
    "std",
    "min",
    "max",
    "absmax",
    "l2",
)
FIRST = 10
WIDTH = len(COLUMNS) + FIRST
COUNTS = 7
"""How many of the columns, the first ones, are counts."""


@dataclass(frozen=True)
class Summary:
    """Mergeable statistics of a tensor.

    The moments are over the finite values: NaN when there are none, except `l2`, which is 0 then.
    `std` is the population's. `subnormal` counts nonzero values below the format's smallest normal
    one. `saturated` counts values at the format's largest magnitude: the largest finite float, the
    minimum or maximum of a signed integer, the maximum of an unsigned one.
    """

    count: int
    nan: int
    posinf: int
    neginf: int
    zeros: int
    subnormal: int
    saturated: int
    mean: float
    std: float
    min: float
    max: float
    absmax: float
    l2: float
    first: tuple[float, ...]
    histogram: Histogram | None = None

    @classmethod
    def from_row(cls, row: Sequence[float], histogram: Histogram | None = None) -> Summary:
        """The summary in a raw row: `COLUMNS`, then `FIRST` first values padded with NaN."""
        if len(row) != WIDTH:
            raise OptionError(f"A summary row has {WIDTH} numbers, but got {len(row)}.")
        values: dict[str, Any] = dict(zip(COLUMNS, map(float, row), strict=False))
        for name in COLUMNS[:COUNTS]:
            values[name] = int(values[name])
        first = row[len(COLUMNS) : len(COLUMNS) + min(FIRST, values["count"])]
        return cls(**values, first=tuple(map(float, first)), histogram=histogram)

    def to_row(self) -> list[float]:
        """The raw row of this summary; the histogram is not in it."""
        values = [float(getattr(self, name)) for name in COLUMNS]
        padding = [math.nan] * (FIRST - len(self.first))
        return [*values, *self.first, *padding]

    @property
    def finite(self) -> int:
        """How many values are neither NaN nor infinite."""
        return self.count - self.nan - self.posinf - self.neginf

    @property
    def rms(self) -> float:
        """The root mean square of the finite values."""
        return self.l2 / math.sqrt(self.finite) if self.finite else math.nan

    @property
    def has_nan(self) -> bool:
        return self.nan > 0

    @property
    def has_inf(self) -> bool:
        return self.posinf + self.neginf > 0

    def merge(self, other: Summary) -> Summary:
        """The summary of both tensors together, this one's values first.

        Chan's formula, in terms of standard deviations instead of sums of squares. A histogram
        survives only when both have one.
        """
        mean, std = _merged_moments(self, other)
        histogram = None
        if self.histogram is not None and other.histogram is not None:
            histogram = self.histogram.merge(other.histogram)
        return Summary(
            count=self.count + other.count,
            nan=self.nan + other.nan,
            posinf=self.posinf + other.posinf,
            neginf=self.neginf + other.neginf,
            zeros=self.zeros + other.zeros,
            subnormal=self.subnormal + other.subnormal,
            saturated=self.saturated + other.saturated,
            mean=mean,
            std=std,
            min=_pick(min, self.min, other.min),
            max=_pick(max, self.max, other.max),
            absmax=_pick(max, self.absmax, other.absmax),
            l2=math.hypot(self.l2, other.l2),
            first=(self.first + other.first)[:FIRST],
            histogram=histogram,
        )

    def quantile(self, q: float) -> float:
        """The q-quantile of the finite values, to within a bucket of the histogram."""
        if self.histogram is None:
            raise OptionError(
                "This summary holds no histogram, so it has no quantiles. "
                "Ask for one: summarize(tensor, histogram=True) or record(..., histograms=True)."
            )
        return self.histogram.quantile(q, lo=self.min, hi=self.max)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold: NaN becomes None, an infinity the word "inf" or "-inf"."""
        result: dict[str, Any] = {
            name: value if isinstance(value := getattr(self, name), int) else _plain(value)
            for name in COLUMNS
        }
        result["rms"] = _plain(self.rms)
        result["first"] = [_plain(value) for value in self.first]
        if self.histogram is not None:
            indices, counts = self.histogram.sparse()
            result["histogram"] = {"buckets": indices.tolist(), "counts": counts.tolist()}
        return result


def _merged_moments(a: Summary, b: Summary) -> tuple[float, float]:
    if not a.finite:
        return b.mean, b.std
    if not b.finite:
        return a.mean, a.std
    if a.finite < b.finite:
        a, b = b, a
    total = a.finite + b.finite
    share = b.finite / total
    half = b.mean / 2 - a.mean / 2  # halves, since the difference itself may overflow
    mean = a.mean + 2 * (half * share)
    between = half * (2 * math.sqrt(share * (a.finite / total)))
    std = math.hypot(a.std * math.sqrt(a.finite / total), b.std * math.sqrt(share), between)
    return mean, std


def _pick(best: Any, a: float, b: float) -> float:
    if math.isnan(a):
        return b
    if math.isnan(b):
        return a
    return float(best(a, b))


def _plain(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value
