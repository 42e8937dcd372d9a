"""The difference of two tensors: candidate minus reference, in every measure there is a use for.

A backend hands over a raw row (`difference_row.State`); `Difference` derives the metrics from it.
Each is derived so that it keeps its digits: 1 - cosine of two almost equal vectors, for one, comes
from the angle between reference and difference, not from a number next to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from tensortap.errors import OptionError
from tensortap.numerics.difference_row import STATE, State, merge_rows, tolerances
from tensortap.numerics.histogram import Histogram
from tensortap.numerics.pairs import Pairs, unravel
from tensortap.numerics.percentiles import (
    from_histogram,
    interpolated,
    merge_histograms,
    ranks,
    weighted,
)

if TYPE_CHECKING:
    import torch

    Pair = tuple[torch.Tensor, torch.Tensor]

__all__ = [
    "METRICS",
    "STATE",
    "Difference",
    "difference",
    "difference_of",
    "merge_rows",
    "ranks",
    "tolerances",
    "weighted",
]

METRICS: tuple[str, ...] = (
    "agreeing",
    "correlation",
    "cosine",
    "cosine_distance",
    "count",
    "disagreeing",
    "error",
    "finite",
    "identical",
    "mae",
    "max_abs",
    "max_relative",
    "mean",
    "mean_relative",
    "mismatched",
    "mse",
    "p50",
    "p90",
    "p95",
    "p99",
    "rel",
    "relative_mae",
    "relative_mse",
    "rmse",
    "sqnr_db",
    "std",
)
"""The names that a rule may use: attributes of a `Difference` that are numbers."""


@dataclass(frozen=True)
class Difference:
    """Mergeable metrics of d = candidate - reference, over the pairs where both are finite.

    `agreeing` pairs are both NaN, or both the same infinity; `disagreeing` ones are not finite on
    one side, or of different kinds. `mismatched` counts |d| > atol + rtol * |reference|, and the
    disagreeing. `identical` means the same dtype, shape and bytes. What is undefined is NaN: the
    cosine with a zero vector, the correlation with a constant, anything relative to nothing.
    docs/numbers.md has the definitions.
    """

    count: int
    finite: int
    agreeing: int
    disagreeing: int
    mean: float
    std: float
    mae: float
    max_abs: float
    max_abs_index: tuple[int, ...] | None
    max_abs_pair: tuple[float, float] | None
    mse: float
    rmse: float
    relative_mse: float
    relative_mae: float
    max_relative: float
    mean_relative: float
    cosine: float
    cosine_distance: float
    correlation: float
    sqnr_db: float
    rel: float
    percentiles: dict[int, float] | None = field(hash=False)
    percentiles_exact: bool
    mismatched: int
    identical: bool
    rtol: float
    atol: float
    dtypes: tuple[str, str]
    reference_mean: float
    reference_std: float
    candidate_mean: float
    candidate_std: float
    row: State = field(repr=False)
    histogram: Histogram | None = field(default=None, repr=False)

    @classmethod
    def from_row(
        cls,
        row: Sequence[float],
        shape: Sequence[int] | None = None,
        *,
        parts: int = 1,
        percentiles: dict[int, float] | None = None,
        percentiles_exact: bool = True,
        histogram: Histogram | None = None,
        rtol: float = 0.0,
        atol: float = 0.0,
        dtypes: tuple[str, str] = ("float64", "float64"),
    ) -> Difference:
        """The difference in a raw row; `shape` and `parts` (2 for complex) place the maximum."""
        if len(row) != len(STATE):
            raise OptionError(f"A difference row has {len(STATE)} numbers, but got {len(row)}.")
        s = State(*map(float, row))
        place = None
        if shape is not None and s.max_abs_at >= 0:
            place = unravel(int(s.max_abs_at) // parts, shape)
        cosine, distance = _cosine(s)
        error = _over(s.d_l2, s.ref_l2)
        rmse = s.d_l2 / math.sqrt(s.finite) if s.finite else math.nan
        rel = _over(s.d_l2, math.hypot(s.ref_l2, s.cand_l2))
        return cls(
            count=int(s.count),
            finite=int(s.finite),
            agreeing=int(s.agreeing),
            disagreeing=int(s.disagreeing),
            mean=s.d_mean,
            std=s.d_std,
            mae=s.d_mae,
            max_abs=s.max_abs,
            max_abs_index=place,
            max_abs_pair=(s.max_abs_reference, s.max_abs_candidate) if s.finite else None,
            mse=rmse * rmse,
            rmse=rmse,
            relative_mse=error * error,
            relative_mae=_over(s.d_mae, s.ref_mae),
            max_relative=s.max_relative,
            mean_relative=s.mean_relative,
            cosine=cosine,
            cosine_distance=distance,
            correlation=_correlation(s),
            sqnr_db=_decibels(s),
            rel=rel * rel,
            percentiles=percentiles,
            percentiles_exact=percentiles_exact and percentiles is not None,
            mismatched=int(s.mismatched),
            identical=bool(s.identical),
            rtol=rtol,
            atol=atol,
            dtypes=dtypes,
            reference_mean=s.ref_mean,
            reference_std=s.ref_std,
            candidate_mean=s.cand_mean,
            candidate_std=s.cand_std,
            row=s,
            histogram=histogram,
        )

    @property
    def error(self) -> float:
        """The relative L2 error |d| / |reference|; NaN for a reference of zeros."""
        return _over(self.row.d_l2, self.row.ref_l2)

    @property
    def p50(self) -> float:
        return self._percentile(50)

    @property
    def p90(self) -> float:
        return self._percentile(90)

    @property
    def p95(self) -> float:
        return self._percentile(95)

    @property
    def p99(self) -> float:
        return self._percentile(99)

    def _percentile(self, percent: int) -> float:
        return math.nan if self.percentiles is None else self.percentiles[percent]

    @property
    def grade(self) -> str:
        """The documents' word for the MSE, which says nothing of values that are not finite."""
        if math.isnan(self.mse) or self.disagreeing:
            return "undefined"
        limits = ((1e-4, "very close"), (1e-3, "good"), (1e-2, "fair"))
        return next((word for limit, word in limits if self.mse < limit), "large")

    @property
    def correlation_grade(self) -> str:
        """The documents' word for the correlation."""
        if math.isnan(self.correlation) or self.disagreeing:
            return "undefined"
        limits = ((0.9999, "nearly perfect"), (0.999, "excellent"), (0.99, "good"))
        found = (word for limit, word in limits if self.correlation > limit)
        return next(found, "needs attention")

    @property
    def device_good(self) -> bool:
        """The documents' limits across devices: max abs, mean abs and cosine, all three.

        Two vectors of zeros have no cosine, and nothing between them that could be bad.
        """
        if self.identical:
            return True
        near = self.max_abs < 0.01 and self.mae < 0.001 and not self.disagreeing
        return near and (self.cosine > 0.99 or (math.isnan(self.cosine) and self.max_abs == 0))

    def merge(self, other: Difference) -> Difference:
        """The difference of both pairs of tensors together, this one's first.

        Percentiles then come from the histograms, and are None unless both have one. The place of
        the largest difference is that within its own side.
        """
        row = merge_rows(self.row, other.row)
        theirs = other.finite and (not self.finite or other.max_abs > self.max_abs)
        histogram = merge_histograms(self.histogram, self.finite, other.histogram, other.finite)
        merged = Difference.from_row(
            row,
            percentiles=None if histogram is None else from_histogram(histogram, row.max_abs),
            percentiles_exact=False,
            histogram=histogram,
            rtol=max(self.rtol, other.rtol),
            atol=max(self.atol, other.atol),
            dtypes=_common(self.dtypes, other.dtypes),
        )
        place = other.max_abs_index if theirs else self.max_abs_index
        return replace(merged, max_abs_index=place)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold: NaN becomes None, an infinity the word "inf" or "-inf"."""
        names = [f.name for f in fields(self) if f.name not in ("row", "histogram", "percentiles")]
        result = {name: _plain(getattr(self, name)) for name in names}
        found = self.percentiles
        result["percentiles"] = found and {str(p): _plain(found[p]) for p in found}
        for name in ("error", "grade", "correlation_grade", "device_good"):
            result[name] = _plain(getattr(self, name))
        return result


def difference(
    reference: torch.Tensor,
    candidate: torch.Tensor,
    *,
    percentiles: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> Difference:
    """Compare two tensors of one shape, whatever their dtypes, strides and devices.

    The difference is taken in float64 (between integers exactly, then rounded). Complex tensors
    are taken as their real and imaginary parts. The percentiles of |d| are exact. `rtol` and `atol`
    decide what counts as mismatched; by default they are those of torch.testing for the looser of
    the two dtypes.
    """
    pairs = Pairs(((reference, candidate),))
    return _difference(pairs, percentiles, rtol, atol, shape=tuple(reference.shape))


def difference_of(
    pairs: Sequence[Pair] | Callable[[], Iterable[Pair]],
    *,
    percentiles: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> Difference:
    """Compare many pairs of tensors as if they were one, percentiles included.

    Shapes and dtypes may differ from pair to pair. `max_abs_index` is then the number of the pair,
    followed by the index in it. Pairs may come from a function that is called again for every
    pass, so that no more than one need be in memory. By default `rtol` and `atol` are those of each
    pair, and the loosest are reported.
    """
    stream = Pairs(pairs)
    found = _difference(stream, percentiles, rtol, atol)
    place = stream.place(int(found.row.max_abs_at))
    return replace(found, max_abs_index=None if place is None else (place[0], *place[1]))


def _difference(
    pairs: Pairs,
    percentiles: bool,
    rtol: float | None,
    atol: float | None,
    shape: tuple[int, ...] | None = None,
) -> Difference:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise OptionError(f"{name} must be 0 or more, but got {value!r}.")
    row, ordered, histogram = pairs.measure(percentiles=percentiles, rtol=rtol, atol=atol)
    usual = pairs.tolerances()
    return Difference.from_row(
        row,
        shape,
        parts=pairs.parts,
        percentiles=None if ordered is None else interpolated(ordered, int(row.finite)),
        histogram=histogram,
        rtol=usual[0] if rtol is None else rtol,
        atol=usual[1] if atol is None else atol,
        dtypes=_common(*((_name(r), _name(c)) for r, c in pairs.dtypes)),
    )


def _over(part: float, whole: float) -> float:
    """A ratio; NaN over nothing."""
    return part / whole if whole else math.nan


def _cosine(s: State) -> tuple[float, float]:
    """The cosine, and 1 minus it: each from what keeps its digits.

    For near vectors 1 - cos = (|d|² - (|c| - |r|)²) / (2 |r| |c|), here in units of |r|.
    """
    if not (s.ref_l2 and s.cand_l2):
        return math.nan, math.nan
    share, ratio = s.d_l2 / s.ref_l2, s.cand_l2 / s.ref_l2
    if not share < 0.5:
        cosine = max(-1.0, min(1.0, s.cos_rc))
        return cosine, 1.0 - cosine
    longer = share * (2 * s.cos_rd + share) / (ratio + 1)
    distance = max(0.0, (share - longer) * (share + longer) / (2 * ratio))
    return 1.0 - distance, distance


def _correlation(s: State) -> float:
    sides = ((s.ref_mean, s.ref_std), (s.cand_mean, s.cand_std))
    # Of n numbers in float64 that are not all equal, one at least is off by its last bit: a spread
    # far below that is what rounding left of a constant.
    if not all(std > abs(mean) * 2.0**-55 / math.sqrt(s.finite or 1) for mean, std in sides):
        return math.nan
    if s.d_l2 == 0:
        return 1.0
    return max(-1.0, min(1.0, s.corr_rc))


def _decibels(s: State) -> float:
    if not s.ref_l2:
        return math.nan
    if not s.d_l2:
        return math.inf
    return 20 * (math.log10(s.ref_l2) - math.log10(s.d_l2))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _common(*dtypes: tuple[str, str]) -> tuple[str, str]:
    """The dtypes of each side; "mixed" where pairs do not have one in common."""
    sides = [dict.fromkeys(pair[side] for pair in dtypes) for side in (0, 1)]
    names = [next(iter(side)) if len(side) == 1 else "mixed" if side else "" for side in sides]
    return names[0], names[1]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value
