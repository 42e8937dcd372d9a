"""Who says, while the model runs, what of it is worth keeping.

A recording against a reference compares every tensor as it comes. Comparing stands above taps, so
taps know it only by this shape, and `record` puts the real one in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..numerics import memory
from ..recording.pieces import address_of

if TYPE_CHECKING:
    from ..recording.reader import Recording
    from .sink import Call, Held, Slot

__all__ = ["Divergence", "Judge", "Snapshots", "Values"]


_IDLE = 4


@dataclass(frozen=True)
class Divergence:
    """Where and when a run first left its reference; `layer` is the candidate's name for it."""

    layer: str
    epoch: int
    batch: int
    call: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "epoch": self.epoch,
            "batch": self.batch,
            "call": self.call,
        }


class Judge(Protocol):
    """Compares what is heard with what should have been."""

    reference: str
    divergence: Divergence | None  # the first, once there is one
    sure: bool  # that it is the first: from `begin` on, whether most layers have a partner

    def begin(
        self, candidate: Recording, slots: Sequence[Slot], layers: Collection[str], rank: int
    ) -> None:
        """The model is about to run; `candidate` has a manifest and no records yet.

        `layers` are all that the model has, whether they are listened to or not.
        """
        ...

    def keep(self, call: Call, heard: Sequence[Held]) -> frozenset[str]:
        """A call has ended: judge its tensors, and name the ports to keep as tensors.

        Inputs that were not asked for come along, in case it is the first divergence.
        """
        ...

    def conclude(self, candidate: Recording, stopped: bool) -> Any:
        """The comparison of all that was heard so far."""
        ...


@dataclass(eq=False)
class Values:
    """A tensor's values on the CPU, known by their content; gone when the judge has seen them."""

    digest: bytes
    tensor: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.numel() * self.tensor.element_size()


class Snapshots:
    """Values of inputs, held until their layer has run; equal ones are held once.

    Layers nest, so what is held is one input a level, and a block's input is often that of its
    first layer. Never more than `limit` bytes: what goes beyond is not held.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.refused = 0
        self._held: weakref.WeakValueDictionary[Any, Values] = weakref.WeakValueDictionary()
        self._idle: list[torch.Tensor] = []  # warm: fresh pages cost more than the copy

    def now(self, tensor: torch.Tensor) -> Values:
        """The values as they are at this moment, to be looked at before anything else runs."""
        flat = _on_cpu(tensor)
        nbytes = flat.numel() * flat.element_size()
        return Values(memory.digest(address_of(flat), nbytes) if nbytes else b"", flat)

    def hold(self, tensor: torch.Tensor) -> Values | None:
        """The values as they are now, whatever is written to the tensor later; None for no room."""
        found = self.now(tensor)
        key = (found.digest, tensor.dtype, tuple(tensor.shape))
        known = self._held.get(key)
        if known is not None and known.tensor is not None:
            return known
        if sum(values.nbytes for values in self._held.values()) + found.nbytes > self.limit:
            self.refused += 1
            return None
        assert found.tensor is not None
        if found.nbytes and _shares(found.tensor, tensor):
            self._copy(found, found.tensor)
        self._held[key] = found
        return found

    def _copy(self, values: Values, tensor: torch.Tensor) -> None:
        """Copy a tensor into a warm buffer, which comes back when nobody holds the values."""
        nbytes = values.nbytes
        fitting = [at for at, idle in enumerate(self._idle) if nbytes <= len(idle) <= 4 * nbytes]
        buffer = self._idle.pop(fitting[0]) if fitting else torch.empty(nbytes, dtype=torch.uint8)
        memory.copy_into(buffer.data_ptr(), tensor.data_ptr(), nbytes)
        values.tensor = buffer[:nbytes].view(tensor.dtype).view(tensor.shape)
        weakref.finalize(values, self._give, buffer)

    def _give(self, buffer: torch.Tensor) -> None:
        self._idle.append(buffer)
        while len(self._idle) > _IDLE or sum(map(len, self._idle)) > self.limit:
            self._idle.pop(0)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def _shares(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return theirs.device.type == "cpu" and ours.data_ptr() == theirs.data_ptr()
