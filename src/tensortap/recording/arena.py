"""A bounded pool of warm buffers for snapshots.

A fresh `clone()` spends most of its time in page faults; a buffer that was used before does not.
The pool is also the bound on memory: whoever wants more than the budget waits until the writer has
put something on disk.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Arena", "Buffer", "size_class", "size_within"]

_PAGE = 4096
_HUGE = 1 << 21


@dataclass(eq=False)
class Buffer:
    """A stretch of anonymous memory that belongs to an arena."""

    memory: mmap.mmap
    address: int
    capacity: int
    pinned: bool = False  # a device may write to it by itself
    _bytes: torch.Tensor | None = None

    def bytes(self) -> torch.Tensor:
        """All of it as a tensor."""
        if self._bytes is None:
            with torch.inference_mode(False):  # so that it may be written in any mode later
                self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        return self._bytes


def size_class(nbytes: int) -> int:
    """Round up to an eighth of an octave, so that layers of about one size share buffers."""
    if nbytes <= _PAGE:
        return _PAGE
    step = max(_PAGE, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def size_within(nbytes: int) -> int:
    """The largest size class of at most `nbytes`, which are a page or more."""
    step = max(_PAGE, 1 << (nbytes.bit_length() - 4))
    return nbytes // step * step


class Arena:
    """Hands out buffers, takes them back, and never owns more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.owned = 0
        self.idle = 0
        self.release: Callable[[Buffer], None] | None = None  # called before memory goes back
        self._free: dict[int, list[Buffer]] = {}
        self._changed = threading.Condition()
        self._waiting = 0  # who wants room

    def take(self, nbytes: int, *, alive: Callable[[], bool], wait: bool = True) -> Buffer | None:
        """A buffer of at least `nbytes` once the limit allows; None when `alive` turns false.

        Without `wait`, None also where the limit does not allow it now.
        """
        size = size_class(nbytes)
        with self._changed:
            while True:
                found = self._find(size)
                if found is not None:
                    return found
                if self.owned + size > self.limit:
                    self._drop_free(self.owned + size - self.limit)
                if self.owned + size <= self.limit or self.owned == 0:
                    self.owned += size
                    break
                if not wait or not alive():
                    return None
                self._waiting += 1
                try:
                    self._changed.wait(0.1)
                finally:
                    self._waiting -= 1
        return self._make(size)

    def lacks(self, size: int, ready: int) -> bool:
        """Whether fewer than so many pinned buffers of such a size are idle, with room for more."""
        with self._changed:
            return self._lacks(size, ready)

    def reserve(self, size: int, ready: int) -> Buffer | None:
        """A new buffer, to be made ready and given; None where nothing is lacking."""
        with self._changed:
            if not self._lacks(size, ready):
                return None
            self.owned += size
        return self._make(size)

    def forget(self, buffer: Buffer) -> None:
        """A buffer that is not given back goes to the system."""
        with self._changed:
            self.owned -= buffer.capacity
            self._changed.notify_all()

    def give(self, buffer: Buffer) -> None:
        with self._changed:
            self._free.setdefault(buffer.capacity, []).append(buffer)
            self.idle += buffer.capacity
            self._changed.notify_all()

    def pressure(self) -> float:
        """The share of the limit that is in use."""
        return (self.owned - self.idle) / self.limit

    def clear(self) -> None:
        """Give all idle memory back."""
        with self._changed:
            self._drop_free(self.owned)

    def wake(self) -> None:
        """Let those who wait look again whether there is still a writer."""
        with self._changed:
            self._changed.notify_all()

    def _lacks(self, size: int, ready: int) -> bool:
        if self._waiting or self.owned + size > self.limit:
            return False
        fitting = [b for s, buffers in self._free.items() if size <= s <= 4 * size for b in buffers]
        return sum(buffer.pinned for buffer in fitting) < ready

    def _make(self, size: int) -> Buffer:
        """A buffer that is counted as owned already."""
        try:
            return _map(size)
        except BaseException:
            with self._changed:
                self.owned -= size
                self._changed.notify_all()
            raise

    def _find(self, size: int) -> Buffer | None:
        """A free buffer of this size or up to four times as large: warm beats tight."""
        fitting = [s for s, buffers in self._free.items() if buffers and size <= s <= 4 * size]
        if not fitting:
            return None
        capacity = min(fitting)
        self.idle -= capacity
        return self._free[capacity].pop()

    def _drop_free(self, nbytes: int) -> None:
        for size in sorted(self._free, reverse=True):
            while self._free[size] and nbytes > 0:
                buffer = self._free[size].pop()
                if self.release is not None:
                    self.release(buffer)
                self.owned -= size
                self.idle -= size
                nbytes -= size


def _map(size: int) -> Buffer:
    memory = mmap.mmap(-1, size)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return Buffer(memory, address, size)
