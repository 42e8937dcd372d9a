"""Softmax over keys: another temperature, or a mask that is another.

Where a model works out its attention step by step, the probabilities themselves are heard. Rows
that add up to one on both sides tell what was done to the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import places_words
from .fits import Fit, factor_words
from .pairs import Pairs

__all__ = ["probabilities"]

_ONE = 1e-3  # how far a row may be from one
_NONE = 1e-30
_EXACT = 1e-5
_CLEAR = 0.01


def probabilities(pairs: Pairs) -> Fit | None:
    """What was done to the scores, where both sides are a softmax over their last axis."""
    if pairs.whole is None or pairs.energy <= 0 or pairs.exponent or pairs.finite is not None:
        return None
    if pairs.sampled or pairs.order:
        return None
    r, c = (side.detach().cpu().double() for side in pairs.whole[:2])
    if r.dim() < 3 or r.shape[-1] < 2 or not all(_softmax(side) for side in (r, c)):
        return None
    ours, theirs = r > _NONE, c > _NONE
    both = ours & theirs
    masked = None
    if not bool((ours == theirs).all()):
        masked = _masked(pairs, r, c, ours, theirs, both)
    return masked or _tempered(pairs, r, c, both)


def _softmax(side: Tensor) -> bool:
    rows = side.sum(-1)
    return bool((side >= 0).all()) and bool((((rows - 1).abs() < _ONE) | (rows == 0)).all())


def _exact(pairs: Pairs, made: Tensor, candidate: Tensor) -> float | None:
    """The part of the error that is left, where that is rounding."""
    rest = float((made - candidate).square().sum())
    near = (_EXACT + 2 * pairs.floor) ** 2 * float(candidate.square().sum())
    return rest / pairs.energy if rest <= near and rest <= _CLEAR * pairs.energy else None


def _masked(
    pairs: Pairs, r: Tensor, c: Tensor, ours: Tensor, theirs: Tensor, both: Tensor
) -> Fit | None:
    """The same scores under another mask: on what both look at they differ by a factor a row."""
    a, b = (torch.where(both, side, 0.0) for side in (r, c))
    size = a.sum(-1, keepdim=True)
    if not bool((size > 0).all()):
        return None
    made = torch.where(both, a / size * b.sum(-1, keepdim=True), c)
    left = _exact(pairs, made, c)
    if left is None:
        return None
    words = [
        f"{places_words(part)} {what}"
        for part, what in (
            (theirs & ~ours, "should be hidden and are looked at"),
            (ours & ~theirs, "should be looked at and are hidden"),
        )
        if bool(part.any())
    ]
    text = f"softmax under another mask: {' and '.join(words)}"
    return Fit("mask", left, left, text, 0.9, 0.05, details={"of": "probabilities"})


def _tempered(pairs: Pairs, r: Tensor, c: Tensor, both: Tensor) -> Fit | None:
    """Scores times a factor: logarithms in proportion, but for a constant in each row."""
    log = [torch.where(both, side.clamp_min(_NONE).log(), 0.0) for side in (r, c)]
    count = both.sum(-1, keepdim=True).clamp_min(1)
    x, y = (torch.where(both, side - side.sum(-1, keepdim=True) / count, 0.0) for side in log)
    size = float(x.square().sum())
    if not size > 0:
        return None
    gain = float((x * y).sum()) / size
    made = torch.where(both, x * gain, -torch.inf).softmax(-1)
    left = _exact(pairs, torch.nan_to_num(made), c)
    if left is None:
        return None
    text = f"softmax of scores that are {factor_words(gain)} times the reference's: another scale"
    return Fit("scale", left, left, text, 0.9, 0.05, details={"factor": gain})
