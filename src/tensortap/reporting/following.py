"""A run that trains, as the terminal shows it while it does: the last step, place by place."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..recording.schema import PORTS, Structure
from . import text
from .console import table
from .tables import bad
from .watched import sparkline

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ..monitoring.follow import State
    from ..monitoring.live import Live, LiveRow

__all__ = ["Screen", "Wanted", "headline", "silence_words", "step_line"]

Wanted = Callable[["LiveRow", Structure], bool]

_TREND = 24
_ALARMS = 4
_AROUND = 9  # lines that are not rows of the table


@dataclass
class Screen:
    """What is on the screen; remembers how each number went since we look."""

    wanted: Wanted
    _ways: dict[tuple[str, str, str], deque[float]] = field(default_factory=dict)

    def take(self, live: Live) -> None:
        """Take a new step in."""
        for row in live.rows:
            value = math.nan if row.bad else row.rms
            self._way((row.layer, row.port, row.leaf)).append(value)
        for name, value in live.scalars.items():
            self._way((name, "scalar", "")).append(value)

    def rows(self, state: State) -> list[LiveRow]:
        """The places of the last step that are asked for."""
        structure = Structure() if state.manifest is None else state.manifest.structure
        found = () if state.live is None else state.live.rows
        return [row for row in found if self.wanted(row, structure)]

    def _way(self, key: tuple[str, str, str]) -> deque[float]:
        return self._ways.setdefault(key, deque(maxlen=_TREND))

    def render(self, state: State, path: str, height: int | None = None) -> Group:
        """All of it; `height` is how many lines there is room for."""
        from rich.console import Group
        from rich.text import Text

        live = state.live
        if live is None:
            return Group(Text(f"{text.clean(path)}: waiting for the first step.", style="dim"))
        parts: list[Any] = [Text(headline(state, path), style="bold")]
        if state.silent:
            parts.append(Text(silence_words(state), style="bold yellow"))
        parts += [Text(text.clean(alarm.text), style="bold red") for alarm in _last(state)]
        logged = [self._scalar(name, value) for name, value in live.scalars.items()]
        parts += logged
        rows = self.rows(state)
        room = None if height is None else max(3, height - _AROUND - len(parts))
        shown = _fitting(rows, room)
        parts += [Text(""), self._table(shown)] if shown else []
        if len(shown) < len(rows):
            rest = text.plural(len(rows) - len(shown), "more place")
            parts.append(Text(f"… and {rest}: choose with --layers or --port.", style="dim"))
        return Group(*parts)

    def _scalar(self, name: str, value: float) -> Any:
        from rich.text import Text

        line = Text(f"{text.clean(name)}  ")
        finite = math.isfinite(value)
        line.append(text.number(value) if finite else "not finite", "" if finite else "bold red")
        return line.append(f"  {sparkline(list(self._way((name, 'scalar', ''))))}", "dim")

    def _table(self, rows: Sequence[LiveRow]) -> Table:
        leaf = any(row.leaf for row in rows)
        columns = [("port", "left"), ("layer", "left"), *([("leaf", "left")] if leaf else [])]
        numbers = ("rms", "mean", "std", "largest", "zeros", "NaN", "Inf")
        made = table(*columns, *((name, "right") for name in numbers), ("rms so far", "left"))
        for row in rows:
            cells: list[Any] = [text.clean(row.port), text.layer_name(row.layer)]
            cells += [text.clean(row.leaf)] if leaf else []
            cells += [text.number(v, 4) for v in (row.rms, row.mean, row.std, row.absmax)]
            cells += [f"{row.zeros / row.count:.0%}" if row.count else "-"]
            cells += [bad(row.nan), bad(row.posinf + row.neginf)]
            way = self._way((row.layer, row.port, row.leaf))
            made.add_row(*cells, sparkline(list(way)))
        return made


def headline(state: State, path: str) -> str:
    """Where the run is, in one line."""
    live = state.live
    assert live is not None
    rate = live.steps_per_second
    parts = [
        text.clean(path),
        state.status,
        f"epoch {live.epoch}, step {live.batch}",
        f"every {live.every}" if live.every > 1 else "",
        f"{rate:.3g} steps/s" if math.isfinite(rate) and not state.over else "",
        f"{text.plural(len(state.alarms), 'alarm')}" if state.alarms else "",
    ]
    return " · ".join(part for part in parts if part)


def silence_words(state: State) -> str:
    return (
        f"No news for {state.silence:.0f} s: a step takes long, or the process has died. What it "
        "had written stays readable."
    )


def step_line(state: State, path: str) -> str:
    """A step in one line, for what is no terminal."""
    live = state.live
    assert live is not None
    parts = [headline(state, path)]
    parts += [f"{text.clean(name)} {text.number(v)}" for name, v in live.scalars.items()]
    wrong = [row for row in live.rows if row.bad]
    if wrong:
        first = wrong[0]
        parts.append(f"NaN or Inf in the {first.port} of {text.layer_name(first.layer)}")
    return " · ".join(parts)


def _last(state: State) -> Sequence[Any]:
    return state.alarms[-_ALARMS:]


def _fitting(rows: Sequence[LiveRow], room: int | None) -> list[LiveRow]:
    """Rows port by port; where there is no room for all, those that are not finite stay."""
    ordered = sorted(rows, key=lambda row: PORTS.index(row.port))
    if room is None or len(ordered) <= room:
        return ordered
    kept = {id(row) for row in sorted(ordered, key=lambda row: not row.bad)[:room]}
    return [row for row in ordered if id(row) in kept]
