"""`tensortap show --follow`: a run while it trains, from another terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import NotARecordingError, OptionError
from .common import DONE, UNHEALTHY, json_text, note, say

if TYPE_CHECKING:
    from ..monitoring.follow import State
    from ..monitoring.live import LiveRow
    from ..recording.schema import Structure
    from ..reporting.following import Screen, Wanted

__all__ = ["follow"]

_EVERY = 0.5


def follow(
    path: str, layers: Sequence[str], port: str | None, *, timeout: float, as_json: bool
) -> int:
    """Show the last step until the run is over. 1 when it failed or has NaN or Inf, else 0."""
    from ..reporting.following import Screen
    from ..selection.recorded import choose_port

    if not timeout >= 0:
        raise OptionError(f"--timeout must be a number of seconds from 0, got {timeout:g}.")
    screen = Screen(_wanted(layers, choose_port(port)))
    states = _states(path, timeout)
    if as_json or not sys.stdout.isatty():
        return _lines(states, screen, path, as_json)
    return _table(states, screen, path)


def _states(path: str, timeout: float) -> Iterator[State]:
    """What there is, twice a second, until it is over."""
    from ..monitoring.follow import Follower

    follower = Follower(path)
    until = time.monotonic() + timeout
    told = False
    while True:
        state = follower.look()
        if state.status == "waiting":
            if time.monotonic() >= until:
                raise NotARecordingError(
                    f"There is no recording at {path}, and none began within {timeout:g} s. Is the "
                    "path right? To wait longer: --timeout SECONDS."
                )
            if not told:
                note(f"There is no recording at {path} yet: waiting up to {timeout:g} s for it.")
                told = True
        else:
            yield state
            if state.over:
                return
        time.sleep(_EVERY)


def _lines(states: Iterator[State], screen: Screen, path: str, as_json: bool) -> int:
    """A line a new step: for a pipe, a file, a program."""
    from ..reporting.following import silence_words, step_line

    last: State | None = None
    warned = False
    with contextlib.suppress(KeyboardInterrupt):
        for state in states:
            last = state
            if state.new and state.live is not None:
                say(_json_line(state, screen) if as_json else step_line(state, path))
                sys.stdout.flush()
                warned = False
            if state.silent and not warned:
                note(silence_words(state))
                warned = True
    return _end(last)


def _json_line(state: State, screen: Screen) -> str:
    assert state.live is not None
    rows = [row.to_dict() for row in screen.rows(state)]
    data = {**state.live.to_dict(), "layers": rows, "status": state.status}
    return json_text(data)


def _table(states: Iterator[State], screen: Screen, path: str) -> int:
    from rich.live import Live as LiveScreen

    from ..reporting.console import stdout

    console = stdout()
    last: State | None = None
    with (
        contextlib.suppress(KeyboardInterrupt),
        LiveScreen(console=console, refresh_per_second=4, transient=True) as shown,
    ):
        for state in states:
            last = state
            if state.new and state.live is not None:
                screen.take(state.live)
            shown.update(screen.render(state, path, console.height))
    if last is not None:
        console.print(screen.render(last, path))
    return _end(last)


def _end(last: State | None) -> int:
    if last is None:
        return DONE
    if last.dead:
        note("The process that wrote the run has ended without closing it.")
    elif last.status == "failed":
        note(f"The run failed: {last.failure or 'no reason was kept'}.")
    elif last.status == "complete":
        note("The run is complete.")
    return UNHEALTHY if last.unhealthy else DONE


def _wanted(patterns: Sequence[str], port: str | None) -> Wanted:
    """Which places to show; names are matched as `--layers` does elsewhere."""
    from ..selection.patterns import split

    words = [part for text in patterns for part in split(text)]
    includes = [_test(word) for word in words if not word.startswith("!")]
    excludes = [_test(word[1:].strip()) for word in words if word.startswith("!")]

    def wanted(row: LiveRow, structure: Structure) -> bool:
        if port is not None and row.port != port:
            return False
        chosen = any(test(row.layer, structure) for test in includes) or not includes
        return chosen and not any(test(row.layer, structure) for test in excludes)

    return wanted


def _test(word: str) -> Callable[[str, Structure], bool]:
    from torch import nn

    from ..selection.patterns import matcher
    from ..selection.sites import Site

    if word == "all":
        return lambda name, structure: True
    if word == "blocks":
        return lambda name, structure: name in structure.blocks
    if word in ("embedding", "final_norm"):
        return lambda name, structure: name == getattr(structure, word)
    test = matcher(word, [])
    return lambda name, structure: bool(test(Site(name, nn.Identity(), "", (name,))))
