"""Both sides as known functions of what was made before: another activation, a gate that is lost.

The reference must be one function of the tensors near it and the candidate another, both down to
rounding: then what was changed is known, and not only what it looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .fits import Fit, factor_words
from .near import Near
from .pairs import Pairs
from .sample import taken

__all__ = ["Term", "formula", "terms_near"]

_THIN = 4096
_EXACT = 3e-6  # what may be left beside the values, whatever the floor
_CLEAR = 1e-2  # of the squared error: what both formulas may leave
_MOST_FACTORS = 8  # tensors of which products are tried

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu6": F.relu6,
    "relu²": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": F.mish,
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "exp": torch.exp,
    "abs": torch.abs,
    "square": torch.square,
    "log1p": torch.log1p,
}


@dataclass(frozen=True)
class Term:
    """A tensor near by, or a half of the one that `half` names, in the shape of the two sides."""

    name: str
    values: Tensor
    own: bool
    half: str = ""
    later: bool = False


@dataclass(frozen=True)
class _Formula:
    """A function of some terms; `shape` is the kind of function, `inner` the activation in it."""

    shape: str
    terms: tuple[int, ...]
    inner: str
    apply: Callable[[Tensor, Tensor], Tensor]

    def of(self, terms: Sequence[Term], part: slice = slice(None)) -> Tensor:
        first, last = terms[self.terms[0]].values, terms[self.terms[-1]].values
        return self.apply(first.reshape(-1)[part], last.reshape(-1)[part])

    def words(self, terms: Sequence[Term]) -> str:
        first, last = (terms[index].name for index in (self.terms[0], self.terms[-1]))
        changed = f"{self.inner}({first})" if self.inner else first
        if self.shape == "one":
            return changed
        return f"{changed} {'x' if self.shape == 'product' else self.shape} {last}"


def formula(pairs: Pairs, near: Sequence[Near]) -> Fit | None:
    """What the reference makes of the tensors near by, and what the candidate makes of them."""
    if pairs.energy <= 0 or pairs.exponent or pairs.finite is not None or not near:
        return None
    terms = list(terms_near(pairs, near))
    if not terms:
        return None
    # What is handed on unchanged, as by dropout, is the reference itself and says nothing of it.
    telling = [term for term in terms if not _is(pairs, term.values.reshape(-1), _flat(pairs), 1)]
    earlier = [term for term in terms if not term.later or any(term is t for t in telling)]
    for known in (telling, earlier) if len(telling) < len(earlier) else (telling,):
        fit = _of(pairs, known)
        if fit is not None:
            return fit
    return None


def _flat(pairs: Pairs) -> Tensor:
    return pairs.reference.reshape(-1)


def _of(pairs: Pairs, terms: Sequence[Term]) -> Fit | None:
    """Both sides as functions of these tensors."""
    ours = _found(pairs, terms, pairs.reference)
    if ours is None:
        return None
    theirs = _found(pairs, terms, pairs.candidate)
    if theirs is None or (theirs.terms, theirs.inner, theirs.shape) == (
        ours.terms,
        ours.inner,
        ours.shape,
    ):
        return None
    left = pairs.left(theirs.of(terms).reshape(pairs.shape))
    was, now = ours.words(terms), theirs.words(terms)
    kind, about = _kind(ours, theirs, terms)
    text = f"output = {now}, where the reference is {was}{about}"
    return Fit(kind, left, left, text, 0.8, 0.05, details={"reference": was, "candidate": now})


def _kind(ours: _Formula, theirs: _Formula, terms: Sequence[Term]) -> tuple[str, str]:
    """What such a change is called, and in words."""
    if ours.shape == "product":
        if theirs.shape == "product":
            same = set(ours.terms) == set(theirs.terms)
            swapped = same and ours.terms != theirs.terms
            return "gate", ": gate and up are exchanged" if swapped else ": another gate"
        return "gate", ": the gate is lost"
    if theirs.shape == "product":
        return "gate", ": there is a gate that should not be"
    if "one" in (ours.shape, theirs.shape) and ours.shape != theirs.shape:
        gone = theirs.shape == "one"
        return "residual", f": what is added is {'lost' if gone else 'new'}"
    if ours.shape != "one":
        return "residual", ": another sum"
    if not ours.inner and not theirs.inner:
        halves = [terms[one.terms[0]].half for one in (ours, theirs)]
        if halves[0] and halves[0] == halves[1]:
            return "gate", ": the halves are exchanged"
        return "source", ": another tensor is taken"
    return "function", ": another activation" if ours.terms == theirs.terms else ""


def terms_near(pairs: Pairs, near: Sequence[Near]) -> Iterator[Term]:
    """The tensors of this shape, and halves of those that are twice as wide."""
    given = pairs.given_shape
    for one in near:
        name = one.name
        if not one.floats or len(one.shape) != len(given) or one.shape[:-1] != given[:-1]:
            continue
        if one.shape == given:
            yield Term(name, _here(pairs, one.tensor()), one.own, later=one.later)
        elif one.shape[-1] == 2 * given[-1]:
            first, second = one.tensor().chunk(2, -1)
            yield Term(f"the first half of {name}", _here(pairs, first), False, name)
            yield Term(f"the second half of {name}", _here(pairs, second), False, name)


def _here(pairs: Pairs, tensor: Tensor) -> Tensor:
    while tensor.dim() < 2:
        tensor = tensor.unsqueeze(0)
    return taken(pairs.as_here(tensor), pairs.places)


def _found(pairs: Pairs, terms: Sequence[Term], side: Tensor) -> _Formula | None:
    """The simplest formula that is this side down to rounding."""
    flat = side.reshape(-1)
    step = max(1, len(flat) // _THIN)
    few = slice(None, None, step)
    target = flat[few]
    for option in _formulas(terms, side):
        if _is(pairs, option.of(terms, few), target, step) and _is(
            pairs, option.of(terms), flat, 1
        ):
            return option
    return None


def _is(pairs: Pairs, made: Tensor, target: Tensor, step: int) -> bool:
    """Whether two tensors are the same but for rounding, and for little of the error."""
    rest = float((made - target).square().sum())
    rounded = (2 * pairs.floor + _EXACT) ** 2 * float(target.square().sum())
    return rest <= rounded and rest <= (_CLEAR + pairs.noise) * pairs.energy / step * 4


def _formulas(terms: Sequence[Term], side: Tensor) -> Iterator[_Formula]:
    """From the simplest on: a tensor, a function of one, a product or a sum of two."""
    every = range(len(terms))
    for a in every:
        yield _Formula("one", (a,), "", lambda x, _: x)
    for a in every:
        for name, function in ACTIVATIONS.items():
            yield _Formula("one", (a,), name, lambda x, _, f=function: f(x))  # type: ignore[misc]
        slope = _slope(terms[a].values, side)
        if slope is not None:
            name = f"leaky_relu[{factor_words(slope)}]"
            leaky = _leaky(slope)
            yield _Formula("one", (a,), name, lambda x, _, f=leaky: f(x))  # type: ignore[misc]
    some = every[:_MOST_FACTORS]
    for a in some:
        for b in some:
            if a == b:
                continue
            if a < b:
                yield _Formula("+", (a, b), "", lambda x, y: x + y)
                yield _Formula("product", (a, b), "", lambda x, y: x * y)
            yield _Formula("-", (a, b), "", lambda x, y: x - y)
    for a in some:
        for b in some:
            for name, function in ACTIVATIONS.items():
                if a != b:
                    yield _Formula(
                        "product",
                        (a, b),
                        name,
                        lambda x, y, f=function: f(x) * y,  # type: ignore[misc]
                    )


def _leaky(slope: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.where(x > 0, x, slope * x)


def _slope(values: Tensor, side: Tensor) -> float | None:
    """The factor of what is negative, where what is positive is as it was."""
    positive = values > 0
    if not torch.allclose(side[positive], values[positive], rtol=1e-2, atol=0.0):
        return None
    negative = values[~positive]
    size = float(negative.square().sum())
    if not size > 0:
        return None
    slope = float((side[~positive] * negative).sum()) / size
    return slope if 1e-4 < abs(slope) < 1 - 1e-4 else None
