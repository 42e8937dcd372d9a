"""Progress that stays out of the way: nothing in the first two seconds, and never on stdout."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["ProgressLine", "progress"]

_QUIET = 2.0
_EVERY = 10.0


class ProgressLine:
    """A bar on a terminal, a line every ten seconds elsewhere; call it with (done, total)."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._start = self._last = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if self._bar is None and now - self._start < _QUIET:
            return
        if self._terminal:
            self._show(done, total)
        elif now - self._last >= _EVERY:
            self._last = now
            of = f" of {total}" if total is not None else ""
            print(f"{self.what}: {done}{of}, {now - self._start:.0f} s", file=sys.stderr)  # noqa: T201

    def _show(self, done: int, total: int | None) -> None:
        if self._bar is None:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            from .console import stderr

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=stderr(),
                transient=True,
            )
            self._task = self._bar.add_task(self.what, total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total)


def progress(what: str) -> ProgressLine:
    """Progress for something that may take long; use it as a context manager."""
    return ProgressLine(what)
