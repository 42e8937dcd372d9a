"""Tensors of a device on their way to the writer's thread, without anybody waiting for the device.

In the hook, a tensor is copied into a region of its device, by the stream that made it: whatever
is written over it later comes behind the copy, and an event is recorded. A full region is handed
over: a stream of its own waits for that event, sums up all its tensors in one launch, and copies
tensors and rows together into one buffer of pinned host memory. An event says when that is done;
the writer's thread waits for it.

The device holds no more than the pool of regions, the host no more than the arena. A region in use
makes the model's stream wait; a full arena makes the host wait until the disk has caught up. That
is all the waiting there is, but for CUDA's own: 56 loads may be under way (see `Cuda.event`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ..numerics.device import fill_many
from .arena import Arena, Buffer, size_within
from .cuda import Cuda
from .parcel import Entry, Line, Parcel
from .pinning import Ahead
from .segment import ALIGNMENT
from .stage import ROW_BYTES, Region, Stage

__all__ = ["Ferry", "Load"]

_CHUNK = 32 << 20  # small tensors share a region of this size
_TOGETHER = 8  # larger ones share one with others of their size: each load keeps the host a while
_LARGEST_SHARED = 128 << 20
_AT_A_TIME = 4  # loads that the pool holds, so that some are filled while others go over
_MOST = 256  # tensors in one
_LARGEST_POOL = 1 << 30
_PATIENCE = 10.0  # seconds without a tensor, after which a device has its memory back

Key = tuple[int, int]
"""(device, stream)"""


@dataclass(eq=False, slots=True)
class Load:
    """Tensors of one stream in a region, not yet handed over."""

    stage: Stage
    region: Region
    buffer: Buffer
    stream: Any
    raw: int  # the same stream, for the driver
    end: int  # of the tensors; behind it there is room for their rows
    most: int  # tensors
    used: int = 0
    entries: list[Entry] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for such a tensor."""
        return self.used + nbytes <= self.end and len(self.entries) < self.most

    def keep(self, number: int, tensor: torch.Tensor, nbytes: int, cuda: Cuda) -> None:
        """Take a tensor's values, behind what its stream has been given to do until now."""
        if nbytes and not self.keep_quickly(number, tensor, nbytes, cuda):
            view = self.region.room_for(self.used, tensor.dtype, tensor.shape)
            view.copy_(tensor.detach())
            self.region.taken.record(self.stream)
            self._note(number, tensor, nbytes)
        elif not nbytes:
            self._note(number, tensor, nbytes)

    def keep_quickly(self, number: int, tensor: torch.Tensor, nbytes: int, cuda: Cuda) -> bool:
        """The same by the driver alone, of a contiguous tensor; False where torch must do it."""
        region = self.region
        if not cuda.copy(region.address + self.used, tensor, nbytes, self.raw):
            return False
        region.taken.record(self.stream)
        self._note(number, tensor, nbytes)
        return True

    def _note(self, number: int, tensor: torch.Tensor, nbytes: int) -> None:
        at, self.used = self.used, self.used + nbytes + -nbytes % ALIGNMENT
        # An interrupt here leaves a hole, and never two tensors in one place.
        self.entries.append(Entry(number, tensor.dtype, tensor.shape, at, nbytes))


