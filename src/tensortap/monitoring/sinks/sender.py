"""Sends values to sinks in a thread of its own: what a sink does, or fails to do, stays there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

from .base import Sinks

__all__ = ["Sender"]

Item = tuple[Callable[[], Mapping[str, float]], int]
_WAITING = 64  # steps; a sink that is slower than training gets fewer of them


class Sender:
    """Takes what is to be sent, and never waits for it."""

    def __init__(self, sinks: Sinks, on_problem: Callable[[str], None]) -> None:
        self._sinks = sinks
        self._on_problem = on_problem
        self._items: deque[Item] = deque()
        self._wake = threading.Event()
        self._ended = False
        self.passed_over = 0
        self._thread: threading.Thread | None = None
        if len(sinks):
            self._thread = threading.Thread(target=self._run, name="tensortap-sinks", daemon=True)
            self._thread.start()

    def send(self, values: Callable[[], Mapping[str, float]], step: int) -> None:
        if self._thread is None:
            return
        if len(self._items) >= _WAITING or not self._thread.is_alive():
            self.passed_over += 1
            return
        self._items.append((values, step))
        self._wake.set()

    def drain(self, timeout: float) -> bool:
        """Wait until all is sent, no longer than this; whether it was."""
        if self._thread is None:
            return True
        waited = threading.Event()
        until = timeout
        while self._items and self._thread.is_alive() and until > 0:
            waited.wait(0.02)
            until -= 0.02
        return not self._items

    def close(self, timeout: float = 10.0) -> None:
        """Send what is left, close the sinks; one that hangs is left behind, with a word."""
        if self._thread is None:
            self._close_sinks()
            return
        self._ended = True
        self._wake.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.passed_over += len(self._items)
            self._on_problem(
                f"A sink has not come back for {timeout:g} seconds: it was left behind, and what "
                "it did not get is in the recording."
            )

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                while self._items:
                    values, step = self._items[0]
                    for problem in self._sinks.log(values(), step):
                        self._on_problem(problem)
                    self._items.popleft()
                if self._ended:
                    self._close_sinks()
                    return
        except BaseException as error:  # a library that calls sys.exit must not end more than this
            self._on_problem(
                f"The sinks ended with {type(error).__name__}: {error}. The recording goes on."
            )

    def _close_sinks(self) -> None:
        for problem in self._sinks.close():
            self._on_problem(problem)
