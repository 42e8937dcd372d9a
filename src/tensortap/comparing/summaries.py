"""Comparing where only summaries were kept: as far as they go, and saying how far that is.

Equal summaries do not make equal tensors (a permutation keeps them all), so the best verdict here
is `within`, never `identical`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..numerics.summary import COLUMNS, Summary
from ..recording.series import finite_of, merge_rows, rms_of
from .results import Verdict

__all__ = ["JudgedRows", "judge_rows", "judge_summaries"]

Rows = NDArray[np.float64]

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
    scale, top = reference.rms, reference.absmax
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


@dataclass(frozen=True, eq=False)
class JudgedRows:
    """Many moments of one site: which diverged, how much each changed, and the one that speaks.

    `at` is the first that diverged, or else the first of all; `why` is said of it.
    """

    diverged: NDArray[np.bool_]
    changes: Rows
    at: int
    why: str
    reference: Summary
    candidate: Summary


def judge_rows(reference: Rows, candidate: Rows, limit: float | Rows) -> JudgedRows:
    """`judge_summaries` for the raw rows of many moments at once, by one limit or one for each."""
    changes = _row_changes(reference, candidate)
    diverged = changes > limit
    at = int(diverged.argmax())  # 0 where none did
    pair = [Summary.from_row(side[at].tolist()) for side in (reference, candidate)]
    here = float(np.broadcast_to(limit, changes.shape)[at])
    _, why = judge_summaries(pair[0], pair[1], here)
    return JudgedRows(diverged, changes, at, why, merge_rows(reference), merge_rows(candidate))


def _row_changes(reference: Rows, candidate: Rows) -> Rows:
    """The largest change of each pair of rows; infinite where they disagree about counts."""
    column = {name: number for number, name in enumerate(COLUMNS)}
    counts = [column[name] for name in _COUNTS]
    scale, top = rms_of(reference), reference[:, column["absmax"]]
    with np.errstate(all="ignore"):
        apart = np.abs(candidate - reference)
        found = (
            np.abs(rms_of(candidate) - scale) / scale,
            *(apart[:, column[name]] / scale for name in ("mean", "std")),
            *(apart[:, column[name]] / top / _EXTREMES for name in ("min", "max")),
        )
        changes: Rows = np.max(found, axis=0)
    silent = candidate[:, column["l2"]] == 0
    changes = np.where(scale == 0, np.where(silent, 0.0, np.inf), changes)
    changes = np.where(finite_of(reference) == 0, 0.0, changes)
    same = (reference[:, counts] == candidate[:, counts]).all(axis=1)
    return np.where(same, changes, np.inf)
