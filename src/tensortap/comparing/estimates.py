"""What error rounding alone lets expect at a site, where no floor run says it.

An estimate is made of what the layer does and of what it was given. Its own part is the coarser
precision of the two runs and the number of operations before it; a quantised layer has the steps of
its grids beside the values that it was given (`grids`). What came in goes on: the error of its
inputs, as the usual place of them has it, for a norm or a matrix may take away what a few large
places hide. Code between two layers, of which only the result was recorded, was given what the
layers before it in the same module returned, and what the module itself was given.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..recording.reader import Record, Recording
from .depth import Depths
from .grids import Grids
from .precision import estimated_floor, precision_of

__all__ = ["Estimates"]

_Step = tuple[int, int, int]  # rank, epoch, batch
_Call = tuple[str, int, int, int, int]  # layer, rank, epoch, batch, call


@dataclass(frozen=True)
class _Given:
    """What good inputs bring along: an error, an offset that a norm takes away, and outliers.

    Several inputs err apart from each other, so their squares add up.
    """

    error: float = 0.0
    offset: float = 1.0
    operand: float = 0.0  # what the layer's own grid takes away from it


_NOTHING = _Given()


class Estimates:
    """Estimates for one comparison; it learns from every tensor that was found to be good."""

    def __init__(self, reference: Recording, candidate: Recording) -> None:
        self.precisions = (precision_of(reference), precision_of(candidate))
        self._depths = Depths(reference)
        self._grids = tuple(Grids(run.manifest.target) for run in (reference, candidate))
        self._layers = frozenset(reference.layers)
        self._given: dict[_Call, _Given] = {}
        self._running: dict[tuple[_Step, str], tuple[int, float]] = {}  # the latest call's inputs
        self._returned: dict[tuple[_Step, str], _Errors] = {}

    def beside(self) -> Estimates:
        """Estimates for the same two runs that have learned nothing yet."""
        other = copy(self)
        other._given, other._running, other._returned = {}, {}, {}
        return other

    def at(self, record: Record, partner: str, dtypes: tuple[str, str]) -> float:
        """The relative error to expect of the tensor that stands beside a reference's record.

        `partner` is what the candidate calls the layer.
        """
        given = _NOTHING if record.port == "input" else self._given.get(_call(record), _NOTHING)
        grids: tuple[str | None, ...] = ()
        own = 0.0
        if record.port != "input":
            sides = tuple(zip(self._grids, (record.layer, partner), strict=True))
            grids = tuple(grid.dtype(name) for grid, name in sides)
            own = math.hypot(
                given.operand,
                *(grid.weight(name) for grid, name in sides),
                *(grid.result(name, record) for grid, name in sides),
            )
        depth = self._depths.of(record)
        floor = estimated_floor(dtypes, (*self.precisions, *grids), depth, given.offset)
        return max(floor, own, given.error, self._before(record)) if floor else 0.0

    def growth(self, records: Sequence[Record]) -> NDArray[np.float64]:
        """How the estimates of the records of one site grow, where nothing but depth is known."""
        first = self._depths.of(records[0])
        depths = first * self._depths.growth(records)
        return np.asarray((1 + np.sqrt(depths) / 2) / (1 + math.sqrt(first) / 2))

    def plain(self, record: Record) -> bool:
        """Whether nothing is known of a call but its depth."""
        return _call(record) not in self._given and not self._before(record)

    def basis(self, dtypes: tuple[str, str]) -> str:
        """What an estimate rests on, in words."""
        named = [name for name in (*dtypes, *self.precisions) if name is not None]
        return f"{' and '.join(dict.fromkeys(named))} and the depth"

    def learn(
        self, record: Record, partner: str, error: float, offset: float, *, good: bool
    ) -> None:
        """A tensor beside a reference's record has this error, and whether that is `good`."""
        error = error if good and error > 0 else 0.0  # of NaN nothing is learnt
        if record.port == "input":
            known = self._given.get(_call(record), _NOTHING)
            sides = zip(self._grids, (record.layer, partner), strict=True)
            operand = max(grid.operand(name, record) for grid, name in sides)
            found = _Given(
                math.hypot(known.error, error),
                max(known.offset, offset),
                max(known.operand, operand),
            )
            self._given[_call(record)] = found
            self._running[_step(record), record.layer] = (record.order, found.error)
        elif record.port == "output" and error:
            scope = (_step(record), self._module(record.layer))
            self._returned.setdefault(scope, _Errors()).add(record.order, error)

    def _before(self, record: Record) -> float:
        """The largest error that the code which made what a record holds was given.

        That is what layers returned to it; for the input of a layer, also what the module was given
        that calls it. Where that is not known (it is, once the module has ended), it is what the
        code around the module had by then.
        """
        step, order = _step(record), record.order
        if record.port == "output":
            return self._returned_to(step, record.layer, order)
        scope, largest = record.layer, 0.0
        while scope:
            scope = self._module(scope)
            largest = max(largest, self._returned_to(step, scope, order))
            ended, given = self._running.get((step, scope), (-1, 0.0))
            if ended > order:
                return max(largest, given)
        return largest

    def _returned_to(self, step: _Step, scope: str, order: int) -> float:
        found = self._returned.get((step, scope))
        return 0.0 if found is None else found.before(order)

    def _module(self, layer: str) -> str:
        """The nearest recorded layer around one; the root where there is none."""
        while layer:
            layer = layer.rpartition(".")[0]
            if layer in self._layers:
                break
        return layer


class _Errors:
    """Errors in the order of execution, and the largest up to each."""

    def __init__(self) -> None:
        self._orders: list[int] = []
        self._largest: list[float] = []

    def add(self, order: int, error: float) -> None:
        at = bisect_right(self._orders, order)
        self._orders.insert(at, order)
        self._largest.insert(at, max(error, self._largest[at - 1]) if at else error)
        for later in range(at + 1, len(self._largest)):
            if self._largest[later] >= error:
                break
            self._largest[later] = error

    def before(self, order: int) -> float:
        at = bisect_left(self._orders, order)
        return self._largest[at - 1] if at else 0.0


def _step(record: Record) -> _Step:
    return record.rank, record.epoch, record.batch


def _call(record: Record) -> _Call:
    return record.layer, record.rank, record.epoch, record.batch, record.call
