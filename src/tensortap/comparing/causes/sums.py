"""What was added or left out: the difference as a sum of tensors that were made before.

A residual that is scaled, a branch that is lost, a skip that is not summed up: whatever it is, the
difference of the two sides is then a few tensors near by, each times a number, down to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .fits import Fit, factor_words
from .formulas import ACTIVATIONS, Term, terms_near
from .near import Near
from .pairs import Pairs

__all__ = ["gated", "summed", "ungated"]

_MOST_TERMS = 4
_EACH = 64  # elements for each number that is fitted
_EXACT = 3e-6  # beside the values, whatever the floor
_CLEAR = 1e-3  # of the squared error
_WHOLE = 1e-3  # how near a number is to a whole one
_LITTLE = 1e-4  # a number that makes no difference
_CHANNELS = 4
_GATES = ("silu", "sigmoid", "gelu")


def summed(pairs: Pairs, near: Sequence[Near]) -> Fit | None:
    """candidate = reference + a x t + …, with tensors t that were made before."""
    terms = _usable(pairs, near)
    if not terms:
        return None
    target = pairs.difference.reshape(-1)
    columns = [term.values.reshape(-1) for term in terms]
    chosen: list[int] = []
    rest = target
    for _ in range(min(_MOST_TERMS, len(terms), int(pairs.count // _EACH))):
        best = _nearest(rest, columns, chosen)
        if best is None:
            return None
        chosen.append(best)
        gains, rest = _solved(target, columns, chosen)
        if _nothing(pairs, rest):
            needed = [
                index for index, gain in zip(chosen, gains, strict=True) if abs(gain) > _LITTLE
            ]
            gains, rest = _solved(target, columns, needed)
            return _fit(pairs, [terms[index] for index in needed], gains, rest)
    return None


def gated(pairs: Pairs, near: Sequence[Near]) -> Fit | None:
    """candidate = reference + a factor for each token x t: another gate, or none."""
    if pairs.shape[-1] < _CHANNELS:
        return None
    for term in _usable(pairs, near):
        if term.own:  # a norm makes of its input what differs by a factor for each token
            continue
        size = term.values.square().sum(-1, keepdim=True)
        gains = (pairs.difference * term.values).sum(-1, keepdim=True) / size.clamp_min(1e-300)
        rest = pairs.difference - gains * term.values
        if _nothing(pairs, rest):
            left = float(rest.square().sum()) / pairs.energy
            low, high = (factor_words(float(x)) for x in (gains.min(), gains.max()))
            text = f"output = reference + {term.name} x a factor for each {pairs.row_name} "
            text += f"({low} to {high}), as another gate makes"
            return Fit("gate", left, left, text, 2.6, 0.05, details={"added": term.name})
    return None


def ungated(pairs: Pairs, near: Sequence[Near]) -> Fit | None:
    """One side is the other times a gate, but for a factor for each token, as a norm makes."""
    if pairs.shape[-1] < _CHANNELS or pairs.energy <= 0 or pairs.exponent:
        return None
    if pairs.finite is not None:
        return None
    for term in terms_near(pairs, near):
        for name in _GATES:
            gate = ACTIVATIONS[name](term.values)
            for product, other, lost in (
                (pairs.reference, pairs.candidate, True),
                (pairs.candidate, pairs.reference, False),
            ):
                made = other * gate
                size = made.square().sum(-1, keepdim=True)
                gains = (made * product).sum(-1, keepdim=True) / size.clamp_min(1e-300)
                if not _nothing(pairs, gains * made - product):
                    continue
                left = float((gains * made - product).square().sum()) / pairs.energy
                words = f"{name}({term.name}), but for a factor for each {pairs.row_name}"
                text = (
                    f"the reference is the output x {words}: the gate is lost"
                    if lost
                    else f"output = the reference x {words}: there is a gate that should not be"
                )
                return Fit("gate", left, left, text, 1.5, 0.05, details={"gate": term.name})
    return None


def _usable(pairs: Pairs, near: Sequence[Near]) -> list[Term]:
    """The tensors near by that are neither side, each once."""
    if pairs.energy <= 0 or pairs.exponent or pairs.finite is not None:
        return []
    found: list[Term] = []
    for term in terms_near(pairs, near):
        size = float(term.values.square().sum())
        sides = (*pairs.sides, *(other.values for other in found))
        if size > 0 and not any(_alike(term.values, side, size) for side in sides):
            found.append(term)
    return found


def _alike(a: Tensor, b: Tensor, size: float) -> bool:
    return float((a - b).square().sum()) <= 1e-10 * size


def _solved(
    target: Tensor, columns: Sequence[Tensor], chosen: Sequence[int]
) -> tuple[list[float], Tensor]:
    """The numbers by which some columns come nearest, and what is left."""
    basis = torch.stack([columns[index] for index in chosen], 1)
    gains = torch.linalg.lstsq(basis, target[:, None]).solution[:, 0]
    return gains.tolist(), target - basis @ gains


def _nearest(rest: Tensor, columns: Sequence[Tensor], taken: Sequence[int]) -> int | None:
    """The column that explains most of what is left."""
    best, most = None, 0.0
    for index, column in enumerate(columns):
        if index in taken:
            continue
        explained = float(rest @ column) ** 2 / float(column @ column)
        if explained > most:
            best, most = index, explained
    return best


def _nothing(pairs: Pairs, rest: Tensor) -> bool:
    """Whether what is left is rounding, and little of the error."""
    left = float(rest.square().sum())
    rounded = (2 * pairs.floor + _EXACT) ** 2 * float(pairs.reference.square().sum())
    return left <= rounded and left <= (_CLEAR + pairs.noise) * pairs.energy


def _fit(pairs: Pairs, terms: Sequence[Term], gains: Sequence[float], rest: Tensor) -> Fit:
    words, about = "", ""
    both = sorted(zip(terms, gains, strict=True), key=lambda pair: not pair[0].own)
    for term, gain in both:
        size = abs(gain)
        many = "" if abs(size - 1) < _WHOLE else f"{factor_words(size)} x "
        words += f" {'+' if gain > 0 else '-'} {many}{term.name}"
    if all(abs(gain + 1) < _WHOLE for _, gain in both):
        about = ": a residual is missing" if both[0][0].own else ": what is added is lost"
    elif all(abs(gain - 1) < _WHOLE for _, gain in both):
        about = ": what is added is new, or added twice"
    left = float(rest.square().sum()) / pairs.energy
    details = {"added": {term.name: gain for term, gain in both}}
    cost = 1.7 + 0.4 * len(terms)
    text = f"output = reference{words}{about}"
    return Fit("residual", left, left, text, cost, 0.05, details=details)
