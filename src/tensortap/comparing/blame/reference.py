"""The reference's tensors as a run of the candidate asks for them."""

from __future__ import annotations

from collections.abc import Mapping

from ...recording.reader import Record, Recording
from ...recording.schema import Port
from .pairing import Pairing

__all__ = ["Known"]

_Place = tuple[str, Port, int, int]


class Known:
    """Records of the reference under the candidate's names.

    Steps of the reference count as batches from 0. Inputs that were not recorded can be lent from
    the layer whose output they are. Tensors lie as the candidate's do.
    """

    def __init__(self, recording: Recording, pairing: Pairing) -> None:
        self.recording = recording
        self.names = dict(pairing.names)  # candidate's layer -> reference's layer
        self.by_values = pairing.by_values
        self.batches = len(recording.steps)
        steps = {step: number for number, step in enumerate(recording.steps)}
        self._records: dict[_Place, dict[str, Record]] = {}
        self.lent: set[str] = set()
        for layer, ours in self.names.items():
            for record in recording[ours].records:
                if record.stored and record.rank == 0 and record.port in ("input", "output"):
                    batch = steps[record.epoch, record.batch]
                    place = (layer, record.port, batch, record.call)
                    lies = pairing.laid_out(layer, record)
                    if lies is not None:
                        self._records.setdefault(place, {}).setdefault(lies.leaf, lies)

    def at(self, layer: str, port: Port, batch: int, call: int) -> Mapping[str, Record]:
        """The records of one port of one call, by leaf; nothing where nothing was kept."""
        return self._records.get((layer, port, batch, call), {})

    def lend(self, layer: str, batch: int, call: int, leaf: str, record: Record) -> None:
        """Another layer's output is this layer's input."""
        self._records.setdefault((layer, "input", batch, call), {})[leaf] = record
        self.lent.add(layer)

    def has(self, layer: str, port: Port) -> bool:
        """Whether a layer has any tensor of a port."""
        return any(place[:2] == (layer, port) for place in self._records)
