"""Outputs that no longer fit in memory: raw bytes in files without a name.

One file holds one leaf of one layer, unless there are very many. Batches of one dtype and one shape
behind the first dimension lie in it as their concatenation would, so a whole epoch is one memory
map and is never in memory at once. A file has no name, so nothing is left behind, whatever ends the
process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from ..recording.dtypes import from_bytes

__all__ = ["Maps", "RawFile", "Spilled", "joined"]

_PIECE = 8 << 20


class RawFile:
    """Bytes that are appended, and looked at through memory maps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with tempfile.TemporaryFile(dir=folder) as file:
            self._fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._fd)  # memory maps outlive it
        self.size = 0

    def append(self, tensor: torch.Tensor) -> Spilled:
        """Write a contiguous CPU tensor behind what is there."""
        itemsize = tensor.dtype.itemsize
        start = -(-self.size // itemsize) * itemsize
        nbytes = tensor.numel() * itemsize
        if nbytes:
            flat = tensor.reshape(-1).view(torch.uint8)
            self._write(start, flat.numpy().data)
        self.size = start + nbytes
        return Spilled(self, start, tuple(tensor.shape), tensor.dtype)

    def view(self, start: int, stop: int, *, private: bool) -> memoryview:
        """A stretch of the file; a private one may be written to without reaching it."""
        first = start - start % mmap.ALLOCATIONGRANULARITY
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        mapped = mmap.mmap(self._fd, stop - first, access=access, offset=first)
        return memoryview(mapped)[start - first :]

    def collected(self, parts: Sequence[Spilled]) -> Spilled:
        """These parts, one behind the other, in a new file: they were not written in that order."""
        target = RawFile(self._folder)
        for part in parts:
            for start in range(part.start, part.stop, _PIECE):
                stop = min(start + _PIECE, part.stop)
                target._write(target.size, part.file.view(start, stop, private=False))
                target.size += stop - start
        rows = sum(part.shape[0] for part in parts)
        return Spilled(target, 0, (rows, *parts[0].shape[1:]), parts[0].dtype)

    def _write(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done : done + _PIECE], offset + done)


@dataclass(frozen=True, eq=False)
class Spilled:
    """A tensor whose values lie in a file."""

    file: RawFile
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + torch.Size(self.shape).numel() * self.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        """The values, read from disk when they are looked at; not to be written to."""
        return Maps(private=False).tensor(self)


class Maps:
    """Tensors over files, each of which is mapped once: a map takes a file descriptor."""

    def __init__(self, *, private: bool) -> None:
        self._private = private
        self._views: dict[RawFile, memoryview] = {}

    def tensor(self, spilled: Spilled) -> torch.Tensor:
        if spilled.start == spilled.stop:
            return torch.empty(spilled.shape, dtype=spilled.dtype)
        file = spilled.file
        view = self._views.get(file)
        if view is None or len(view) < spilled.stop:
            view = self._views[file] = file.view(0, file.size, private=self._private)
        return from_bytes(view[spilled.start : spilled.stop], spilled.dtype, spilled.shape)


def joined(parts: Sequence[Spilled]) -> torch.Tensor:
    """The concatenation along the first dimension, as a memory map; not to be written to."""
    first = parts[0]
    if all(b.file is a.file and b.start == a.stop for a, b in pairwise(parts)):
        rows = sum(part.shape[0] for part in parts)
        whole = Spilled(first.file, first.start, (rows, *first.shape[1:]), first.dtype)
    else:
        whole = first.file.collected(parts)
    return whole.tensor()
