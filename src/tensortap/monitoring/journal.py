"""Behind the training loop: a thread that turns finished steps into rows, values and a live page.

The loop hands a step over and goes on. Here the numbers arrive from the device, rules are judged
where nobody waits for them, and what is due is written: a step of the cadence, and with an alarm
the steps before it too, which the ring has kept.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..numerics.summary import WIDTH
from ..recording.rows import fill_row
from ..recording.schema import Site
from ..recording.writer import Writer
from .board import Gathered
from .live import live_text, write_live
from .ring import Ring
from .rules import Alarm
from .sinks import Sinks, values_of
from .step import Step

__all__ = ["Entry", "Journal"]

Held = dict[tuple[Site, int], torch.Tensor]
"""Full tensors of a step by (site, call), kept because a rule asked for a snapshot."""

_LIVE_EVERY = 1.0
_BACKLOG = 32  # steps that wait; with more, sinks are passed over


@dataclass(eq=False)
class Entry:
    """A step that is over, and what is to be done with it."""

    gathered: Gathered
    due: bool  # its turn by the cadence
    every: int
    alarms: list[Alarm] | None = None  # None: nobody has judged it yet
    held: Held = field(default_factory=dict)
    all_of_ring: bool = False  # training broke off: keep the last steps


class Journal:
    """Writes steps down in a thread of its own."""

    def __init__(
        self,
        writer: Writer,
        sinks: Sinks,
        *,
        ring: int,
        judge: Callable[[Step], list[Alarm]],
        on_failure: Callable[[Exception], None],
        on_problem: Callable[[str], None],
        live: bool = True,
    ) -> None:
        self._writer = writer
        self._sinks = sinks
        self._ring = Ring(ring)
        self._judge = judge
        self._on_failure = on_failure
        self._on_problem = on_problem
        self._live = live
        self._queue: queue.SimpleQueue[Entry | threading.Event | None] = queue.SimpleQueue()
        self._order = itertools.count()
        self._recent: list[Alarm] = []
        self._live_at = -math.inf
        self._seen: tuple[float, int] | None = None  # when, and which step, for the rate
        self._rate = math.nan
        self.passed_over = 0  # steps that sinks did not get, because they were too slow
        self.written = 0
        self._thread = threading.Thread(target=self._run, name="tensortap-watch", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        self._queue.put(entry)

    def drain(self, timeout: float = 60.0) -> None:
        """Return when everything put so far is done."""
        done = threading.Event()
        self._queue.put(done)
        until = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < until:
            if done.wait(0.05):
                return

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=60.0)
        for problem in self._sinks.close():
            self._on_problem(problem)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._do(item)
            except Exception as error:  # training must not notice
                self._on_failure(error)

    def _do(self, entry: Entry) -> None:
        step = entry.gathered.step()
        alarms = self._judge(step) if entry.alarms is None else entry.alarms
        self._recent += alarms
        if alarms or entry.all_of_ring:
            for earlier in self._ring.take():
                self._write(earlier, {})
        if entry.due or alarms or entry.all_of_ring:
            self._write(step, entry.held)
        elif len(step):
            self._ring.push(step)
        if (entry.due or alarms) and len(self._sinks):
            self._tell_sinks(step, alarms)
        self._tell_live(step, entry.every, alarms)

    def _write(self, step: Step, held: Held) -> None:
        self.written += 1
        for row, (site, call) in enumerate(zip(step.sites, step.calls, strict=True)):
            moment = (next(self._order), step.epoch, step.batch, call)
            number = self._writer.site(site)
            tensor = held.get((site, call))
            if tensor is not None:
                self._writer.line(number, moment, self._writer.take(tensor))
            else:
                self._writer.summary_line(number, moment, step.table[row])
        for name, value in step.scalars.items():
            self._write_scalar(step, name, value)

    def _write_scalar(self, step: Step, name: str, value: float) -> None:
        row = np.empty(WIDTH)
        fill_row(row, torch.tensor(value, dtype=torch.float64), False, 1)
        site = Site(name, "scalar", type="scalar", dtype="float64")
        moment = (next(self._order), step.epoch, step.batch, 0)
        self._writer.summary_line(self._writer.site(site), moment, row)

    def _tell_sinks(self, step: Step, alarms: Sequence[Alarm]) -> None:
        if self._queue.qsize() > _BACKLOG:
            self.passed_over += 1
            return
        for problem in self._sinks.log(values_of(step, alarms), step.batch):
            self._on_problem(problem)

    def _tell_live(self, step: Step, every: int, alarms: Sequence[Any]) -> None:
        now = time.monotonic()
        if self._live and len(step) and (alarms or now - self._live_at >= _LIVE_EVERY):
            if self._seen is not None and now > self._seen[0]:
                self._rate = (step.batch - self._seen[1]) / (now - self._seen[0])
            self._seen, self._live_at = (now, step.batch), now
            text = live_text(step, self._recent[-20:], every=every, rate=self._rate)
            write_live(self._writer.store, text)
