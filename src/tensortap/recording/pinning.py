"""Pinned buffers that are ready before a hook asks for them.

To pin memory keeps whoever does it for 0.4 s a GiB, nine tenths of it to find the pages, and a
recording takes a while until its arena has all the buffers that it will ever need. So a thread of
its own makes the next ones while the model runs: a few more than are in use, within the arena's
limit. A hook that finds none ready pins one itself; whatever fails here is left to it as well.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading

from .arena import Arena, Buffer
from .cuda import Cuda, relax_captures

__all__ = ["Ahead"]

_READY = 2  # buffers of a size
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE

Want = tuple[int, int]
"""(device, size)"""


class Ahead:
    """Keeps an arena supplied with pinned buffers of the sizes that are asked for."""

    def __init__(self, arena: Arena, cuda: Cuda) -> None:
        self._arena = arena
        self._cuda = cuda
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wants: queue.SimpleQueue[Want | None] = queue.SimpleQueue()
        self._failed = False

    def want(self, device: int, size: int) -> None:
        """A buffer of this size was taken for a device: see that the next ones are ready."""
        if self._failed or not self._wants.empty() or not self._arena.lacks(size, _READY):
            return
        with self._lock:
            if self._thread is None:
                self._wants = queue.SimpleQueue()
                thread = threading.Thread(
                    target=self._run, args=(self._wants,), name="tensortap-pinning", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # no more threads here: hooks do without
                    self._failed = True
                    return
                self._thread = thread
            self._wants.put((device, size))

    def stop(self) -> None:
        """Return when the thread has ended; it begins anew when something is wanted again."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._wants.put(None)
        if thread is not None:
            thread.join()

    def _run(self, wants: queue.SimpleQueue[Want | None]) -> None:
        try:
            relax_captures()
            while (want := wants.get()) is not None:
                device, size = want
                self._cuda.use(device)
                while wants.empty():  # else it is told to end, or something else is needed now
                    buffer = self._arena.reserve(size, _READY)
                    if buffer is None:
                        break
                    self._prepare(buffer)
        except Exception:  # hooks do without us, and say what is wrong
            self._failed = True

    def _prepare(self, buffer: Buffer) -> None:
        try:
            _touch(buffer)
            reason = self._cuda.pin(buffer.address, buffer.capacity)
            if reason is not None:
                raise OSError(reason)
            buffer.pinned = True
        except BaseException:
            self._arena.forget(buffer)
            raise
        self._arena.give(buffer)


def _touch(buffer: Buffer) -> None:
    """Have the system find the memory now; by ctypes, which gives the GIL away meanwhile."""
    if sys.platform == "linux":  # an older one refuses, and finds it while it pins
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        madvise(buffer.address, buffer.capacity, _POPULATE_WRITE)
