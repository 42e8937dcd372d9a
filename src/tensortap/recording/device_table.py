"""Summary rows that are computed on a device and come over many at a time.

Asking a device for one number stops it until it has answered. So a row is written there, by the
stream that made the tensor (whatever overwrites the tensor comes behind in that order), and a table
of rows comes over when it is full, or when somebody wants what there is: one copy, and an event
for the writer's thread to wait for.

A kernel may leave a row half done, with parts of it in memory beside the table (`room`): one launch
completes all such rows before they come over.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..numerics import device as on_device
from ..numerics.summary import WIDTH
from .parcel import Moment

__all__ = ["ROWS", "ROW_BYTES", "DeviceTable", "DeviceTables", "Lines", "Ticket", "cuda_in_use"]

ROWS = 1024
ROW_BYTES = WIDTH * 8
_PARTS = 16 << 20  # bytes for what rows leave

Line = tuple[int, Moment]
Lines = np.ndarray[Any, np.dtype[np.int64]]
"""A line a row: site, order, epoch, batch, call. Of one that is not known yet, the site is -1."""


def cuda_in_use() -> bool:
    """Whether a tensor on a CUDA device can exist in this process; quick to ask."""
    cuda: Any = torch.cuda  # untyped in torch
    return bool(cuda.is_initialized())


class PutRows(Protocol):
    """`Writer.put_rows`."""

    def __call__(
        self,
        lines: Sequence[Line] | Lines,
        table: torch.Tensor,
        ready: Any = None,
        *,
        sketches: Mapping[int, torch.Tensor] | None = None,
    ) -> None: ...


@dataclass(eq=False, slots=True)
class Ticket:
    """A row whose line is not known yet: its call has not ended."""

    table: DeviceTable
    index: int
    sketch: torch.Tensor | None = None  # a few of its values, on the device until they are sent
    host: torch.Tensor | None = None
    ready: Any = None


class DeviceTable:
    """Rows of one stream. Who fills one by a launch of its own holds `lock` from row to line.

    `state` (rows in use, bytes of parts in use) and `lines` are plain memory, which the core writes
    to as well: see native/shortcut.cpp.
    """

    def __init__(self, device: torch.device, put_rows: PutRows) -> None:
        self.lock = threading.Lock()
        self.state: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(2, np.int64)
        self.lines: Lines = np.full((ROWS, 5), -1, np.int64)
        self.stream: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
        with torch.inference_mode(False):
            # Zeros: what nobody wrote must not look as if there were something left to do.
            self.rows = torch.zeros(ROWS, WIDTH, dtype=torch.float64, device=device)
        self.address = self.rows.data_ptr()
        self.parts: torch.Tensor | None = None
        self._views = self.rows.unbind(0)
        self._put_rows = put_rows
        self._making = threading.Lock()
        self._refused = False  # there was no memory for parts
        self._settled = 0  # rows before which none is left half done
        self._open: list[Ticket] = []
        self._sketches: dict[int, torch.Tensor] = {}  # by row

    @property
    def used(self) -> int:
        return int(self.state[0])

    @used.setter
    def used(self, count: int) -> None:
        self.state[0] = count

    def make_parts(self) -> torch.Tensor | None:
        """Memory for what rows leave, once and for good; None where the device has none left."""
        with self._making:  # of two, one would be given back, and written to all the same
            if self.parts is None and not self._refused:
                try:
                    self.parts = on_device.parts_on(self.rows.device, _PARTS)
                except torch.OutOfMemoryError:
                    self._refused = True
        return self.parts

    def next_row(self) -> int:
        """The row to fill next, -1 where none can be had now; the caller holds the lock."""
        if self.used >= ROWS:
            self.send()
        return -1 if self.used >= ROWS else self.used

    def room(self, nbytes: int) -> int:
        """Where a row may leave so many bytes, until it is settled; the caller holds the lock."""
        parts = self.parts
        assert parts is not None
        if self.state[1] + nbytes > parts.nbytes:
            self.settle()
        at = parts.data_ptr() + int(self.state[1])
        self.state[1] += nbytes
        return at

    def add(self, site: int, moment: Moment) -> None:
        """Count the next row, which was just filled, and say where and when it stands."""
        self.lines[self.used] = (site, *moment)
        self.state[0] += 1

    def settle(self) -> None:
        """Complete the rows that were left; the caller holds the lock."""
        with torch.cuda.stream(self.stream):
            on_device.settle(self.rows[self._settled : self.used])
        self._settled, self.state[1] = self.used, 0

    def take(self, tensor: torch.Tensor, sketch: torch.Tensor | None = None) -> Ticket:
        """Sum a tensor up as it is now; the line comes later."""
        with self.lock:
            row = self._room_for(1)
            ticket = Ticket(self, row, sketch)
            on_device.fill_on(tensor, self._views[row])
            self.lines[row, 0] = -1
            self._open.append(ticket)
            self.used = row + 1
        return ticket

    def take_rows(self, rows: torch.Tensor) -> list[Ticket]:
        """Rows that this device has computed elsewhere, as they are now; the lines come later."""
        with self.lock:
            first = self._add(rows)
            tickets = [Ticket(self, first + i) for i in range(len(rows))]
            self._open += tickets
        return tickets

    def put(self, rows: torch.Tensor, lines: Sequence[Line]) -> None:
        """The same of rows whose lines are known."""
        known = np.array([(site, *moment) for site, moment in lines], np.int64).reshape(-1, 5)
        with self.lock:
            first = self._add(rows)  # which may begin a new table
            self.lines[first : first + len(known)] = known

    def _add(self, rows: torch.Tensor) -> int:
        """Copy as many rows as a table holds, or fewer; the first one's place."""
        first = self._room_for(len(rows))
        last = first + len(rows)
        with torch.no_grad():
            self.rows[first:last].copy_(rows)
        self.lines[first:last, 0] = -1
        self.used = last
        return first

    def _room_for(self, count: int) -> int:
        """Where so many rows may stand."""
        if self.used + count > ROWS:
            self.send()
        if self.used + count > ROWS:
            raise RuntimeError("rows cannot come over while their stream is being captured")
        return self.used

    def line(self, ticket: Ticket, line: Line) -> None:
        """Say where and when the row of a ticket stands."""
        site, moment = line
        with self.lock:
            if ticket.host is None:
                self.lines[ticket.index] = (site, *moment)
                self._open.remove(ticket)
                if ticket.sketch is not None:
                    self._sketches[ticket.index] = ticket.sketch
            else:
                row = ticket.host[ticket.index : ticket.index + 1]
                sketches = {} if ticket.sketch is None else {0: ticket.sketch}
                self._put_rows([line], row, ticket.ready, sketches=sketches)

    def send(self) -> None:
        """Let the rows come over; the caller holds the lock. The next ones begin at 0 again.

        Not while somebody captures the stream into a graph: then they come when that is done.
        """
        if not self.used or self._captured():
            return
        if self.state[1]:
            self.settle()
        late = [ticket.sketch for ticket in self._open if ticket.sketch is not None]
        host, sketches, ready = self._copy(self.used, [*self._sketches.values(), *late])
        lines = self.lines[: self.used].copy()
        self._settled = 0
        self.used = 0  # now that the copy has not failed
        known = dict(zip(self._sketches, sketches, strict=False))
        coming = iter(sketches[len(known) :])
        for ticket in self._open:
            ticket.host, ticket.ready = host, ready
            ticket.sketch = None if ticket.sketch is None else next(coming)
        self._open, self._sketches = [], {}
        for first, last in _runs(lines[:, 0] >= 0):
            here = {at - first: known[at] for at in range(first, last) if at in known}
            self._put_rows(lines[first:last], host[first:last], ready, sketches=here)

    def _captured(self) -> bool:
        if self.stream is None:
            return False
        with torch.cuda.stream(self.stream):
            return torch.cuda.is_current_stream_capturing()

    def _copy(
        self, used: int, sketches: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
        """Rows and sketches on the host, or on their way there, and what to wait for."""
        if self.stream is None:
            return self.rows[:used].to("cpu", copy=True), [s.cpu() for s in sketches], None
        with torch.cuda.stream(self.stream), torch.inference_mode(False), torch.no_grad():
            host = _pinned(self.rows[:used])
            together = _pinned(torch.cat(list(sketches))) if sketches else host.new_empty(0)
            make: Any = torch.cuda.Event  # untyped in torch
            ready = make()
            ready.record(self.stream)
        return host, list(torch.split(together, [len(sketch) for sketch in sketches])), ready


def _pinned(values: torch.Tensor) -> torch.Tensor:
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _runs(known: np.ndarray[Any, np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    """Neighbouring rows together: (the first, one behind the last) of each run of known ones."""
    edges = np.flatnonzero(np.diff(known, prepend=False, append=False))
    return [(int(first), int(last)) for first, last in zip(edges[::2], edges[1::2], strict=True)]


class DeviceTables:
    """The tables of one recording, one a stream."""

    def __init__(self, put_rows: PutRows) -> None:
        self._put_rows = put_rows
        self._tables: dict[tuple[torch.device, int], DeviceTable] = {}
        self._lock = threading.Lock()

    def of(self, device: torch.device) -> DeviceTable:
        """The table of the device's current stream."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        with self._lock:
            table = self._tables.get((device, stream))
            if table is None:
                table = self._tables[(device, stream)] = DeviceTable(device, self._put_rows)
        return table

    def send(self) -> None:
        """Let everything come over that is there."""
        with self._lock:
            tables = list(self._tables.values())
        for table in tables:
            with table.lock:
                table.send()
