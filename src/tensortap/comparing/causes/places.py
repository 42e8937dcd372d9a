"""Where the error sits, when it sits in a part of the tensor and the rest is right.

For each axis the places that hold the error are sought: few of them, a run, or all from one on.
They must hold it in absolute terms and beside their own size, since an error that is everywhere
proportional to the values is largest where the values are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...numerics.profile import Profile
from .fits import Fit, Floats, ranges
from .pairs import Pairs
from .sample import axis_sums

Places = np.ndarray[Any, np.dtype[np.int64]]

__all__ = ["Region", "region_fit", "regions"]

_SHARE = 0.9  # of the squared error, that a small part must hold
_CLEAR = 1e-3  # of the error inside, squared and relative: what the rest may have where it is right
_STRICT = 1e-6
_FEW = 0.05  # of the places
_ENOUGH = 16  # elements outside; fewer may be right by chance
_MANY = 1024  # elements in all; of fewer a few may be large by chance
_LONG = 1 << 16  # places; on a longer axis a quarter must hold the error, or none is sought
_SCORES = "what looks at other tokens went wrong (scores, positions, a mask or a state)"
_NOTEWORTHY = 4  # so many places may always be few, if they are a quarter at most


@dataclass(frozen=True)
class Region:
    """Some places of each axis (None: all), or some rows; `share` of the squared error."""

    places: tuple[tuple[int, ...] | None, ...]
    share: float
    kind: str
    text: str
    rows: tuple[tuple[int, ...], ...] = ()


def regions(pairs: Pairs, found: Profile) -> Region | None:
    """The part of the tensor that holds the error, if there is one."""
    energy = found.tokens[:, 0].reshape(found.shape)
    size = found.tokens[:, 1].reshape(found.shape)
    total = float(energy.sum())
    if not total > 0 or not math.isfinite(total):
        return None
    sets = _sets(pairs, energy, size, found)
    rows = _rows(pairs, energy, size)
    if all(chosen is None for chosen in sets):
        return rows
    share = _share(pairs, energy, found, sets)
    if rows is not None and sets[-1] is None and 2 * len(rows.rows) <= _count(sets, energy.shape):
        return rows
    if share < _SHARE:
        return None
    named = [(axis, chosen) for axis, chosen in enumerate(sets) if chosen is not None]
    words = [
        place_words(pairs.axes[axis], chosen, pairs.sizes[axis], sized=len(named) == 1)
        for axis, chosen in reversed(named)
    ]
    text = " of ".join(words)
    if not any(words in text for words in (" from ", " up to ", "all tokens but")):
        text += " alone"
    return Region(tuple(sets), share, _kind(pairs.axes, pairs.sizes, sets), text)


def _sets(
    pairs: Pairs, energy: Floats, size: Floats, found: Profile
) -> list[tuple[int, ...] | None]:
    """For each axis the places that hold the error, None for all of them.

    Where one axis has few of them, little of the others is left to tell by: there only what is
    right to the last bit, or to rounding, is left out.
    """
    last, total = len(pairs.sizes) - 1, math.prod(pairs.sizes)
    sums: list[tuple[Floats, ...]] = [
        tuple(axis_sums(part, found.shape, axis) for part in (energy, size)) for axis in range(last)
    ]
    sums.append((found.channels[:, 0], found.channels[:, 1]))
    sets = [
        _held(e, r, pairs.floor, _limit(total, e), total / len(e), ordered=name == "token")
        for (e, r), name in zip(sums, pairs.axes, strict=True)
    ]
    shares = {
        axis: len(chosen) / pairs.sizes[axis]
        for axis, chosen in enumerate(sets)
        if chosen is not None
    }
    narrowest = min(shares, key=lambda axis: shares[axis], default=None)
    for axis in shares:
        if axis != narrowest:
            e, r = sums[axis]
            ordered = pairs.axes[axis] == "token"
            sets[axis] = _held(e, r, pairs.floor, _STRICT, total / len(e), ordered=ordered)
    return sets


def _limit(elements: int, places: Floats) -> float:
    """What the rest may have of the error inside: less, the fewer elements a place has."""
    return _CLEAR / (1 + 10 * places.size / elements)


def _count(sets: Sequence[tuple[int, ...] | None], shape: Sequence[int]) -> int:
    """How many rows are meant."""
    pairs = zip(sets[:-1], shape, strict=True)
    return math.prod(size if chosen is None else len(chosen) for chosen, size in pairs)


def region_fit(region: Region) -> Fit:
    """A region as a hypothesis: all of the error is there."""
    names = {"places": [None if p is None else list(p[:256]) for p in region.places]}
    if region.rows:
        names = {"places": [list(row) for row in region.rows]}
    left = max(0.0, 1 - region.share)
    return Fit(region.kind, left, left, region.text, 3.2, 0.1, place=True, details=names)


def _kind(axes: Sequence[str], sizes: Sequence[int], sets: Sequence[tuple[int, ...] | None]) -> str:
    """Named for the axis of which the smallest part is meant."""
    shares = {
        name: len(chosen) / size
        for name, chosen, size in zip(axes, sets, sizes, strict=True)
        if chosen is not None
    }
    name = min(shares, key=lambda name: shares[name])
    return f"{name}s" if name in ("channel", "token", "head", "sample") else "places"


def _share(
    pairs: Pairs, energy: Floats, found: Profile, sets: Sequence[tuple[int, ...] | None]
) -> float:
    """The part of the squared error inside; a lower bound where only a sample is at hand."""
    inside = energy
    for axis, chosen in enumerate(sets[:-1]):
        if chosen is not None:
            inside = inside.take(chosen, axis)
    rows = float(inside.sum()) / float(energy.sum())
    if sets[-1] is None:
        return rows
    columns = found.channels[:, 0]
    channels = float(columns[list(sets[-1])].sum()) / float(columns.sum())
    if all(chosen is None for chosen in sets[:-1]):
        return channels
    if pairs.sampled:
        return max(0.0, rows + channels - 1)
    return pairs.within(sets).energy / pairs.energy


def _held(
    e: Floats, r: Floats, floor: float, limit: float, each: float, *, ordered: bool
) -> tuple[int, ...] | None:
    """The places that hold the error; None where they are all of them, or no clear part.

    `each` is how many elements a place has: few of them are small together by chance, so the fewer
    are left outside, or are there at all, the less error they may have.
    """
    living = (r > 0) | (e > 0)
    count, total = int(living.sum()), float(e.sum())
    if count < 2 or not total > 0:
        return None
    chosen = _by_step(e, count)
    if chosen is None:
        return None
    number = len(chosen)
    absolute, relative = _contrasts(e, r, chosen, count)
    if absolute is None or absolute > 100 * _CLEAR * min(1.0, count * each / _MANY):
        return None
    limit *= min(1.0, ((count - number) * each / _ENOUGH) ** 4)
    rounded = min((2 * floor) ** 2 / relative.inside, 50 * limit) if relative.inside > 0 else 0.0
    clear = relative.ratio <= max(limit, rounded)
    alone = relative.ratio <= 100 * _CLEAR * min(1.0, count * each / _MANY)
    before = int(living[: chosen[0]].sum())
    run = int(living[chosen[0] : chosen[-1] + 1].sum()) == number
    end = run and (before == 0 or before + number == count)
    few = number <= max(_FEW * count, min(_NOTEWORTHY, count // 4))
    right = (few and alone) or (
        clear and ((ordered and end) or (run and number <= count // 2) or number <= count // 4)
    )
    return tuple(chosen.tolist()) if right else None


def _by_step(e: Floats, count: int) -> Places | None:
    """The worst places, up to the largest step down among those that could be the last inside.

    On a long axis they are all that are wrong, if these are a run, or are among the worst quarter.
    """
    total, wrong = float(e.sum()), np.flatnonzero(e > 0)
    if count > _LONG:
        if len(wrong) < count and wrong[-1] - wrong[0] + 1 == len(wrong):
            return wrong
        if len(wrong) > count // 4:
            least = np.partition(e[wrong], len(wrong) - count // 4)[len(wrong) - count // 4]
            wrong = np.flatnonzero(e >= least)
            if float(e[wrong].sum()) < _SHARE * total:
                return None
    order = wrong[np.argsort(-e[wrong], kind="stable")]
    held = np.cumsum(e[order]) / total
    first = int(np.searchsorted(held, _SHARE))
    last = min(count - 2, int(np.searchsorted(held, 1 - 1e-12)), len(order) - 1)
    if first > last:
        return None
    steps = np.log(np.append(e[order], 0.0)[first : last + 2] + 1e-300)
    return np.sort(order[: first + int(np.argmax(steps[:-1] - steps[1:])) + 1])


class _Contrast(NamedTuple):
    """How large the squared error is inside, beside the values; and outside, as part of that."""

    inside: float
    ratio: float


def _contrasts(e: Floats, r: Floats, chosen: Places, count: int) -> tuple[float | None, _Contrast]:
    """The error of a place outside as part of one inside: as it is, and beside the values.

    Where the values of a side are zero there is nothing to set it beside. None where all that is
    outside is zero on both sides: that is not right, but dead.
    """
    others = np.ones(len(e), dtype=bool)
    others[chosen] = False
    inside, outside = float(e[chosen].sum()), float(e[others].sum())
    size, other = float(r[chosen].sum()), float(r[others].sum())
    if other <= 0 and outside <= 0:
        return None, _Contrast(0.0, 1.0)
    absolute = outside / (count - len(chosen)) / (inside / len(chosen))
    if size > 0 and other > 0:
        return absolute, _Contrast(inside / size, outside / other / (inside / size))
    return absolute, _Contrast(0.0, absolute)


def _rows(pairs: Pairs, energy: Floats, size: Floats) -> Region | None:
    """A few rows here and there, as one token of each sample."""
    if sum(extent > 1 for extent in energy.shape) < 2:
        return None
    flat, limit = energy.reshape(-1), _limit(math.prod(pairs.sizes), energy)
    chosen = _held(flat, size.reshape(-1), pairs.floor, limit, pairs.sizes[-1], ordered=False)
    if chosen is None or len(chosen) > _NOTEWORTHY:
        return None
    share = float(energy.reshape(-1)[list(chosen)].sum() / energy.sum())
    index = [tuple(int(i) for i in np.unravel_index(row, energy.shape)) for row in chosen]
    words = [
        " of ".join(f"{pairs.axes[axis]} {place}" for axis, place in reversed(list(enumerate(row))))
        for row in index
    ]
    text = ", ".join(words) + " alone"
    return Region((None,) * len(pairs.sizes), share, "tokens", text, tuple(index))


def place_words(name: str, places: Sequence[int], size: int, *, sized: bool = True) -> str:
    """Some places of an axis: `channel 7 of 256`, `tokens from 12 on (of 24)`."""
    ordered = name == "token"
    first, last = places[0], places[-1]
    run = last - first + 1 == len(places)
    if len(places) == 1:
        if ordered and size > 2 and first in (0, size - 1):
            text = f"the {'first' if first == 0 else 'last'} token"
        else:
            return f"{name} {first}{f' of {size}' if sized else ''}"
    elif ordered and run and last == size - 1:
        text = f"tokens from {first} on"
        if first == 1 and sized:
            return f"all tokens but the first (of {size}), which has none before it: {_SCORES}"
    elif ordered and run and first == 0:
        text = f"tokens up to {last}"
    else:
        text = f"{name}s {ranges(places)}"
    return f"{text} (of {size})" if sized else text
