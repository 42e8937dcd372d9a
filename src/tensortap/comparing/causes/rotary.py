"""Tables of rotary positions: cosines or sines of positions times falling speeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .fits import Fit, factor_words
from .pairs import Pairs

__all__ = ["rotary"]

_NEAR = 1e-3
_TELLS = 0.05  # the angle at the last position; of a smaller one the cosine is 1


@dataclass(frozen=True)
class _Table:
    """A table's base, how the places of a head are paired, and a factor of the positions."""

    base: float
    pairing: str
    factor: float

    def like(self, other: _Table) -> bool:
        """Whether two tables are the same as far as their values tell."""
        near = math.isclose(self.base, other.base, rel_tol=0.01)
        return near and self.pairing == other.pairing and abs(self.factor - other.factor) < 0.01

    def words(self) -> str:
        text = f"the base {self.base:.6g}, paired as {self.pairing}"
        if abs(self.factor - 1) < _NEAR:
            return text
        return f"{text}, positions times {factor_words(self.factor)}"


def rotary(pairs: Pairs) -> Fit | None:
    """Rotary tables with another base, another pairing, or positions times a factor."""
    if pairs.energy <= 0 or pairs.finite is not None or pairs.sampled or pairs.exponent:
        return None
    if pairs.shape[-2] < 4 or pairs.shape[-1] < 4 or pairs.shape[-1] % 2:
        return None
    sides = [side.reshape(-1, *side.shape[-2:])[0] for side in pairs.sides]
    ours, theirs = (_table(side) for side in sides)
    if ours is None or theirs is None or ours.like(theirs):
        return None
    text = f"rotary positions with {theirs.words()}, where the reference has {ours.words()}"
    details = {"base": theirs.base, "reference_base": ours.base, "factor": theirs.factor}
    return Fit("rotary", 0.0, 0.0, text, 0.8, 0.05, details=details)


def _table(side: Tensor) -> _Table | None:
    """What a table of (position, place) was made of; None where it is not one."""
    half = side.shape[1] // 2
    if torch.allclose(side[:, :half], side[:, half:], atol=1e-6):
        pairing, values = "halves", side[:, :half]
    elif torch.allclose(side[:, ::2], side[:, 1::2], atol=1e-6):
        pairing, values = "neighbours", side[:, ::2]
    else:
        return None
    if not bool((values.abs() <= 1 + 1e-3).all()):
        return None
    cosines = bool((values[0] - 1).abs().max() < _NEAR)
    if not cosines and not bool(values[0].abs().max() < _NEAR):
        return None
    first = values[1].clamp(-1, 1)
    speeds = torch.arccos(first) if cosines else torch.arcsin(first)
    # Slow ones are known by their last position, since a cosine near 1 tells little.
    last = len(values) - 1
    slow = speeds * last < 1
    far = values[last].clamp(-1, 1)
    exact = (torch.arccos(far) if cosines else torch.arcsin(far)) / last
    speeds = torch.where(slow, exact, speeds)
    told = (speeds * last > _TELLS).numpy()
    if told.sum() < 3:
        return None
    places = np.arange(len(speeds)) / len(speeds)
    slope, start = np.polyfit(places[told], np.log(speeds.numpy()[told]), 1)
    made = torch.exp(torch.from_numpy(start + slope * places))
    angles = torch.outer(torch.arange(len(values), dtype=torch.float64), made)
    again = angles.cos() if cosines else angles.sin()
    if float((again - values).abs().max()) > 0.02:
        return None
    return _Table(float(f"{np.exp(-slope):.4g}"), pairing, float(f"{np.exp(start):.4g}"))
