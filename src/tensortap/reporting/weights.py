"""A comparison of two checkpoints in the terminal: what differs, and the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .console import stdout

if TYPE_CHECKING:
    from rich.console import Console

    from ..comparing.weights.results import WeightComparison

__all__ = ["print_weights"]


def print_weights(comparison: WeightComparison, *, only_bad: bool = False) -> None:
    """One line for each weight that is not the same, the config, and a sentence."""
    console = stdout()
    shown = comparison.differing if only_bad else [row for row in comparison.weights if row.how]
    for item in comparison.config:
        text = f"config {item.name}: {item.reference} -> {item.candidate}"
        _say(console, text)
    width = max((len(row.name) for row in shown), default=0)
    for row in shown:
        text = f"{row.verdict:<12} {row.name:<{width}}  {row.text}"
        _say(console, text)
    for note in comparison.notes:
        _say(console, note)
    _say(console, comparison.sentence)


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
