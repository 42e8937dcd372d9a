"""The step in hand: summary rows in order of execution, reduced where the tensors are.

A row is reserved before anything is computed and written by the device itself: on a CPU the core
writes it in place, elsewhere a kernel does, and nobody waits. What a step has gathered leaves the
board as one copy a device; the host reads it when it has arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..numerics import native
from ..numerics.backend import pick
from ..numerics.device import accumulate_many, accumulate_on, empty_rows, reset
from ..numerics.summary import WIDTH
from ..recording.rows import fill_row
from ..recording.schema import Site
from .step import Step

__all__ = ["Board", "Gathered"]

_BLOCK = 256  # device rows are allocated so many at a time
MOST_ROWS = 1 << 16  # of one step; more than that is a step that never ends


@dataclass(eq=False)
class _DeviceRows:
    """Rows on one device, in blocks that stay where they are."""

    device: torch.device
    blocks: list[torch.Tensor] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)
    used: int = 0

    def next(self) -> tuple[int, torch.Tensor]:
        if self.used == len(self.views):
            block = empty_rows(_BLOCK, self.device)
            self.blocks.append(block)
            self.views += block.unbind(0)
        index = self.used
        self.used += 1
        return index, self.views[index]

    def copy(self, clear: bool) -> torch.Tensor:
        """All rows in use; then the device's own are empty again."""
        rows: torch.Tensor = torch.cat(self.blocks)[: self.used]
        if clear:
            self.clear()
        return rows

    def clear(self) -> None:
        for block in self.blocks:
            reset(block)


@dataclass(eq=False)
class _Copy:
    """Rows on their way from a device, and where they belong in the table."""

    host: torch.Tensor
    places: list[int]
    sources: list[int]
    event: Any = None

    def into(self, table: NDArray[np.float64]) -> None:
        if self.event is not None:
            self.event.synchronize()
        table[self.places] = self.host.numpy()[self.sources]


@dataclass(eq=False)
class Gathered:
    """What one step left on the board; its numbers may still be on their way."""

    epoch: int
    batch: int
    sites: tuple[Site, ...]
    calls: tuple[int, ...]
    table: NDArray[np.float64]
    scalars: Mapping[str, float | torch.Tensor]
    copies: list[_Copy]
    _step: Step | None = None

    def step(self) -> Step:
        """The step itself. Waits for what is still on its way."""
        if self._step is None:
            for copy in self.copies:
                copy.into(self.table)
            self._step = Step(
                self.epoch,
                self.batch,
                self.sites,
                self.calls,
                self.table,
                {name: float(value) for name, value in self.scalars.items()},
            )
        return self._step


class Board:
    """Takes tensors while a step runs; `gather` ends the step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: list[Site] = []
        self._calls: list[int] = []
        self._device_of: list[tuple[_DeviceRows, int] | None] = []
        self._table: NDArray[np.float64] = np.zeros((_BLOCK, WIDTH))
        self._address = self._table.ctypes.data
        self._devices: dict[torch.device, _DeviceRows] = {}
        self.captured = False
        self._native = native.core is not None and pick(torch.empty(0)).name == "native"

    def __len__(self) -> int:
        return len(self._sites)

    def take(self, site: Site, call: int, tensor: torch.Tensor) -> bool:
        """Reduce a plain tensor into the next row; False when the step has too many of them."""
        with self._lock:
            row = len(self._sites)
            if row >= MOST_ROWS:
                return False
            if tensor.is_cpu:
                if row >= len(self._table):
                    self._grow()
                where = self._address + row * WIDTH * 8
                if not (
                    self._native and native.suits(tensor) and native.summarize_into(tensor, where)
                ):
                    fill_row(self._table[row], tensor, False)
                source = None
            else:
                if self._captures(tensor.device):
                    return True
                rows = self._rows_on(tensor.device)
                index, view = rows.next()
                accumulate_on(tensor, view)
                source = (rows, index)
            self._sites.append(site)
            self._calls.append(call)
            self._device_of.append(source)
            return True

    def take_many(self, items: Sequence[tuple[Site, torch.Tensor]]) -> bool:
        """Reduce tensors of one call each, on a device with as few launches as may be."""
        by_device: dict[torch.device, list[tuple[Site, torch.Tensor]]] = {}
        taken = True
        for site, tensor in items:
            if tensor.is_cpu:
                taken = self.take(site, 0, tensor) and taken
            else:
                by_device.setdefault(tensor.device, []).append((site, tensor))
        for device, group in by_device.items():
            with self._lock:
                if not self._captures(device):
                    self._take_group(self._rows_on(device), group)
        return taken

    def _captures(self, device: torch.device) -> bool:
        """Whether a CUDA graph is being captured: what it replays runs no Python."""
        now = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self.captured = self.captured or now
        return now

    def _take_group(self, rows: _DeviceRows, group: Sequence[tuple[Site, torch.Tensor]]) -> None:
        while group:
            index, _ = rows.next()
            block, start = divmod(index, _BLOCK)
            now, group = group[: _BLOCK - start], group[_BLOCK - start :]
            rows.used = index + len(now)
            part = rows.blocks[block][start : start + len(now)]
            accumulate_many([tensor for _, tensor in now], part)
            self._sites += [site for site, _ in now]
            self._calls += [0] * len(now)
            self._device_of += [(rows, index + i) for i in range(len(now))]

    def gather(
        self,
        epoch: int,
        batch: int,
        scalars: Mapping[str, float | torch.Tensor],
        *,
        clear: bool = True,
    ) -> Gathered:
        """What the step has so far, as far as it is known; then the board is empty again."""
        with self._lock:
            sites, calls, sources = self._sites, self._calls, self._device_of
            table = self._table[: len(sites)].copy()
            copies = [
                self._fetch(rows, sources, clear) for rows in self._devices.values() if rows.used
            ]
            if clear:
                self._clear()
        return Gathered(epoch, batch, tuple(sites), tuple(calls), table, dict(scalars), copies)

    def _fetch(
        self, rows: _DeviceRows, sources: list[tuple[_DeviceRows, int] | None], clear: bool
    ) -> _Copy:
        places, indices = [], []
        for place, source in enumerate(sources):
            if source is not None and source[0] is rows:
                places.append(place)
                indices.append(source[1])
        device_rows = rows.copy(clear)
        if rows.device.type != "cuda":
            return _Copy(device_rows.cpu(), places, indices)
        host = torch.empty(device_rows.shape, dtype=device_rows.dtype, pin_memory=True)
        host.copy_(device_rows, non_blocking=True)
        make: Any = torch.cuda.Event  # untyped in torch
        event = make()
        event.record(torch.cuda.current_stream(rows.device))
        return _Copy(host, places, indices, event)

    def _clear(self) -> None:
        self._sites, self._calls, self._device_of = [], [], []
        for rows in self._devices.values():
            rows.used = 0

    def prepare(self, device: torch.device) -> None:
        """Have rows on a device before anything runs there."""
        if device.type not in ("cpu", "meta"):
            rows = self._rows_on(device)
            rows.next()
            rows.used -= 1

    def _rows_on(self, device: torch.device) -> _DeviceRows:
        rows = self._devices.get(device)
        if rows is None:
            rows = self._devices[device] = _DeviceRows(device)
        return rows

    def _grow(self) -> None:
        larger = np.zeros((2 * len(self._table), WIDTH))
        larger[: len(self._table)] = self._table
        self._table, self._address = larger, larger.ctypes.data
