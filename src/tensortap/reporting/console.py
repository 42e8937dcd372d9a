"""Consoles that lose nothing: wide and plain when what is printed goes to a file or a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["plain", "print_table", "stderr", "stdout", "table", "written"]

_WIDE = 10_000


def stdout() -> Console:
    """The console for data. Not a terminal: no colour, and as wide as the table needs."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(
        file=sys.stdout,
        width=None if terminal else _WIDE,
        no_color=None if terminal else True,
        highlight=False,
        emoji=False,
        soft_wrap=not terminal,
        markup=False,
    )


def stderr() -> Console:
    """The console for notes and progress."""
    from rich.console import Console

    return Console(
        file=sys.stderr, highlight=False, emoji=False, markup=False, soft_wrap=True, stderr=True
    )


def plain() -> Console:
    """A console that keeps what it is told, wide and without colour, for `written`."""
    from rich.console import Console

    return Console(
        file=io.StringIO(),
        width=_WIDE,
        no_color=True,
        highlight=False,
        emoji=False,
        soft_wrap=True,
        markup=False,
        force_terminal=False,
        force_jupyter=False,
    )


def written(console: Console) -> str:
    """What a plain console was told."""
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


_FOLDING = ("layer", "alias", "type", "leaf", "finding")
_NARROWEST = 14


def table(*columns: tuple[str, str], folds: Sequence[str] = ()) -> Table:
    """An empty table in the house style; a column is its title and how it is justified.

    Columns of names may fold on a narrow terminal, and those that `folds` names.
    """
    from rich import box
    from rich.table import Table

    made = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="bold",
        show_edge=False,
    )
    for title, justify in columns:
        made.add_column(
            title,
            justify=justify,  # type: ignore[arg-type]
            overflow="fold",
            no_wrap=title not in (*_FOLDING, *folds),
        )
    return made


def print_table(console: Console, made: Table) -> None:
    """Print a table whole. Names may fold; where even that is too wide, the terminal wraps lines.

    rich on its own would squeeze every column, and cut numbers.
    """
    from rich.measure import Measurement

    wide = console.options.update(max_width=_WIDE, width=_WIDE)
    natural = Measurement.get(console, wide, made).maximum
    spare = 0
    for column in made.columns:
        if not column.no_wrap:
            cells = max((len(str(cell)) for cell in column.cells), default=0)
            spare += max(0, cells - _NARROWEST)
    made.width = min(natural, max(console.width, natural - spare))
    console.print(made, crop=False)
