"""A comparison as one page that opens without a network, and as a table for a notebook.

The page is a single file: the style, the script and the data are in it, and its own policy forbids
it to fetch anything. What is said in words is written here, escaped; the chart and the table are
drawn by the script from a block of JSON, as text and never as markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...comparing.results import EnvironmentDifference
from .. import text
from ..generations import HEAD, generation_rows
from .data import payload
from .shell import as_json, assembled, notes_html, said, terms_html, warnings_html, words

if TYPE_CHECKING:
    from ...comparing.results import Comparison

__all__ = ["notebook", "render_page"]

_SCRIPTS = ("base", "table", "detail", "axis", "chart", "start")
_MOST = 200
_OUTCOMES = {"good": "agrees", "bad": "does not agree", "void": "nothing compared"}
_COLUMNS = ("layer", "verdict", "made", "error", "× floor", "MSE", "MAE", "max abs", "1 - cosine")


def render_page(comparison: Comparison) -> str:
    """The comparison as a page in one file."""
    state = _state(comparison)
    data = {**payload(comparison), "floor_words": _floor_words(comparison)}
    parts = {
        "title": said(_title(comparison)),
        "state": state,
        "outcome": _OUTCOMES[state],
        "sentence": said(comparison.sentence),
        "causes": _causes_html(comparison),
        "reference": said(comparison.reference),
        "candidate": said(comparison.candidate),
        "warnings": warnings_html(_warnings(comparison)),
        "notes": notes_html(comparison.notes),
        "environment": _environment_html(comparison),
        "epochs": _generations_html(comparison) + _epochs_html(comparison),
        "foot": _foot_html(comparison),
        "data": as_json(data),
    }
    return assembled("template.html", parts, styles=("page.css",), scripts=_SCRIPTS)


def notebook(comparison: Comparison) -> str:
    """The answer, its causes, the warnings and a plain table: no script, no style sheet."""
    from ...recording.html import table

    rows = []
    for row in comparison.layers[:_MOST]:
        d = row.difference
        metrics = (d.mse, d.mae, d.max_abs, d.cosine_distance) if d is not None else (None,) * 4
        numbers = [text.number(value, 4) for value in (row.error, row.floor_ratio, *metrics)]
        rows.append([text.layer_name(row.layer), row.verdict, row.origin or "", *numbers])
    html = [f"<p><b>{said(comparison.sentence)}</b></p>"]
    html += [f"<p>{said(cause)}</p>" for cause in _causes(comparison)]
    html += [f"<p>Warning: {said(warning)}</p>" for warning in _warnings(comparison)]
    html += [table(_COLUMNS, rows)] if rows else []
    rest = len(comparison.layers) - _MOST
    html += [f"<p>and {text.plural(rest, 'more layer')}</p>"] if rest > 0 else []
    return "".join(html)


def _title(comparison: Comparison) -> str:
    first = comparison.first_divergence
    if first is not None:
        return f"Diverged at {text.layer_name(first.layer)} - tensortap"
    return f"{'No divergence' if comparison.compared else 'Nothing compared'} - tensortap"


def _state(comparison: Comparison) -> str:
    if not comparison.same:
        return "bad"
    return "good" if comparison.compared else "void"


def _causes(comparison: Comparison) -> list[str]:
    first = comparison.first_divergence
    return [] if first is None else [str(cause) for cause in first.causes]


def _causes_html(comparison: Comparison) -> str:
    """What kind of error the first divergence is."""
    items = "".join(f"<li>{said(cause)}</li>" for cause in _causes(comparison))
    return f'<ul class="causes" aria-label="What kind of error it is">{items}</ul>' if items else ""


def _warnings(comparison: Comparison) -> list[str]:
    """Different inputs first: nothing below means much when the models did not see the same."""
    found = list(comparison.warnings)
    if comparison.same_input is not False:
        return found
    about = [warning for warning in found if "input" in warning.lower()]
    first = about or ["The two runs did not get the same inputs."]
    return [*first, *(warning for warning in found if warning not in about)]


def _environment_html(comparison: Comparison) -> str:
    """Side by side: what differs in sight, what is the same folded away."""
    differs = [item for item in comparison.environment if item.reference != item.candidate]
    same = [item for item in comparison.environment if item.reference == item.candidate]
    same += [EnvironmentDifference(name, value, value) for name, value in comparison.in_common]
    if differs:
        html = _sides_html(differs, "What differs between the two runs")
    else:
        html = '<p class="soft">Nothing that the recordings say of the two runs differs.</p>'
    if same:
        summary = f"<summary>{text.plural(len(same), 'thing')} the same on both sides</summary>"
        inside = _sides_html(same, "What both runs have in common")
        html += f'<details class="plain">{summary}{inside}</details>'
    return html


def _sides_html(items: Iterable[EnvironmentDifference], caption: str) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "reference", "candidate"))
    body = "".join(
        f'<tr><th scope="row">{said(item.name)}</th>'
        f"<td>{said(item.reference)}</td><td>{said(item.candidate)}</td></tr>"
        for item in items
    )
    return (
        f'<table class="both"><caption class="unseen">{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _epochs_html(comparison: Comparison) -> str:
    """Two training runs, a row an epoch; nothing where there is one."""
    epochs = comparison.epochs
    if len(epochs) < 2:
        return ""
    names = ("epoch", "steps", "layers", "diverged", "first to diverge", "largest error", "at")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = ""
    for row in epochs:
        first = "-"
        if row.first is not None and row.first_layer is not None:
            first = f"{text.layer_name(row.first_layer)}, batch {row.first[1]}"
        worst = text.layer_name(row.worst_layer) if row.worst_layer and row.error else "-"
        numbers = (text.count(n) for n in (row.steps, row.layers, row.diverged))
        cells = (*numbers, first, text.number(row.error, 4), worst)
        body += f'<tr><th scope="row">{row.epoch}</th>'
        body += "".join(f"<td>{said(cell)}</td>" for cell in cells) + "</tr>"
    return (
        '<section><h2>Epoch by epoch</h2><table class="both">'
        '<caption class="unseen">How the two runs compare, epoch by epoch</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></section>"
    )


def _generations_html(comparison: Comparison) -> str:
    """What the two runs wrote, a row for each text; nothing where they wrote none."""
    if not comparison.generations:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in HEAD)
    body = ""
    for first, *cells in generation_rows(comparison.generations):
        inside = "".join(f"<td>{said(cell)}</td>" for cell in cells)
        body += f'<tr><th scope="row">{said(first)}</th>{inside}</tr>'
    return (
        '<section><h2>What the two runs wrote</h2><table class="both">'
        '<caption class="unseen">The texts of both runs, and where they part</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></section>"
    )


def _floor_words(comparison: Comparison) -> str:
    if any(row.floor is not None for row in comparison.layers):
        return f"Dashed: the floor ({words(comparison.floor)})." if comparison.floor else ""
    return ""


def _foot_html(comparison: Comparison) -> str:
    import tensortap

    entries = {
        "reference": comparison.reference,
        "candidate": comparison.candidate,
        "floor": comparison.floor,
        "judged by": f"preset {comparison.preset}" if comparison.preset else "",
        "truth": comparison.truth or "",
        "made by": f"tensortap {tensortap.__version__}",
    }
    return terms_html(entries)
