"""Where tensors are compared: in the machine's own memory, or on a device.

Everything that reads whole tensors asks a place for them; what looks at a few values of a tensor,
to pair or to lay it out, reads those through the memory map. Numbers come back, never tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from ..errors import OptionError
from ..recording.reader import Record

__all__ = ["HERE", "Device", "Place", "device_of", "placed"]

T = TypeVar("T")
Device = str | torch.device


class Place:
    """The memory of this machine, into which the recordings' files are mapped."""

    name = "cpu"

    def tensor(self, record: Record) -> torch.Tensor:
        """What a record holds, to be read here."""
        return record.tensor()

    def run(self, work: Callable[[Place], T]) -> T:
        """Do some work with tensors of this place; where it has no room for them, of another."""
        return work(self)

    def begin(self) -> None:
        """Another comparison begins."""

    def expect(self, records: Iterable[Record]) -> None:
        """These will be asked for next, in about this order."""

    def notes(self) -> list[str]:
        """What a reader should know of the work since this was last asked."""
        return []

    def close(self) -> None:
        """Give back what is held."""


HERE = Place()


@contextmanager
def placed(device: Device | Place | None) -> Iterator[Place]:
    """The place of a device; one that was opened before stays open."""
    if isinstance(device, Place):
        device.begin()
        yield device
        return
    wanted = device_of(device)
    if wanted is None:
        yield HERE
        return
    from .carrier import Carrier

    place = Carrier(wanted)
    try:
        yield place
    finally:
        place.close()


def device_of(device: Device | None) -> torch.device | None:
    """A device that is there and can compare; None is the machine itself."""
    if device is None:
        return None
    from ..targets.options import parse_device

    found = parse_device(str(device), "Leave --device out to compare on the CPU.")
    if found.type == "cpu":
        return None
    try:
        torch.zeros(1, dtype=torch.float64, device=found).sum().item()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        why = "has no float64, in which differences are taken"
        if found.type == "meta":
            why = "holds no values that could be compared"
        raise OptionError(
            f"The device {str(device)!r} {why}. Leave --device out to compare on the CPU."
        ) from error
    if found.type == "cuda" and str(found) == "cuda":
        found = torch.device("cuda", torch.cuda.current_device())
    return found
