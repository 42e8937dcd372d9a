"""How far the recording of many modes is, and how long it still takes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..targets.modes.results import ModeStep

__all__ = ["ModesTracker", "RunningMode", "clock", "time_left"]


@dataclass(frozen=True)
class RunningMode:
    """A mode that runs: seconds since it began, when its batches began, and how many are done.

    `at` is when the last batch ended, so that one that is under way does not look slow.
    """

    seconds: float
    loaded: float | None = None
    at: float = 0.0
    batch: int = 0
    batches: int | None = None

    @property
    def whole(self) -> float | None:
        """The seconds that the whole mode takes, as its batches so far tell; None before one."""
        if self.loaded is None or not self.batches or self.batch < 1:
            return None
        return self.loaded + (self.at - self.loaded) / self.batch * self.batches


def time_left(
    finished: Sequence[float], running: Sequence[RunningMode], waiting: int, jobs: int
) -> float | None:
    """The seconds until every mode is done; None while nothing tells.

    A mode that runs takes as long as its batches so far say, one that waits as long as those that
    have finished, or else as those that run. `jobs` of them go on side by side.
    """
    told = [mode.whole for mode in running if mode.whole is not None]
    known = list(finished) or told
    usual = sum(known) / len(known) if known else None
    left = []
    for mode in running:
        whole = usual if mode.whole is None else mode.whole
        if whole is None:
            return None
        left.append(max(0.0, whole - mode.seconds))
    if waiting and usual is None:
        return None
    places = left + [0.0] * max(1 - len(left), jobs - len(left))
    heapq.heapify(places)
    for _ in range(waiting):  # each takes the place that is free first
        heapq.heapreplace(places, places[0] + (usual or 0.0))
    return max(places)


def clock(seconds: float) -> str:
    """Seconds as 0:42, or 1:02:03 from an hour on."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    end = f"{whole % 60:02d}"
    return f"{hours}:{minutes:02d}:{end}" if hours else f"{minutes}:{end}"


class ModesTracker:
    """Gathers what is said of modes, and tells where things stand at a moment."""

    def __init__(self, jobs: int = 1) -> None:
        self.jobs = jobs
        self._of = 0
        self._ended: set[str] = set()
        self._took: list[float] = []
        self._began: dict[str, float] = {}
        self._running: dict[str, RunningMode] = {}
        self._numbers: dict[str, int] = {}

    def see(self, step: ModeStep, now: float) -> None:
        """A mode or a batch began or ended."""
        self._of = step.of
        self._numbers[step.mode] = step.number
        if step.state == "waiting":
            return
        if step.state == "loading":
            self._began[step.mode] = now
            self._running[step.mode] = RunningMode(0.0)
        elif step.state == "running":
            self._see_batch(step, now - self._began.setdefault(step.mode, now))
        else:
            self._ended.add(step.mode)
            if self._running.pop(step.mode, None) is not None and step.state == "recorded":
                self._took.append(now - self._began[step.mode])

    def _see_batch(self, step: ModeStep, seconds: float) -> None:
        mode = self._running.get(step.mode, RunningMode(0.0))
        self._running[step.mode] = replace(
            mode,
            loaded=seconds if mode.loaded is None else mode.loaded,
            at=seconds,
            batch=step.batch or 0,
            batches=step.batches,
        )

    @property
    def done(self) -> float:
        """How much of all modes is done, from 0 to 1."""
        if not self._of:
            return 0.0
        parts = [mode.batch / mode.batches for mode in self._running.values() if mode.batches]
        return (len(self._ended) + sum(parts)) / self._of

    def left(self, now: float) -> float | None:
        """The seconds that are left."""
        running = [
            replace(mode, seconds=now - self._began[name]) for name, mode in self._running.items()
        ]
        waiting = self._of - len(self._ended) - len(running)
        return time_left(self._took, running, waiting, self.jobs)

    def text(self, now: float) -> str:
        """As in: mode 3 of 8 · 2-1 · batch 4 of 10 · 0:42 left."""
        if not self._running:
            return f"{len(self._ended)} of {self._of} modes done"
        numbers = ", ".join(str(self._numbers[name]) for name in self._running)
        parts = [f"mode{'s' if len(self._running) > 1 else ''} {numbers} of {self._of}"]
        alone = len(self._running) == 1
        for name, mode in self._running.items():
            where = _batch(mode)
            parts += [name, where] if alone else [f"{name} {where}"]
        left = self.left(now)
        return " · ".join([*parts, *([] if left is None else [f"{clock(left)} left"])])


def _batch(mode: RunningMode) -> str:
    if mode.loaded is None or not mode.batches:
        return "loading"
    return f"batch {min(mode.batch + 1, mode.batches)} of {mode.batches}"
