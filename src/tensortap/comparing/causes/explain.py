"""`explain`: all hypotheses fitted to two tensors, and those worth a word, best first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from ...numerics.pairs import check_pair
from .affine import affine, affines, bias, factor, factors, positions, shift, sign
from .attention import attention
from .capped import activated, dropout, soft_cap
from .cause import Cause
from .elementwise import function
from .fits import Fit
from .formats import rounding, saturation
from .formulas import formula
from .grids import grid
from .inputs import branch, residual, skipped
from .layouts import offset, offset_of_added, transpose
from .lookup import lookup
from .near import Near
from .noise import noise, not_finite
from .order import orders
from .pairs import Pairs, prepared
from .places import Region, region_fit, regions
from .probabilities import probabilities
from .reductions import reduction
from .rotary import rotary
from .sums import gated, summed, ungated

__all__ = ["explain"]

_MOST = 3
_NOTHING = 1e-3  # what is left of the error and not worth another hypothesis
_PRICE = 0.3  # of a hypothesis' cost, in powers of ten of what it leaves
_GOOD = 0.02  # what is left where a hypothesis says what happened to a part of the tensor
# Said of a part of the tensor under their own name; the others are said with the part's.
_OWN_NAME = ("sign", "saturation")


def explain(
    reference: Tensor,
    candidate: Tensor,
    *,
    floor: float = 0.0,
    input: Tensor | None = None,
    axes: Sequence[str] = (),
    near: Sequence[Near] = (),
) -> tuple[Cause, ...]:
    """What made the difference of two tensors of one shape, best first, at most three.

    `floor` is the relative L2 error that rounding explains. `input` is what the layer was given,
    where it has the shape of the output: a missing residual shows by it. `axes` are the names of
    the axes, where they are not the usual ones (`sample`, `channel`, `row`, `column` of a
    convolution). `near` are tensors of the reference that were made before. Nothing is said where
    there is no difference; where no hypothesis fits, a cause of the kind `noise` says that.
    """
    check_pair(reference, candidate)
    if not reference.numel():
        return ()
    with np.errstate(all="ignore"):
        return _explained(reference, candidate, floor, input, axes, near)


def _explained(
    reference: Tensor,
    candidate: Tensor,
    floor: float,
    input: Tensor | None,
    axes: Sequence[str],
    near: Sequence[Near],
) -> tuple[Cause, ...]:
    floor = floor if math.isfinite(floor) and floor > 0 else 0.0
    pairs, found = prepared(reference, candidate, floor, input, axes)
    odd = not_finite(pairs, found)
    said = () if odd is None else (odd,)
    if not float(found.tokens[:, 0].sum()) > 0:
        return said
    if not 0 < pairs.energy < math.inf or not math.isfinite(float(pairs.total.rr[0])):
        return said or (noise(pairs, found),)
    region = regions(pairs, found)
    known = _nothing_left(pairs) or probabilities(pairs)
    for made_of in (lookup, formula, reduction, attention):
        known = known or made_of(pairs, near)
        if known is not None:
            return (*said, _cause(known, pairs))
    tables = rotary(pairs)
    if tables is not None:
        return (*said, _cause(tables, pairs))
    fits = list(_fits(pairs))
    fits += [fit for made in (summed, gated, ungated) if (fit := made(pairs, near)) is not None]
    if region is not None:
        fits.append(_inside(pairs, region))
    chosen = _chosen(fits, pairs)
    if not chosen:
        return said or (noise(pairs, found),)
    return (*said, *(_cause(fit, pairs) for fit in chosen))[:_MOST]


def _nothing_left(pairs: Pairs) -> Fit | None:
    """A candidate that is zero all over: whatever else it looks like, that is what it is."""
    whole = pairs.whole
    return factor(pairs) if whole is not None and not bool(whole[1].any()) else None


def _fits(pairs: Pairs) -> Iterator[Fit]:
    """What was done to the whole tensor, from the simplest hypothesis on.

    Once one leaves nothing, those that ask for more belief have nothing to add.
    """
    single = (factor, shift, residual, skipped, rounding, offset, offset_of_added, saturation)
    bent = (dropout, soft_cap, activated)
    for hypothesis in (*single, *bent, branch, grid, sign, transpose, affine):
        fit = hypothesis(pairs)
        if fit is not None:
            yield fit
            if _rest(fit, pairs) <= _NOTHING and not fit.place:
                return
    for several in (orders, bias, positions, factors, affines):
        yield from several(pairs)
    last = function(pairs)
    if last is not None:
        yield last


def _inside(pairs: Pairs, region: Region) -> Fit:
    """A region, and what was done to it where that can be said."""
    fit = region_fit(region)
    part = _part(pairs, region)
    if part.count < 4 or not part.energy > 0:
        return fit
    options = [made for one in (factor, shift, saturation, affine) if (made := one(part))]
    good = [
        option
        for option in options
        if _rest(option, part) <= (5 * _GOOD if option.kind in _OWN_NAME else _GOOD)
    ]
    if not good:
        return fit
    best = min(good, key=lambda option: _score(option, part))
    left = 1 - region.share * (1 - best.left)
    kind = best.kind if best.kind in _OWN_NAME else fit.kind
    within = {"kind": best.kind, "text": best.text, **best.details}
    cost = 1.8 if best.kind in _OWN_NAME else 2.5
    made = replace(fit, kind=kind, left=left, adjusted=left, cost=cost, place=False)
    return replace(made, text=f"{fit.text}: {best.text}").with_details(within=within)


def _part(pairs: Pairs, region: Region) -> Pairs:
    """The pairs of a region."""
    return pairs.at_rows(region.rows) if region.rows else pairs.within(region.places)


def _chosen(fits: Sequence[Fit], pairs: Pairs) -> list[Fit]:
    """Those that explain enough, each simpler than those before it or clearly better."""
    good = [fit for fit in fits if _rest(fit, pairs) <= fit.most]
    good.sort(key=lambda fit: _score(fit, pairs))
    chosen: list[Fit] = []
    for fit in good:
        if not chosen or _adds(fit, chosen, pairs):
            chosen.append(fit)
    return chosen[:_MOST]


def _adds(fit: Fit, chosen: Sequence[Fit], pairs: Pairs) -> bool:
    """Whether a worse hypothesis is worth a word beside better ones."""
    rest = _rest(fit, pairs)
    best = min(_rest(other, pairs) for other in chosen)
    if best <= _NOTHING or rest > 0.05 + 5 * best:
        return False
    if fit.place or any(other.place for other in chosen):
        return all(other.place != fit.place for other in chosen)
    simpler = all(fit.cost < other.cost for other in chosen)
    return (simpler and rest <= 0.1) or all(rest < _rest(other, pairs) / 3 for other in chosen)


def _rest(fit: Fit, pairs: Pairs) -> float:
    """What is left beyond rounding, per degree of freedom."""
    return max(0.0, fit.adjusted - pairs.noise) / (1 - pairs.noise)


def _score(fit: Fit, pairs: Pairs) -> float:
    """Less is better: what is left, in powers of ten, and a price for what is to be believed."""
    return math.log10(_rest(fit, pairs) + _NOTHING) + _PRICE * fit.cost


def _cause(fit: Fit, pairs: Pairs) -> Cause:
    explains = min(1.0, max(0.0, 1 - fit.left))
    details = dict(fit.details)
    if pairs.sampled:
        details["sampled"] = math.prod(pairs.shape)
        details["elements"] = math.prod(pairs.sizes)
    return Cause(fit.kind, explains, fit.text, details)
