"""Summary rows that are computed on a device and come over many at a time.

Asking a device for one number stops it until it has answered. So a row is written there, by the
stream that made the tensor (whatever overwrites the tensor comes behind in that order), and a table
of rows comes over when it is full, or when somebody wants what there is: one copy, and an event
for the writer's thread to wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..numerics import device as on_device
from ..numerics.summary import WIDTH
from .parcel import Moment

__all__ = ["ROWS", "ROW_BYTES", "DeviceTable", "DeviceTables", "Ticket", "cuda_in_use"]

ROWS = 1024
ROW_BYTES = WIDTH * 8

Line = tuple[int, Moment]


def cuda_in_use() -> bool:
    """Whether a tensor on a CUDA device can exist in this process; quick to ask."""
    cuda: Any = torch.cuda  # untyped in torch
    return bool(cuda.is_initialized())


class PutRows(Protocol):
    """`Writer.put_rows`."""

    def __call__(
        self,
        lines: Sequence[Line],
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
    """Rows of one stream. Who fills one by a launch of its own holds `lock` from row to line."""

    def __init__(self, device: torch.device, put_rows: PutRows) -> None:
        self.lock = threading.Lock()
        self.used = 0
        self.lines: list[tuple[int, Line]] = []
        self.stream: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
        with torch.inference_mode(False):
            self.rows = torch.empty(ROWS, WIDTH, dtype=torch.float64, device=device)
        self.address = self.rows.data_ptr()
        self._views = self.rows.unbind(0)
        self._put_rows = put_rows
        self._open: list[Ticket] = []
        self._sketches: dict[int, torch.Tensor] = {}  # by row

    def take(self, tensor: torch.Tensor, sketch: torch.Tensor | None = None) -> Ticket:
        """Sum a tensor up as it is now; the line comes later."""
        with self.lock:
            if self.used == ROWS:
                self.send()
            ticket = Ticket(self, self.used, sketch)
            on_device.fill_on(tensor, self._views[self.used])
            self.used += 1
            self._open.append(ticket)
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
        with self.lock:
            first = self._add(rows)  # which may begin a new list of lines
            self.lines += enumerate(lines, first)

    def _add(self, rows: torch.Tensor) -> int:
        """Copy as many rows as a table holds, or fewer; the first one's place."""
        if self.used + len(rows) > ROWS:
            self.send()
        first, self.used = self.used, self.used + len(rows)
        with torch.no_grad():
            self.rows[first : self.used].copy_(rows)
        return first

    def line(self, ticket: Ticket, line: Line) -> None:
        """Say where and when the row of a ticket stands."""
        with self.lock:
            if ticket.host is None:
                self.lines.append((ticket.index, line))
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
        late = [ticket.sketch for ticket in self._open if ticket.sketch is not None]
        host, sketches, ready = self._copy(self.used, [*self._sketches.values(), *late])
        lines, self.lines, self.used = self.lines, [], 0  # now that the copy has not failed
        known = dict(zip(self._sketches, sketches, strict=False))
        coming = iter(sketches[len(known) :])
        for ticket in self._open:
            ticket.host, ticket.ready = host, ready
            ticket.sketch = None if ticket.sketch is None else next(coming)
        self._open, self._sketches = [], {}
        for first, group in _runs(sorted(lines)):
            last = first + len(group)
            here = {at - first: known[at] for at in range(first, last) if at in known}
            self._put_rows(group, host[first:last], ready, sketches=here)

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


def _runs(lines: Iterable[tuple[int, Line]]) -> list[tuple[int, list[Line]]]:
    """Lines of neighbouring rows together: (the first row, its line and those behind it)."""
    runs: list[tuple[int, list[Line]]] = []
    for index, line in lines:
        if runs and runs[-1][0] + len(runs[-1][1]) == index:
            runs[-1][1].append(line)
        else:
            runs.append((index, [line]))
    return runs


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
