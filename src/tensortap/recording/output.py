"""One segment on its way to disk: tensors are streamed behind a reserved header.

safetensors puts the header first, and the header is not known until the last tensor: so room is
reserved for it, tensors are appended behind that room, and sealing writes the header, padded with
spaces, which the format allows. The file has a temporary name until then.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from .schema import segment_name
from .segment import HeaderBuilder
from .store import Store

__all__ = ["SegmentOutput"]

RESERVED = 256 * 1024
_AHEAD = 64 << 20
_PIECE = 8 << 20


class SegmentOutput:
    """Streams one segment; nothing is visible to a reader before `seal`."""

    def __init__(self, store: Store, rank: int, number: int) -> None:
        self.store = store
        self.name = segment_name(rank, number)
        self.builder = HeaderBuilder(rank, number)
        self._path: Path = store.scratch(self.name)
        self._fd = -1
        self._allocated = 0

    @property
    def full(self) -> bool:
        """Whether the header nears the end of its room, so that this segment must be sealed."""
        return self.builder.estimate > RESERVED * 3 // 4

    def append(self, start: int, data: memoryview) -> None:
        """Write bytes at an offset of the data part."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write(8 + RESERVED + start, data)

    def seal(self) -> int:
        """Finish the file and give it its name; its size in bytes."""
        tail = self.builder.tail()
        header = self.builder.header()
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            room = len(header) + -(len(header) + 8) % 64
        else:
            room = RESERVED
        if len(header) > room:
            raise OSError(f"the header of {self.name} outgrew its room")
        for start, data in tail:
            self._write(8 + room + start, memoryview(data))
        self._write(0, memoryview(struct.pack("<Q", room) + header.ljust(room)))
        size = 8 + room + self.builder.size
        os.ftruncate(self._fd, size)
        os.close(self._fd)
        self._fd = -1
        self.store.commit(self._path, self.name)
        return size

    def sync(self) -> None:
        if self._fd >= 0:
            os.fsync(self._fd)

    def abandon(self) -> None:
        """Leave no half segment behind."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write(self, offset: int, data: memoryview) -> None:
        end = offset + len(data)
        if len(data) >= _PIECE // 8 and end > self._allocated:
            self._reserve(end)
        done = 0
        while done < len(data):
            written = os.pwrite(self._fd, data[done : done + _PIECE], offset + done)
            if written == 0:
                raise OSError("the disk took no more bytes")
            done += written

    def _reserve(self, end: int) -> None:
        """Ask for disk blocks ahead of the writes; a file system that cannot is no trouble."""
        start, self._allocated = self._allocated, end + _AHEAD
        if hasattr(os, "posix_fallocate"):
            with contextlib.suppress(OSError):
                os.posix_fallocate(self._fd, start, self._allocated - start)
