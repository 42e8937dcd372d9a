"""A sudden rise of the error that the floor does not call a divergence.

For quantised runs the estimated floor is wide: how much a grid costs depends on the values. A layer
that is many times worse than all before it may hide below the limit, so it is at least told.
"""

from __future__ import annotations

from collections.abc import Sequence

from .results import LayerComparison
from .sentences import name_of

__all__ = ["sudden_note", "sudden_rise"]

_TIMES = 5.0
_BEFORE = 3  # compared layers that must stand before it, to know what is usual


def sudden_rise(rows: Sequence[LayerComparison]) -> tuple[LayerComparison, float] | None:
    """The first row above its floor and many times further above it than all before it, if any."""
    before: list[float] = []
    for row in rows:
        ratio = row.floor_ratio
        if ratio is None or not ratio >= 0.0:
            continue
        if row.verdict == "diverged":
            return None
        if len(before) >= _BEFORE and ratio > 1.0 and ratio > _TIMES * max(before):
            return row, ratio / max(before) if max(before) > 0 else float("inf")
        before.append(ratio)
    return None


def sudden_note(rows: Sequence[LayerComparison], precision: str) -> str | None:
    """What to say of such a row, where the floor was estimated for a quantised run."""
    found = sudden_rise(rows)
    if found is None:
        return None
    row, times = found
    return (
        f"At '{name_of(row.layer)}' the error rises to {times:.2g} times what it is, beside the "
        f"floor, at every layer before it. That is within the estimated floor of {precision}, "
        "which is wide: give a sound run in that precision as the floor to be sure (--floor RUN)."
    )
