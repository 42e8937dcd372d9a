"""Values that are bent or taken away one by one: a soft cap, and dropout that is still active."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .fits import Fit, factor_words, number_words
from .formulas import ACTIVATIONS
from .pairs import Pairs

__all__ = ["activated", "dropout", "soft_cap"]

_EXACT = 3e-6
_CLEAR = 1e-3
_MOST = 0.95  # of the values that dropout may take
_LEAST = 8  # values that it has to take
_SIGMAS = 6.0


def soft_cap(pairs: Pairs) -> Fit | None:
    """One side is cap x tanh(the other side / cap)."""
    if pairs.energy <= 0 or pairs.finite is not None or pairs.exponent or pairs.count < 16:
        return None
    for bent, straight, lost in (
        (pairs.candidate, pairs.reference, False),
        (pairs.reference, pairs.candidate, True),
    ):
        cap = _cap(bent, straight)
        if cap is None:
            continue
        rest = float((bent - cap * torch.tanh(straight / cap)).square().sum())
        rounded = (2 * pairs.floor + _EXACT) ** 2 * float(bent.square().sum())
        if rest > rounded or rest > (_CLEAR + pairs.noise) * pairs.energy:
            continue
        words = number_words(cap)
        text = (
            f"reference = {words} x tanh(output / {words}): a soft cap is lost"
            if lost
            else f"output = {words} x tanh(reference / {words}): a soft cap that should not be"
        )
        left = rest / pairs.energy
        return Fit("saturation", left, left, text, 1.2, 0.05, details={"cap": cap, "lost": lost})
    return None


def _cap(bent: Tensor, straight: Tensor) -> float | None:
    """The cap that bends one side into the other, by the value that is bent most."""
    ratio = torch.where(straight != 0, bent / straight, 1.0)
    if float(ratio.min()) < 0 or float(ratio.max()) > 1 + 1e-3 or float(ratio.min()) > 1 - 1e-5:
        return None
    wanted = torch.where((ratio > 0.3) & (ratio < 1), ratio, 1.0).argmin()
    x, y = abs(float(straight.reshape(-1)[wanted])), abs(float(bent.reshape(-1)[wanted]))
    if not 0 < y < x:
        return None
    low, high = y * (1 + 1e-9), 1e6 * x
    for _ in range(200):  # cap x tanh(x / cap) grows with the cap
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle * math.tanh(x / middle) < y else (low, middle)
    return high if math.isfinite(high) and high > 0 else None


def activated(pairs: Pairs) -> Fit | None:
    """One side is a known activation of the other, down to rounding."""
    if pairs.energy <= 0 or pairs.finite is not None or pairs.exponent or pairs.count < 16:
        return None
    for name, function in ACTIVATIONS.items():
        for bent, straight, lost in (
            (pairs.candidate, pairs.reference, False),
            (pairs.reference, pairs.candidate, True),
        ):
            rest = float((bent - function(straight)).square().sum())
            rounded = (2 * pairs.floor + _EXACT) ** 2 * float(bent.square().sum())
            if not (rest <= rounded and rest <= (_CLEAR + pairs.noise) * pairs.energy):
                continue
            text = (
                f"reference = {name}(output): an activation is lost"
                if lost
                else f"output = {name}(reference): there is an activation that should not be"
            )
            left = rest / pairs.energy
            return Fit("function", left, left, text, 1.3, 0.05, details={"function": name})
    return None


def dropout(pairs: Pairs) -> Fit | None:
    """Some values are zero, here and there, and all others are larger by what that takes away."""
    if pairs.energy <= 0 or pairs.finite is not None or pairs.sampled:
        return None
    r, c = pairs.sides
    living = r != 0
    gone = living & (c == 0)
    count, lost = int(living.sum()), int(gone.sum())
    if lost < _LEAST or not lost < _MOST * count:
        return None
    kept = living & ~gone
    gain = float((r * c)[kept].sum() / r[kept].square().sum())
    rest = float((c - gain * r)[kept].square().sum())
    size = float(c.square().sum())
    rounded = (2 * pairs.floor + _EXACT) ** 2 * size
    share, told = lost / count, 1 - 1 / gain if gain > 0 else 0.0
    spread = _SIGMAS * math.sqrt(share * (1 - share) / count)
    if rest > rounded or not gain > 1 + 1e-3 or abs(told - share) > spread:
        return None
    left = rest / pairs.energy
    text = f"{100 * share:.2g} % of the values are zero and all others {factor_words(gain)} times "
    text += "the reference: dropout is active"
    return Fit("dropout", left, left, text, 1.0, 0.05, details={"share": share, "factor": gain})
