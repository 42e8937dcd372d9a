"""What the page's script is given: everything in a comparison, without saying a word twice.

Names of metrics stand once, numbers follow in that order with as many digits as anybody looks at,
and what is empty is left out, so that thousands of layers stay a few megabytes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ...numerics.summary import COLUMNS
from .. import text
from ..bars import bars_of_summary, span
from ..provenance import both_sides, sentence_of_both
from .shell import short, words

if TYPE_CHECKING:
    from ...comparing.results import Comparison, LayerComparison, Part
    from ...numerics.difference import Difference
    from ...numerics.histogram import Histogram
    from ...numerics.summary import Summary

__all__ = ["payload"]

METRICS = (
    "count",
    "finite",
    "agreeing",
    "disagreeing",
    "mismatched",
    "mean",
    "std",
    "mae",
    "max_abs",
    "mse",
    "rmse",
    "relative_mse",
    "relative_mae",
    "max_relative",
    "mean_relative",
    "cosine",
    "cosine_distance",
    "correlation",
    "sqnr_db",
    "rel",
)
STATISTICS = (*COLUMNS, "rms")
_PERCENTS = (50, 90, 95, 99)
_OCTAVE = 16  # buckets of a histogram from one power of two to the next
_BIAS = 127  # of a float32's exponent


def payload(comparison: Comparison) -> dict[str, Any]:
    """The comparison as the script reads it."""
    first = comparison.first_divergence
    at = next((n for n, row in enumerate(comparison.layers) if row is first), None)
    return {
        "first": None if first is None else at,
        "metrics": METRICS,
        "statistics": STATISTICS,
        "layers": [_layer(row) for row in comparison.layers],
    }


def _layer(row: LayerComparison) -> dict[str, Any]:
    main = row.main
    other = row.candidate_layer
    return _filled(
        layer=text.layer_name(row.layer),
        candidate=text.layer_name(other) if other is not None and other != row.layer else "",
        type=text.clean(row.type),
        candidate_type=text.clean(row.candidate_type),
        verdict=row.verdict,
        origin=row.origin,
        input=row.input_verdict,
        matched=words(row.matched_by),
        known=both_sides(row),
        known_words=sentence_of_both(row),
        note=words(row.note),
        causes=[words(str(cause)) for cause in row.causes],
        main=next((n for n, part in enumerate(row.parts) if part is main), None),
        parts=[_part(part) for part in row.parts],
    )


def _part(part: Part) -> dict[str, Any]:
    left, right = part.reference_summary, part.candidate_summary
    both = left is not None or right is not None
    return _filled(
        port=text.clean(part.port),
        leaf=text.clean(part.leaf),
        verdict=part.verdict,
        why=words(part.why),
        shape=part.shape,
        candidate_shape=part.candidate_shape if part.candidate_shape != part.shape else (),
        dtype=part.dtype,
        candidate_dtype=part.candidate_dtype if part.candidate_dtype != part.dtype else "",
        transform=text.clean(part.transform),
        error=short(part.error),
        floor=short(part.floor),
        ratio=short(part.floor_ratio),
        hints=[words(hint) for hint in part.hints],
        moments=part.moments,
        worst=part.worst_moment,
        nearer=part.nearer,
        reference_error=short(part.reference_error),
        candidate_error=short(part.candidate_error),
        reference=_statistics(left),
        candidate=_statistics(right),
        first=[_first(left), _first(right)] if both else (),
        bars=_bars(left, right),
        **_difference(part.difference),
    )


def _difference(difference: Difference | None) -> dict[str, Any]:
    if difference is None:
        return {}
    found = difference.percentiles
    pair = difference.max_abs_pair
    return {
        "metrics": [short(getattr(difference, name)) for name in METRICS],
        "at": difference.max_abs_index,
        "pair": None if pair is None else [short(side) for side in pair],
        "percentiles": None if found is None else [short(found.get(p)) for p in _PERCENTS],
        "exact": difference.percentiles_exact,
        "grade": difference.grade,
        "correlation_grade": difference.correlation_grade,
        "device_good": difference.device_good,
        "identical": difference.identical,
        "tolerance": [short(difference.rtol), short(difference.atol)],
        "histogram": _octaves(difference.histogram, difference.finite),
    }


def _octaves(histogram: Histogram | None, finite: int) -> dict[str, Any] | None:
    """|d| from one power of two to the next; zero, and what a float32 takes for it, apart."""
    if histogram is None:
        return None
    counts = histogram.counts[: len(histogram.counts) // 2].reshape(-1, _OCTAVE).sum(axis=1)
    filled = np.flatnonzero(counts[1:]) + 1
    low, end = (int(filled[0]), int(filled[-1]) + 1) if filled.size else (1, 1)
    return {
        "low": low - _BIAS,
        "counts": counts[low:end].tolist(),
        "zeros": int(counts[0]),
        "sampled": histogram.total < finite,
    }


def _statistics(summary: Summary | None) -> list[Any] | None:
    if summary is None:
        return None
    return [short(getattr(summary, name)) for name in STATISTICS]


def _first(summary: Summary | None) -> list[Any]:
    return [] if summary is None else [short(value) for value in summary.first]


def _bars(left: Summary | None, right: Summary | None) -> dict[str, Any] | None:
    """Both sides' values over the same steps, where both have a histogram."""
    sides = (left, right)
    if not all(side is not None and side.histogram is not None and side.finite for side in sides):
        return None
    assert left is not None and right is not None
    low, high = min(left.min, right.min), max(left.max, right.max)
    inner = [side.quantile(q) for side in (left, right) for q in (0.01, 0.99)]
    low, high = span(low, high, min(inner), max(inner))
    drawn = [bars_of_summary(side, low, high) for side in (left, right)]
    if any(one is None or not math.isfinite(one.high - one.low) for one in drawn):
        return None
    reference, candidate = drawn
    assert reference is not None and candidate is not None
    return {
        "low": short(reference.low),
        "high": short(reference.high),
        "reference": reference.counts,
        "candidate": candidate.counts,
        "beyond": sum(one.below + one.above for one in (reference, candidate)),
    }


def _filled(**entries: Any) -> dict[str, Any]:
    """Without what is empty; zero and False are not."""
    return {name: value for name, value in entries.items() if value not in (None, "", (), [])}
