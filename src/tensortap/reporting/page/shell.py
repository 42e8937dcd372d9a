"""What every page of ours is made of: one file, which its own policy forbids to fetch anything.

The style, the script and the data stand in it; what comes from a file enters as text, escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from .. import text

__all__ = [
    "as_json",
    "assembled",
    "notes_html",
    "said",
    "short",
    "terms_html",
    "warnings_html",
    "words",
]

_DIGITS = 8


def assembled(
    template: str, parts: Mapping[str, str], *, styles: Sequence[str], scripts: Sequence[str]
) -> str:
    """The template with its parts in it, a style sheet, a script, and a policy that knows both."""
    style, script = "".join(_read(name) for name in styles), _script(tuple(scripts))
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    every = {**parts, "style": style, "script": script, "policy": policy}
    # One pass, so that text which looks like a marker stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: every[found[1]], _read(template))


@cache
def _read(name: str) -> str:
    file = resources.files(__package__).joinpath(*name.split("/"))
    return file.read_text(encoding="utf-8").replace("\r\n", "\n")


@cache
def _script(names: tuple[str, ...]) -> str:
    """One function around all parts, so that the page's window stays clean."""
    parts = "".join(_read(f"script/{name}.js") for name in names)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


@cache
def _digest(content: str) -> str:
    """What the page's policy knows its style and its script by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def as_json(data: Mapping[str, Any]) -> str:
    """Strict JSON that can stand inside a script element, whatever the names in it."""
    plain = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def words(sentence: str) -> str:
    """A sentence from a file with its line breaks, without letters that are not printable."""
    return "\n".join(text.clean(line) for line in sentence.splitlines())


def said(sentence: str) -> str:
    """A sentence as markup that says it and nothing else."""
    return escape(words(sentence))


def short(value: float | None) -> float | str | None:
    """A number with few letters; None where it is undefined, a word where it is infinite."""
    if value is None or isinstance(value, int):
        return value
    if not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def warnings_html(warnings: Iterable[str]) -> str:
    items = "".join(
        f'<li class="warning"><b>Warning:</b> {said(warning)}</li>' for warning in warnings
    )
    return f'<ul class="warnings" aria-label="Warnings">{items}</ul>' if items else ""


def notes_html(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{said(note)}</li>" for note in notes)
    return f'<ul class="notes" aria-label="Notes">{items}</ul>' if items else ""


def terms_html(entries: Mapping[str, str]) -> str:
    """Terms and what they are; those that are nothing are left out."""
    items = "".join(
        f"<dt>{said(name)}</dt><dd>{said(value)}</dd>" for name, value in entries.items() if value
    )
    return f"<dl>{items}</dl>"
