"""A blame in the terminal: the answer, what kind of error it is, a row a layer, what it cost.

As with comparisons, a narrow terminal loses the least telling columns first and says which, and a
long model shows the layers with the largest shares and says how many it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import text
from .blame_rows import (
    Row,
    amplification,
    cost,
    final_words,
    most_telling,
    outside,
    percent,
    rows_of,
)
from .console import plain, print_table, table, written

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..comparing.blame.results import Blame

__all__ = ["MOST", "blame_table", "blame_text", "print_blame"]

MOST = 40  # rows that a person still reads
_GAP = 2
_BAR = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_NARROW = {"layer": 22, "note": 24}


@dataclass(frozen=True)
class _Column:
    """A column: its cells, and its rank when there is room for some alone (0 stays always)."""

    title: str
    cell: Callable[[Row], str]
    rank: int = 0
    justify: str = "right"


def blame_table(blame: Blame, *, full: bool = True, width: int | None = None) -> Table:
    """A row a layer, children indented below the layer that was descended into.

    Without `full` a long model shows the largest shares alone; `width` leaves out columns.
    """
    made, _ = _fitted(_shown(blame, full), width)
    return made


def _shown(blame: Blame, full: bool) -> list[Row]:
    rows = rows_of(blame)
    return rows if full else most_telling(rows, MOST)


def _columns() -> list[_Column]:
    return [
        _Column("", lambda row: "►" if row.culprit else "", justify="left"),
        _Column("layer", lambda row: f"{'  ' * row.depth}{row.name}", justify="left"),
        _Column("type", lambda row: row.type, 9, "left"),
        _Column("made here", _number("made_here"), 2),
        _Column("accumulated", _number("accumulated"), 3),
        _Column("handed", _number("handed"), 5),
        _Column("amplification", lambda row: amplification(row.value("amplification")), 7),
        _Column("share", lambda row: percent(row.share)),
        _Column(" ", lambda row: bar(row.share), 4, "left"),
        _Column("note", lambda row: row.note, 6, "left"),
    ]


def _number(name: str) -> Callable[[Row], str]:
    return lambda row: text.number(row.value(name), 3)


def bar(share: float, cells: int = _BAR) -> str:
    """A share as a bar; all of it fills the room, and less than nothing has none."""
    eighths = round(8 * cells * min(max(share, 0.0), 1.0)) if math.isfinite(share) else 0
    if share > 0:
        eighths = max(eighths, 1)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _fitted(rows: Sequence[Row], width: int | None) -> tuple[Table, list[str]]:
    """The table and the titles that it has no room for."""
    from rich.text import Text

    columns = [(column, [column.cell(row) for row in rows]) for column in _columns()]
    columns = [
        (column, cells)
        for column, cells in columns
        if column.title in ("layer", "share") or any(cell not in ("", "-") for cell in cells)
    ]
    dropped = []
    while width is not None and _needs(columns) > width:
        least = max(columns, key=lambda item: item[0].rank)
        if not least[0].rank:
            break
        columns.remove(least)
        dropped.append(least[0].title)
    made = table(*((c.title, c.justify) for c, _ in columns), folds=tuple(_NARROW))
    for at, row in enumerate(rows):
        style = "bold red" if row.culprit else ""
        cells: list[Any] = []
        for column, words in columns:
            if column.title in ("", "layer", "share"):
                cells.append(Text(words[at], style=style))
            elif column.title == "note":
                cells.append(Text(words[at], style="dim"))
            else:
                cells.append(words[at])
        made.add_row(*cells)
    return made, [title for title in dropped if title.strip()]


def _needs(columns: Sequence[tuple[_Column, Sequence[str]]]) -> int:
    """The fewest letters in which these columns stand whole, names folded."""
    total = 0
    for column, cells in columns:
        widest = max((len(cell) for cell in (column.title, *cells)), default=0)
        total += min(widest, _NARROW.get(column.title, widest)) + _GAP
    return total - _GAP


def print_blame(console: Console, blame: Blame, *, full: bool = False, notes: bool = False) -> None:
    """The answer first, what kind of error it is, the layers, what it cost and what to beware."""
    style = "bold green" if blame.same else "bold red" if blame.culprit is not None else "bold"
    console.print(text.clean(blame.sentence), style=style)
    for cause in blame.causes:
        console.print(f"  {text.clean(str(cause))}")
    parts = (
        f"reference {text.clean(blame.reference)}",
        f"candidate {text.clean(blame.candidate)}",
        final_words(blame),
    )
    console.print(" · ".join(parts), style="dim")
    if blame.layers:
        console.print()
        _print_layers(console, blame, full)
    if outside(blame):
        console.print(outside(blame), style="dim")
    console.print(cost(blame).capitalize() + ".", style="dim")
    for warning in blame.warnings:
        console.print(f"warning: {text.clean(warning)}", style="bold yellow")
    if notes:
        for note in blame.notes:
            console.print(f"note: {text.clean(note)}", style="dim")


def _print_layers(console: Console, blame: Blame, full: bool) -> None:
    shown = _shown(blame, full)
    made, dropped = _fitted(shown, console.width)
    print_table(console, made)
    left = len(rows_of(blame)) - len(shown)
    if left:
        many = f"{text.plural(left, 'layer')} with no larger share {'is' if left == 1 else 'are'}"
        console.print(f"{many} left out (--all shows every one, .layers has them).", style="dim")
    if dropped:
        console.print(
            f"No room for: {', '.join(reversed(dropped))}. Widen the terminal, or --json.",
            style="dim",
        )
    console.print()


def blame_text(blame: Blame, *, full: bool = False) -> str:
    """All of it as plain text: what `print(blame)` shows."""
    console = plain()
    print_blame(console, blame, full=full, notes=True)
    return written(console)
