"""What a whole-tensor error hides: one bad token or channel, or all but a few massive ones.

One token of a thousand that is wholly wrong moves the error by three per cent. And where a few
places are a thousand times larger than the rest, as in the residual stream of a large language
model, the error of the whole is theirs, whatever happens to the others. So the error of each token
(a row of all axes but the last) and of each channel (the last axis) is set against the same place
in the floor run, or without one against what the others have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..numerics.profile import Profile

__all__ = [
    "Outlier",
    "find_outliers",
    "non_finite_places",
    "token_errors",
    "typical_ratio",
    "usual_error",
]

_AGAINST_FLOOR = 3.5
_AGAINST_WORST = 3.0
_AGAINST_OTHERS = 16.0
_MOST_NAMED = 4
_MOST_SHARE = 0.25  # with more of them than this, it is the layer that is bad

_SQUARES, _ENERGY, _LARGEST, _DISAGREEING = 0, 1, 2, 3

_Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Outlier:
    """Tokens or channels whose error stands clear of the rest."""

    axis: str
    places: tuple[int | tuple[int, ...], ...]
    count: int
    error: float
    usual: float

    def __str__(self) -> str:
        names = ", ".join(_place(place) for place in self.places)
        more = f" and {self.count - len(self.places)} more" if self.count > len(self.places) else ""
        times = self.error / self.usual if self.usual > 0 else math.inf
        far = f"{times:.3g} times what is usual here"
        far = far if math.isfinite(times) else "where the others are the same"
        word = self.axis if self.count == 1 else f"{self.axis}s"
        return f"{word} {names}{more}: error {self.error:.3g}, {far}"


def find_outliers(own: Profile, floor: Profile | None, least: float) -> list[Outlier]:
    """The bad tokens and channels.

    Errors below `least` (relative) are never bad; where there is a floor run, `least` is the noise
    that it has at least in each place.
    """
    found = []
    for axis, table, other in _tables(own, floor):
        outlier = _outlier(axis, table, other, least)
        if outlier is not None:
            found.append(_named(outlier, own))
    return found


def typical_ratio(own: Profile, floor: Profile | None, least: float) -> tuple[float, str, int]:
    """The median place's error as a multiple of the floor's there, or of `least` without one.

    Of tokens or of channels, whichever is more; the axis, and how many places it has.
    """
    best = (0.0, "", 0)
    for axis, table, other in _tables(own, floor):
        scores = _scores(table)
        expected = np.full_like(scores, least) if other is None else _floor_scores(other, least)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = float(np.median(np.where(scores > 0, scores / expected, 0.0)))
        best = max(best, (ratio, axis, len(table)))
    return best


def token_errors(own: Profile) -> _Floats:
    """The error of each token, relative to its own size and to that of the usual one."""
    return math.sqrt(2) * _scores(own.tokens)


def usual_error(own: Profile) -> float:
    """The relative error of the usual token or channel, whichever is more.

    Where a few places own nearly all of a tensor, the error of the whole is theirs.
    """
    errors = [
        math.sqrt(2 * float(np.square(_scores(table)).mean()))  # a score is beside twice its size
        for _, table, _ in _tables(own, None)
    ]
    return max(errors, default=0.0)


def _tables(own: Profile, floor: Profile | None) -> Iterator[tuple[str, _Floats, _Floats | None]]:
    """Both axes that have several places, with the floor run's where it has the same."""
    for axis in ("token", "channel"):
        table = own.tokens if axis == "token" else own.channels
        other = None
        if floor is not None:
            other = floor.tokens if axis == "token" else floor.channels
        if len(table) > 1:
            yield axis, table, other if other is None or other.shape == table.shape else None


