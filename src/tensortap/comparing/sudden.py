"""A sudden rise of the error that the floor does not call a divergence.

For quantised runs the estimated floor is wide: how much a grid costs depends on the values. A layer
that is many times worse than all before it may hide below the limit, so it is at least told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .results import LayerComparison
from .sentences import name_of

__all__ = ["Rise", "sudden_note", "sudden_rise"]

_TIMES = 4.0  # the largest error before it
_BEFORE = 2  # compared layers that must stand before it, to know what is usual


@dataclass(frozen=True)
class Rise:
    """A layer whose error is many times that of all before it; both in floors."""

    layer: str
    before: float
    ratio: float


def sudden_rise(rows: Sequence[LayerComparison]) -> Rise | None:
    """The first row above its floor and many times further above it than all before it, if any."""
    before: list[float] = []
    for row in rows:
        ratio = row.floor_ratio
        if ratio is None or not ratio >= 0.0:
            continue
        if row.verdict == "diverged":
            return None
        if len(before) >= _BEFORE and ratio > max(1.0, _TIMES * max(before)):
            return Rise(name_of(row.layer), max(before), ratio)
        before.append(ratio)
    return None


def sudden_note(rise: Rise, precision: str) -> str:
    """What to say of it, where the floor was estimated for a quantised run."""
    return (
        f"The error jumps at '{rise.layer}', from at most {rise.before:.2g} to {rise.ratio:.2g} "
        f"times the floor. {precision} may make that much, but does not in the layers before: "
        "give a sound run in that precision as the floor to be sure (--floor RUN)."
    )
