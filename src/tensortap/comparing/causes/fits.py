"""What a hypothesis hands back: how much squared error it leaves, and with how many numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

__all__ = ["Fit", "Floats", "factor_words", "number_words", "range_words", "ranges"]

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Fit:
    """A hypothesis after fitting.

    `left` is the part of the squared error that it leaves, `adjusted` the same per degree of
    freedom, so that noise never explains itself. `cost` says how much there is to believe: 1 for
    a single number, more for one number a channel. `most` is the largest part that may be left for
    the hypothesis to be worth a word. `place` marks those that say where and not what.
    """

    kind: str
    left: float
    adjusted: float
    text: str
    cost: float = 1.0
    most: float = 0.5
    place: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    def with_details(self, **more: Any) -> Fit:
        return replace(self, details={**self.details, **more})


def number_words(value: float) -> str:
    """A number in four digits."""
    text = f"{value:.4g}"
    return "0" if text == "-0" else text


def factor_words(value: float) -> str:
    """A factor, with as many digits as its distance from 1 needs."""
    far = abs(value - 1)
    digits = 4 if far >= 1e-2 or far == 0 else min(12, 2 - math.floor(math.log10(far)))
    return number_words(value) if digits == 4 else f"{value:.{digits}f}".rstrip("0").rstrip(".")


def range_words(values: Floats, words: Callable[[float], str] = number_words) -> str:
    """From the least to the greatest of some values."""
    low, high = words(float(values.min())), words(float(values.max()))
    return low if low == high else f"{low} to {high}"


def ranges(places: Sequence[int], most: int = 6) -> str:
    """Ascending places as `0 to 15, 20, 31`; what is too long ends in how many more there are."""
    runs: list[list[int]] = []
    if len(places) > 2 and places[-1] - places[0] + 1 == len(places):
        return f"{places[0]} to {places[-1]}"
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    words = [
        str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs[:most]
    ]
    rest = sum(b - a + 1 for a, b in runs[most:])
    return ", ".join(words) + (f" and {rest} more" if rest else "")
