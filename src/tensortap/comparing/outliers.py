"""One bad token or channel in an otherwise good layer.

A whole-tensor error hides it: one token of a thousand that is wholly wrong moves the error by three
per cent. So the error of each token (a row of all axes but the last) and of each channel (the last
axis) is set against what the others have, or against the same place in the floor run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..numerics.profile import Profile

__all__ = ["Outlier", "find_outliers", "non_finite_places"]

_AGAINST_FLOOR = 4.0
_AGAINST_WORST = 3.0
_AGAINST_OTHERS = 8.0
_MOST_NAMED = 4
_MOST_SHARE = 0.25  # with more of them than this, it is the layer that is bad

_SQUARES, _ENERGY, _DISAGREEING = 0, 1, 3


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
        far = f"{times:.3g} times" if math.isfinite(times) else "infinitely far above"
        word = self.axis if self.count == 1 else f"{self.axis}s"
        return f"{word} {names}{more}: error {self.error:.3g}, {far} what is usual here"


def find_outliers(own: Profile, floor: Profile | None, least: float) -> list[Outlier]:
    """The bad tokens and channels; errors below `least` (relative) are never bad."""
    found = []
    for axis in ("token", "channel"):
        table = own.tokens if axis == "token" else own.channels
        if len(table) < 2:
            continue
        other = None
        if floor is not None:
            other = floor.tokens if axis == "token" else floor.channels
            if other.shape != table.shape:
                other = None
        outlier = _outlier(axis, table, other, least, _width(own, axis))
        if outlier is not None:
            found.append(_named(outlier, own))
    return found


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


def _width(profile: Profile, axis: str) -> int:
    return len(profile.channels) if axis == "token" else len(profile.tokens)


def _scores(table: np.ndarray) -> np.ndarray:
    """Each place's error relative to its own size and to the usual size of a place.

    Its own size alone would make much of the rounding in a place that is almost zero.
    """
    energy = table[:, _ENERGY]
    scale = energy + energy.mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(np.where(scale > 0, table[:, _SQUARES] / scale, 0.0))


def _outlier(
    axis: str, table: np.ndarray, other: np.ndarray | None, least: float, width: int
) -> Outlier | None:
    scores = _scores(table)
    # A place of few values scatters more than one of many.
    slack = 1.0 + 2.0 / math.sqrt(max(1, width))
    if other is not None:
        expected = _scores(other)
        usual = np.maximum(expected, np.median(expected))
        # Noise may fall on other places in another run, so its worst place counts for all.
        limits = np.maximum(_AGAINST_FLOOR * slack * usual, _AGAINST_WORST * expected.max())
        limits = np.maximum(least, limits)
    else:
        usual = np.full_like(scores, np.median(scores))
        limits = np.maximum(least, _AGAINST_OTHERS * slack * usual)
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
