"""A comparison as one page that opens without a network, and as a table for a notebook.

The page is a single file: the style, the script and the data are in it, and its own policy forbids
it to fetch anything. What is said in words is written here, escaped; the chart and the table are
drawn by the script from a block of JSON, as text and never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from ...comparing.results import EnvironmentDifference
from .. import text
from .data import as_json, payload, words

if TYPE_CHECKING:
    from ...comparing.results import Comparison

__all__ = ["notebook", "render_page"]

_SCRIPTS = ("base", "table", "detail", "chart", "start")
_MOST = 200
_OUTCOMES = {"good": "agrees", "bad": "does not agree", "void": "nothing compared"}
_COLUMNS = ("layer", "verdict", "made", "error", "× floor", "MSE", "MAE", "max abs", "1 - cosine")


def render_page(comparison: Comparison) -> str:
    """The comparison as a page in one file."""
    style, script = _read("page.css"), _script()
    state = _state(comparison)
    data = {**payload(comparison), "floor_words": _floor_words(comparison)}
    parts = {
        "policy": f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'",
        "title": _said(_title(comparison)),
        "style": style,
        "state": state,
        "outcome": _OUTCOMES[state],
        "sentence": _said(comparison.sentence),
        "reference": _said(comparison.reference),
        "candidate": _said(comparison.candidate),
        "warnings": _warnings_html(comparison),
        "notes": _notes_html(comparison),
        "environment": _environment_html(comparison),
        "foot": _foot_html(comparison),
        "data": as_json(data),
        "script": script,
    }
    # One pass, so that text which looks like a marker stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("template.html"))


def notebook(comparison: Comparison) -> str:
    """The answer, the warnings and a plain table: no script, no style sheet."""
    from ...recording.html import table

    rows = []
    for row in comparison.layers[:_MOST]:
        d = row.difference
        metrics = (d.mse, d.mae, d.max_abs, d.cosine_distance) if d is not None else (None,) * 4
        numbers = [text.number(value, 4) for value in (row.error, row.floor_ratio, *metrics)]
        rows.append([text.layer_name(row.layer), row.verdict, row.origin or "", *numbers])
    said = [f"<p><b>{_said(comparison.sentence)}</b></p>"]
    said += [f"<p>Warning: {_said(warning)}</p>" for warning in _warnings(comparison)]
    said += [table(_COLUMNS, rows)] if rows else []
    rest = len(comparison.layers) - _MOST
    said += [f"<p>and {text.plural(rest, 'more layer')}</p>"] if rest > 0 else []
    return "".join(said)


@cache
def _read(name: str) -> str:
    file = resources.files(__package__).joinpath(*name.split("/"))
    return file.read_text(encoding="utf-8").replace("\r\n", "\n")


@cache
def _script() -> str:
    """One function around all parts, so that the page's window stays clean."""
    parts = "".join(_read(f"script/{name}.js") for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


@cache
def _digest(content: str) -> str:
    """What the page's policy knows its style and its script by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _said(sentence: str) -> str:
    return escape(words(sentence))


def _title(comparison: Comparison) -> str:
    first = comparison.first_divergence
    if first is not None:
        return f"Diverged at {text.layer_name(first.layer)} - tensortap"
    return f"{'No divergence' if comparison.compared else 'Nothing compared'} - tensortap"


def _state(comparison: Comparison) -> str:
    if not comparison.same:
        return "bad"
    return "good" if comparison.compared else "void"


def _warnings(comparison: Comparison) -> list[str]:
    """Different inputs first: nothing below means much when the models did not see the same."""
    found = list(comparison.warnings)
    if comparison.same_input is not False:
        return found
    about = [warning for warning in found if "input" in warning.lower()]
    first = about or ["The two runs did not get the same inputs."]
    return [*first, *(warning for warning in found if warning not in about)]


def _warnings_html(comparison: Comparison) -> str:
    items = "".join(
        f'<li class="warning"><b>Warning:</b> {_said(warning)}</li>'
        for warning in _warnings(comparison)
    )
    return f'<ul class="warnings" aria-label="Warnings">{items}</ul>' if items else ""


def _notes_html(comparison: Comparison) -> str:
    items = "".join(f"<li>{_said(note)}</li>" for note in comparison.notes)
    return f'<ul class="notes" aria-label="Notes">{items}</ul>' if items else ""


def _environment_html(comparison: Comparison) -> str:
    """Side by side: what differs in sight, what is the same folded away."""
    differs = [item for item in comparison.environment if item.reference != item.candidate]
    same = [item for item in comparison.environment if item.reference == item.candidate]
    same += [EnvironmentDifference(name, value, value) for name, value in comparison.in_common]
    if differs:
        said = _sides_html(differs, "What differs between the two runs")
    else:
        said = '<p class="soft">Nothing that the recordings say of the two runs differs.</p>'
    if same:
        summary = f"<summary>{text.plural(len(same), 'thing')} the same on both sides</summary>"
        inside = _sides_html(same, "What both runs have in common")
        said += f'<details class="plain">{summary}{inside}</details>'
    return said


def _sides_html(items: Iterable[EnvironmentDifference], caption: str) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "reference", "candidate"))
    body = "".join(
        f'<tr><th scope="row">{_said(item.name)}</th>'
        f"<td>{_said(item.reference)}</td><td>{_said(item.candidate)}</td></tr>"
        for item in items
    )
    return (
        f'<table class="both"><caption class="unseen">{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
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
    items = "".join(
        f"<dt>{name}</dt><dd>{_said(value)}</dd>" for name, value in entries.items() if value
    )
    return f"<dl>{items}</dl>"
