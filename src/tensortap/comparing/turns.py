"""When the tensors of a comparison are judged: in the order in which the model made them.

A comparison goes from layer to layer, and a layer may be called at the begin and at the end of a
model, as a dropout or a block that is shared. What it was given the second time comes from the
layers in between, whose errors have to be known by then. So a tensor waits until no layer that is
still to come has an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Generic, TypeVar

from ..recording.reader import Record
from .align import LayerPair

__all__ = ["Turns"]

T = TypeVar("T")
_When = tuple[int, bool, int]  # the place in its step; inputs before outputs, outer layers first
_Step = tuple[int, int, int]
_Call = tuple[str, int, int, int, int]


class Turns(Generic[T]):
    """What waits for its turn, by the record of the reference that it belongs to."""

    def __init__(self, pairs: Sequence[LayerPair]) -> None:
        records = [() if p.reference is None else p.reference.records for p in pairs]
        self._begins: dict[_Step, int] = {}
        self._starts: dict[_Call, int] = {}
        self._see(sorted((r for group in records for r in group), key=lambda r: r.order))
        first = [min(map(self._when, group), default=None) for group in records]
        self._next: list[_When | None] = [None] * len(pairs)  # the earliest of all pairs to come
        for number in range(len(pairs) - 2, -1, -1):
            coming = [w for w in (first[number + 1], self._next[number + 1]) if w is not None]
            self._next[number] = min(coming, default=None)
        self._waiting: list[tuple[_When, int, T]] = []
        self._count = 0

    def add(self, record: Record, item: T) -> None:
        """Let something wait that belongs to this record."""
        heappush(self._waiting, (self._when(record), self._count, item))
        self._count += 1

    def due(self, number: int) -> Iterator[T]:
        """What waits no longer, once the pairs up to this number have been added."""
        until = self._next[number]
        while self._waiting and (until is None or self._waiting[0][0] < until):
            yield heappop(self._waiting)[2]

    def _see(self, records: Sequence[Record]) -> None:
        """When each step and each call began: a call ends after all that it calls."""
        begun: dict[tuple[_Step, str], int] = {}  # modules of which a layer inside has run
        for record in records:
            step = _step(record)
            self._begins.setdefault(step, record.order)
            if record.port not in ("input", "output") or _call(record) in self._starts:
                continue
            start = begun.pop((step, record.layer), record.order)
            self._starts[_call(record)] = start
            around = record.layer
            while around:
                around = around.rpartition(".")[0]
                begun.setdefault((step, around), start)

    def _when(self, record: Record) -> _When:
        begin = self._begins[_step(record)]
        if record.port == "input":  # the row was written when the call had ended
            return self._starts[_call(record)] - begin, False, len(record.layer)
        return record.order - begin, True, 0


def _step(record: Record) -> _Step:
    return record.rank, record.epoch, record.batch


def _call(record: Record) -> _Call:
    return record.layer, *_step(record), record.call
