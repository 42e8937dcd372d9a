"""What two outputs of different shapes have in common."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from ..shapes import shape_words
from ..sketch import agreement
from .cause import Cause

__all__ = ["shape_cause"]

_MOST_AXES = 3  # of another extent: with more, nothing simple happened

_Part = tuple[int, slice, str]


def shape_cause(
    ours: Sequence[int], theirs: Sequence[int], tensors: tuple[Tensor, Tensor] | None
) -> Cause:
    """The cause `shape`: both shapes, and which part of one side the other side holds.

    A stride that moved leaves every second position, a token that was dropped the rest of them.
    """
    found = None if tensors is None else _held(*tensors)
    tail = "" if found is None else f"; the {found[0]} holds {found[1]} of the {found[2]}"
    text = f"the output has another shape: {shape_words(ours, theirs)}{tail}"
    return Cause("shape", 1.0, text, {"reference": list(ours), "candidate": list(theirs)})


def _held(reference: Tensor, candidate: Tensor) -> tuple[str, str, str] | None:
    """The shorter side, what it holds, and the longer side; None where nothing simple does."""
    if reference.dim() != candidate.dim():
        return None
    ours, theirs = reference.shape, candidate.shape
    if all(n >= m for n, m in zip(ours, theirs, strict=True)):
        words = _part_held(reference, candidate)
        return None if words is None else ("candidate", words, "reference")
    if all(n <= m for n, m in zip(ours, theirs, strict=True)):
        words = _part_held(candidate, reference)
        return None if words is None else ("reference", words, "candidate")
    return None


def _part_held(long: Tensor, short: Tensor) -> str | None:
    axes = [axis for axis, size in enumerate(long.shape) if size != short.shape[axis]]
    if not axes or len(axes) > _MOST_AXES or not short.numel():
        return None
    options = (list(_parts(axis, long.shape[axis], short.shape[axis])) for axis in axes)
    for parts in itertools.product(*options):
        view = long
        for axis, part, _ in parts:
            view = view[(slice(None),) * axis + (part,)]
        if view.shape != short.shape:
            continue
        found = agreement(view, short)
        if found.clear and found.telling:
            return " and ".join(words for _, _, words in parts)
    return None


def _parts(axis: int, long: int, short: int) -> Iterator[_Part]:
    yield axis, slice(0, short), f"the first {short} of {long} on axis {axis}"
    yield axis, slice(long - short, long), f"the last {short} of {long} on axis {axis}"
    step = -(-long // short)
    if step > 1:
        for start in range(step):
            after = "" if not start else f" from {start} on"
            words = f"one of every {step} on axis {axis}{after}"
            yield axis, slice(start, None, step), words
