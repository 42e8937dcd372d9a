"""A blame as one page that opens without a network, and as a table for a notebook.

The answer, the descent and the table stand in the page as markup, so that it can be read without
its script, which draws the charts and makes the table sortable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
from .page.shell import (
    as_json,
    assembled,
    notes_html,
    said,
    short,
    terms_html,
    warnings_html,
    words,
)

if TYPE_CHECKING:
    from ..comparing.blame.results import Blame

__all__ = ["blame_notebook", "render_blame_page"]

_SCRIPTS = ("base", "axis", "blame_charts", "blame_table", "blame_start")
_OUTCOMES = {"good": "nothing to blame", "bad": "a culprit", "void": "no single culprit"}
_LOW, _HIGH = -0.5, 1.5  # bars end here, whatever the share
_DEEPEST = 5
_TAG = '<span class="tag">culprit</span>'
_MOST = 200
_NUMBERS = ("made_here", "accumulated", "handed", "amplification")
_COLUMNS = (
    ("order", "#", "order of execution"),
    ("layer", "layer", "layer"),
    ("share", "share", "part of the squared final error that goes when the layer is made right"),
    ("made", "made here", "relative L2 error of the layer alone, on the reference's inputs"),
    ("accumulated", "accumulated", "relative L2 error of its output in the candidate's own run"),
    ("handed", "handed", "relative L2 error of its input there"),
    ("amplification", "amplification", "how many times larger what it was handed leaves it"),
    ("floor", "rounding", "what rounding explains of what is made here"),
    ("type", "type", "type of the layer"),
    ("note", "note", "what else there is to say"),
)


def render_blame_page(blame: Blame) -> str:
    """The blame as a page in one file."""
    rows = rows_of(blame, full_names=True)
    path = _path(rows)
    state = "good" if blame.same else "bad" if blame.culprit is not None else "void"
    parts = {
        "title": said(_title(blame)),
        "state": state,
        "outcome": _OUTCOMES[state],
        "sentence": said(blame.sentence),
        "causes": _causes_html(blame),
        "reference": said(blame.reference),
        "candidate": said(blame.candidate),
        "final": f"<div><dt>final error</dt><dd>{said(_final(blame))}</dd></div>",
        "warnings": warnings_html(blame.warnings),
        "notes": notes_html(blame.notes),
        "descent": _descent_html(rows, path),
        "table": _table_html(rows, path),
        "foot": _foot_html(blame),
        "data": as_json(
            {
                "metrics": [],
                "statistics": [],
                "outside": outside(blame),
                "layers": _payload(rows, path),
            }
        ),
    }
    return assembled("blame.html", parts, styles=("page.css", "blame.css"), scripts=_SCRIPTS)


def blame_notebook(blame: Blame) -> str:
    """The answer, the causes, the warnings and a plain table: no script, no style sheet."""
    from ..recording.html import table

    every = rows_of(blame, full_names=True)
    rows = most_telling(every, _MOST)
    html = [f"<p><b>{said(blame.sentence)}</b></p>"]
    html += [f"<p>{said(str(cause))}</p>" for cause in blame.causes]
    html += [f"<p>Warning: {said(warning)}</p>" for warning in blame.warnings]
    if rows:
        titles = ("layer", "type", "made here", "accumulated", "handed", "amplification", "share")
        cells = [[r.name, r.type, *_cells(r), percent(r.share), r.note] for r in rows]
        html.append(table((*titles, "note"), cells))
    rest = len(every) - len(rows)
    html += [f"<p>and {text.plural(rest, 'more layer')}</p>"] if rest else []
    html.append(f"<p>{said(cost(blame).capitalize())}.</p>")
    return "".join(html)


def _cells(row: Row) -> list[str]:
    numbers = [text.number(row.value(name), 3) for name in _NUMBERS[:3]]
    return [*numbers, amplification(row.value("amplification"))]


def _path(rows: Sequence[Row]) -> set[int]:
    """The culprit's row and those above it."""
    found: set[int] = set()
    for at, row in enumerate(rows):
        above = at if row.culprit else None
        while above is not None:
            found.add(above)
            above = rows[above].parent
    return found


def _title(blame: Blame) -> str:
    if blame.culprit is not None:
        return f"{text.layer_name(blame.culprit)} is to blame - tensortap"
    return f"{'Nothing to blame' if blame.same else 'No single culprit'} - tensortap"


def _final(blame: Blame) -> str:
    return final_words(blame).removeprefix("final error ")


def _causes_html(blame: Blame) -> str:
    items = "".join(f"<li>{said(str(cause))}</li>" for cause in blame.causes)
    return f'<ul class="causes" aria-label="What kind of error it is">{items}</ul>' if items else ""


