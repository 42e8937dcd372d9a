"""What a value in a JSON document may be: small checks that are put together to a schema.

A kind takes a value and the words that name its place, and gives the checked value back. Whatever
does not fit is `Unfit`, with a clause that says where, what was found and what was expected. What
has passed can be used without further thought: text can be encoded and has a length, numbers are
in their range, lists are lists.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "LONGEST_NAME",
    "LONGEST_TEXT",
    "Kind",
    "Unfit",
    "fields",
    "flag",
    "items",
    "mapping",
    "number",
    "one_of",
    "or_none",
    "parse",
    "plain",
    "text",
    "whole",
    "why_unfit",
    "writable",
]

Kind = Callable[[Any, str], Any]

LONGEST_NAME = 4096
"""Characters of a name: of a layer, a leaf, a type, a dtype, a device."""

LONGEST_TEXT = 1 << 20
"""Characters of a sentence, a prompt, a command."""

_DEEPEST = 64
_LARGEST = 1 << 1000  # a larger whole number does not fit a float
_SHOWN = 60


class Unfit(ValueError):
    """A value that is not of its kind."""


def parse(text: str | bytes | bytearray) -> Any:
    """JSON as Python values; whatever is wrong with it is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def text(longest: int = LONGEST_NAME) -> Kind:
    """Text of a bounded length that can be written as UTF-8."""

    def check(value: Any, what: str) -> str:
        if not isinstance(value, str):
            raise _other(value, what, "text")
        if len(value) > longest:
            raise Unfit(f"{what} is text of {len(value)} characters, expected at most {longest}")
        if not value.isascii():
            _encodable(value, what)
        return value

    return check


def whole(least: int = 0, most: int = (1 << 63) - 1) -> Kind:
    """A whole number within these bounds."""

    def check(value: Any, what: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _other(value, what, "a whole number")
        if not least <= value <= most:
            raise _other(value, what, f"a whole number from {least} to {most}")
        return value

    return check


def number(value: Any, what: str) -> float:
    """A number that fits a float; it may be NaN or infinite, as what it counts may be."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _other(value, what, "a number")
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise Unfit(f"{what} is a whole number beyond what a float holds")
    return value


def flag(value: Any, what: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise _other(value, what, "true or false")
    return value


def one_of(*words: str) -> Kind:
    """One of a few words."""

    def check(value: Any, what: str) -> str:
        if not isinstance(value, str) or value not in words:
            raise _other(value, what, " or ".join(repr(word) for word in words))
        return value

    return check


def or_none(kind: Kind) -> Kind:
    """The same, or null."""

    def check(value: Any, what: str) -> Any:
        return None if value is None else kind(value, what)

    return check


def items(kind: Kind, most: int | None = None) -> Kind:
    """A list of such values."""

    def check(value: Any, what: str) -> list[Any]:
        if not isinstance(value, list):
            raise _other(value, what, "a list")
        if most is not None and len(value) > most:
            raise Unfit(f"{what} is a list of {len(value)} items, expected at most {most}")
        return [kind(item, f"an item of {what}") for item in value]

    return check


def mapping(kind: Kind, key: Kind | None = None) -> Kind:
    """An object with any names, which has such values."""
    named = text() if key is None else key

    def check(value: Any, what: str) -> dict[str, Any]:
        return {
            named(name, f"a name in {what}"): kind(item, f"{what}.{name[:_SHOWN]}")
            for name, item in _object(value, what).items()
        }

    return check


def fields(known: Mapping[str, Kind], required: tuple[str, ...] = ()) -> Kind:
    """An object: what is known of it is checked, what is not must be plain."""
    named = text()

    def check(value: Any, what: str) -> dict[str, Any]:
        found = _object(value, what)
        for name in required:
            if name not in found:
                raise Unfit(f"{what} has no '{name}'")
        return {
            named(name, f"a name in {what}"): known.get(name, plain)(item, _inside(what, name))
            for name, item in found.items()
        }

    return check


def plain(value: Any, what: str) -> Any:
    """Any JSON value of bounded depth whose texts can be written and whose numbers are usable."""
    _plain(value, what, 0)
    return value


def _plain(value: Any, what: str, depth: int) -> None:
    if depth > _DEEPEST:
        raise Unfit(f"{what} is nested more than {_DEEPEST} deep")
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            raise Unfit(f"{what} holds text of {len(value)} characters")
        if not value.isascii():
            _encodable(value, what)
    elif isinstance(value, dict):
        for name, item in value.items():
            _plain(name, what, depth + 1)
            _plain(item, what, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _plain(item, what, depth + 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number(value, what)


def why_unfit(kind: Kind, value: Any, what: str) -> str | None:
    """Why a value is not of a kind, in a clause; None where it is."""
    try:
        kind(value, what)
    except Unfit as error:
        return str(error)
    return None


def writable(value: str, longest: int = LONGEST_NAME) -> str:
    """A text as a reader takes it: half characters are spelled out, and what is too long is cut,
    with a digest that still tells two such texts apart."""
    found = value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if len(found) <= longest:
        return found
    digest = hashlib.blake2b(found.encode(), digest_size=8).hexdigest()
    return f"{found[: longest - 17]}…{digest}"


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _other(value, what, "an object")
    return value


def _inside(what: str, name: str) -> str:
    name = name[:_SHOWN]
    return f"{what[:-1]}.{name}'" if what.endswith("'") else f"'{name}' of {what}"


def _encodable(value: str, what: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Unfit(f"{what} holds half a character (a lone surrogate)") from None


def _other(value: Any, what: str, expected: str) -> Unfit:
    return Unfit(f"{what} is {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    """A value in a few words, whatever it is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 1 << 70:
        return "a whole number of many digits"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return str(value) if math.isfinite(value) else f"the number {value}"
    if isinstance(value, str):
        return f"the text {value[:_SHOWN]!a}{'…' if len(value) > _SHOWN else ''}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
