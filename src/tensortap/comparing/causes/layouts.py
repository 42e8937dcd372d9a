"""The right values read with the wrong shape: axes exchanged, reshaped, off by some tokens.

Each is a rule which element of the reference stands where, so it is tried on a few thousand places
drawn from the whole tensor, and only what fits there is measured on all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .fits import Fit
from .pairs import Pairs

__all__ = ["offset", "offset_of_added", "transpose"]

_PROBES = 4096
_MANY_PROBES = 1 << 16
_THIN = 1 << 14
_LEFT = 0.1
_MOST_OFFSET = 64
_MOST_HEADS = 128
_MOST_AXES = 6  # of more, only neighbours are exchanged


@dataclass(frozen=True)
class _Reading:
    """The reference viewed in `shape`, its axes permuted, and read in its own shape again."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    text: str

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.shape).permute(self.axes).reshape(tensor.shape)

    def source(self, flat: Tensor) -> Tensor:
        """Where in the reference the elements at these places come from."""
        permuted = [self.shape[axis] for axis in self.axes]
        strides = [math.prod(self.shape[axis + 1 :]) for axis in self.axes]
        found = torch.zeros_like(flat)
        for extent, stride in zip(reversed(permuted), reversed(strides), strict=True):
            found += flat % extent * stride
            flat = flat // extent
        return found


def transpose(pairs: Pairs) -> Fit | None:
    """The best of the wrong readings."""
    if pairs.energy <= 0 or pairs.count < 8 or pairs.whole is None:
        return None
    best: tuple[float, _Reading] | None = None
    reference, candidate = (pairs.as_given(side) for side in pairs.whole[:2])
    probes = _Probes(reference, candidate, _PROBES)
    for reading in _readings(tuple(reference.shape)):
        left = probes.left(reading)
        if left < 0.5 and (best is None or left < 0.5 * best[0]):
            best = (left, reading)
    if best is None:
        return None
    reading = best[1]
    if pairs.sampled:
        left = _Probes(reference, candidate, _MANY_PROBES).left(reading)
    else:
        left = pairs.left(pairs.as_here(reading.apply(pairs.as_given(pairs.reference))))
    details = {"shape": list(reading.shape), "axes": list(reading.axes)}
    return Fit("transpose", left, left, reading.text, 1.5, _LEFT, details=details)


class _Probes:
    """Places drawn from all of a tensor, and what both sides hold there."""

    def __init__(self, reference: Tensor, candidate: Tensor, most: int) -> None:
        self.reference = reference
        count = candidate.numel()
        generator = torch.Generator().manual_seed(0)
        self.places = (
            torch.arange(count)
            if count <= most
            else torch.randint(count, (most,), generator=generator)
        )
        self.candidate = _at(candidate, self.places)
        self.before = self._squares(self.places)

    def left(self, reading: _Reading) -> float:
        """The part of the squared error that a reading leaves."""
        return self._squares(reading.source(self.places)) / self.before if self.before > 0 else 1.0

    def _squares(self, source: Tensor) -> float:
        rest = self.candidate - _at(self.reference, source)
        return float(torch.where(torch.isfinite(rest), rest, 0.0).square().sum())


def _at(tensor: Tensor, places: Tensor) -> Tensor:
    """The elements at flat places, whatever the layout: nothing else is read."""
    found = tensor.detach()[torch.unravel_index(places, tensor.shape)]
    return found.cpu().to(torch.float64)


