"""The tensors that were made just before another, as the reference has them.

What a layer did with them can be tried: an activation, a gate, a sum, a mean over tokens. They are
the layer's own inputs, the outputs of the layers that ran last, what the model was given, and the
masks and biases that the modules around it were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...recording.reader import Record

__all__ = ["Near", "near_of"]

_MOST = 12
_AFTER = 3
_FLOATS = ("float", "bfloat")
_ROTARY = ("rotary", "rope")


@dataclass(frozen=True, eq=False)
class Near:
    """A tensor of the reference, with what it is called in a sentence.

    `own` says that it is an input of the layer that is explained, `later` that it was made after
    the tensor that is.
    """

    name: str
    record: Record = field(repr=False)
    own: bool = False
    later: bool = False

    @property
    def layer(self) -> str:
        return self.record.layer

    @property
    def port(self) -> str:
        return self.record.port

    @property
    def leaf(self) -> str:
        return self.record.leaf

    @property
    def rotary(self) -> bool:
        """Whether a layer of rotary positions made it."""
        return any(word in self.layer.lower() for word in _ROTARY)

    @property
    def floats(self) -> bool:
        return self.record.dtype.startswith(_FLOATS)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape

    def tensor(self) -> Tensor:
        return self.record.tensor()

    def padding(self) -> Tensor | None:
        """Which tokens of each sample are real, if that is what it says."""
        if self.floats or len(self.shape) != 2 or 0 in self.shape:
            return None
        tensor = self.tensor().cpu()
        return tensor.bool() if bool(((tensor == 0) | (tensor == 1)).all()) else None


def near_of(record: Record) -> tuple[Near, ...]:
    """What was there when this tensor was made, the nearest first; nothing for gradients."""
    if record.port not in ("input", "output"):
        return ()
    then = [
        other
        for other in record._recording.records
        if other.stored
        and other.port in ("input", "output")
        and (other.rank, other.epoch, other.batch) == (record.rank, record.epoch, record.batch)
    ]
    taken: set[str | None] = set()
    found = []
    for other in _wanted(record, then):
        if other != record and other.tensor_id not in taken:
            taken.add(other.tensor_id)
            own = other.port == "input" and other.layer == record.layer
            later = other.port == "output" and other.order > record.order
            found.append(Near(_name(other, record, own=own), other, own, later))
    return tuple(found)


def _wanted(record: Record, then: Sequence[Record]) -> Iterator[Record]:
    before = [other for other in reversed(then) if other.order < record.order]
    if record.port == "output":
        place = (record.layer, "input", record.call)
        yield from (r for r in then if (r.layer, r.port, r.call) == place)
    made = [r for r in before if r.port == "output" and r.dtype.startswith(_FLOATS)]
    yield from made[:_MOST]
    after = [r for r in then if r.order > record.order and r.port == "output"]
    yield from after[:_AFTER]  # the other run may have made them before
    yield from [r for r in made if any(word in r.layer.lower() for word in _ROTARY)][:4]
    yield from (r for r in then if r.port == "input" and not r.layer)
    yield from _of_modules_around(record, after=[r for r in then if r.order > record.order])


def _of_modules_around(record: Record, after: Sequence[Record]) -> Iterator[Record]:
    """Masks and biases of positions that the modules around a layer were given.

    What a module was given is written down when its call is over.
    """
    seen: set[tuple[str, str]] = set()
    for other in after:
        around = not other.layer or record.layer.startswith(f"{other.layer}.")
        if other.port != "input" or not around or len(other.shape) < 3:
            continue
        named = any(word in other.leaf for word in ("mask", "bias"))
        if (named or other.shape[-1] == other.shape[-2]) and (other.layer, other.leaf) not in seen:
            seen.add((other.layer, other.leaf))
            yield other


def _name(other: Record, record: Record, *, own: bool) -> str:
    """What a tensor is called, from the layer that is explained."""
    if own:
        return f"the layer's input {other.leaf}".rstrip()
    if not other.layer and other.port == "input":
        return f"the model's input {other.leaf}".rstrip()
    if other.port == "input":
        return f"the input {other.leaf} of '{other.layer}'"
    name = f"'{other.layer}'"
    for around in (record.layer, record.layer.rpartition(".")[0]):
        if around and other.layer.startswith(f"{around}."):
            name = other.layer.removeprefix(f"{around}.")
            break
    return f"{name} {other.leaf}".rstrip()
