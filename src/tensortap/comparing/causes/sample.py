"""Which part of a large tensor is looked at, and in which unit.

The part is spread over the whole of every axis, and holds the worst places besides: a block around
the worst place alone would be bad through and through, and what was done to it would be taken for
what was done to all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...numerics.profile import Profile
from .fits import Floats

__all__ = ["LIMIT", "Places", "axis_sums", "chosen", "exponent_of", "limited", "scaled", "taken"]

LIMIT = 1 << 20  # elements that are looked at one by one
_SPREAD = 16  # places that an axis keeps, before channels are left out
_SAFE = 200  # powers of two within which fourth powers and their sums are numbers

Places = tuple[Tensor | None, ...]  # of each axis those that are looked at; None: all


def exponent_of(*sides: Tensor) -> int:
    """The power of two of the largest finite value, where squares would not be numbers; else 0."""
    if not any(side.dtype == torch.float64 for side in sides):
        return 0
    most = max(_largest(side) for side in sides)
    exponent = math.frexp(most)[1] - 1 if most > 0 else 0
    return exponent if abs(exponent) > _SAFE else 0


def _largest(side: Tensor) -> float:
    if not side.numel() or not side.is_floating_point() or side.element_size() < 4:
        return 65504.0 if side.numel() else 0.0  # of what is narrower, every value is near enough
    low, high = (float(end) for end in torch.aminmax(side.detach()))
    most = max(abs(low), abs(high))
    if math.isfinite(most):
        return most
    finite = side.detach()[torch.isfinite(side.detach())]
    return float(finite.abs().max()) if finite.numel() else 0.0


def scaled(side: Tensor, exponent: int) -> Tensor:
    """side x 2^-exponent, in float64: in two steps, since the power may be no number itself."""
    if not exponent:
        return side
    half = exponent // 2
    return side.detach().to(torch.float64) * 2.0**-half * 2.0 ** (half - exponent)


def chosen(sizes: Sequence[int], found: Profile, keep: int | None = None) -> Places:
    """The places of each axis, at most `LIMIT` elements; `keep` is the axis that stays whole."""
    counts = list(sizes)
    while math.prod(counts) > LIMIT:
        lead = [a for a in range(len(sizes) - 1) if a != keep and counts[a] > _SPREAD]
        rest = [a for a in range(len(sizes)) if a != keep and counts[a] > 1]
        if not rest:
            break
        widest = max(lead or rest, key=lambda axis: counts[axis])
        counts[widest] = -(-counts[widest] // 2)
    return tuple(
        None if count == size else _spread(_badness(found, axis, len(sizes)), count)
        for axis, (count, size) in enumerate(zip(counts, sizes, strict=True))
    )


def limited(places: Sequence[Sequence[int] | None], sizes: Sequence[int]) -> Places:
    """At most `LIMIT` elements of those at some places."""
    kept = [
        torch.arange(size) if some is None else torch.as_tensor(some[:: 1 + len(some) // LIMIT])
        for some, size in zip(places, sizes, strict=True)
    ]
    while math.prod(len(some) for some in kept) > LIMIT:
        widest = max(range(len(kept)), key=lambda axis: len(kept[axis]))
        kept[widest] = kept[widest][::2]
    return tuple(kept)


def _spread(badness: Tensor, count: int) -> Tensor:
    """So many places: a quarter the worst, the others evenly over all."""
    worst = torch.topk(badness, max(1, count // 4))[1]
    even = torch.linspace(0, len(badness) - 1, count - len(worst), dtype=torch.float64).long()
    made: Tensor = torch.unique(torch.cat((worst, even)))
    return made


def _badness(found: Profile, axis: int, axes: int) -> Tensor:
    """By what the places of an axis are worst: pairs that are not finite first, then the error."""
    if axis == axes - 1:
        energy, odd = found.channels[:, 0], found.channels[:, 3]
    else:
        energy, odd = (axis_sums(found.tokens[:, part], found.shape, axis) for part in (0, 3))
    return torch.from_numpy(np.where(odd > 0, math.inf, energy))


def axis_sums(flat: Floats, shape: Sequence[int], axis: int) -> Floats:
    """The sums over all other axes; three axes at most are summed, however many there are."""
    behind = math.prod(shape[axis + 1 :])
    sums: Floats = flat.reshape(-1, shape[axis], behind).sum((0, 2))
    return sums


def taken(side: Tensor, places: Places) -> Tensor:
    """The elements at those places in float64; the axis that loses most comes first."""
    side = side.detach()
    cut = [axis for axis, some in enumerate(places) if some is not None]
    for axis in sorted(cut, key=lambda axis: len(places[axis]) / side.shape[axis]):  # type: ignore[arg-type]
        some = places[axis]
        assert some is not None
        # Not index_select: it copies the whole of a view whose elements are not in order.
        side = side[(slice(None),) * axis + (some.to(side.device),)]
    return side.cpu().to(torch.float64).contiguous()
