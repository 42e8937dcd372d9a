"""Matching two sequences in order: the arithmetic of alignment, which knows nothing of layers."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

__all__ = ["Matrix", "best_path", "equal", "gaps", "rising", "table"]

Matrix = np.ndarray[Any, np.dtype[np.float32]]
_T = TypeVar("_T", bound=Hashable)


def table(ours: Sequence[_T], theirs: Sequence[_T], likeness: Callable[[_T, _T], float]) -> Matrix:
    """A matrix of likenesses, computed once for each two different things."""
    left, right = list(dict.fromkeys(ours)), list(dict.fromkeys(theirs))
    small = np.array([[likeness(a, b) for b in right] for a in left], dtype=np.float32)
    rows = {item: i for i, item in enumerate(left)}
    columns = {item: i for i, item in enumerate(right)}
    found: Matrix = small[np.ix_([rows[a] for a in ours], [columns[b] for b in theirs])]
    return found


def equal(ours: Sequence[object], theirs: Sequence[object]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Where two things are the same."""
    codes: dict[object, int] = {}
    left, right = (
        np.array([codes.setdefault(item, len(codes)) for item in side], dtype=np.int64)
        for side in (ours, theirs)
    )
    return np.asarray(left[:, None] == right[None, :])


def best_path(scores: Matrix, bonus: float = 0.25) -> list[tuple[int, int]]:
    """The pairs of greatest total score that keep the order on both sides; 0 or less is no pair.

    A pair that follows another without a gap on either side earns the bonus: of several that fit
    equally well, the one beside its neighbours is meant.
    """
    n, m = scores.shape
    best = np.zeros((n + 1, m + 1), dtype=np.float32)
    ending = np.full((n + 1, m + 1), -np.inf, dtype=np.float32)  # with the pair (i, j) itself
    gain = np.where(scores > 0, scores, -np.inf).astype(np.float32)
    for i in range(n):
        ending[i + 1, 1:] = gain[i] + np.maximum(best[i, :-1], ending[i, :-1] + bonus)
        row = np.maximum(best[i, 1:], ending[i + 1, 1:])
        best[i + 1, 1:] = np.maximum.accumulate(row)
    path = []
    i, j = n, m
    follows = False
    while i and j:
        if follows or best[i, j] == ending[i, j]:
            path.append((i - 1, j - 1))
            follows = bool(ending[i - 1, j - 1] + bonus >= best[i - 1, j - 1])
            i, j = i - 1, j - 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i -= 1
    return path[::-1]


def rising(values: Sequence[int]) -> list[int]:
    """Which places to keep so that the values rise, and as many as possible."""
    ends: list[int] = []
    places: list[int] = []
    before: list[int] = []
    for place, value in enumerate(values):
        at = bisect.bisect_left(ends, value)
        before.append(places[at - 1] if at else -1)
        if at == len(ends):
            ends.append(value)
            places.append(place)
        else:
            ends[at], places[at] = value, place
    kept = []
    place = places[-1] if places else -1
    while place >= 0:
        kept.append(place)
        place = before[place]
    return kept[::-1]


def gaps(
    pairs: Mapping[int, int], free: Collection[int], others: Collection[int]
) -> Iterator[tuple[list[int], list[int], int]]:
    """What is still free between two pairs that keep the order, and how many pairs bound it."""
    ours = sorted(pairs)
    kept = rising([pairs[i] for i in ours])
    anchors = [(ours[k], pairs[ours[k]]) for k in kept]
    left, right = sorted(free), sorted(others)
    bounds = [(-1, -1), *anchors, (1 << 60, 1 << 60)]
    a = b = 0
    for number in range(len(bounds) - 1):
        ours_here, theirs_here = [], []
        while a < len(left) and left[a] < bounds[number + 1][0]:
            ours_here.append(left[a])
            a += 1
        while b < len(right) and right[b] < bounds[number + 1][1]:
            theirs_here.append(right[b])
            b += 1
        if ours_here and theirs_here:
            yield ours_here, theirs_here, (number > 0) + (number < len(anchors))
