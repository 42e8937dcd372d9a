"""A hypothesis about what made a difference, and how much of the difference it explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..results import number

__all__ = ["Cause", "say_little", "share_words"]


_LITTLE = ("noise", "tokens", "channels", "heads", "samples", "places")


@dataclass(frozen=True)
class Cause:
    """One explanation of candidate - reference, fitted numerically.

    `explains` is the part of the squared error that goes away when the reference is changed as the
    hypothesis says: 1 - |candidate - changed|² / |candidate - reference|². `text` says the change,
    as `output = 0.9808 x reference`; `details` holds its numbers by name, for programs.
    """

    kind: str
    explains: float
    text: str
    details: dict[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        if self.kind in ("noise", "not finite", "shape", "missing") or "argument" in self.details:
            return self.text
        return f"explains {share_words(self.explains)} of the error: {self.text}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "explains": number(self.explains),
            "text": self.text,
            "details": self.details,
        }


def say_little(causes: Sequence[Cause]) -> bool:
    """Whether causes say no more than where an error is, or nothing at all."""
    return not causes or (causes[0].kind in _LITTLE and "within" not in causes[0].details)


def share_words(share: float) -> str:
    """A share as a percentage that never says 100 % of what is a little less."""
    percent = 100 * share
    if percent >= 99.95:
        return "100 %" if share >= 1 - 1e-9 else "over 99.9 %"
    return f"{percent:.1f} %" if percent >= 10 else f"{percent:.2g} %"
