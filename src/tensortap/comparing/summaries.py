"""Comparing where only summaries were kept: as far as they go, and saying how far that is.

Equal summaries do not make equal tensors (a permutation keeps them all), so the best verdict here
is `within`, never `identical`.
"""

from __future__ import annotations

import math

from ..numerics.summary import Summary
from .results import Verdict

__all__ = ["judge_summaries"]

_COUNTS = ("count", "nan", "posinf", "neginf")
_KEPT = "known are moments, range and counts alone, not which elements differ"
# An extreme is one element, and errs more than a moment over all of them.
_EXTREMES = 8.0
_AGAINST_FLOOR = 2.0


def judge_summaries(
    reference: Summary,
    candidate: Summary,
    limit: float,
    floor: tuple[Summary | None, Summary | None] | None = None,
) -> tuple[Verdict, str]:
    """A verdict from two summaries; `limit` is relative to the reference's root mean square."""
    for name in _COUNTS:
        left, right = getattr(reference, name), getattr(candidate, name)
        if left != right:
            return "diverged", f"{name} is {right}, the reference's is {left} ({_KEPT})"
    if not reference.finite:
        return "within", f"nothing finite on both sides ({_KEPT})"
    if floor is not None and floor[0] is not None and floor[1] is not None:
        limit = max(limit, _AGAINST_FLOOR * max(_changes(floor[0], floor[1]).values(), default=0.0))
    changes = _changes(reference, candidate)
    name = max(changes, key=lambda key: changes[key])
    change = changes[name]
    text = (
        f"{name} {getattr(candidate, name):.6g} against {getattr(reference, name):.6g}, "
        f"a change of {change:.3g}"
    )
    if change > limit:
        return "diverged", f"{text} where {limit:.3g} is allowed ({_KEPT})"
    return "within", f"moments and range agree, at most {text} ({_KEPT})"


def _changes(reference: Summary, candidate: Summary) -> dict[str, float]:
    """How much each statistic moved, relative to the size of the reference's values."""
    scale = reference.rms
    top = max(reference.absmax, 1e-30)
    if not scale:
        return {"l2": math.inf if candidate.l2 else 0.0}
    moments = {
        "mean": abs(candidate.mean - reference.mean) / scale,
        "std": abs(candidate.std - reference.std) / scale,
        "rms": abs(candidate.rms - reference.rms) / scale,
    }
    extremes = {
        name: abs(getattr(candidate, name) - getattr(reference, name)) / top / _EXTREMES
        for name in ("min", "max")
    }
    return {**moments, **extremes}
