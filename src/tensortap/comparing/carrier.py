"""A device as the place of a comparison: tensors are brought over ahead of the work.

A few threads read the files piece by piece into pinned memory, each piece goes over on a stream of
its own, and the work waits for a tensor on the device, not here. What came over is held for a
while: judging, the floor, the truth and the causes read the same tensors again. Both the pinned
memory and what is held are bounded. A tensor for which the device has no room, or a dtype with
which it cannot work, is compared here instead, and a note says so.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..errors import DamagedError
from ..recording.reader import Record
from .place import HERE, Place

__all__ = ["Carrier"]

T = TypeVar("T")
_Key = tuple[int, str]  # which recording, and the name of the tensor in it

PIECE = 8 << 20
_SLOTS = 16
_THREADS = 8
_MOST_HELD = 16 << 30


class _NoRoom(Exception):
    """The device has no room for a tensor and what is worked with it."""


class Carrier(Place):
    """Brings tensors to a device; `held` bounds what stays there, `largest` a single tensor."""

    def __init__(
        self, device: torch.device, *, held: int | None = None, largest: int | None = None
    ) -> None:
        self.name = str(device)
        self.device = device
        free = _free(device)
        self._most = min(free // 2, _MOST_HELD) if held is None else held
        self._largest = free // 4 if largest is None else largest
        self._held: OrderedDict[_Key, _Load] = OrderedDict()
        self._bytes = 0
        self._expected: deque[Record] = deque()
        self._known: set[_Key] = set()
        self._lanes = _Lanes(device)
        self._no_room = 0
        self._unsuited: dict[str, None] = {}

    @property
    def held(self) -> int:
        """How many bytes are on the device, or on their way to it."""
        return self._bytes

    def tensor(self, record: Record) -> torch.Tensor:
        if not record.stored or not record.nbytes:
            return record.tensor().to(self.device)
        key = _key(record)
        load = self._held.get(key)
        if load is None:
            if record.nbytes > self._largest:
                raise _NoRoom
            self._make_room(record.nbytes, unread_too=True)
            load = self._load(key, record)
        self._held.move_to_end(key)
        load.read = True
        try:
            flat = load.wait()
        except BaseException:
            self._drop(key)
            raise
        self._ahead()
        made: torch.Tensor = flat.view(record.tensor().dtype).view(record.shape)
        return made

    def run(self, work: Callable[[Place], T]) -> T:
        for _ in range(2):
            try:
                with self._guard():
                    return work(self)
            except _NoRoom:
                break
            except torch.cuda.OutOfMemoryError:
                pass
            except RuntimeError as error:  # a dtype that the device does not know
                if "not implemented" not in str(error) and "not support" not in str(error):
                    raise
                self._unsuited.setdefault(str(error).splitlines()[0])
                return work(HERE)
            self._forget()
            if self.device.type == "cuda":  # what nobody uses is given back to who needs it
                torch.cuda.empty_cache()
        self._no_room += 1
        return work(HERE)

    def begin(self) -> None:
        self._expected.clear()
        self._known.clear()

    def expect(self, records: Iterable[Record]) -> None:
        self._expected.extend(record for record in records if record.stored and record.nbytes)
        self._ahead()

    def notes(self) -> list[str]:
        found = []
        if self._no_room:
            times = "One comparison" if self._no_room == 1 else f"{self._no_room} comparisons"
            found.append(
                f"{times} of tensors ran on the CPU: {self.name} has no room for them "
                f"({_gib(_free(self.device))} free)."
            )
        if self._unsuited:
            found.append(
                f"Some tensors were compared on the CPU, since {self.name} cannot work with them: "
                f"{next(iter(self._unsuited))}"
            )
        self._no_room, self._unsuited = 0, {}
        return found

    def close(self) -> None:
        self._expected.clear()
        self._lanes.close()
        self._forget()

    def _guard(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _ahead(self) -> None:
        """Begin to bring what comes next, as far as there is room beside what was not yet read."""
        while self._expected:
            record = self._expected[0]
            key = _key(record)
            new = key not in self._known and key not in self._held
            if new and record.nbytes <= self._largest:
                if not self._make_room(record.nbytes, unread_too=False):
                    return
                try:
                    self._load(key, record)
                except DamagedError:  # said where it is read
                    pass
                except torch.cuda.OutOfMemoryError:
                    self._expected.clear()
                    return
            self._expected.popleft()

    def _load(self, key: _Key, record: Record) -> _Load:
        load = self._held[key] = self._lanes.load(record)
        self._known.add(key)
        self._bytes += load.nbytes
        return load

    def _make_room(self, nbytes: int, *, unread_too: bool) -> bool:
        """Let go of what was read longest ago, until so much more may be held."""
        for key in [key for key, load in self._held.items() if unread_too or load.read]:
            if self._bytes + nbytes <= self._most:
                return True
            self._drop(key)
        return self._bytes + nbytes <= self._most

    def _drop(self, key: _Key) -> None:
        load = self._held.pop(key, None)
        if load is not None:
            self._bytes -= load.nbytes

    def _forget(self) -> None:
        """Hold nothing."""
        for load in self._held.values():
            load.settle()
        self._held.clear()
        self._bytes = 0


@dataclass(eq=False)
class _Load:
    """A tensor on its way: its bytes on the device, once all pieces have been sent."""

    flat: torch.Tensor
    pieces: list[Future[None]]
    stream: torch.cuda.Stream | None
    recording: object  # so that its number is nobody else's meanwhile
    read: bool = False
    arrived: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        return self.flat.numel()

    def wait(self) -> torch.Tensor:
        """The bytes; this stream waits for them, and nobody else."""
        for piece in self.pieces:
            piece.result()
        self.pieces = []
        if self.stream is not None:
            if self.arrived is None:
                self.arrived = self.stream.record_event()
            here = torch.cuda.current_stream(self.flat.device)
            here.wait_event(self.arrived)
            self.flat.record_stream(here)
        return self.flat

    def settle(self) -> None:
        """Send no more of it."""
        for piece in self.pieces:
            if not piece.cancel():
                piece.exception()


class _Lanes:
    """Threads, and pieces of pinned memory that they fill from the files and send over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = ThreadPoolExecutor(
            min(_THREADS, os.cpu_count() or 1), thread_name_prefix="tensortap-carrier"
        )
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._made = 0
        self._lock = threading.Lock()

    def load(self, record: Record) -> _Load:
        source = record.tensor().reshape(-1).view(torch.uint8)
        with torch.cuda.stream(self._stream):
            flat = torch.empty(source.numel(), dtype=torch.uint8, device=self._device)
        pieces = [
            self._pool.submit(self._send, record, source, flat, start)
            for start in range(0, source.numel(), PIECE)
        ]
        return _Load(flat, pieces, self._stream, record._recording)

    def _send(self, record: Record, source: torch.Tensor, flat: torch.Tensor, start: int) -> None:
        size = min(PIECE, source.numel() - start)
        slot = self._take()
        try:
            slot.fill(record, source, start, size)
            slot.send(flat[start : start + size], self._stream)
        finally:
            self._slots.put(slot)

    def _take(self) -> _Slot:
        with self._lock:
            new = self._slots.empty() and self._made < _SLOTS
            self._made += new
        return _Slot(self._stream is not None) if new else self._slots.get()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        while not self._slots.empty():
            self._slots.get().settle()


