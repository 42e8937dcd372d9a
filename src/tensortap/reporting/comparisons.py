"""A comparison in the terminal: what differs between the runs, a row a layer, the answer.

On a narrow terminal the least telling columns go first, and a line says which went: a number is
never cut, and nothing vanishes silently. What goes to a file or a pipe has them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import text
from .console import plain, print_table, table, written
from .generations import generations_table
from .layer_comparison import layer_screen
from .modes import modes_document_text, modes_table, modes_text, print_each_mode, print_modes
from .provenance import both_sides
from .verdicts import GOOD_GRADES, GRADES_ARE, STYLES, cosine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..comparing.results import Comparison, LayerComparison

__all__ = [
    "comparison_table",
    "comparison_text",
    "environment_table",
    "epochs_table",
    "layer_screen",
    "modes_document_text",
    "modes_table",
    "modes_text",
    "print_comparison",
    "print_each_mode",
    "print_modes",
]

_GAP = 2  # between columns
_NARROW = {"layer": 14, "candidate layer": 14, "note": 24}


@dataclass(frozen=True)
class _Column:
    """A column: its cells, and its rank when there is room for some alone (0 stays always)."""

    title: str
    cell: Callable[[LayerComparison], str]
    rank: int = 0
    justify: str = "right"


def comparison_table(
    comparison: Comparison,
    *,
    rows: Sequence[LayerComparison] | None = None,
    width: int | None = None,
) -> Table:
    """A row a layer, in order; columns that say nothing are left out, `width` leaves out more."""
    made, _ = _fitted(comparison, comparison.layers if rows is None else rows, width)
    return made


def _fitted(
    comparison: Comparison, rows: Sequence[LayerComparison], width: int | None
) -> tuple[Table, list[str]]:
    """The table and the titles that it has no room for."""
    from rich.text import Text

    first = comparison.first_divergence
    columns = [(column, [column.cell(row) for row in rows]) for column in _columns(rows, first)]
    columns = [
        (column, cells)
        for column, cells in columns
        if not column.rank or any(cell not in ("", "-") for cell in cells)
    ]
    dropped = []
    while width is not None and _needs(columns) > width:
        least = max(columns, key=lambda item: item[0].rank)
        if not least[0].rank:
            break
        columns.remove(least)
        dropped.append(least[0].title)
    made = table(*((c.title, c.justify) for c, _ in columns), folds=tuple(_NARROW))
    for number, row in enumerate(rows):
        cells: list[Any] = [cells[number] for _, cells in columns]
        for at, (column, _) in enumerate(columns):
            if column.title in ("verdict", "input"):
                cells[at] = Text(cells[at], style=STYLES.get(cells[at], "dim"))
            elif column.title == "layer" and row is first:
                cells[at] = Text(cells[at], style="bold red")
        made.add_row(*cells)
    return made, dropped


def _needs(columns: Sequence[tuple[_Column, Sequence[str]]]) -> int:
    """The fewest letters in which these columns stand whole, names folded."""
    total = 0
    for column, cells in columns:
        widest = max((len(cell) for cell in (column.title, *cells)), default=0)
        total += min(widest, _NARROW.get(column.title, widest)) + _GAP
    return total - _GAP


def _columns(rows: Sequence[LayerComparison], first: LayerComparison | None) -> list[_Column]:
    renamed = any(row.candidate_layer not in (None, row.layer) for row in rows)
    matched = any(row.matched_by not in ("", "name") for row in rows)
    columns = [_Column("layer", lambda row: text.layer_name(row.layer), justify="left")]
    if renamed:
        columns.append(_Column("candidate layer", _candidate_layer, 6, "left"))
    if matched:
        columns.append(_Column("matched by", lambda row: row.matched_by or "-", 11, "left"))
    if any(both_sides(row) for row in rows):
        columns.append(_Column("name by", both_sides, 3, "left"))
    return [
        *columns,
        _Column("verdict", lambda row: row.verdict, justify="left"),
        _Column("input", lambda row: row.input_verdict or "-", 2, "left"),
        _Column("origin", lambda row: row.origin or "-", 3, "left"),
        _Column("max abs", _metric("max_abs"), 4),
        _Column("MAE", _metric("mae"), 8),
        _Column("MSE", _metric("mse"), 9),
        _Column("cosine", _cosine, 5),
        _Column("error", lambda row: text.number(row.error, 4), 7),
        *(_Column(name, _added(name), 7) for name in _added_names(rows)),
        _Column("× floor", _ratio, 1),
        _Column("nearer to truth", _nearer, 2, "left"),
        _Column("grade", lambda row: row.grade or "-", 10, "left"),
        _Column("note", lambda row: _note(row, reason=row is not first), 6, "left"),
    ]


def _candidate_layer(row: LayerComparison) -> str:
    return "-" if row.candidate_layer is None else text.layer_name(row.candidate_layer)


def _metric(name: str) -> Callable[[LayerComparison], str]:
    def cell(row: LayerComparison) -> str:
        return "-" if row.difference is None else text.number(getattr(row.difference, name), 4)

    return cell


def _added_names(rows: Sequence[LayerComparison]) -> list[str]:
    """Metrics that somebody registered and asked for, in the order in which they were."""
    mains = [row.main for row in rows]
    return list(dict.fromkeys(name for part in mains if part for name, _ in part.added))


def _added(name: str) -> Callable[[LayerComparison], str]:
    def cell(row: LayerComparison) -> str:
        return "-" if row.main is None else text.number(dict(row.main.added).get(name), 4)

    return cell


def _cosine(row: LayerComparison) -> str:
    return "-" if row.difference is None else cosine(row.difference)


def _ratio(row: LayerComparison) -> str:
    return text.number(row.floor_ratio, 3)


def _nearer(row: LayerComparison) -> str:
    """The side that is nearer to the truth, and how far both are: the nearer one first."""
    ours, theirs = row.reference_error, row.candidate_error
    if math.isnan(ours):
        return "-"
    if row.nearer is None:
        return f"even, {text.number(max(ours, theirs), 3)} off"
    near, far = sorted((ours, theirs))
    return f"{row.nearer}, {text.number(near, 3)} : {text.number(far, 3)}"


def _note(row: LayerComparison, *, reason: bool) -> str:
    """What is worth saying of a row beside its numbers.

    What is inherited needs no reason, and that of the first divergence stands in the sentence.
    """
    parts = [row.transform, *row.hints, row.note]
    made = row.verdict == "diverged" and row.origin != "inherited" and not row.hints
    if (made and reason) or row.verdict == "incomparable":
        parts.append(row.why)
    return text.clean("; ".join(dict.fromkeys(part.rstrip(".") for part in parts if part)))


def environment_table(comparison: Comparison) -> Table:
    """What the two runs do not have in common."""
    made = table(
        ("differs", "left"),
        ("reference", "left"),
        ("candidate", "left"),
        folds=("reference", "candidate"),
    )
    for item in comparison.environment:
        cells = (item.name, item.reference, item.candidate)
        made.add_row(*(text.clean(cell) or "-" for cell in cells))
    return made


def epochs_table(comparison: Comparison) -> Table:
    """Two training runs, a row an epoch."""
    from rich.text import Text

    made = table(
        ("epoch", "right"),
        ("steps", "right"),
        ("layers", "right"),
        ("diverged", "right"),
        ("first to diverge", "left"),
        ("largest error", "right"),
        ("at", "left"),
        folds=("first to diverge", "at"),
    )
    for row in comparison.epochs:
        first = "-"
        if row.first is not None and row.first_layer is not None:
            first = f"{text.layer_name(row.first_layer)}, batch {row.first[1]}"
        style = "bold red" if row.diverged else "dim"
        made.add_row(
            str(row.epoch),
            text.count(row.steps),
            text.count(row.layers),
            Text(text.count(row.diverged), style=style),
            first,
            text.number(row.error, 4),
            text.layer_name(row.worst_layer) if row.worst_layer and row.error else "-",
        )
    return made


def print_comparison(
    console: Console,
    comparison: Comparison,
    *,
    rows: Sequence[LayerComparison] | None = None,
    notes: bool = False,
) -> None:
    """Warnings first, the answer last, where the eye is when the table has gone by."""
    print_head(console, comparison)
    shown = comparison.layers if rows is None else rows
    if shown:
        made, dropped = _fitted(comparison, shown, console.width)
        print_table(console, made)
        if dropped:
            console.print(
                f"No room for: {', '.join(reversed(dropped))}. Widen the terminal, or --json.",
                style="dim",
            )
        if "grade" not in dropped and any(
            row.verdict == "diverged" and row.grade in GOOD_GRADES for row in shown
        ):
            console.print(GRADES_ARE, style="dim")
        console.print()
    if len(comparison.epochs) > 1:
        print_table(console, epochs_table(comparison))
        console.print()
    if comparison.generations:
        print_table(console, generations_table(comparison.generations))
        console.print()
    if notes:
        for note in comparison.notes:
            console.print(f"note: {text.clean(note)}", style="dim")
    print_sentence(console, comparison)
    first = comparison.first_divergence
    for cause in () if first is None else first.causes:
        console.print(f"  {text.clean(str(cause))}")


def print_sentence(console: Console, comparison: Comparison) -> None:
    """The answer."""
    style = "bold green" if comparison.same else "bold red"
    console.print(text.clean(comparison.sentence), style=style)


def print_head(console: Console, comparison: Comparison) -> None:
    """What to know before the first number: warnings, the two runs, where they differ."""
    for warning in comparison.warnings:
        console.print(f"warning: {text.clean(warning)}", style="bold yellow")
    parts = [
        f"reference {text.clean(comparison.reference)}",
        f"candidate {text.clean(comparison.candidate)}",
        f"floor: {text.clean(comparison.floor)}" if comparison.floor else "",
        f"preset {comparison.preset}" if comparison.preset else "",
        f"truth {text.clean(comparison.truth)}" if comparison.truth else "",
    ]
    console.print(" · ".join(part for part in parts if part), style="dim")
    if comparison.environment:
        print_table(console, environment_table(comparison))
        console.print()


def comparison_text(comparison: Comparison) -> str:
    """All of it as plain text: what `print(result)` shows."""
    console = plain()
    print_comparison(console, comparison, notes=True)
    return written(console)
