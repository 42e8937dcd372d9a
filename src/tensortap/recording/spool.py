"""The writer's thread: takes parcels in order, fills segments and seals them.

Only this thread touches the open segment, so nothing here needs a lock. The first error ends it:
what was sealed stays readable, whoever waits is released, and the reason is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import TapError
from ..numerics import memory as host_memory
from ..numerics.summary import WIDTH, Summary
from .arena import Arena
from .cuda import relax_captures
from .dtypes import from_bytes, storage_of
from .output import PAGE, SegmentOutput
from .parcel import Broken, Entry, Flush, Line, Parcel
from .pieces import address_of, bytes_at, pieces
from .rows import Sparse, fill_row, sparse
from .schema import Site
from .segment import ALIGNMENT, HeaderBuilder, tensor_id
from .store import Store

__all__ = ["REMEMBERED", "Key", "Spool"]

Key = tuple[bytes, int, torch.dtype]
"""What tells contents apart: (digest, bytes, dtype)"""

REMEMBERED = 1 << 16
"""How many stored tensors are remembered, so that content seen again is not stored again."""

_WITH_HISTOGRAM = 4096  # a histogram takes a few kilobytes
_DIRECT_PIECE = 16 << 20
_THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))  # for a device's tensors: cores are idle
_FEW, _MANY = 32, 512  # summary rows that go into a segment at once; few where room is scarce
_NAP, _PRESSING = 0.1, 0.25  # seconds; the share of the arena in use beyond which there are none
_PRESSURE = 0.5  # beyond this share of the arena in use, the page cache takes the writes


class Spool:
    """Turns a queue of parcels into segments, in a thread of its own."""

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
        pending: Callable[[], Parcel | None],
        claim: Callable[[Sequence[Key], Sequence[int]], list[int]],
    ) -> None:
        self.failure: str | None = None
        self.alive = True
        self.names: list[str] = []
        self._synced = 0
        self._store = store
        self._arena = arena
        self._sites = sites
        self._places: tuple[HeaderBuilder | None, dict[int, int]] = (None, {})
        self._rank = rank
        self._seal_size = seal_size
        self._seal_after = seal_after
        self._histograms = histograms
        self._pending = pending
        self._claim = claim
        self._relaxed = False
        self._hurry = threading.Event()
        self._stands = array("q")  # by number: the number to refer to, -1 where it is not here yet
        self._early: dict[int, list[Line]] = {}
        self._queue: queue.SimpleQueue[Parcel | Flush | Broken | None] = queue.SimpleQueue()
        self._output: SegmentOutput | None = None
        self._deadline = 0.0
        self._summaries: OrderedDict[int, tuple[np.ndarray[Any, Any], Sparse | None]]
        self._summaries = OrderedDict()
        self._thread = threading.Thread(target=self._run, name="tensortap-writer", daemon=True)
        self._thread.start()

    def put(self, item: Parcel | Flush | Broken | None) -> None:
        self._queue.put(item)
        from_device = isinstance(item, Parcel) and item.rows_at is not None
        if not from_device or self._arena.pressure() > _PRESSING:
            self._hurry.set()

    def close(self) -> None:
        """Let the thread finish what it has, seal, and end."""
        self.put(None)
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
        finally:
            self.alive = False
            self._release_waiting()

    def _nap(self, item: Parcel | Flush | Broken | None) -> None:
        """Leave the model alone while it calls its layers, as long as there is room.

        A thread that wants the GIL makes every call of another one slower, and a model on a GPU
        is mostly calls: behind them, while it waits for the device, our work costs nothing.
        """
        if not isinstance(item, Parcel) or item.rows_at is None:
            return
        if self._arena.pressure() <= _PRESSING:
            self._hurry.wait(_NAP)

    def _step(self) -> bool:
        if self._queue.empty():
            self._hurry.clear()
        try:
            item = self._queue.get(timeout=self._patience())
            self._nap(item)
        except queue.Empty:
            self._take_pending()
        else:
            if item is None:
                self._take_pending()
                self._take_rest()
                return False
            if isinstance(item, Parcel):
                self._take(item)
            elif isinstance(item, Broken):
                raise item.error
            else:
                self._take_pending()
                self._seal()
                if item.sync:
                    self._sync()
                item.done.set()
        if self._output is not None and time.monotonic() >= self._deadline:
            self._seal()
        return True

    def _patience(self) -> float:
        """How long to wait for the next parcel before something is due anyway."""
        if self._output is None:
            return self._seal_after / 4
        return max(0.0, self._deadline - time.monotonic())

    def _relax(self) -> None:
        """Once CUDA is in use: what we do must not spoil a graph that somebody captures."""
        cuda: Any = torch.cuda  # untyped in torch
        if not self._relaxed and cuda.is_initialized():
            self._relaxed = True
            relax_captures()

    def _take_pending(self) -> None:
        self._hurry.set()  # it has waited for long enough
        self._relax()
        parcel = self._pending()
        if parcel is not None:
            self._take(parcel)

    def _take_rest(self) -> None:
        """What was handed over while we were told to end."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, Parcel):
                    self._take(item)
                elif isinstance(item, Broken):
                    raise item.error
                elif item is not None:
                    item.done.set()

    def _take(self, parcel: Parcel) -> None:
        try:
            if parcel.ready is not None:
                self._relax()
                _wait_for(parcel)
            if parcel.rows_at is not None:
                self._receive(parcel, parcel.rows_at)
            if parcel.direct is not None:
                self._store_direct(parcel.entries[0], parcel.direct)
            elif parcel.entries:
                self._store_entries(parcel)
        finally:
            if parcel.buffer is not None:
                self._arena.give(parcel.buffer)
            if parcel.done is not None:
                parcel.done.set()
        if parcel.ready is not None and parcel.table is not None:
            parcel.table = parcel.table.copy()  # whose memory it was may want it back
            parcel.sketches = {at: values.copy() for at, values in parcel.sketches.items()}
        for line in parcel.lines:
            self._add_line(line, parcel)
        start, coming = 0, parcel.coming
        while coming is not None and start < len(coming):
            together = _FEW if self._segment().streamed else _MANY
            self._add_rows(parcel, start, coming[start : start + together])
            start += together
        if self._early:
            self._add_early(parcel)

    def _receive(self, parcel: Parcel, rows_at: int) -> None:
        """Tensors of a device are complete: keep those whose content we do not have yet."""
        assert parcel.buffer is not None
        buffer, count = parcel.buffer, len(parcel.entries)
        rows: np.ndarray[Any, Any] = np.empty((count, WIDTH))
        if rows_at >= 0:
            there = np.frombuffer(buffer.memory, np.float64, count * WIDTH, rows_at)
            rows[:] = there.reshape(count, WIDTH)
        where = [(buffer.address + entry.offset, entry.nbytes) for entry in parcel.entries]
        digests = host_memory.digest_many(where, _THREADS)
        keys = [(d, e.nbytes, e.dtype) for d, e in zip(digests, parcel.entries, strict=True)]
        numbers = self._claim(keys, [entry.number for entry in parcel.entries])
        kept: list[Entry] = []
        for entry, number, row in zip(parcel.entries, numbers, rows, strict=True):
            self._stand(entry.number, number)
            if number != entry.number:
                continue
            end = entry.offset + entry.nbytes
            if gap := -entry.nbytes % ALIGNMENT:
                buffer.memory[end : end + gap] = bytes(gap)
            if rows_at >= 0:
                kept.append(entry._replace(row=row))
            else:
                values = memoryview(buffer.memory)[entry.offset : end]
                kept.append(self._summed_up(entry, from_bytes(values, entry.dtype, entry.shape)))
        parcel.entries = kept

    def _summed_up(self, entry: Entry, tensor: torch.Tensor) -> Entry:
        """An entry with its summary; without, where there can be none."""
        row = np.empty(WIDTH)
        try:
            histogram = fill_row(row, tensor, self._histograms, threads=_THREADS)
        except (TapError, RuntimeError, TypeError, NotImplementedError):
            return entry
        return entry._replace(row=row, histogram=sparse(histogram))

    def _segment(self, *, streams: bool = False) -> SegmentOutput:
        """The open segment, where a tensor `streams` into it or rows are added; a full one is
        sealed first."""
        if self._output is not None and (
            self._output.builder.size >= self._seal_size
            or (self._output.crowded if streams else self._output.full)
        ):
            self._seal()
        if self._output is None:
            self._output = SegmentOutput(self._store, self._rank, len(self.names))
            # What waited for us until now has used up to a quarter of its time.
            self._deadline = time.monotonic() + 0.7 * self._seal_after
        return self._output

    def _store_entries(self, parcel: Parcel) -> None:
        """Place the entries; neighbours that lie alike in buffer and segment go in one write."""
        assert parcel.buffer is not None
        memory = memoryview(parcel.buffer.memory)
        whole = parcel.entries[-1].offset + parcel.entries[-1].nbytes
        run: _Run | None = None
        for entry in parcel.entries:
            output = self._segment(streams=True)
            start = self._place(output, entry, PAGE if entry.offset == 0 else ALIGNMENT)
            end = entry.offset + entry.nbytes
            if run is not None and run.output is output and run.continues(start, entry.offset):
                run = run._replace(high=end)
            else:
                self._write(run, memory, whole)
                run = _Run(output, start, entry.offset, end)
            self._remember(entry, entry.row, entry.histogram)
            if output.crowded or output.builder.size >= self._seal_size:
                self._write(run, memory, whole)
                run = None
        self._write(run, memory, whole)

    def _write(self, run: _Run | None, memory: memoryview, whole: int) -> None:
        """Write a run; one that is all of its parcel may go past the page cache."""
        if run is None:
            return
        pages = -(-run.high // PAGE) * PAGE
        if (
            run.low == 0
            and run.high == whole
            and pages <= len(memory)
            and self._arena.pressure() < _PRESSURE
            and run.output.append_pages(run.start, _blank(memory, run.high, pages))
        ):
            return
        run.output.append(run.start, memory[run.low : run.high])

    def _store_direct(self, entry: Entry, tensor: torch.Tensor) -> None:
        """A tensor too large for a buffer is written from where it lies; its owner waits."""
        output = self._segment(streams=True)
        start = self._place(output, entry)
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
        self._remember(entry, np.asarray(total.to_row()), sparse(total.histogram))

    def _place(self, output: SegmentOutput, entry: Entry, align: int = ALIGNMENT) -> int:
        code, shape = storage_of(entry.dtype, entry.shape)
        name = tensor_id(self._rank, entry.number)
        return output.builder.place(name, code, shape, entry.nbytes, align)

    def _remember(
        self, entry: Entry, row: np.ndarray[Any, Any] | None, histogram: Sparse | None
    ) -> None:
        self._stand(entry.number, entry.number)
        if row is None:
            return
        self._summaries[entry.number] = (row, histogram)
        if len(self._summaries) > (_WITH_HISTOGRAM if self._histograms else 2 * REMEMBERED):
            self._summaries.popitem(last=False)

    def _stand(self, number: int, at: int) -> None:
        """From now on, rows that name `number` refer to `at`."""
        if number >= len(self._stands):
            self._stands.extend([-1] * (number + 1 - len(self._stands)))
        self._stands[number] = at

    def _resolve(self, number: int) -> tuple[int, bool]:
        """The number to refer to, and whether its tensor is here by now."""
        while number < len(self._stands) and self._stands[number] not in (-1, number):
            number = self._stands[number]
        return number, number < len(self._stands) and self._stands[number] == number

    def _add_early(self, parcel: Parcel) -> None:
        """Rows that came before their tensors, which may have come now."""
        for number in [n for n in self._early if self._resolve(n)[1]]:
            for line in self._early.pop(number):
                self._add_line(line, parcel)

    def _add_line(self, line: Line, parcel: Parcel) -> None:
        number = line.number
        if number >= 0:
            number, here = self._resolve(number)
            if not here:
                self._early.setdefault(number, []).append(line)
                return
        row: np.ndarray[Any, Any] | None = None
        histogram: Sparse | None = None
        if number < 0:
            assert parcel.table is not None
            row, histogram = parcel.table[line.summary], parcel.histograms.get(line.summary)
            if parcel.present_only and not row[0]:
                return
        elif number in self._summaries:
            row, histogram = self._summaries[number]
        builder = self._segment().builder
        index = -1  # a summary that is forgotten by now is computed by the reader
        if row is not None:
            index = builder.summary(row)
            if histogram is not None:
                builder.histograms.append((index, *histogram))
            if number < 0 and line.summary in parcel.sketches:
                builder.sketch(index, parcel.sketches[line.summary])
        site = self._placed(builder, line.site)
        builder.row((site, *line.moment, number, index))

    def _add_rows(self, parcel: Parcel, start: int, coming: np.ndarray[Any, Any]) -> None:
        """Many summary rows at once: a model that launches kernels waits while Python works."""
        assert parcel.table is not None
        table = parcel.table[start : start + len(coming)]
        places: Sequence[int] = range(len(coming))
        if parcel.present_only:
            places = np.flatnonzero(table[:, 0]).tolist()
            if len(places) < len(coming):
                table, coming = table[places], coming[places]
        if not len(coming):
            return
        builder = self._segment().builder
        rows: Any = np.empty((len(coming), 7), np.int64)
        rows[:, 0] = [self._placed(builder, site) for site in coming[:, 0].tolist()]
        rows[:, 1:5] = coming[:, 1:]
        rows[:, 5] = -1
        first = builder.summary(table)
        rows[:, 6] = np.arange(first, first + len(coming))
        builder.add_rows(list(map(tuple, rows.tolist())))
        if parcel.sketches:
            for at, place in enumerate(places):
                if start + place in parcel.sketches:
                    builder.sketch(first + at, parcel.sketches[start + place])

    def _placed(self, builder: HeaderBuilder, site: int) -> int:
        """A site's place in a segment; looked up once a segment, as to compare sites is slow."""
        if self._places[0] is not builder:
            self._places = (builder, {})
        place = self._places[1].get(site)
        if place is None:
            place = self._places[1][site] = builder.site(self._sites[site])
        return place

    def _sync(self) -> None:
        """Wait for the disk itself to have what was sealed since the last time."""
        self._store.sync(self.names[self._synced :])
        self._synced = len(self.names)

    def _seal(self) -> None:
        if self._output is None:
            return
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
            if isinstance(item, Parcel):
                with contextlib.suppress(Exception):  # a device may still be writing to it
                    if item.ready is not None:
                        _wait_for(item)
                if item.buffer is not None:
                    self._arena.give(item.buffer)
            if item is not None and item.done is not None:
                item.done.set()
        self._arena.wake()


class _Run(NamedTuple):
    """Neighbouring entries: where they begin in the segment, and where they lie in the buffer."""

    output: SegmentOutput
    start: int
    low: int
    high: int

    def continues(self, start: int, offset: int) -> bool:
        return start - self.start == offset - self.low


def _blank(memory: memoryview, high: int, pages: int) -> memoryview:
    """Whole pages of a buffer, without what an earlier tensor left behind the last entry."""
    memory[high:pages] = bytes(pages - high)
    return memory[:pages]


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (errno {error.errno})"
    return f"{type(error).__name__}: {error}"


def _wait_for(parcel: Parcel) -> None:
    """Until what a device writes is complete. Where it has failed, the memory is kept for good: it
    may be torch's, which ends the process when such a device's memory is given back.
    """
    assert parcel.ready is not None
    try:
        parcel.ready.synchronize()
    except RuntimeError:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(parcel))
        raise