class _Slot:
    """A piece of pinned memory, free again once the device has what was in it."""

    def __init__(self, pinned: bool) -> None:
        try:
            self._memory = torch.empty(PIECE, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError:  # no more memory may be pinned: slower, but as right
            self._memory = torch.empty(PIECE, dtype=torch.uint8)
        self._view = self._memory.numpy().data
        self._sent: torch.cuda.Event | None = None

    def fill(self, record: Record, source: torch.Tensor, start: int, size: int) -> None:
        """Read a piece of a tensor: from its file where it has one, which maps no pages."""
        self.settle()
        place = record.file
        if place is None:
            self._memory[:size].copy_(source[start : start + size])
            return
        path, offset = place
        with path.open("rb", buffering=0) as file:
            file.seek(offset + start)
            at = 0
            while at < size:
                count = file.readinto(self._view[at:size])
                if not count:
                    raise DamagedError(
                        f"{path} was cut off while it was read: {record.where()} should go on."
                    )
                at += count

    def send(self, target: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        if stream is None:
            target.copy_(self._memory[: target.numel()])
            return
        with torch.cuda.stream(stream):
            target.copy_(self._memory[: target.numel()], non_blocking=True)
            if self._sent is None:
                self._sent = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._sent.record(stream)

    def settle(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()


def _key(record: Record) -> _Key:
    return id(record._recording), record.tensor_id or ""


def _free(device: torch.device) -> int:
    """The bytes that the device has left for us."""
    if device.type != "cuda":
        return 8 << 30
    ours = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + ours


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
