"""What the caller's side hands to the writer's thread: many small things at once.

A parcel has a buffer with the bytes of new tensors, one behind the other as they will lie in the
segment, and the rows that came up meanwhile. Handing over costs a lock and a wake-up, so small
tensors share a parcel and large ones go at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..numerics.summary import WIDTH
from .arena import Buffer
from .rows import Sparse
from .segment import ALIGNMENT

__all__ = ["SUMMARY_ROWS", "Broken", "Entry", "Flush", "Line", "Moment", "Parcel", "Ready"]

SUMMARY_ROWS = 1024
_ROW_BYTES = WIDTH * 8

Moment = tuple[int, int, int, int]
"""(order, epoch, batch, call)"""


class Ready(Protocol):
    """What says that memory is complete: a `torch.cuda.Event`, or anything else to wait for."""

    def synchronize(self) -> None: ...


class Entry(NamedTuple):
    """A tensor to store: its number, kind, place in the parcel's buffer, and summary.

    The summary is made by the caller's side, right behind the copy: the values are still in the
    processor's cache, and the threads that computed them are at hand.
    """

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    row: np.ndarray[Any, Any] | None = None
    histogram: Sparse | None = None


class Line(NamedTuple):
    """A row: where and when, and either a stored tensor's number or -1 and a row of the table."""

    site: int
    moment: Moment
    number: int
    summary: int = -1


@dataclass(eq=False)
class Parcel:
    """Tensors and rows on their way to a segment.

    With `ready`, buffer and table are complete only once it has been waited for, which is for the
    writer's thread to do. With `present_only`, lines whose summary counts nothing are left out.
    With `rows_at`, the entries come from a device: their digests are not taken yet, and their
    summaries stand in the buffer from there on, or are not made yet (-1).
    """

    buffer: Buffer | None = None
    used: int = 0
    entries: list[Entry] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    coming: np.ndarray[Any, Any] | None = None  # lines (site, moment) of the table, one by one
    table: np.ndarray[Any, Any] | None = None
    table_address: int = 0
    summaries: int = 0
    histograms: dict[int, Sparse] = field(default_factory=dict)
    sketches: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    direct: torch.Tensor | None = None
    done: threading.Event | None = None
    ready: Ready | None = None
    present_only: bool = False
    rows_at: int | None = None

    def __bool__(self) -> bool:
        return bool(self.entries or self.lines or self.coming is not None)

    def room(self) -> int:
        return 0 if self.buffer is None else self.buffer.capacity - self.used

    def keep(self, entry: Entry) -> None:
        """The bytes at `used` are this entry's; the next ones begin behind it, aligned."""
        assert self.buffer is not None
        self.entries.append(entry)
        end = self.used + entry.nbytes
        self.used = min(end + -end % ALIGNMENT, self.buffer.capacity)
        if self.used > end:
            self.buffer.memory[end : self.used] = bytes(self.used - end)

    def next_summary(self) -> tuple[int, int]:
        """A free row of the table and its address."""
        if self.table is None:
            self.table = np.empty((SUMMARY_ROWS, WIDTH))
            self.table_address = self.table.ctypes.data
        index = self.summaries
        return index, self.table_address + index * _ROW_BYTES

    @property
    def full(self) -> bool:
        return self.summaries == SUMMARY_ROWS or len(self.entries) >= SUMMARY_ROWS


@dataclass(eq=False)
class Flush:
    """Seal what is there, and say when it is done."""

    done: threading.Event
    sync: bool = False


@dataclass(eq=False)
class Broken:
    """Something taken could not be handed over: the writer must end and say why."""

    error: Exception
    done: threading.Event | None = None
