"""A small histogram of blocks for the terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import text

if TYPE_CHECKING:
    import torch

    from ..numerics.summary import Summary

__all__ = ["Bars", "bars_of_summary", "bars_of_tensor", "counted", "draw", "finite_values"]

WIDTH = 40
HEIGHT = 5
_BLOCKS = " ▁▂▃▄▅▆▇█"
_LARGE = 1 << 24


@dataclass(frozen=True)
class Bars:
    """Counts over equal steps from `low` to `high`, and how many lie beyond."""

    low: float
    high: float
    counts: tuple[int, ...]
    below: int = 0
    above: int = 0
    approximate: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "low": self.low,
            "high": self.high,
            "counts": list(self.counts),
            "below": self.below,
            "above": self.above,
            "approximate": self.approximate,
        }


def finite_values(tensor: torch.Tensor, most: int | None = None) -> np.ndarray[Any, Any]:
    """The finite values of a tensor as a flat array; evenly picked ones when there are too many."""
    import torch

    flat = tensor.detach()
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    flat = flat.reshape(-1)
    if most is not None and flat.numel() > most:
        flat = flat[:: -(-flat.numel() // most)]
    values: np.ndarray[Any, Any] = flat.to(torch.float64).numpy()
    finite: np.ndarray[Any, Any] = values[np.isfinite(values)]
    return finite


def bars_of_tensor(tensor: torch.Tensor, low: float, high: float) -> Bars | None:
    """Count a tensor's values between two bounds; None when nothing is finite."""
    values = finite_values(tensor, _LARGE)
    if not values.size:
        return None
    low, high = _widened(low, high)
    counts, _ = counted(values, WIDTH, low, high)
    return Bars(
        low,
        high,
        tuple(int(n) for n in counts),
        below=int((values < low).sum()),
        above=int((values > high).sum()),
        approximate=tensor.numel() > _LARGE,
    )


def counted(
    values: np.ndarray[Any, Any], steps: int, low: float, high: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Counts and edges of equal steps; a span that overflows a float64 is counted at a quarter."""
    if math.isfinite(high - low):
        return np.histogram(values, bins=steps, range=(low, high))
    counts, edges = np.histogram(values / 4, bins=steps, range=(low / 4, high / 4))
    return counts, edges * 4


def bars_of_summary(summary: Summary, low: float, high: float) -> Bars | None:
    """The same from a summary's histogram, whose buckets are spread over the steps."""
    if summary.histogram is None or not summary.finite:
        return None
    low, high = _widened(low, high)
    lower, upper, counts = summary.histogram.buckets()
    lower = np.maximum(lower, summary.min)
    upper = np.minimum(upper, summary.max)
    upper = np.maximum(upper, lower)
    edges = np.linspace(low, high, WIDTH + 1)
    width = np.maximum(upper - lower, np.finfo(np.float64).tiny)
    with np.errstate(over="ignore"):
        share = np.clip((edges[:, None] - lower) / width, 0.0, 1.0)
    cumulative = np.rint((share * counts).sum(axis=1)).astype(np.int64)
    total = int(counts.sum())
    return Bars(
        low,
        high,
        tuple(int(n) for n in np.diff(cumulative)),
        below=int(cumulative[0]) if low > summary.min else 0,
        above=total - int(cumulative[-1]) if high < summary.max else 0,
        approximate=True,
    )


def span(low: float, high: float, inner_low: float, inner_high: float) -> tuple[float, float]:
    """From where to where to draw: all of it, unless outliers would squeeze the rest together."""
    inner = inner_high - inner_low
    if inner <= 0 or high - low <= 8 * inner:
        return low, high
    return max(low, inner_low - inner / 2), min(high, inner_high + inner / 2)


def _widened(low: float, high: float) -> tuple[float, float]:
    """A span of one value gets some room, as numpy's histogram wants it."""
    if high > low:
        return low, high
    room = max(abs(low) * 0.5, 0.5)
    return low - room, high + room


def draw(bars: Bars) -> list[str]:
    """The histogram as lines of blocks, with its axis and what lies beyond."""
    most = max(bars.counts) or 1
    levels = [-(-n * HEIGHT * 8 // most) for n in bars.counts]
    lines = [
        "".join(_BLOCKS[min(8, max(0, level - row * 8))] for level in levels).rstrip()
        for row in range(HEIGHT - 1, -1, -1)
    ]
    left, right = text.number(bars.low), text.number(bars.high)
    lines.append("─" * len(bars.counts))
    lines.append(left + right.rjust(len(bars.counts) - len(left)))
    beyond = [
        f"{text.count(n)} {where}"
        for n, where in ((bars.below, "below"), (bars.above, "above"))
        if n
    ]
    if beyond:
        lines.append(f"({', '.join(beyond)})")
    return lines
