"""Behind the training loop: a thread that turns finished steps into rows, values and a live page.

The loop hands a step over and goes on. Here the numbers arrive from the device, rules are judged
where nobody waits for them, and what is due is written: a step of the cadence, and with an alarm
the steps before it too, which the ring has kept. A step that was judged by the loop itself and is
not due goes into the ring without waking anybody.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import RecordingError
from ..numerics.summary import WIDTH
from ..recording.rows import fill_row
from ..recording.schema import Site
from ..recording.writer import Writer
from .board import Gathered
from .live import live_text, write_live
from .ring import Ring
from .rules import Alarm
from .sinks import Sinks, values_of
from .sinks.sender import Sender
from .step import Step

__all__ = ["Entry", "Journal"]

Held = dict[tuple[Site, int], torch.Tensor]
"""Full tensors of a step by (site, call), kept because a rule asked for a snapshot."""

_LIVE_EVERY = 1.0
_LOOK_EVERY = 0.05
_RECENT = 20  # alarms that the live page shows


@dataclass(eq=False)
class Entry:
    """A step that is over, and what is to be done with it."""

    gathered: Gathered
    due: bool  # its turn by the cadence
    every: int
    alarms: list[Alarm] | None = None  # None: nobody has judged it yet
    held: Held = field(default_factory=dict)
    broken: bool = False  # training broke off: the steps before it are wanted too
    wanted: bool = False  # whether it is written
    before: list[Step] = field(default_factory=list)  # and these from the ring with it


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
        self._sends = len(sinks) > 0
        self._sender = Sender(sinks, on_problem)
        self._ring = Ring(ring)
        self._judge = judge
        self._on_failure = on_failure
        self._on_problem = on_problem
        self._live = live
        self._queue: deque[Entry | threading.Event | None] = deque()
        self._wake = threading.Event()
        self._order = itertools.count()
        self._numbers: dict[int, tuple[Site, int]] = {}
        self._recent: list[Alarm] = []
        self._live_at = -math.inf
        self._last: tuple[Step, int] | None = None
        self._seen: tuple[float, int] | None = None  # when, and which step, for the rate
        self._rate = math.nan
        self._thread = threading.Thread(target=self._run, name="tensortap-watch", daemon=True)
        self._thread.start()

    @property
    def passed_over(self) -> int:
        """Steps that the sinks did not get, because they were too slow."""
        return self._sender.passed_over

    def put(self, entry: Entry) -> None:
        """Take a step over. One that the loop has judged finds its place in the ring at once."""
        if entry.alarms is not None:
            step = entry.gathered.step()
            self._sort_in(entry, step, entry.alarms)
            if len(step):
                self._last = (step, entry.every)
            if not (entry.wanted or entry.gathered.scalars or self._is_time()):
                return
        self._queue.append(entry)  # not woken for it: that would cost the loop more than a look

    def _sort_in(self, entry: Entry, step: Step, alarms: Sequence[Alarm]) -> None:
        entry.wanted = entry.due or bool(alarms) or entry.broken
        if alarms or entry.broken:
            entry.before = self._ring.take()
        elif not entry.wanted and len(step):
            self._ring.push(step)

    def drain(self, timeout: float = 60.0) -> None:
        """Return when everything put so far is done."""
        done = threading.Event()
        self._tell(done)
        until = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < until:
            if done.wait(0.05):
                self._sender.drain(5.0)
                return

    def close(self) -> None:
        self._tell(None)
        self._thread.join(timeout=60.0)
        if self._queue:
            self._on_problem(
                f"{len(self._queue)} steps were not written: the disk does not come back, or the "
                "thread that writes has ended."
            )
        if self._last is not None and not self._thread.is_alive():
            self._live_at = -math.inf  # so that whoever follows the run sees its last step
            self._tell_live(*self._last, ())
        self._sender.close()

    def _tell(self, item: threading.Event | None) -> None:
        self._queue.append(item)
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait(_LOOK_EVERY)
            self._wake.clear()
            while self._queue:
                item = self._queue.popleft()
                if item is None:
                    return
                if isinstance(item, threading.Event):
                    item.set()
                    continue
                try:
                    self._do(item)
                except Exception as error:  # training must not notice
                    self._on_failure(error)
                except BaseException as error:  # and this thread must not end of it
                    self._on_failure(RuntimeError(f"{type(error).__name__}: {error}"))

    def _do(self, entry: Entry) -> None:
        step = entry.gathered.step()
        alarms = entry.alarms
        if alarms is None:
            alarms = self._judge(step)
            self._sort_in(entry, step, alarms)
        self._recent = [*self._recent, *alarms][-_RECENT:]
        for earlier in entry.before:
            self._write(earlier, {})
        if entry.wanted:
            self._write(step, entry.held)
        for name, value in step.scalars.items():  # kept at every step, due or not
            self._write_scalar(step, name, value)
        if (entry.due or alarms) and self._sends:
            self._sender.send(lambda: values_of(step, alarms), step.batch)
        self._tell_live(step, entry.every, alarms)
        if self._writer.failure is not None:
            raise RecordingError(self._writer.failure)
        if len(step):
            self._last = (step, entry.every)

    def _write(self, step: Step, held: Held) -> None:
        rest = dict(held)
        for row, (site, call) in enumerate(zip(step.sites, step.calls, strict=True)):
            moment = (next(self._order), step.epoch, step.batch, call)
            number = self._number(site)
            tensor = rest.pop((site, call), None)
            if tensor is not None:
                self._writer.line(number, moment, self._writer.take(tensor))
            else:
                self._writer.summary_line(number, moment, step.table[row])
        for (site, call), tensor in rest.items():  # held, though not summed up in this step
            moment = (next(self._order), step.epoch, step.batch, call)
            self._writer.line(self._number(site), moment, self._writer.take(tensor))

    def _number(self, site: Site) -> int:
        """The writer's number of a site; by identity, for the same sites come in every step."""
        known = self._numbers.get(id(site))
        if known is None or known[0] is not site:
            known = self._numbers[id(site)] = (site, self._writer.site(site))
        return known[1]

    def _write_scalar(self, step: Step, name: str, value: float) -> None:
        row = np.empty(WIDTH)
        fill_row(row, torch.tensor(value, dtype=torch.float64), False, 1)
        site = Site(name, "scalar", type="scalar", dtype="float64")
        moment = (next(self._order), step.epoch, step.batch, 0)
        self._writer.summary_line(self._writer.site(site), moment, row)

    def _tell_live(self, step: Step, every: int, alarms: Sequence[Any]) -> None:
        now = time.monotonic()
        if self._live and len(step) and (alarms or self._is_time()):
            if self._seen is not None and now > self._seen[0]:
                self._rate = (step.batch - self._seen[1]) / (now - self._seen[0])
            self._seen, self._live_at = (now, step.batch), now
            text = live_text(step, self._recent, every=every, rate=self._rate)
            try:
                write_live(self._writer.store, text)
            except OSError as error:  # onlookers miss a look; the recording is another matter
                self._on_problem(f"live.json was not written: {error.strerror or error}.")

    def _is_time(self) -> bool:
        return self._live and time.monotonic() - self._live_at >= _LIVE_EVERY
