"""Where tensors wait on their device until they are copied out: a bounded pool of regions.

A hook must take a tensor's values at once, and the way to the host is long: so they are copied into
a region beside them, by the stream that made them, and the region goes over as a whole. One that is
still on its way may be filled again: the stream then waits for the copy, the host does not.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ..numerics.summary import WIDTH
from .arena import size_class
from .cuda import Cuda

__all__ = ["ROW_BYTES", "Region", "Stage"]

ROW_BYTES = WIDTH * 8
_VIEWS = 1024


@dataclass(eq=False)
class Region:
    """A stretch of a device's memory, and what has to be over before it may be used again."""

    memory: torch.Tensor
    taken: Any  # recorded behind the last copy into it; who waits for that has it in a queue
    copied: Any = None  # recorded behind the copy to the host
    streams: dict[int, Any] = field(default_factory=dict)
    _views: dict[Any, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.capacity = self.memory.numel()
        self.address = self.memory.data_ptr()

    def room_for(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The bytes from `offset` on as a contiguous tensor; kept, for a model comes again."""
        key = (offset, dtype, shape)
        view = self._views.get(key)
        return self._make(key) if view is None else view

    def rows(self, offset: int, count: int) -> torch.Tensor:
        """The bytes from `offset` on as summary rows."""
        return self.room_for(offset, torch.float64, (count, WIDTH))

    def _make(self, key: tuple[int, torch.dtype, tuple[int, ...]]) -> torch.Tensor:
        if len(self._views) >= _VIEWS:
            self._views.clear()
        offset, dtype, shape = key
        start, count = offset // dtype.itemsize, math.prod(shape)
        with torch.inference_mode(False):  # so that it may be written in any mode later
            flat = self.memory.view(dtype)
            view = self._views[key] = flat.narrow(0, start, count).view(shape)
        return view


class Stage:
    """The regions of one device, together never more than `limit` bytes."""

    def __init__(self, device: torch.device, limit: int, cuda: Cuda) -> None:
        self.device = device
        self.limit = limit
        self.owned = 0
        self.side = cuda.stream(device)
        self._cuda = cuda
        self._idle: list[Region] = []

    def take(self, nbytes: int, stream: Any) -> Region | None:
        """A region that this stream may write from now on; None where all are open.

        Copied out already is better than new, new is better than one to wait for.
        """
        size = size_class(nbytes)
        found = self._find(size)
        if found is None or not found.copied.query():
            new = self._new(size, spare=found)
            if new is None and found is not None:
                stream.wait_event(found.copied)
            elif new is not None:
                found = new
        if found is None:
            return None
        if found.copied is not None:  # not a new one
            self._idle.remove(found)
        found.streams[stream.cuda_stream] = stream
        return found

    def give(self, region: Region) -> None:
        """Back from a load; `region.copied` says when its bytes have been read."""
        self._idle.append(region)

    def clear(self) -> None:
        """Give what is idle back to torch, once it has been copied out.

        Not by `used_by`: where the device has failed, torch ends the process over memory that
        streams may still use.
        """
        for region in self._idle:
            with contextlib.suppress(Exception):
                region.copied.synchronize()
            self.owned -= region.capacity
        self._idle.clear()

    def _find(self, size: int) -> Region | None:
        """The one that was handed over first: one stream copies them, so it is free first."""
        for region in self._idle:
            if size <= region.capacity <= 4 * size:
                return region
        return None

    def _new(self, size: int, spare: Region | None) -> Region | None:
        """A new region if the limit allows; only when there is no spare one, others make room."""
        while spare is None and self._idle and self.owned + size > self.limit:
            self._drop(self._idle.pop(0))
        if self.owned + size > self.limit:
            return None
        memory = self._cuda.empty(size, self.device)
        if memory is None:
            return None
        self.owned += size
        return Region(memory, self._cuda.mark())

    def _drop(self, region: Region) -> None:
        """Give a region back that may still be on its way; torch is told which streams use it."""
        for stream in (self.side, *region.streams.values()):
            self._cuda.used_by(region.memory, stream)
        self.owned -= region.capacity