def _payload(rows: Sequence[Row], path: set[int]) -> list[dict[str, Any]]:
    """What the charts are drawn from, row by row as in the table."""
    made = []
    for at, row in enumerate(rows):
        told = {
            "layer": row.name,
            "type": row.type,
            "note": words(row.note),
            "depth": row.depth,
            "share": short(row.share),
            "made": short(row.value("made_here")),
            "accumulated": short(row.value("accumulated")),
            "handed": short(row.value("handed")),
            "amplification": short(row.value("amplification")),
            "floor": short(row.value("floor")),
            "path": at in path,
        }
        made.append({name: v for name, v in told.items() if v or (v == 0 and v is not False)})
    return made


def _bar_html(share: float, low: float, high: float, on_path: bool) -> str:
    """A share as a bar on a track from `low` to `high`; no script, no style attribute."""
    if not math.isfinite(share):
        return ""
    left, right = sorted((min(max(share, low), high), 0.0))
    x, width = 100 * (left - low) / (high - low), 100 * (right - left) / (high - low)
    kind = "share path" if on_path else "share"
    return (
        '<svg class="shares" aria-hidden="true"><rect class="track" width="100%" height="100%"/>'
        f'<rect class="{kind}" x="{x:.2f}%" width="{width:.2f}%" height="100%"/></svg>'
    )


def _span(rows: Iterable[Row]) -> tuple[float, float]:
    """From where to where the bars of these rows go: all of 100 %, and some beyond."""
    shares = [row.share for row in rows if math.isfinite(row.share)]
    return max(_LOW, min([0.0, *shares])), min(_HIGH, max([1.0, *shares]))


def _dotted(name: str) -> str:
    """A dotted name that may break behind its dots."""
    return said(name).replace(".", ".<wbr>")


def _descent_html(rows: Sequence[Row], path: set[int]) -> str:
    """Each layer that was descended into, with what is inside it, as nested bars."""
    entered = {row.parent for row in rows if row.parent is not None}
    if not entered:
        return ""
    shown = [(at, row) for at, row in enumerate(rows) if row.depth or at in entered]
    low, high = _span(row for _, row in shown)
    items = "".join(
        f'<li class="{"path" if at in path else ""}"><span class="who depth{_depth(row)}">'
        f"<code>{_dotted(row.name)}</code>"
        f"{_TAG if row.culprit else ''}</span>"
        f"<span>{_bar_html(row.share, low, high, at in path)}</span>"
        f'<span class="n">{said(percent(row.share))}</span></li>'
        for at, row in shown
    )
    return (
        '<section><h2 id="inside">Where inside: the share of each part</h2>'
        f'<ul class="descent" aria-labelledby="inside">{items}</ul></section>'
    )


def _depth(row: Row) -> int:
    return min(row.depth, _DEEPEST)


def _table_html(rows: Sequence[Row], path: set[int]) -> str:
    """The table as it is read without a script; columns of words that say nothing are left out."""
    low, high = _span(rows)
    empty = {word for word in ("type", "note") if not any(getattr(row, word) for row in rows)}
    head = "".join(
        f'<th scope="col" class="static{_right(name)}" data-column="{name}" title="{said(about)}">'
        f"{said(title)}</th>"
        for name, title, about in _COLUMNS
        if name not in empty
    )
    body = "".join(
        _row_html(at, row, empty, _bar_html(row.share, low, high, at in path))
        for at, row in enumerate(rows)
    )
    return (
        '<table class="layers blamed"><caption class="unseen">The layers with what they make, what '
        "they are handed and their share of the final error; in a browser that runs scripts the "
        f"buttons in the head sort</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _right(name: str) -> str:
    return "" if name in ("layer", "type", "note", "share") else " n"


def _row_html(at: int, row: Row, empty: set[str], bar: str) -> str:
    numbers = [*_cells(row), text.number(row.value("floor"), 3)]
    columns = ("made", "accumulated", "handed", "amplification", "floor")
    cells = "".join(
        f'<td class="n" data-column="{name}">{said(cell)}</td>'
        for name, cell in zip(columns, numbers, strict=True)
    )
    worded = [
        f'<td{kind} data-column="{name}">{said(cell)}</td>'
        for name, kind, cell in (("type", "", row.type), ("note", ' class="wrap"', row.note))
        if name not in empty
    ]
    culprit = ' <span class="unseen">(the culprit)</span>' if row.culprit else ""
    return (
        f'<tr class="row{" first" if row.culprit else ""}" data-row="{at}">'
        f'<td class="n" data-column="order">{at + 1}</td>'
        f'<th scope="row"><div class="indent depth{_depth(row)}">{_dotted(row.name)}{culprit}</div>'
        f'</th><td class="part" data-column="share"><div><span>{said(percent(row.share))}</span>'
        f"{bar}</div></td>{cells}{''.join(worded)}</tr>"
    )


def _foot_html(blame: Blame) -> str:
    import tensortap

    entries = {
        "reference": blame.reference,
        "candidate": blame.candidate,
        "final error": _final(blame),
        "outside the chain": outside(blame).partition(": ")[2],
        "cost": cost(blame) + (", by bisection" if blame.bisect else ""),
        "made by": f"tensortap {tensortap.__version__}",
    }
    return terms_html(entries)