def non_finite_places(profile: Profile) -> str:
    """Where the two sides disagree about NaN and infinities."""
    parts = []
    for axis, table in (("token", profile.tokens), ("channel", profile.channels)):
        places = np.flatnonzero(table[:, _DISAGREEING] > 0)
        if not len(places) or len(table) < 2:
            continue
        named = [_position(int(p), profile.shape if axis == "token" else ()) for p in places]
        shown = ", ".join(_place(p) for p in named[:_MOST_NAMED])
        more = f" and {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else ""
        parts.append(f"{axis}{'s' if len(places) > 1 else ''} {shown}{more}")
    return ", ".join(parts)


def _scores(table: _Floats) -> _Floats:
    """Each place's error relative to its own size and to the usual size of a place.

    Its own size alone would make much of the rounding in a place that is almost zero. The usual
    size is the mean, but without the largest tenth where that owns nearly all of it.
    """
    energy = table[:, _ENERGY]
    usual = energy.mean()
    rest = _least(energy, len(energy) - math.ceil(len(energy) / 10))
    if len(rest) and 0 < 10 * rest.mean() < usual:
        usual = rest.mean()
    scale = energy + usual
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scores: _Floats = np.sqrt(np.where(scale > 0, table[:, _SQUARES] / scale, 0.0))
    return scores


def _floor_scores(other: _Floats, least: float) -> _Floats:
    """What the floor run lets expect in each place: its own error there, or the usual one."""
    scores = _scores(other)
    return np.maximum(scores, max(least, float(np.median(scores))))


def _scatter(table: _Floats) -> _Floats:
    """How much a place may stand out by chance: the more, the fewer of its values err."""
    largest = table[:, _LARGEST]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        count = np.where(largest > 0, table[:, _SQUARES] / largest**2, 1.0)
    scatter: _Floats = 1.0 + 2.0 / np.sqrt(np.maximum(count, 1.0))
    return scatter


def _usual(scores: _Floats) -> float:
    """The score of a good place: of the lower three quarters, in which dead ones hardly count."""
    low = _least(scores, len(scores) - len(scores) // 4)
    return float(np.sqrt(np.square(low).mean()))


def _least(values: _Floats, count: int) -> _Floats:
    """So many of the smallest, in any order: there may be a hundred thousand tokens."""
    return np.partition(values, count - 1)[:count] if count else values[:0]


def _outlier(axis: str, table: _Floats, other: _Floats | None, least: float) -> Outlier | None:
    scores = _scores(table)
    if other is not None:
        usual = _floor_scores(other, least)
        # Noise may fall on other places in another run, so its worst place counts for all.
        limits = np.maximum(_AGAINST_FLOOR * _scatter(table) * usual, _AGAINST_WORST * usual.max())
    else:
        usual = np.full_like(scores, _usual(scores))
        limits = np.maximum(least, _AGAINST_OTHERS * _scatter(table) * usual)
    bad = np.flatnonzero(scores > limits)
    if not len(bad) or len(bad) > max(1, _MOST_SHARE * len(scores)):
        return None
    order = bad[np.argsort(-scores[bad], kind="stable")]
    top = int(order[0])
    return Outlier(
        axis,
        tuple(int(place) for place in order[:_MOST_NAMED]),
        len(bad),
        float(scores[top]),
        float(usual[top]),
    )


def _named(outlier: Outlier, profile: Profile) -> Outlier:
    if outlier.axis == "channel":
        return outlier
    places = tuple(_position(int(p), profile.shape) for p in outlier.places if isinstance(p, int))
    return Outlier(outlier.axis, places, outlier.count, outlier.error, outlier.usual)


def _position(place: int, shape: tuple[int, ...]) -> int | tuple[int, ...]:
    """A flat place in the leading axes; one axis, or leading axes of extent 1, give a number."""
    if len(shape) < 2:
        return place
    index = tuple(int(i) for i in np.unravel_index(place, shape))
    if all(extent == 1 for extent in shape[:-1]):
        return index[-1]
    return index


def _place(place: int | tuple[int, ...]) -> str:
    if isinstance(place, int):
        return str(place)
    *samples, token = place
    return f"{token} of sample {', '.join(str(s) for s in samples)}"
