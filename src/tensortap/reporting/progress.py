"""Progress that stays out of the way: nothing in the first two seconds, and never on stdout.

A thread does the showing, so that a single long step (quantiles of a huge tensor) is shown too, and
saying how far things are costs nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from .time_left import ModesTracker

if TYPE_CHECKING:
    from ..targets.modes.results import ModeStep

__all__ = ["ModesLine", "ProgressLine", "modes_progress", "progress"]

QUIET = 2.0
EVERY = 10.0
_REFRESH = 0.2
_Kind = TypeVar("_Kind", bound="_Line")


class _Line(ABC):
    """A thread that shows something after a while, until the block ends."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="tensortap-progress", daemon=True)

    def __enter__(self: _Kind) -> _Kind:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _show(self) -> None:
        if self._ended.wait(QUIET):
            return
        if sys.stderr.isatty():
            self._bar()
        else:
            self._lines()

    def _lines(self) -> None:
        while not self._ended.wait(EVERY):
            print(self._text(), file=sys.stderr)  # noqa: T201

    @abstractmethod
    def _text(self) -> str:
        """How far things are, in a line."""

    @abstractmethod
    def _bar(self) -> None:
        """Show a bar until the end."""


class ProgressLine(_Line):
    """A bar on a terminal, a line every ten seconds elsewhere; call it with (done, total)."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self._done = 0
        self._total: int | None = None
        self._told: list[tuple[int, float]] = []  # the first and the last that was done, and when

    def __call__(self, done: int, total: int | None) -> None:
        if done > self._done:
            self._told = [*self._told[:1], (done, time.monotonic())]
        self._done, self._total = done, total

    def _text(self) -> str:
        of = f" of {self._total}" if self._total else ""
        seconds = time.monotonic() - self._start
        return f"{self.what}: {self._done}{of}, {seconds:.0f} s{self._left()}"

    def _left(self) -> str:
        """How long it still takes: what came before the first that was done tells nothing."""
        if not self._total or len(self._told) < 2:
            return ""
        (begin, since), (done, until) = self._told
        left = (until - since) / (done - begin) * (self._total - done)
        return f", about {max(0.0, left - (time.monotonic() - until)):.0f} s left"

    def _bar(self) -> None:
        from rich import progress as rich_progress

        from .console import stderr

        with rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TimeRemainingColumn(),
            console=stderr(),
            transient=True,
        ) as bar:
            task = bar.add_task(self.what, total=self._total)
            while not self._ended.wait(_REFRESH):
                bar.update(task, completed=self._done, total=self._total)


class ModesLine(_Line):
    """The same over modes and their batches, with the time left; call it with a ModeStep."""

    def __init__(self, jobs: int = 1) -> None:
        super().__init__()
        self._tracker = ModesTracker(jobs)
        self._lock = threading.Lock()

    def __call__(self, step: ModeStep) -> None:
        with self._lock:
            self._tracker.see(step, time.monotonic())

    def _text(self) -> str:
        with self._lock:
            text = self._tracker.text(time.monotonic())
        return f"Recording: {text}, {time.monotonic() - self._start:.0f} s"

    def _bar(self) -> None:
        from rich import progress as rich_progress

        from .console import stderr

        with rich_progress.Progress(
            rich_progress.BarColumn(bar_width=20),
            rich_progress.TextColumn("{task.description}"),
            console=stderr(),
            transient=True,
        ) as bar:
            task = bar.add_task("", total=1.0)
            while not self._ended.wait(_REFRESH):
                with self._lock:
                    text = self._tracker.text(time.monotonic())
                    done = self._tracker.done
                bar.update(task, description=text, completed=done)


def progress(what: str) -> ProgressLine:
    """Progress for something that may take long; use it as a context manager."""
    return ProgressLine(what)


def modes_progress(jobs: int = 1) -> ModesLine:
    """Progress while several modes are recorded, `jobs` at a time."""
    return ModesLine(jobs)
