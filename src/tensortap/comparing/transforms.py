"""How two tensors of one value in different layouts become views of equal shape.

`layouts` lists every way that the shapes allow, the likeliest first; whether one of them is true is
for the values to say.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

__all__ = ["Transform", "layouts", "reorderings"]

_Shape = tuple[int, ...]
_MOST_AXES = 6
_MOST_LAYOUTS = 400


@dataclass(frozen=True)
class Transform:
    """A change of layout, with its name for the report; both sides stay views.

    In this order: axes of extent 1 are dropped on either side (`squeeze`); on the side that has
    axes flattened they are divided again (`flat`, with how many axes each of its own becomes); the
    candidate's axes are permuted into the reference's order; and what is padding is cut off
    (`crop`: axis, and whether the first or the last part is kept). It fits other shapes of the same
    kind too. `shapes` are those it was found for.
    """

    name: str
    shapes: tuple[_Shape, _Shape] = ((), ())
    squeeze: tuple[_Shape, _Shape] = ((), ())
    flat: str = ""
    counts: _Shape = ()
    permute: _Shape = ()
    crop: tuple[tuple[int, str], ...] = ()

    def views(
        self, reference: torch.Tensor, candidate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tensors in the common layout."""
        ours, theirs = self._laid_out(reference, candidate)
        for axis, part in self.crop:
            extent = min(ours.shape[axis], theirs.shape[axis])
            ours, theirs = _cut(ours, axis, part, extent), _cut(theirs, axis, part, extent)
        return ours, theirs

    def _laid_out(
        self, ours: torch.Tensor, theirs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ours = ours.squeeze(self.squeeze[0]) if self.squeeze[0] else ours
        theirs = theirs.squeeze(self.squeeze[1]) if self.squeeze[1] else theirs
        cropped = {axis for axis, _ in self.crop}
        if self.flat == "candidate":
            order = _inverse(self.permute) if self.permute else range(ours.dim())
            sizes = [-1 if axis in cropped else ours.shape[axis] for axis in order]
            theirs = _divide(theirs, self.counts, sizes)
        if self.permute:
            theirs = theirs.permute(self.permute)
        if self.flat == "reference":
            sizes = [-1 if i in cropped else extent for i, extent in enumerate(theirs.shape)]
            ours = _divide(ours, self.counts, sizes)
        return ours, theirs

    def reference(self, tensor: torch.Tensor) -> torch.Tensor:
        """The reference's tensor in the common layout."""
        return self.views(tensor, _meta(self.shapes[1]))[0]

    def candidate(self, tensor: torch.Tensor) -> torch.Tensor:
        """The candidate's tensor in the common layout."""
        return self.views(_meta(self.shapes[0]), tensor)[1]

    @property
    def only_squeezes(self) -> bool:
        """Whether nothing is done but dropping axes of extent 1."""
        return self.squeeze != ((), ()) and not (self.flat or self.permute or self.crop)

    @property
    def cuts_channels(self) -> bool:
        """Whether something is cut off the last axis of the common layout."""
        ours, _ = self._laid_out(*(_meta(shape) for shape in self.shapes))
        return any(axis == ours.dim() - 1 for axis, _ in self.crop)

    def named(self, name: str) -> Transform:
        """The same transform under another name."""
        return replace(self, name=name)

    def fits(self, ours: Sequence[int], theirs: Sequence[int]) -> bool:
        """Whether tensors of these shapes come out with equal shapes, padding cut off included."""
        try:
            left, right = self.views(_meta(ours), _meta(theirs))
        except (RuntimeError, IndexError):
            return False
        return left.shape == right.shape


def _divide(tensor: torch.Tensor, counts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    start = 0
    for count in counts:
        part = list(sizes[start : start + count])
        if count > 1:
            tensor = tensor.unflatten(start, part)  # type: ignore[no-untyped-call]
        start += count
    return tensor


def _cut(tensor: torch.Tensor, axis: int, part: str, extent: int) -> torch.Tensor:
    start = 0 if part == "first" else tensor.shape[axis] - extent
    return tensor.narrow(axis, start, extent)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


@functools.lru_cache(maxsize=4096)
def layouts(ours: _Shape, theirs: _Shape) -> tuple[Transform, ...]:
    """Every transform that brings a tensor of shape `theirs` beside one of shape `ours`.

    Equal shapes have none but the reorderings of `reorderings`. Simple ones come first, and cut
    padding only where nothing else fits.
    """
    if ours == theirs or math.prod(ours) == 0 or math.prod(theirs) == 0:
        return ()
    whole = _unique(_whole(ours, theirs))
    return whole or _unique(_cropped(ours, theirs))


@functools.lru_cache(maxsize=4096)
def reorderings(shape: _Shape) -> tuple[Transform, ...]:
    """The permutations of whole axes that keep a shape, but for the one that does nothing."""
    if len(shape) > _MOST_AXES:
        return ()
    found = (_build(shape, shape, permute=order) for order in _orders(shape, shape, 0))
    return tuple(transform for transform in found if transform.permute)


def _unique(transforms: Iterator[Transform]) -> tuple[Transform, ...]:
    return tuple(dict.fromkeys(itertools.islice(transforms, _MOST_LAYOUTS)))


def _whole(ours: _Shape, theirs: _Shape) -> Iterator[Transform]:
    if math.prod(ours) != math.prod(theirs):
        return
    for squeeze in _squeezes(ours, theirs):
        left, right = _without(ours, squeeze[0]), _without(theirs, squeeze[1])
        if max(len(left), len(right)) > _MOST_AXES:
            continue
        if len(left) == len(right):
            for order in _orders(left, right, 0):
                yield _build(ours, theirs, squeeze=squeeze, permute=order)
        else:
            yield from _divided(ours, theirs, squeeze)


def _cropped(ours: _Shape, theirs: _Shape) -> Iterator[Transform]:
    for squeeze in _squeezes(ours, theirs):
        left, right = _without(ours, squeeze[0]), _without(theirs, squeeze[1])
        if max(len(left), len(right)) > _MOST_AXES:
            continue
        if len(left) != len(right):
            yield from _divided_and_cropped(ours, theirs, squeeze)
            continue
        for differing in (1, 2):
            orders = _orders(left, right, differing) if differing == 1 else [range(len(left))]
            for order in orders:
                axes = [i for i, axis in enumerate(order) if left[i] != right[axis]]
                if len(axes) == differing and (differing == 1 or len(left) > 2):
                    for parts in itertools.product(("first", "last"), repeat=differing):
                        crop = tuple(zip(axes, parts, strict=True))
                        yield _build(ours, theirs, squeeze=squeeze, permute=tuple(order), crop=crop)


def _squeezes(ours: _Shape, theirs: _Shape) -> Iterator[tuple[_Shape, _Shape]]:
    """Which axes of extent 1 to drop: as few as make the ranks equal, then all of them."""
    extra = len(ours) - len(theirs)
    longer = ours if extra > 0 else theirs
    ones = [axis for axis, extent in enumerate(longer) if extent == 1]
    for axes in itertools.islice(itertools.combinations(ones, abs(extra)), 20):
        yield (axes, ()) if extra > 0 else ((), axes)
    everywhere = tuple(
        tuple(axis for axis, extent in enumerate(shape) if extent == 1) for shape in (ours, theirs)
    )
    if extra:
        yield everywhere[0], everywhere[1]


def _without(shape: _Shape, axes: Sequence[int]) -> _Shape:
    return tuple(extent for axis, extent in enumerate(shape) if axis not in axes)


def _orders(left: _Shape, right: _Shape, differing: int) -> Iterator[_Shape]:
    """Orders of the right axes that agree with the left ones but for so many; as they are first.

    Axes of extent 1 are interchangeable, so only one of their orders is given.
    """

    def extend(order: list[int], misses: int) -> Iterator[_Shape]:
        place = len(order)
        if place == len(left):
            if misses == differing:
                yield tuple(order)
            return
        skipped_one = False
        for axis in sorted(set(range(len(right))) - set(order), key=lambda a: (a != place, a)):
            if right[axis] == 1:
                if skipped_one:
                    continue
                skipped_one = True
            miss = left[place] != right[axis]
            if misses + miss <= differing and not (miss and 1 in (left[place], right[axis])):
                yield from extend([*order, axis], misses + miss)

    if len(left) == len(right):
        yield from extend([], 0)


def _divided(ours: _Shape, theirs: _Shape, squeeze: tuple[_Shape, _Shape]) -> Iterator[Transform]:
    left, right = _without(ours, squeeze[0]), _without(theirs, squeeze[1])
    flat, (short, long) = (
        ("reference", (left, right)) if len(left) < len(right) else ("candidate", (right, left))
    )
    for order in itertools.permutations(range(len(long))):
        extents = [long[axis] for axis in order]
        for counts in _compositions(len(long), len(short)):
            if _products(extents, counts) == list(short):
                permute = tuple(order) if flat == "reference" else tuple(_inverse(order))
                yield _build(
                    ours, theirs, squeeze=squeeze, flat=flat, counts=counts, permute=permute
                )


def _divided_and_cropped(
    ours: _Shape, theirs: _Shape, squeeze: tuple[_Shape, _Shape]
) -> Iterator[Transform]:
    left, right = _without(ours, squeeze[0]), _without(theirs, squeeze[1])
    flat, (short, long) = (
        ("reference", (left, right)) if len(left) < len(right) else ("candidate", (right, left))
    )
    for counts in _compositions(len(long), len(short)):
        products = _products(long, counts)
        wrong = [i for i, product in enumerate(products) if product != short[i]]
        if len(wrong) != 1:
            continue
        start = sum(counts[: wrong[0]])
        for axis in range(start, start + counts[wrong[0]]):
            rest, kept = products[wrong[0]] // long[axis], short[wrong[0]]
            extents = sorted((kept // rest, long[axis]))
            # Half of an axis is more than padding: samples, say, that one side dropped.
            if kept % rest or extents[0] * 2 <= extents[1]:
                continue
            for part in ("first", "last"):
                yield _build(
                    ours,
                    theirs,
                    squeeze=squeeze,
                    flat=flat,
                    counts=counts,
                    crop=((axis, part),),
                )


@functools.lru_cache(maxsize=64)
def _compositions(total: int, parts: int) -> tuple[_Shape, ...]:
    """Ways to write a number as a sum of so many positive ones; one large part first."""
    if not parts:
        return ()
    cuts = itertools.combinations(range(1, total), parts - 1)
    found = [tuple(b - a for a, b in itertools.pairwise((0, *cut, total))) for cut in cuts]
    return tuple(sorted(found, key=lambda counts: -max(counts)))


def _products(extents: Sequence[int], counts: _Shape) -> list[int]:
    ends = list(itertools.accumulate(counts))
    return [math.prod(extents[end - n : end]) for end, n in zip(ends, counts, strict=True)]


def _build(
    ours: _Shape,
    theirs: _Shape,
    *,
    squeeze: tuple[_Shape, _Shape] = ((), ()),
    flat: str = "",
    counts: _Shape = (),
    permute: _Shape = (),
    crop: tuple[tuple[int, str], ...] = (),
) -> Transform:
    if permute == tuple(range(len(permute))):
        permute = ()
    shapes = (ours, theirs)
    transform = Transform("", shapes, squeeze, flat, counts, permute, crop)
    return transform.named(_name(transform))


def _name(transform: Transform) -> str:
    parts = [
        f"squeeze {_axes(axes)} of the {side}"
        for side, axes in zip(("reference", "candidate"), transform.squeeze, strict=True)
        if axes
    ]
    if transform.permute:
        order = transform.permute if transform.flat != "candidate" else _inverse(transform.permute)
        parts.append(f"permute {tuple(order)}")
    if transform.flat:
        other = "candidate" if transform.flat == "reference" else "reference"
        ends = itertools.accumulate(transform.counts)
        groups = [
            f"axes {end - count}..{end - 1}"
            for end, count in zip(ends, transform.counts, strict=True)
            if count > 1
        ]
        parts.append(f"flatten {' and '.join(groups)} of the {other}")
    if transform.crop:
        ours, theirs = transform._laid_out(*(_meta(shape) for shape in transform.shapes))
        for axis, part in transform.crop:
            low, high = sorted((ours.shape[axis], theirs.shape[axis]))
            parts.append(f"padding: {part} {low} of {high} on axis {axis}")
    return ", ".join(parts)


def _meta(shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), device="meta")


def _axes(axes: Sequence[int]) -> str:
    if len(axes) == 1:
        return f"axis {axes[0]}"
    return f"axes {', '.join(map(str, axes[:-1]))} and {axes[-1]}"
