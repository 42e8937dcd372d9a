"""The reference's tensors as a run of the candidate asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...errors import OptionError
from ...recording.reader import Record, Recording
from ...recording.schema import Port
from ..names import normalised, parse_map

__all__ = ["Known", "pair_names"]

_Place = tuple[str, Port, int, int]


class Known:
    """Records of the reference under the candidate's names.

    Steps of the reference count as batches from 0. Inputs that were not recorded can be lent from
    the layer whose output they are.
    """

    def __init__(self, recording: Recording, names: Mapping[str, str]) -> None:
        self.recording = recording
        self.names = dict(names)  # candidate's layer -> reference's layer
        self.batches = len(recording.steps)
        steps = {step: number for number, step in enumerate(recording.steps)}
        self._records: dict[_Place, dict[str, Record]] = {}
        self.lent: set[str] = set()
        for layer, ours in names.items():
            for record in recording[ours].records:
                if record.stored and record.rank == 0 and record.port in ("input", "output"):
                    batch = steps[record.epoch, record.batch]
                    place = (layer, record.port, batch, record.call)
                    self._records.setdefault(place, {}).setdefault(record.leaf, record)

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


def pair_names(
    recording: Recording, layers: Iterable[str], maps: Iterable[str] = ()
) -> dict[str, str]:
    """The candidate's layers that the reference has, each with its name there."""
    mine = list(layers)
    found: dict[str, str] = {}
    for rule in [parse_map(text) for text in maps]:
        for ours in recording.layers:
            theirs = rule.target(ours)
            if theirs in mine and theirs not in found:
                found[theirs] = ours
        if not found:
            raise OptionError(
                f"The map '{rule.text}' leads to no layer of the candidate, which has "
                f"{', '.join(repr(name) for name in mine[1:4])}, …."
            )
    taken = set(found.values())
    found.update((n, n) for n in mine if n in recording.layers and n not in {*found, *taken})
    taken = set(found.values())
    plain = {normalised(name): name for name in recording.layers if name not in taken}
    for name in mine:
        ours = plain.get(normalised(name), "")
        if name and ours and name not in found and ours not in found.values():
            found[name] = ours
    return found
