"""Summary rows that are computed on a device and come over many at a time.

Asking a device for one number stops it until it has answered. So a row is written there, by the
stream that made the tensor (whatever overwrites the tensor comes behind in that order), and a table
of rows comes over when it is full, or when somebody wants what there is: one copy, and an event
for the writer's thread to wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..numerics import device as on_device
from ..numerics.summary import WIDTH
from .parcel import Moment

__all__ = ["ROWS", "ROW_BYTES", "DeviceTable", "DeviceTables", "Ticket"]

ROWS = 1024
ROW_BYTES = WIDTH * 8

Line = tuple[int, Moment]
PutRows = Callable[[Sequence[Line], torch.Tensor, Any], None]


@dataclass(eq=False, slots=True)
class Ticket:
    """A row whose line is not known yet: its call has not ended."""

    table: DeviceTable
    index: int
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

    def take(self, tensor: torch.Tensor) -> Ticket:
        """Sum a tensor up as it is now; the line comes later."""
        with self.lock:
            if self.used == ROWS:
                self.send()
            ticket = Ticket(self, self.used)
            on_device.fill_on(tensor, self._views[self.used])
            self.used += 1
            self._open.append(ticket)
        return ticket

    def line(self, ticket: Ticket, line: Line) -> None:
        """Say where and when the row of a ticket stands."""
        with self.lock:
            if ticket.host is None:
                self.lines.append((ticket.index, line))
                self._open.remove(ticket)
            else:
                self._put_rows([line], ticket.host[ticket.index : ticket.index + 1], ticket.ready)

    def send(self) -> None:
        """Let the rows come over; the caller holds the lock. The next ones begin at 0 again."""
        if not self.used:
            return
        lines, self.lines, used, self.used = self.lines, [], self.used, 0
        host, ready = self._copy(used)
        for ticket in self._open:
            ticket.host, ticket.ready = host, ready
        self._open = []
        for first, group in _runs(sorted(lines)):
            self._put_rows(group, host[first : first + len(group)], ready)

    def _copy(self, used: int) -> tuple[torch.Tensor, Any]:
        if self.stream is None:
            return self.rows[:used].cpu(), None
        with torch.cuda.stream(self.stream), torch.inference_mode(False), torch.no_grad():
            host = torch.empty(used, WIDTH, dtype=torch.float64, pin_memory=True)
            host.copy_(self.rows[:used], non_blocking=True)
            ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self.stream)
        return host, ready


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
