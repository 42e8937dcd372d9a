"""A recording in a notebook: a plain table, no script, no style sheet, everything escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .reader import Recording

__all__ = ["recording_table", "table"]

_COLUMNS = ("layer", "type", "shape", "dtype", "mean", "std", "min", "max", "NaN", "Inf")
_MOST = 200


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table of these cells."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def recording_table(recording: Recording) -> str:
    """The first record of each layer, in order of execution."""
    rows = []
    for name in recording.layers[:_MOST]:
        layer = recording[name]
        outputs = layer.port("output")
        record, s = (outputs or layer.records)[0], layer.summary
        numbers = [f"{value:.6g}" for value in (s.mean, s.std, s.min, s.max)]
        shape = list(record.shape)
        rows.append([name, layer.type, shape, record.dtype, *numbers, s.nan, s.posinf + s.neginf])
    rest = len(recording) - _MOST
    more = f"<p>and {rest} more layers</p>" if rest > 0 else ""
    notes = "".join(f"<p>{escape(note)}</p>" for note in recording.notes)
    return f"<p>{escape(repr(recording))}</p>{table(_COLUMNS, rows)}{more}{notes}"
