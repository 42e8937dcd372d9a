"""Progress that stays out of the way: nothing in the first two seconds, and never on stdout.

A thread does the showing, so that a single long step (quantiles of a huge tensor) is shown too, and
saying how far things are costs nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

__all__ = ["ProgressLine", "progress"]

QUIET = 2.0
EVERY = 10.0
_REFRESH = 0.2


class ProgressLine:
    """A bar on a terminal, a line every ten seconds elsewhere; call it with (done, total)."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._done = 0
        self._total: int | None = None
        self._start = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="tensortap-progress", daemon=True)

    def __enter__(self) -> ProgressLine:
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

    def __call__(self, done: int, total: int | None) -> None:
        self._done, self._total = done, total

    def _show(self) -> None:
        if self._ended.wait(QUIET):
            return
        if sys.stderr.isatty():
            self._bar()
        else:
            self._lines()

    def _lines(self) -> None:
        while not self._ended.wait(EVERY):
            of = f" of {self._total}" if self._total else ""
            seconds = time.monotonic() - self._start
            print(f"{self.what}: {self._done}{of}, {seconds:.0f} s", file=sys.stderr)  # noqa: T201

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


def progress(what: str) -> ProgressLine:
    """Progress for something that may take long; use it as a context manager."""
    return ProgressLine(what)
