"""The right values in the wrong order along an axis: heads, channels, tokens, samples.

The distance of every place of the candidate from every place of the reference is one product of
matrices. Where each wrong place has a nearest partner among the wrong places, and no two share
one, the partners are the order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .fits import Fit
from .pairs import Pairs

__all__ = ["head_order", "orders"]

_MOST_PLACES = 2048
_MOST_BLOCKS = 256
_WORK = 1 << 27  # multiplications for one matrix of distances
_THIN = 1 << 17  # elements from which an order is guessed, before it is tried on all
_LEFT = 0.1
_MOST_NAMED = 12


def orders(pairs: Pairs) -> list[Fit]:
    """A permutation of the places of each axis, of blocks of channels first."""
    found = [head_order(pairs)]
    for axis in range(len(pairs.shape)):
        if pairs.axes[axis] != "channel" or found[0] is None:
            found.append(_order(pairs, axis))
    return [fit for fit in found if fit is not None]


def head_order(pairs: Pairs) -> Fit | None:
    """Equal blocks of channels in another order; the widest blocks that show it."""
    channels = pairs.shape[-1]
    if pairs.energy <= 0 or channels != pairs.sizes[-1]:
        return None
    rows = max(8, _THIN // channels)
    thin = [_thinned(side.reshape(-1, channels), rows, 0) for side in pairs.sides]
    for blocks in range(2, min(_MOST_BLOCKS, channels // 2) + 1):
        if channels % blocks:
            continue
        width = channels // blocks
        partners = _partners(*(_blocks(side, blocks) for side in thin))
        if partners is None:
            continue
        moved, order = partners
        index = (torch.as_tensor(order)[:, None] * width + torch.arange(width)).reshape(-1)
        left = pairs.left(pairs.reference.index_select(-1, index))
        if left > _LEFT + pairs.noise:
            continue
        if width > 1 and blocks > _MOST_NAMED and _rolled(order):
            continue  # a roll is said as one, of channels
        text = f"heads in another order: {_order_words(order, moved)} (of width {width})"
        details = {"width": width, "order": order[:256]}
        return Fit("permutation", left, left, text, 1.5, _LEFT, details={**details, "of": "heads"})
    return None


def _blocks(side: Tensor, blocks: int) -> Tensor:
    """A row for each block of channels."""
    return side.reshape(-1, blocks, side.shape[-1] // blocks).transpose(0, 1).reshape(blocks, -1)


def _order(pairs: Pairs, axis: int) -> Fit | None:
    """The places of an axis in another order."""
    pairs = pairs.with_all_of(axis)
    size = pairs.shape[axis]
    if size < 2 or size != pairs.sizes[axis] or pairs.energy <= 0:
        return None
    if axis == len(pairs.shape) - 1:
        rows = [side.reshape(-1, size) for side in pairs.sides]
        thin = [_thinned(side, max(16, _THIN // size), 0).T for side in rows]
    else:
        behind = max(1, 16 * _THIN // size)
        thin = [_thinned(_axis_first(side, axis), behind, 1) for side in pairs.sides]
    partners = _partners(*thin)
    if partners is None:
        return None
    moved, order = partners
    left = pairs.left(pairs.reference.index_select(axis, torch.as_tensor(order)))
    if left > _LEFT + pairs.noise:
        return None
    name = pairs.axes[axis]
    details = {
        "of": f"{name}s",
        "axis": pairs.axis_given(axis),
        "order": order[:256],
        "moved": len(moved),
    }
    rolled = _rolled(order)
    if rolled:
        details["roll"] = rolled
    text = f"{name}s {_order_text(order, moved, rolled)}"
    cost = 1.2 if rolled or len(moved) == 2 else 2.0
    return Fit("permutation", left, left, text, cost, _LEFT, details=details)


def _axis_first(side: Tensor, axis: int) -> Tensor:
    """A row for each place of an axis, as a view where the tensor's layout allows it."""
    moved = side.movedim(axis, 0)
    most = max(1, 16 * _THIN // moved[:, 0].numel())
    if moved.dim() > 2 and moved.shape[1] > most:
        moved = moved[:, torch.linspace(0, moved.shape[1] - 1, most).long()]
    return moved.reshape(moved.shape[0], -1)


def _thinned(rows: Tensor, most: int, dim: int) -> Tensor:
    """At most so many rows or columns, spread over all."""
    if rows.shape[dim] <= most:
        return rows
    return rows.index_select(dim, torch.linspace(0, rows.shape[dim] - 1, most).long())


def _partners(reference: Tensor, candidate: Tensor) -> tuple[list[int], list[int]] | None:
    """The rows that are not in their place, and for each row of the candidate the reference's."""
    rest = (candidate - reference).square().sum(1)
    size = reference.square().sum(1) + candidate.square().sum(1)
    wrong = torch.nonzero(rest > 1e-4 * size)[:, 0]
    if len(wrong) < 2:
        return None
    if len(wrong) > _MOST_PLACES:
        at = _same_rows(reference[wrong], candidate[wrong])
        return None if at is None else _ordered(len(reference), wrong, at)
    a, b = reference[wrong], candidate[wrong]
    if a.shape[1] < 4 and not _same_values(a, b):
        return None  # so few values have near partners by chance
    most = max(16, _WORK // len(wrong) ** 2)
    a, b = _thinned(a, most, 1), _thinned(b, most, 1)
    far = a.square().sum(1)[None, :] + b.square().sum(1)[:, None] - 2 * (b @ a.T)
    nearest, at = far.min(1)
    if len(set(at.tolist())) < len(wrong):
        return None
    if float(nearest.clamp_min(0).sum()) > 0.3 * float(far.diagonal().sum()):
        return None
    return _ordered(len(reference), wrong, at)


def _ordered(size: int, wrong: Tensor, at: Tensor) -> tuple[list[int], list[int]] | None:
    order = np.arange(size)
    order[wrong.numpy()] = wrong[at].numpy()
    return None if (order == np.arange(size)).all() else (wrong.tolist(), order.tolist())


def _same_rows(a: Tensor, b: Tensor) -> Tensor | None:
    """For each row of b the row of a that is the same to the last bit; too many to try all."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(a.shape[1], generator=generator, dtype=torch.float64)
    (left, first), (right, second) = (side.mul(weights).sum(1).sort() for side in (a, b))
    if not torch.equal(left, right):
        return None
    at = torch.empty_like(first)
    at[second] = first
    return at


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Whether both hold the same values to the last bit, in whatever order."""
    return bool(torch.equal(a.flatten().sort()[0], b.flatten().sort()[0]))


def _rolled(order: Sequence[int]) -> int:
    """By how many places all are rolled; 0 for none."""
    by = -order[0] % len(order)
    even = all((place - by) % len(order) == other for place, other in enumerate(order))
    if not even:
        return 0
    return by if by <= len(order) // 2 else by - len(order)


def _order_text(order: Sequence[int], moved: Sequence[int], rolled: int) -> str:
    size = len(order)
    if len(moved) == 2:
        return f"{moved[0]} and {moved[1]} (of {size}) swapped"
    if rolled:
        return f"rolled by {rolled} (of {size})"
    if list(order) == list(range(size))[::-1]:
        return f"in reverse order (of {size})"
    outer = _interleaved(order)
    if outer:
        return f"interleaved: ({outer}, {size // outer}) read as ({size // outer}, {outer})"
    return f"in another order: {_order_words(order, moved)} (of {size})"


def _interleaved(order: Sequence[int]) -> int:
    """The number of blocks that were read the other way round; 0 for none."""
    size = len(order)
    outer = next((n for n in range(2, size // 2 + 1) if size % n == 0 and order[1] == size // n), 0)
    if not outer:
        return 0
    expected = np.arange(size).reshape(outer, size // outer).T.reshape(-1)
    return outer if (expected == np.asarray(order)).all() else 0


def _order_words(order: Sequence[int], moved: Sequence[int]) -> str:
    if len(order) <= _MOST_NAMED:
        return ", ".join(str(place) for place in order)
    named = [f"{order[place]} at {place}" for place in moved[:6]]
    more = len(moved) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
