"""Exact order statistics of a stream of any length, in bounded memory.

Few values are kept and partitioned. Of many, the bits are counted, sixteen at a time from the top:
non-negative floats are ordered as their bits are. Each pass narrows the values in question to some
that can be kept, or, after the last, to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["KEEP", "Ordering"]

KEEP = 1 << 24  # float64 values held at once: 128 MiB
_DIGIT = 16
_BITS = 64

Values = NDArray[np.float64]


class Ordering:
    """Takes the non-negative values of a first pass, and finds those at given ranks."""

    def __init__(self, keep: int | None = None) -> None:
        self._keep = KEEP if keep is None else keep
        self._kept: list[Values] | None = []
        self._total = 0
        self._counts = np.zeros(1 << _DIGIT, dtype=np.int64)

    def add(self, values: Values) -> None:
        self._total += values.size
        keys = values.view(np.int64)
        self._counts += np.bincount(keys >> (_BITS - _DIGIT), minlength=1 << _DIGIT)
        if self._kept is not None:
            self._kept.append(values)
            if self._total > self._keep:
                self._kept = None

    def values_at(self, ranks: Sequence[int], again: Callable[[], Iterable[Values]]) -> list[float]:
        """The values at these ranks; `again` starts another pass over the same values."""
        if self._kept is not None:
            return _partition(self._kept, ranks)
        # By rank: the leading bits of its value, how many values lie below those bits, and how
        # many share them.
        found = {rank: _locate(rank, 0, 0, self._counts) for rank in ranks}
        shift = _BITS - _DIGIT
        while shift:
            sharing = {prefix: count for prefix, _, count in found.values()}
            if sum(sharing.values()) <= self._keep:
                return self._collected(found, shift, again())
            shift -= _DIGIT
            tables = {prefix: np.zeros(1 << _DIGIT, dtype=np.int64) for prefix in sharing}
            for keys in _keys(again()):
                for prefix, table in tables.items():
                    inside = keys[keys >> (shift + _DIGIT) == prefix] >> shift
                    table += np.bincount(inside & ((1 << _DIGIT) - 1), minlength=1 << _DIGIT)
            found = {
                rank: _locate(rank, prefix, below, tables[prefix])
                for rank, (prefix, below, _) in found.items()
            }
        bits = np.array([found[rank][0] for rank in ranks], dtype=np.int64)
        values: list[float] = bits.view(np.float64).tolist()
        return values

    def _collected(
        self, found: dict[int, tuple[int, int, int]], shift: int, again: Iterable[Values]
    ) -> list[float]:
        prefixes = sorted({prefix for prefix, _, _ in found.values()})
        kept: dict[int, list[Values]] = {prefix: [] for prefix in prefixes}
        for keys in _keys(again):
            heads = keys >> shift
            for prefix in prefixes:
                kept[prefix].append(keys[heads == prefix].view(np.float64))
        values: dict[int, float] = {}
        for prefix in prefixes:
            ranks = [rank for rank, place in found.items() if place[0] == prefix]
            inside = [rank - found[rank][1] for rank in ranks]
            values.update(zip(ranks, _partition(kept.pop(prefix), inside), strict=True))
        return [values[rank] for rank in found]


def _keys(values: Iterable[Values]) -> Iterator[NDArray[np.int64]]:
    for part in values:
        yield part.view(np.int64)


def _locate(rank: int, prefix: int, below: int, counts: NDArray[np.int64]) -> tuple[int, int, int]:
    """The next digit of the value at a rank, given the counts of that digit."""
    cumulative = np.cumsum(counts)
    digit = int(np.searchsorted(cumulative, rank - below, side="right"))
    count = int(counts[digit])
    return (prefix << _DIGIT) | digit, below + int(cumulative[digit]) - count, count


def _partition(kept: Sequence[Values], ranks: Sequence[int]) -> list[float]:
    if not ranks:
        return []
    values = np.concatenate(kept)
    values.partition(ranks)
    chosen: list[float] = values[list(ranks)].tolist()
    return chosen