class Ferry:
    """The open loads of a writer, one a stream. Whoever calls holds the writer's lock."""

    def __init__(self, arena: Arena, *, rows: bool, cuda: Cuda | None = None) -> None:
        self.cuda = cuda or Cuda()
        self._ahead = Ahead(arena, self.cuda)
        self._notes: dict[str, str] = {}
        self.loads: dict[Key, Load] = {}
        self.pool = min(arena.limit // 2, _LARGEST_POOL)
        self.shared = size_within(min(_LARGEST_SHARED, self.pool // _AT_A_TIME))
        self.chunk = min(_CHUNK, self.shared)
        self.most = min(_MOST, self.chunk // 1024)  # so that rows take a sixth of it at most
        self.largest = size_within(self.pool) - self._beside()
        self._rows = rows
        self._stages: dict[int, Stage] = {}
        self._lost: list[Buffer] = []
        self._opened = 0.0
        arena.release = self._unpin

    @property
    def notes(self) -> list[str]:
        """What a user should know."""
        return list(self._notes.values())

    def key(self, tensor: torch.Tensor) -> Key:
        device = tensor.get_device()
        return device, self.cuda.stream_key(device)

    def size_for(self, nbytes: int) -> int:
        """How large a region and a buffer must be for a load that begins with such a tensor.

        A few of them, as far as they fit into what is shared; one that does not has a load alone.
        """
        each = nbytes + -nbytes % ALIGNMENT
        fit = (self.shared - self._beside()) // each if each else 0
        others = max(0, min(_TOGETHER, fit) - 1)
        return max(others * each + nbytes + self._beside(), self.chunk)

    def _beside(self) -> int:
        """What a load needs beside its tensors: rows, and the gap before them."""
        return ALIGNMENT + self.most * ROW_BYTES

    def pin(self, buffer: Buffer, device: int) -> None:
        """Once a buffer; copies into memory that cannot be pinned are right, but waited for."""
        if "pin" in self._notes:
            return
        if not buffer.pinned:
            reason = self.cuda.pin(buffer.address, buffer.capacity)
            buffer.pinned = reason is None
            if reason is not None:
                self._notes["pin"] = (
                    f"Host memory could not be pinned ({reason}): the model waited for copies from "
                    "the GPU. A smaller --budget, or a higher limit of locked memory, may help."
                )
                return
        self._ahead.want(device, buffer.capacity)

    def _unpin(self, buffer: Buffer) -> None:
        if buffer.pinned:
            buffer.pinned = False
            self.cuda.unpin(buffer.address)

    def open(self, key: Key, device: torch.device, nbytes: int, buffer: Buffer) -> Load | None:
        """Begin a load on the current stream; None where the device has no region for it."""
        stage = self._stages.get(key[0])
        if stage is None:
            stage = self._stages[key[0]] = Stage(device, self.pool, self.cuda)
        stream = self.cuda.current(device)
        region = stage.take(self.size_for(nbytes), stream)
        if region is None:
            return None
        self._opened = time.monotonic()
        end = min(region.capacity, buffer.capacity) - self._beside()
        load = Load(stage, region, buffer, stream, stream.cuda_stream, end, self.most)
        self.loads[key] = load
        return load

    def ship(self, key: Key) -> Parcel:
        """Send a load on its way; what it needs of the host is a few launches."""
        load = self.loads[key]
        region, buffer, side, end = load.region, load.buffer, load.stage.side, load.used
        parcel = Parcel(buffer, end, load.entries, load.lines, rows_at=-1)
        side.wait_event(region.taken)
        if self._rows and self._fill(load):
            parcel.rows_at, end = end, end + len(load.entries) * ROW_BYTES
        if buffer.pinned:
            self.cuda.send(region.memory, buffer.bytes(), end, side)
        else:
            with torch.no_grad(), self.cuda.on(side):
                buffer.bytes()[:end].copy_(region.memory[:end])
        region.copied = parcel.ready = copied = self.cuda.event()
        copied.record(side)
        del self.loads[key]  # not before: whoever is interrupted until here may do it again
        load.stage.give(region)
        return parcel

    def lose(self, key: Key) -> None:
        """Give a load up that cannot be sent; its buffer stays, a device may still write to it."""
        load = self.loads.pop(key, None)
        if load is not None:
            self._lost.append(load.buffer)

    def _fill(self, load: Load) -> bool:
        """Sum up all tensors of a load; False where the writer's thread must do it.

        It does where there are no kernels: torch's own operations would keep the host for longer
        than the copies.
        """
        entries, region, known = load.entries, load.region, None
        for entry in entries:
            if entry.dtype is not known:
                known = entry.dtype
                if not self.cuda.sums_up(known):
                    return False
        try:
            views = [region.room_for(e.offset, e.dtype, e.shape) for e in entries]
            rows = region.rows(load.used, len(entries))
            with torch.inference_mode(False), torch.no_grad(), self.cuda.on(load.stage.side):
                fill_many(views, rows)
        except Exception:  # an odd dtype; if it is the device, the copy fails as well
            return False
        return True

    def rest(self) -> None:
        """Called now and then: a training run that is watched may take nothing for hours."""
        if not self.loads and time.monotonic() - self._opened > _PATIENCE:
            self.clear()

    def clear(self) -> None:
        """Give the devices' memory back."""
        self._ahead.stop()
        for stage in self._stages.values():
            stage.clear()

    def stop(self) -> None:
        """Before the interpreter ends: nothing of ours may call CUDA any more."""
        self._ahead.stop()

    def say(self, note: str) -> None:
        self._notes[note] = note

    def lacks_room(self, device: torch.device) -> None:
        """Say that a tensor went the slow way, for want of memory on its device."""
        self._notes["room"] = (
            f"{device} had too little memory left to hold copies of tensors: the model waited "
            "while some were brought over. A smaller --budget takes less of the GPU as well."
        )
