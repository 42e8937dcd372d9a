"""Two tensors made ready for fitting: in float64, of bounded size, without what is not finite.

Most hypotheses are least squares in one or two unknowns for each place of an axis. All of them
follow from a few sums for each row and each channel, which are taken once. The sums are of the
difference and the reference, not of the candidate: a small difference keeps its digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...numerics.profile import Profile, profile
from .fits import Floats

__all__ = ["LIMIT", "Pairs", "Sums", "prepared"]

LIMIT = 1 << 20  # elements that are looked at one by one
_MOST_CHANCE = 0.9


class Sums(NamedTuple):
    """Over the finite pairs of each place: how many, d, r, d², dr, d²r², r²; d = candidate - r."""

    n: Floats
    d: Floats
    r: Floats
    dd: Floats
    dr: Floats
    ddrr: Floats
    rr: Floats

    def chance_of_constants(self) -> float:
        """The squared error that a constant for each place removes from noise, on average."""
        return float((self.dd / self.n.clip(1)).sum())

    def chance_of_factors(self) -> float:
        """The same of factors; large where a few values are most of a place's size."""
        positive = self.rr > 0
        return float((self.ddrr[positive] / self.rr[positive]).sum())


@dataclass(frozen=True, eq=False)
class Pairs:
    """Both sides of one shape, at least two axes, values that are not finite set to zero.

    `axes` are the names of the axes, `starts` and `sizes` say which part of the whole is here.
    `floor` is the relative error that rounding explains; `raw` are both sides with what is not
    finite in them, where there is any. `whole` are both sides as they were given.
    """

    reference: Tensor
    candidate: Tensor
    difference: Tensor
    finite: Tensor | None
    input: Tensor | None
    axes: tuple[str, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    floor: float
    dtypes: tuple[torch.dtype, torch.dtype]
    raw: tuple[Tensor, Tensor] | None = None
    whole: tuple[Tensor, Tensor] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.reference.shape)

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        return self.reference, self.candidate

    @property
    def sampled(self) -> bool:
        return self.shape != self.sizes

    @cached_property
    def _sums(self) -> tuple[Floats, Floats]:
        """The sums of each row, over the last axis, and of each channel: one product at a time."""
        lead = tuple(range(len(self.shape) - 1))
        rows, columns = [], []
        for part in self._terms():
            rows.append(part.sum(-1).numpy())
            columns.append(part.sum(lead).numpy())
        return np.stack(rows), np.stack(columns)

    def _terms(self) -> Iterator[Tensor]:
        d, r = self.difference, self.reference
        if self.finite is None:
            yield torch.ones((), dtype=torch.float64).expand(d.shape)
        else:
            yield self.finite.to(torch.float64)
        yield d
        yield r
        yield d * d
        product = d * r
        yield product
        yield product.square_()
        yield r * r

    @property
    def _rows(self) -> Floats:
        return self._sums[0]

    @property
    def _columns(self) -> Floats:
        return self._sums[1]

    @cached_property
    def total(self) -> Sums:
        return Sums(*(np.atleast_1d(part) for part in self._columns.sum(1)))

    @property
    def count(self) -> float:
        return float(self.total.n[0])

    @property
    def energy(self) -> float:
        """The squared error."""
        return float(self.total.dd[0])

    @property
    def noise(self) -> float:
        """The part of the squared error that rounding explains, at most half."""
        expected = self.floor**2 * float(self.total.rr[0])
        return min(0.5, expected / self.energy) if self.energy > 0 else 0.0

    @property
    def relative(self) -> float:
        """The relative L2 error; infinite where the reference is zero."""
        size = float(self.total.rr[0])
        return math.sqrt(self.energy / size) if size > 0 else math.inf

    def rows(self) -> Sums:
        """The sums of each row: of all axes but the last."""
        return Sums(*self._rows.reshape(7, -1))

    def along(self, axis: int) -> Sums:
        """The sums of each place of one axis."""
        last = len(self.shape) - 1
        if axis % len(self.shape) == last:
            return Sums(*self._columns)
        others = tuple(1 + a for a in range(last) if a != axis)
        return Sums(*self._rows.sum(others))

    def left(self, changed: Tensor) -> float:
        """The part of the squared error that is left when the reference is changed to this."""
        rest = self.candidate - changed
        if self.finite is not None:
            rest *= self.finite
        return float((rest * rest).sum()) / self.energy

    def adjusted(self, left: float, chance: float) -> float:
        """What is left, so that noise leaves all of itself.

        `chance` is the squared error that as many free numbers remove from noise of this size.
        Where that is more than half, only what leaves next to nothing is believed.
        """
        share = chance / self.energy
        if share > _MOST_CHANCE:
            return 1.0
        if share > 0.5 + 1e-9:
            return left if left < 1e-6 else 1.0
        return min(1.0, left / (1 - share))

    def within(self, places: Sequence[Sequence[int] | None]) -> Pairs:
        """The pairs at some places of each axis; None stands for all."""

        def cut(tensor: Tensor | None) -> Tensor | None:
            for axis, chosen in enumerate(places):
                if tensor is not None and chosen is not None:
                    tensor = tensor.index_select(axis, torch.as_tensor(list(chosen)))
            return tensor

        reference, candidate = cut(self.reference), cut(self.candidate)
        difference = cut(self.difference)
        assert reference is not None and candidate is not None and difference is not None
        return replace(
            self,
            reference=reference,
            candidate=candidate,
            difference=difference,
            finite=cut(self.finite),
            input=cut(self.input),
            starts=(0,) * len(self.shape),
            sizes=tuple(reference.shape),
        )

    def at_rows(self, rows: Sequence[Sequence[int]]) -> Pairs:
        """The pairs of some rows, each given by its place in all axes but the last."""
        flat = [int(np.ravel_multi_index(tuple(row), self.shape[:-1])) for row in rows]

        def as_rows(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.reshape(-1, self.shape[-1])

        reference, candidate = as_rows(self.reference), as_rows(self.candidate)
        difference = as_rows(self.difference)
        assert reference is not None and candidate is not None and difference is not None
        made = replace(
            self,
            reference=reference,
            candidate=candidate,
            difference=difference,
            finite=as_rows(self.finite),
            input=as_rows(self.input),
            axes=("token", "channel"),
            starts=(0, 0),
            sizes=tuple(reference.shape),
        )
        return made.within((flat, None))


def prepared(
    reference: Tensor, candidate: Tensor, floor: float, given: Tensor | None
) -> tuple[Pairs, Profile]:
    """Both sides ready for fitting, and the profile of the whole of them."""
    dtypes = (reference.dtype, candidate.dtype)
    if given is not None and (given.shape != reference.shape or given.is_complex()):
        given = None
    names: list[str] = []
    if reference.is_complex() or candidate.is_complex():
        reference, candidate = (_parts(side) for side in (reference, candidate))
        names, given = ["part"], None
    while reference.dim() < 2:
        reference, candidate = reference.unsqueeze(0), candidate.unsqueeze(0)
        given = None if given is None else given.unsqueeze(0)
    found = profile(reference, candidate)
    assert found is not None
    sizes = tuple(reference.shape)
    axes = (*names, *_names(len(sizes) - len(names)))
    window = _window(sizes, found)
    sides = [_window_of(side, window) for side in (reference, candidate)]
    finite = torch.isfinite(sides[0]) & torch.isfinite(sides[1])
    whole = bool(finite.all())
    raw = None if whole else (sides[0], sides[1])
    if not whole:
        sides = [torch.where(finite, side, 0.0) for side in sides]
    other = None if given is None else _window_of(given, window)
    if other is not None and not bool(torch.isfinite(other).all()):
        other = None
    made = Pairs(
        reference=sides[0],
        candidate=sides[1],
        difference=sides[1] - sides[0],
        finite=None if whole else finite,
        input=other,
        axes=axes,
        starts=tuple(start for start, _ in window),
        sizes=sizes,
        floor=floor,
        dtypes=dtypes,
        raw=raw,
        whole=(reference, candidate),
    )
    return made, found


def _parts(tensor: Tensor) -> Tensor:
    """The real and the imaginary part, as a first axis."""
    if not tensor.is_complex():
        return torch.stack((tensor, torch.zeros_like(tensor)))
    return torch.view_as_real(tensor.resolve_conj()).movedim(-1, 0)


def _names(axes: int) -> tuple[str, ...]:
    """What the axes are called: the last are channels, before it tokens, the first samples."""
    if axes <= 2:
        return ("token", "channel")[-axes:]
    middle = ("head",) if axes == 4 else tuple(f"place of axis {a}" for a in range(1, axes - 2))
    return ("sample", *middle, "token", "channel")


def _window(sizes: Sequence[int], found: Profile) -> list[tuple[int, int]]:
    """A block of whole tokens around the worst place, of at most `LIMIT` elements."""
    room, window = LIMIT, []
    energy = found.tokens[:, 0].reshape(found.shape)
    for axis, size in enumerate(sizes):
        behind = math.prod(sizes[axis + 1 :])
        length = min(size, max(1, room // max(1, behind)))
        if axis == len(sizes) - 1:
            worst = int(found.channels[:, 0].argmax())
        else:
            others = tuple(a for a in range(energy.ndim) if a != axis)
            worst = int(energy.sum(others).argmax())
        window.append((max(0, min(worst - length // 2, size - length)), length))
        room //= length
    return window


def _window_of(tensor: Tensor, window: Sequence[tuple[int, int]]) -> Tensor:
    for axis, (start, length) in enumerate(window):
        tensor = tensor.narrow(axis, start, length)
    return tensor.detach().cpu().to(torch.float64).contiguous()
