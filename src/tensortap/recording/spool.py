"""The writer's thread: takes items in order, summarises tensors, fills and seals segments.

Only this thread touches the open segment, so nothing here needs a lock. The first error ends it:
what was sealed stays readable, whoever waits is released, and the reason is kept.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..numerics.histogram import Histogram
from ..numerics.summary import WIDTH, Summary
from .arena import Arena, Buffer
from .dtypes import from_bytes, storage_of
from .output import SegmentOutput
from .pieces import address_of, bytes_at, pieces
from .rows import fill_row
from .schema import Site
from .segment import tensor_id
from .store import Store

__all__ = ["REMEMBERED", "Blob", "Flush", "Item", "Line", "Moment", "Slab", "Spool"]

REMEMBERED = 1 << 16
"""How many stored tensors are remembered, so that content seen again is not stored again."""

Moment = tuple[int, int, int, int]
"""(order, epoch, batch, call)"""

_DIRECT_PIECE = 16 << 20


@dataclass(eq=False)
class Blob:
    """A tensor to store: its bytes wait in a buffer, or in the caller's tensor while it waits."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    buffer: Buffer | None = None
    direct: torch.Tensor | None = None
    done: threading.Event | None = None


@dataclass(eq=False)
class Line:
    """A row that refers to a stored tensor."""

    site: int
    moment: Moment
    number: int


@dataclass(eq=False)
class Slab:
    """Rows of summaries alone: one line of float64 numbers each."""

    table: np.ndarray[Any, Any]
    rows: list[tuple[int, Moment]] = field(default_factory=list)
    histograms: list[tuple[int, Histogram]] = field(default_factory=list)


@dataclass(eq=False)
class Flush:
    """Seal what is there, and say when it is done."""

    done: threading.Event
    sync: bool = False


Item = Blob | Line | Slab | Flush | None


class Spool:
    """Turns a queue of items into segments, in a thread of its own."""

    def __init__(
        self,
        store: Store,
        arena: Arena,
        sites: Sequence[Site],
        *,
        rank: int,
        seal_size: int,
        seal_after: float,
        histograms: bool,
        pending: Callable[[], Slab | None],
    ) -> None:
        self.failure: str | None = None
        self.names: list[str] = []
        self._store = store
        self._arena = arena
        self._sites = sites
        self._rank = rank
        self._seal_size = seal_size
        self._seal_after = seal_after
        self._histograms = histograms
        self._pending = pending
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._output: SegmentOutput | None = None
        self._deadline = 0.0
        self._summaries: OrderedDict[int, tuple[np.ndarray[Any, Any], Histogram | None]]
        self._summaries = OrderedDict()
        self._thread = threading.Thread(target=self._run, name="tensortap-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    def put(self, item: Item) -> None:
        self._queue.put(item)

    def close(self) -> None:
        """Let the thread finish what it has, seal, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._step():
                pass
            self._seal()
        except Exception as error:  # a failed writer must never reach the user's model
            self.failure = _reason(error)
            if self._output is not None:
                self._output.abandon()
            self._release_waiting()

    def _step(self) -> bool:
        try:
            item = self._queue.get(timeout=self._patience())
        except queue.Empty:
            self._take_pending()
            if self._output is not None and time.monotonic() >= self._deadline:
                self._seal()
            return True
        if item is None:
            self._take_pending()
            return False
        if isinstance(item, Blob):
            self._store_blob(item)
        elif isinstance(item, Line):
            self._add_line(item)
        elif isinstance(item, Slab):
            self._add_slab(item)
        else:
            self._take_pending()
            self._seal(sync=item.sync)
            item.done.set()
        if self._output is not None and time.monotonic() >= self._deadline:
            self._seal()
        return True

    def _patience(self) -> float:
        """How long to wait for the next item before something is due anyway."""
        if self._output is None:
            return self._seal_after / 2
        return max(0.0, self._deadline - time.monotonic())

    def _take_pending(self) -> None:
        slab = self._pending()
        if slab is not None:
            self._add_slab(slab)

    def _segment(self) -> SegmentOutput:
        """The open segment; a full one is sealed first."""
        if self._output is not None and (
            self._output.builder.size >= self._seal_size or self._output.full
        ):
            self._seal()
        if self._output is None:
            self._output = SegmentOutput(self._store, self._rank, len(self.names))
            self._deadline = time.monotonic() + self._seal_after
        return self._output

    def _store_blob(self, blob: Blob) -> None:
        output = self._segment()
        code, shape = storage_of(blob.dtype, blob.shape)
        count = int(np.prod(blob.shape, dtype=np.int64))
        nbytes = count * blob.dtype.itemsize
        start = output.builder.place(tensor_id(self._rank, blob.number), code, shape, nbytes)
        try:
            if blob.buffer is not None:
                data = memoryview(blob.buffer.memory)[:nbytes]
                tensor = from_bytes(data, blob.dtype, blob.shape)
                row = np.empty(WIDTH)
                histogram = fill_row(row, tensor, self._histograms, threads=1)
                output.append(start, data)
                del tensor, data
            else:
                assert blob.direct is not None
                row, histogram = self._append_direct(output, start, blob.direct)
        finally:
            if blob.buffer is not None:
                self._arena.give(blob.buffer)
            if blob.done is not None:
                blob.done.set()
        self._summaries[blob.number] = (row, histogram)
        if len(self._summaries) > REMEMBERED:
            self._summaries.popitem(last=False)

    def _append_direct(
        self, output: SegmentOutput, start: int, tensor: torch.Tensor
    ) -> tuple[np.ndarray[Any, Any], Histogram | None]:
        total: Summary | None = None
        row = np.empty(WIDTH)
        for piece in pieces(tensor, _DIRECT_PIECE):
            nbytes = piece.numel() * piece.element_size()
            output.append(start, bytes_at(address_of(piece), nbytes))
            start += nbytes
            histogram = fill_row(row, piece, self._histograms, threads=1)
            part = Summary.from_row(row.tolist(), histogram)
            total = part if total is None else total.merge(part)
        assert total is not None
        return np.asarray(total.to_row()), total.histogram

    def _add_line(self, line: Line) -> None:
        builder = self._segment().builder
        index = -1  # a summary that is forgotten by now is computed by the reader
        if line.number in self._summaries:
            row, histogram = self._summaries[line.number]
            index = len(builder.summaries)
            builder.summaries.append(row)
            if histogram is not None:
                builder.histograms.append((index, *histogram.sparse()))
        site = builder.site(self._sites[line.site])
        builder.row((site, *line.moment, line.number, index))

    def _add_slab(self, slab: Slab) -> None:
        builder = self._segment().builder
        base = len(builder.summaries)
        builder.summaries.extend(slab.table[: len(slab.rows)])
        builder.histograms.extend((base + i, *h.sparse()) for i, h in slab.histograms)
        for offset, (site, moment) in enumerate(slab.rows):
            builder.row((builder.site(self._sites[site]), *moment, -1, base + offset))

    def _seal(self, *, sync: bool = False) -> None:
        if self._output is None:
            return
        if sync:
            self._output.sync()
        self._output.seal()
        self.names.append(self._output.name)
        self._output = None

    def _release_waiting(self) -> None:
        """Nothing more will be written: let everyone who waits for us go on."""
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Blob) and item.buffer is not None:
                self._arena.give(item.buffer)
            if isinstance(item, Blob | Flush) and item.done is not None:
                item.done.set()
        self._arena.wake()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (errno {error.errno})"
    return f"{type(error).__name__}: {error}"
