"""How many tokens chose other experts at a layer, as data and in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

__all__ = ["Flips", "about_flips"]


@dataclass(frozen=True)
class Flips:
    """The tokens of a layer that chose other experts than in the reference.

    Of `tokens`, `changed` chose other experts, and `reordered` the same in another order. `beyond`
    are those that rounding does not explain; `followed` those that an earlier choice had touched,
    so that they came in with other values. `margin` is the largest of the others', by the
    reference's own scores; `room` the largest that is to be expected. `basis` says what they rest
    on: the `scores` of all experts, the `values` of the chosen ones, or the `count` of tokens where
    neither was recorded; then both are NaN.
    """

    tokens: int
    changed: int
    beyond: int = 0
    followed: int = 0
    reordered: int = 0
    margin: float = math.nan
    room: float = math.nan
    basis: Literal["scores", "values", "count"] = "count"

    def merge(self, other: Flips) -> Flips:
        """Both together, of two moments or of two layers."""
        bases = ("count", "values", "scores")
        return Flips(
            tokens=self.tokens + other.tokens,
            changed=self.changed + other.changed,
            beyond=self.beyond + other.beyond,
            followed=self.followed + other.followed,
            reordered=self.reordered + other.reordered,
            margin=_larger(self.margin, other.margin),
            room=_larger(self.room, other.room),
            basis=min(self.basis, other.basis, key=bases.index),
        )

    @property
    def words(self) -> str:
        """What happened, in words."""
        if not self.changed:
            order = f"{_of(self.reordered, self.tokens)} chose the same experts in another order"
            return f"{order}, {self._reason}"
        said = f"{_of(self.changed, self.tokens)} chose another expert"
        if self.beyond:
            return f"{said}, {self.beyond} of them by more than rounding explains{self._limit}"
        if self.followed == self.changed:
            return f"{said}, after an earlier choice had touched them"
        text = f"{said}, {'all ' if self.changed > 1 else ''}{self._reason}"
        if self.followed:
            text += f"; an earlier choice had touched {self.followed} of them"
        return text

    @property
    def _reason(self) -> str:
        if self.basis == "scores":
            return f"within a margin of {self.margin:.2g}{self._limit}"
        if self.basis == "values":
            return (
                f"between values that differ by {self.margin:.2g}{self._limit}; the scores of the "
                "experts left out were not recorded"
            )
        return "as many as rounding moves; what they were chosen by was not recorded"

    @property
    def _limit(self) -> str:
        if self.basis == "count" or not math.isfinite(self.room) or not self.room:
            return ""
        return f" (up to {self.room:.2g} is to be expected)"

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "changed": self.changed,
            "beyond": self.beyond,
            "followed": self.followed,
            "reordered": self.reordered,
            "margin": None if math.isnan(self.margin) else self.margin,
            "room": self.room if math.isfinite(self.room) else None,
            "basis": self.basis,
        }


def about_flips(found: Sequence[tuple[str, Flips]]) -> str:
    """A sentence about all layers at which tokens chose other experts; empty where none did."""
    changed = [(layer, flips) for layer, flips in found if flips.changed]
    if not changed:
        return ""
    whole = reduce(Flips.merge, (flips for _, flips in changed))
    layer, first = changed[0]
    if len(changed) == 1:
        return f" {first.words[0].upper()}{first.words[1:]} at {layer}."
    text = f" Tokens chose other experts at {len(changed)} layers (first {first.changed} of "
    text += f"{first.tokens} at {layer})"
    if whole.beyond:
        return f"{text}, {whole.beyond} of {whole.changed} by more than rounding explains."
    margins = [flips.margin for _, flips in changed if math.isfinite(flips.margin)]
    if len(margins) == len(changed):
        return f"{text}, all within a margin of {max(margins):.2g}."
    return f"{text}, as rounding explains."


def _larger(ours: float, theirs: float) -> float:
    known = [value for value in (ours, theirs) if not math.isnan(value)]
    return max(known, default=math.nan)


def _of(count: int, tokens: int) -> str:
    return f"{count} of {tokens} {'token' if tokens == 1 else 'tokens'}"
