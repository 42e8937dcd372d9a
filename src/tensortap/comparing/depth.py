"""How many operations stand before each output of a run, from its order of execution.

A layer that is called twice, as a dropout that is shared by the begin and the end of an encoder,
has a depth for each of its calls. A gradient stands behind the whole way forwards and back. While a
model trains, each step rounds every weight once more, and all of them stand before an output.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..recording.reader import Record, Recording

__all__ = ["Depths"]

_OPERATIONS_PER_BLOCK = 10
_BACKWARD = ("grad_output", "grad_input", "grad_param", "update")
_OF_TRAINING = ("param", *_BACKWARD)


class Depths:
    """The depth of every record of one recording."""

    def __init__(self, recording: Recording) -> None:
        structure = recording.manifest.structure
        self._blocks, self._embedding = structure.blocks, structure.embedding
        outputs: dict[str, list[int]] = {}
        for name, rows in recording._rows.items():
            orders = [row[1] for segment, row in rows if segment.sites[row[0]].port == "output"]
            outputs[name] = sorted(set(orders))
        self._outputs = sorted({order for orders in outputs.values() for order in orders})
        self._heard = sorted(order for name in self._blocks for order in outputs.get(name, ()))
        # A pass begins after the last output of the root, or else where the first layer runs.
        first = next((name for name, orders in outputs.items() if orders), None)
        ends = [order + 1 for order in outputs.get("", ())]
        self._passes = sorted({0, *(ends or ([] if first is None else outputs[first]))})
        ports = {site.port for segment in recording._segments for site in segment.sites}
        self._trains = not ports.isdisjoint(_OF_TRAINING)
        self._steps = {step: number for number, step in enumerate(recording.steps)}

    def of(self, record: Record) -> float:
        """About how many operations stand before what a record holds, itself included.

        Where the model's blocks alone were recorded, each of them stands for many operations.
        """
        here: float = self._of_step(record)
        if record.port not in _OF_TRAINING:
            start = self._passes[max(0, bisect_left(self._passes, record.order + 1) - 1)]
            before = _between(self._outputs, start, record.order)
            passed = _between(self._heard, start, record.order + 1) + self._unheard(record.layer)
            here = max(before + 1, _OPERATIONS_PER_BLOCK * passed)
        return here + self._step(record) * self._of_step(record) if self._trains else here

    def growth(self, records: Sequence[Record]) -> NDArray[np.float64]:
        """How many times deeper than the first each of the records of one site stands."""
        if not self._trains:
            return np.ones(len(records))
        first = self.of(records[0])
        steps = np.array([self._step(record) for record in records])
        return np.asarray((first + (steps - steps[0]) * self._of_step(records[0])) / first)

    def _step(self, record: Record) -> int:
        """How many steps stand before a record's: not all of them may have been recorded."""
        first = next(iter(self._steps), (0, 0))[1]
        number = self._steps.get((record.epoch, record.batch), 0)
        return max(number, record.batch - first)

    def _of_step(self, record: Record) -> float:
        """About how many operations of one step stand before a record like this."""
        if record.port == "param":
            return 1
        outputs = len(self._outputs) / max(1, len(self._passes) - 1)
        blocks = _OPERATIONS_PER_BLOCK * len(self._blocks)
        return max(1, outputs, blocks) * (2 if record.port in _BACKWARD else 1)

    def _unheard(self, layer: str) -> int:
        """How many blocks ran before a layer though none of them was recorded."""
        if self._heard or layer == self._embedding:
            return 0
        for number, block in enumerate(self._blocks):
            if layer.startswith(f"{block}."):
                return number
        return len(self._blocks)


def _between(orders: list[int], start: int, end: int) -> int:
    return bisect_left(orders, end) - bisect_left(orders, start)