def _readings(shape: tuple[int, ...]) -> Iterator[_Reading]:
    """Exchanged axes first, then channels that are split into heads and exchanged with another."""
    axes = len(shape)
    for a in range(axes):
        for b in range(a + 1, axes):
            if shape[a] > 1 and shape[b] > 1 and (axes <= _MOST_AXES or b == a + 1):
                order = list(range(axes))
                order[a], order[b] = b, a
                words = f"axes {a} and {b} exchanged"
                if shape[a] != shape[b]:
                    words += f", and {list(shape)} read over it"
                yield _Reading(shape, tuple(order), f"transposed: {words}")
    channels = shape[-1]
    for heads in range(2, min(_MOST_HEADS, channels // 2) + 1):
        if channels % heads:
            continue
        width = channels // heads
        split = (*shape[:-1], heads, width)
        inner = (*range(axes - 1), axes, axes - 1)
        text = f"channels ({heads}, {width}) read as ({width}, {heads})"
        yield _Reading(split, inner, f"a wrong reshape: {text}")
        tokens = shape[-2]
        if tokens > 1:
            outer = (*range(axes - 2), axes - 1, axes - 2, axes)
            text = f"({tokens}, {heads}, {width}) read as ({heads}, {tokens}, {width})"
            yield _Reading(split, outer, f"a wrong reshape: {text}")
            other = (*shape[:-2], heads, tokens, width)
            text = f"({heads}, {tokens}, {width}) read as ({tokens}, {heads}, {width})"
            yield _Reading(other, outer, f"a wrong reshape: {text}")


def offset(pairs: Pairs) -> Fit | None:
    """Tokens off by k: the candidate's token t is the reference's token t - k."""
    pairs = pairs.with_all_of(len(pairs.shape) - 2)
    return _offset(pairs, pairs.reference, pairs.candidate, "output")


def offset_of_added(pairs: Pairs) -> Fit | None:
    """The same of what the layer adds to its input, as positions are added."""
    if pairs.input is None:
        return None
    pairs = pairs.with_all_of(len(pairs.shape) - 2)
    if pairs.input is None:
        return None
    return _offset(
        pairs, pairs.reference - pairs.input, pairs.candidate - pairs.input, "what it adds"
    )


def _offset(pairs: Pairs, reference: Tensor, candidate: Tensor, what: str) -> Fit | None:
    axis = len(pairs.shape) - 2
    size = pairs.shape[axis]
    if size < 3 or size < pairs.sizes[axis] or not pairs.energy > 0 or pairs.axes[axis] != "token":
        return None
    best: tuple[float, int] | None = None
    a, b, finite = (_thinned(t, axis) for t in (reference, candidate, pairs.finite))
    assert a is not None and b is not None
    for far in range(1, min(_MOST_OFFSET, size // 2) + 1):
        for by in (far, -far):
            left = _left_of(a, b, finite, by)
            if left < 0.5 * (1.0 if best is None else best[0]) and left <= _LEFT + pairs.noise:
                best = (left, by)
    if best is None:
        return None
    by = best[1]
    inside, wrong = _slices(size, by)
    rest = (candidate[..., inside[1], :] - reference[..., inside[0], :]).square()
    if pairs.finite is not None:
        rest *= pairs.finite[..., inside[1], :]
    border = pairs.difference[..., wrong, :].square().sum()
    left = float(rest.sum() + border) / pairs.energy
    if what == "output":
        rolled = pairs.left(reference.roll(by, axis))
        if rolled <= best[0] + 1e-6:
            text = f"tokens rolled by {by} (of {size})"
            details = {"of": "tokens", "axis": axis, "roll": by}
            return Fit("permutation", rolled, rolled, text, 1.2, _LEFT, details=details)
    tokens = "1 token" if abs(by) == 1 else f"{abs(by)} tokens"
    text = f"{what} off by {tokens}: token t holds what belongs to t {'-' if by > 0 else '+'} "
    text += f"{abs(by)} (of {size})"
    details = {"offset": by, "of": "added" if what != "output" else "output"}
    return Fit("offset", left, best[0], text, 1.2, _LEFT, details=details)


def _thinned(tensor: Tensor | None, axis: int) -> Tensor | None:
    """A few channels and samples, all tokens: enough to choose an offset by."""
    if tensor is None:
        return None
    made = tensor.reshape(-1, *tensor.shape[axis:])[: 1 + _THIN // 64]
    made = made.movedim(1, 0).reshape(tensor.shape[axis], -1)
    most = max(4, _THIN // made.shape[0])
    if made.shape[1] > most:
        made = made[:, torch.linspace(0, made.shape[1] - 1, most).long()]
    return made


def _slices(size: int, by: int) -> tuple[tuple[slice, slice], slice]:
    """The reference's and the candidate's tokens that are set side by side; those that are not."""
    if by > 0:
        return (slice(0, size - by), slice(by, size)), slice(0, by)
    return (slice(-by, size), slice(0, size + by)), slice(size + by, size)


def _left_of(a: Tensor, b: Tensor, finite: Tensor | None, by: int) -> float:
    (left, right), _ = _slices(len(a), by)
    rest, before = (b[right] - a[left]).square(), (b[right] - a[right]).square()
    if finite is not None:
        rest, before = rest * finite[right], before * finite[right]
    total = float(before.sum())
    return float(rest.sum()) / total if total > 0 else 1.0
