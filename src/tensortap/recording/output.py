"""One segment on its way to disk: tensors are streamed behind a reserved header.

safetensors puts the header first, and the header is not known until the last tensor: so room is
reserved for it, tensors are appended behind that room, and sealing writes the header, padded with
spaces, which the format allows. The file has a temporary name until then.

Large writes go past the page cache where the system allows it: they cost the processor almost
nothing, so the model keeps its cores. A disk that cannot keep up is noticed by the arena filling
up, and the page cache then takes what it can.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from .schema import segment_name
from .segment import HeaderBuilder
from .store import Store

__all__ = ["PAGE", "RESERVED", "SegmentOutput"]

PAGE = 4096
RESERVED = 256 * 1024 - 8
"""Room for the header; with its length in front, the data begins on a page."""

_LARGEST_HEADER = 16 << 20  # of a segment without tensors
_PIECE = 64 << 20
_WORTH_BYPASSING = 1 << 20
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


class SegmentOutput:
    """Streams one segment; nothing is visible to a reader before `seal`."""

    def __init__(self, store: Store, rank: int, number: int) -> None:
        self.store = store
        self.name = segment_name(rank, number)
        self.builder = HeaderBuilder(rank, number)
        self._path: Path = store.scratch(self.name)
        self._fd = -1
        self._bypass = -1
        self._may_bypass = bool(_O_DIRECT)

    @property
    def streamed(self) -> bool:
        """Whether tensors stand behind the header, whose room is then given."""
        return self._fd >= 0

    @property
    def crowded(self) -> bool:
        """Whether the header would near the end of its room, were there tensors behind it."""
        return self.builder.estimate > RESERVED * 3 // 4

    @property
    def full(self) -> bool:
        """Whether the header nears the end of its room, so that this segment must be sealed."""
        return (self.streamed and self.crowded) or self.builder.estimate > _LARGEST_HEADER

    def append(self, start: int, data: memoryview) -> None:
        """Write bytes at an offset of the data part."""
        self._open()
        self._write(self._fd, 8 + RESERVED + start, data)

    def append_pages(self, start: int, data: memoryview) -> bool:
        """Write whole pages, from memory that begins on one, past the page cache.

        False, with nothing written, where that is impossible or not worth while. The last page may
        hold more than was asked for: what follows is written over, or cut off when sealed.
        """
        if start % PAGE or len(data) % PAGE or len(data) < _WORTH_BYPASSING:
            return False
        self._open()
        if self._bypass < 0 and self._may_bypass:
            try:
                self._bypass = os.open(self._path, os.O_WRONLY | _O_DIRECT)
            except OSError:
                self._may_bypass = False
        if not self._may_bypass:
            return False
        try:
            self._write(self._bypass, 8 + RESERVED + start, data)
        except OSError as error:
            if error.errno != 22:  # EINVAL: this file system wants other alignment
                raise
            self._may_bypass = False
            return False
        return True

    def seal(self) -> int:
        """Finish the file and give it its name; its size in bytes."""
        tail = self.builder.tail()
        header = self.builder.header()
        streamed = self._fd >= 0
        self._open()
        room = RESERVED if streamed else len(header) + -(len(header) + 8) % 64
        if len(header) > room:
            raise OSError(f"the header of {self.name} outgrew its room")
        for start, data in tail:
            self._write(self._fd, 8 + room + start, memoryview(data))
        self._write(self._fd, 0, memoryview(struct.pack("<Q", room) + header.ljust(room)))
        size = 8 + room + self.builder.size
        os.ftruncate(self._fd, size)
        self._close()
        self.store.commit(self._path, self.name)
        return size

    def abandon(self) -> None:
        """Leave no half segment behind."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _open(self) -> None:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

    def _close(self) -> None:
        bypass, self._bypass = self._bypass, -1
        fd, self._fd = self._fd, -1  # one that cannot be closed is not to be closed again
        try:
            if bypass >= 0:
                os.close(bypass)
        finally:
            if fd >= 0:
                os.close(fd)

    def _write(self, fd: int, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            written = os.pwrite(fd, data[done : done + _PIECE], offset + done)
            if written == 0:
                raise OSError("the disk took no more bytes")
            done += written
