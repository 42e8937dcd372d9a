"""The table of document 003: every mode against the reference, first and last layer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import text
from .console import plain, print_table, table, written
from .verdicts import GOOD_GRADES, GRADES_ARE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..comparing.modes import ModeRow, Modes

__all__ = ["modes_document_text", "modes_table", "modes_text", "print_each_mode", "print_modes"]

WIDTH = 80
_COLUMNS = (
    ("Mode", 10),
    ("Layer 0 MSE", 15),
    ("Layer 0 MAE", 12),
    ("Last Layer MSE", 15),
    ("Last Layer MAE", 15),
    ("Avg Corr", 10),
)
_RULE = 100  # letters of the document's rule below its columns
_ROOM = 150  # letters that leave some for the reasons beside the numbers


def modes_table(modes: Modes, *, notes: bool = True, tall: bool = False) -> Table:
    """A row a mode with the document's columns, then the grade, the input and where it parts.

    Without `notes` a mode that could not be compared says so, and not why. `tall` headings take
    two lines and less room.
    """
    from rich.text import Text

    numbers = ("Layer 0 MSE", "Layer 0 MAE", "Last Layer MSE", "Last Layer MAE", "Avg Corr")
    words = ("Grade", "Same Input", "First Divergence")
    noted = notes and any(row.problem for row in modes.modes)
    made = table(
        ("Mode", "left"),
        *((_heading(title, tall), "right") for title in numbers),
        *((_heading(title, tall), "left") for title in words),
        *([("Note", "left")] if noted else []),
        folds=(_heading("First Divergence", tall), "Note"),
    )
    for row in modes.modes:
        cells: list[Any] = [
            text.clean(row.mode),
            _scientific(row.first_layer_mse),
            _fixed(row.first_layer_mae),
            _scientific(row.last_layer_mse),
            _fixed(row.last_layer_mae),
            _fixed(row.mean_correlation),
            row.grade or "-",
            Text(*_same_input(row)),
            Text(*_divergence(row)),
        ]
        if noted:
            cells.append(Text(text.clean(row.problem), style="yellow"))
        made.add_row(*cells)
    return made


def _heading(title: str, tall: bool) -> str:
    return "\n".join(title.rsplit(" ", 1)) if tall else title


def _same_input(row: ModeRow) -> tuple[str, str]:
    if row.same_input is None:
        return ("-" if row.problem else "unknown"), "dim"
    return ("yes", "") if row.same_input else ("no", "bold yellow")


def _divergence(row: ModeRow) -> tuple[str, str]:
    if row.problem or row.same is None:
        return "not compared", "yellow"
    if row.first_divergence is not None:
        return text.layer_name(row.first_divergence), "bold red"
    return ("none", "green") if row.same else ("none, but incomparable", "bold red")


def _scientific(value: float | None, lacking: str = "-") -> str:
    return lacking if value is None or math.isnan(value) else f"{value:.6e}"


def _fixed(value: float | None, lacking: str = "-") -> str:
    """Six decimals, as the document has it; an exponent where they would hide the number."""
    if value is None or math.isnan(value):
        return lacking
    plainly = value == 0 or 1e-6 <= abs(value) < 1e9 or math.isinf(value)
    return f"{value:.6f}" if plainly else f"{value:.6e}"


def print_modes(console: Console, modes: Modes) -> None:
    """Warnings, the table under its heading, and which layers its columns are of."""
    for warning in modes.warnings:
        console.print(f"warning: {text.clean(warning)}", style="bold yellow")
    console.print("=" * WIDTH, style="dim")
    console.print(f"SUMMARY TABLE - All Modes vs {text.clean(modes.reference)}", style="bold")
    console.print("=" * WIDTH, style="dim")
    wide = console.width >= _ROOM
    print_table(console, modes_table(modes, notes=wide, tall=not wide))
    console.print("=" * WIDTH, style="dim")
    for row in modes.modes:
        if row.problem and not wide:
            said = f"{row.mode} was not compared: {row.problem}"
            console.print(text.clean(said), style="yellow")
    if any(row.first_divergence is not None and row.grade in GOOD_GRADES for row in modes.modes):
        console.print(GRADES_ARE, style="dim")
    for line in _layers(modes):
        console.print(line, style="dim")


def print_each_mode(console: Console, modes: Modes, *, only_bad: bool = False) -> None:
    """A block a mode: its answer and where it parts; then the document's table of all of them."""
    for warning in modes.warnings:
        console.print(f"warning: {text.clean(warning)}", style="bold yellow")
    for row in modes.modes:
        if only_bad and row.same:
            continue
        word, style = _answer(row)
        console.print(
            f"{text.clean(row.mode)} vs {text.clean(modes.reference)}: {word}", style=style
        )
        found = row.comparison
        if found is None:
            console.print(f"  {_one_line(row.problem)}")
        else:
            for warning in found.warnings:
                console.print(f"  warning: {text.clean(warning)}", style="yellow")
            console.print(f"  {text.clean(found.sentence)}")
            first = found.first_divergence
            for cause in () if first is None else first.causes:
                console.print(f"  {text.clean(str(cause))}")
        console.print()
    console.print(modes_document_text(modes), soft_wrap=True)
    for line in _layers(modes):
        console.print(line, style="dim")


