"""The table of modes that were recorded together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import text
from .console import plain, print_table, table, written

if TYPE_CHECKING:
    from rich.table import Table

    from ..targets.modes.results import RecordedMode, RecordedModes

__all__ = ["modes_text", "recorded_table"]

_STYLES = {"recorded": "green", "kept": "dim", "failed": "bold red"}


def recorded_table(modes: RecordedModes) -> Table:
    """A row a mode: what became of it, and how much there is."""
    from rich.text import Text

    compared = any(row.compared is not None for row in modes.modes)
    made = table(
        ("mode", "left"),
        ("status", "left"),
        ("layers", "right"),
        ("records", "right"),
        ("size", "right"),
        ("seconds", "right"),
        *([("first divergence", "left")] if compared else []),
    )
    for row in modes.modes:
        cells: list[Any] = [
            text.clean(row.mode),
            Text(row.status, style=_STYLES.get(row.status, "")),
            *_amounts(row),
            f"{row.seconds:.1f}" if row.status != "kept" else "-",
        ]
        made.add_row(*cells, *([_divergence(row)] if compared else []))
    return made


def _amounts(row: RecordedMode) -> list[str]:
    if row.status == "failed":
        return ["-", "-", "-"]
    return [text.count(row.layers), text.count(row.records), text.size(row.nbytes)]


def _divergence(row: RecordedMode) -> str:
    if row.compared is None:
        return "not compared"
    first = row.compared.get("first_divergence")
    if first is not None:
        return text.layer_name(str(first))
    return "none" if row.compared.get("same") else "none, but incomparable"


def modes_text(modes: RecordedModes) -> str:
    """The table as plain text, and below it what went wrong with the modes that failed."""
    console = plain()
    print_table(console, recorded_table(modes))
    problems = [f"{text.clean(row.mode)}: {row.problem}" for row in modes.failed]
    return "\n".join([written(console), *problems])
