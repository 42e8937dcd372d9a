"""Numbers and sizes as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["clean", "count", "layer_name", "number", "plural", "shape", "size"]


def number(value: float | None, digits: int = 5) -> str:
    """A number in few letters: plain where that is short, with an exponent where it is not."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        text = f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
        return text if "e" not in text else f"{value:.0f}"
    return f"{value:.{digits - 2}e}"


def size(nbytes: int) -> str:
    """Bytes with the unit that fits."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError


def count(value: int) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,}"


def plural(value: int, word: str) -> str:
    return f"{value:,} {word}" if value == 1 else f"{value:,} {word}s"


def shape(extents: Iterable[int]) -> str:
    return f"[{', '.join(str(extent) for extent in extents)}]"


def layer_name(name: str) -> str:
    """The root module has an empty name, which nobody would see."""
    return clean(name) or "(root)"


def clean(text: str) -> str:
    """Text from a file without the letters that could drive a terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)