def _answer(row: ModeRow) -> tuple[str, str]:
    if row.same is None:
        return "not compared", "bold yellow"
    if row.same:
        return "same", "bold green"
    if row.first_divergence is None:
        return "incomparable", "bold red"
    return f"diverged, first at {text.layer_name(row.first_divergence)}", "bold red"


def _layers(modes: Modes) -> list[str]:
    """Which layers stand in the columns, said once where all modes agree."""
    ends: dict[tuple[str, str], list[str]] = {}
    for row in modes.modes:
        if not row.problem:
            ends.setdefault((row.first_layer, row.last_layer), []).append(row.mode)
    lines = []
    for (first, last), names in ends.items():
        who = "" if len(ends) == 1 else f"{text.clean(', '.join(names))}: "
        lines.append(
            f"{who}Layer 0 is {text.layer_name(first)}, the last layer {text.layer_name(last)}."
        )
    return lines


def modes_text(modes: Modes) -> str:
    """All of it as plain text: what `print(modes)` shows."""
    console = plain()
    print_modes(console, modes)
    return written(console)


def modes_document_text(modes: Modes) -> str:
    """The document's own table to the letter, and nothing else; a row a mode, in their order.

    A number that a mode has not got is called what it is: undefined, missing with its layer, or
    n/a where summaries alone were compared. A mode that could not be compared says why, in its
    first sentence.
    """
    names = [text.clean(row.mode) for row in modes.modes]
    least, *rest = (wide for _, wide in _COLUMNS)
    widths = (max(least, *map(len, names)) if names else least, *rest)
    lines = [
        "=" * WIDTH,
        f"SUMMARY TABLE - All Modes vs {text.clean(modes.reference)}",
        "=" * WIDTH,
        "",
        _aligned([title for title, _ in _COLUMNS], widths),
        "-" * _RULE,
    ]
    for name, row in zip(names, modes.modes, strict=True):
        if row.problem:
            lines.append(_aligned([name, f"not compared: {_first_sentence(row.problem)}"], widths))
            continue
        first, last = (_lacking(row, layer) for layer in (row.first_layer, row.last_layer))
        cells = [
            _scientific(row.first_layer_mse, first),
            _fixed(row.first_layer_mae, first),
            _scientific(row.last_layer_mse, last),
            _fixed(row.last_layer_mae, last),
            _fixed(row.mean_correlation, _lacking(row)),
        ]
        lines.append(_aligned([name, *cells], widths))
    return "\n".join([*lines, "=" * WIDTH])


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(f"{cell:<{wide}}" for cell, wide in zip(cells, widths, strict=False)).rstrip()


def _lacking(row: ModeRow, layer: str | None = None) -> str:
    """What stands in place of a number that a mode, or one of its layers, has not got."""
    found = row.comparison
    if found is not None and all(compared.by_summaries for compared in found.compared):
        return "n/a"
    rows = [] if found is None or layer is None else found.layers
    gone = any(
        text.layer_name(r.layer) == text.layer_name(layer or "") and r.verdict == "missing"
        for r in rows
    )
    return "missing" if gone else "undefined"


def _one_line(words: str) -> str:
    return text.clean(" ".join(words.split()))


def _first_sentence(words: str) -> str:
    return re.split(r"(?<=[.!?]) ", _one_line(words), maxsplit=1)[0]
