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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...numerics.profile import Profile, profile
from .axes import usual_axes
from .fits import Floats
from .sample import LIMIT, Places, chosen, exponent_of, limited, scaled, taken

__all__ = ["Pairs", "Sums", "prepared"]

_MOST_CHANCE = 0.9
_FEW = 16  # elements; of so few a number takes much by chance
Whole = tuple[Tensor, Tensor, Tensor | None]


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

    `axes` are the names of the axes, `places` and `sizes` say which part of the whole is here.
    `floor` is the relative error that rounding explains; `raw` are both sides with what is not
    finite in them, where there is any. `whole` are both sides and the input as they were given, and
    `found` their profile. All values are times 2^-exponent: `natural` gives them back. Channels
    are the last axis here, wherever they were given: `order` says which axis each of these was.
    """

    reference: Tensor
    candidate: Tensor
    difference: Tensor
    finite: Tensor | None
    input: Tensor | None
    axes: tuple[str, ...]
    places: Places
    sizes: tuple[int, ...]
    floor: float
    dtypes: tuple[torch.dtype, torch.dtype]
    exponent: int = 0
    raw: tuple[Tensor, Tensor] | None = None
    whole: Whole | None = None
    found: Profile | None = None
    order: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.reference.shape)

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        return self.reference, self.candidate

    @property
    def sampled(self) -> bool:
        return self.shape != self.sizes

    @property
    def row_name(self) -> str:
        """What a place of all axes but the channels is called."""
        return "token" if self.axes[-2] == "token" else "place"

    def natural(self, value: float) -> float:
        """A fitted value in the unit of the tensors."""
        return float(self.naturals(np.float64(value)))

    def naturals(self, values: Any) -> Any:
        """The same of many; the largest number stands for what is beyond it."""
        if not self.exponent:
            return values
        most = torch.finfo(torch.float64).max
        return np.clip(np.ldexp(values, self.exponent), -most, most)

    def place(self, axis: int, index: int) -> int:
        """Where in the whole a place of an axis stands."""
        some = self.places[axis]
        return index if some is None else int(some[index])

    @property
    def given_shape(self) -> tuple[int, ...]:
        """The shape of the whole with its axes as they were given."""
        if not self.order:
            return self.sizes
        return tuple(self.sizes[axis] for axis in _inverse(self.order))

    def axis_given(self, axis: int) -> int:
        """Which axis of the tensors as they were given this is."""
        return self.order[axis] if self.order else axis

    def as_given(self, tensor: Tensor) -> Tensor:
        """A tensor of these axes with its axes as they were given."""
        return tensor.permute(_inverse(self.order)) if self.order else tensor

    def as_here(self, tensor: Tensor) -> Tensor:
        """A tensor whose axes are as they were given, with the channels last."""
        return tensor.permute(self.order) if self.order else tensor

    def with_all_of(self, axis: int) -> Pairs:
        """Another part, in which no place of an axis is missing; the same where it is too long."""
        if self.places[axis] is None or self.found is None or self.sizes[axis] > LIMIT:
            return self
        places = chosen(self.sizes, self.found, axis)
        return self._at(places)

    def _at(self, places: Places) -> Pairs:
        """The pairs of the whole at some places."""
        assert self.whole is not None
        return replace(self, places=places, **_values(self.whole, places))

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
        return self._along[axis]

    @cached_property
    def _along(self) -> list[Sums]:
        """Of each axis. From the first on, what is in front is summed once."""
        found, rest = [], self._rows.reshape(7, -1)
        for size in self.shape[:-1]:
            here = rest.reshape(7, size, -1)
            found.append(Sums(*here.sum(2)))
            rest = here.sum(1)
        return [*found, Sums(*self._columns)]

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
        return min(1.0, left / (1 - share) * (1 + _FEW / self.count))

    def within(self, places: Sequence[Sequence[int] | None]) -> Pairs:
        """The pairs at some places of each axis of the whole, None stands for all; for themselves.

        Of what is too much, places are left out.
        """
        assert self.whole is not None
        return self._alone(self.whole, limited(places, self.sizes), self.axes)

    def at_rows(self, rows: Sequence[Sequence[int]]) -> Pairs:
        """The pairs of some rows, each given by its place in all axes but the last."""
        assert self.whole is not None
        index = tuple(torch.as_tensor(some) for some in zip(*rows, strict=True))
        reference, candidate, given = self.whole
        sides = (reference[index], candidate[index], None if given is None else given[index])
        every = (range(len(rows)), None)
        places = limited(every, (len(rows), self.sizes[-1]))
        return self._alone(sides, places, ("token", "channel"))

    def _alone(self, whole: Whole, places: Places, axes: tuple[str, ...]) -> Pairs:
        made = _values(whole, places)
        sizes = tuple(made["reference"].shape)
        every = (None,) * len(sizes)
        return replace(
            self, axes=axes, places=every, sizes=sizes, whole=None, found=None, order=(), **made
        )


def prepared(
    reference: Tensor,
    candidate: Tensor,
    floor: float,
    given: Tensor | None,
    layout: Sequence[str] = (),
) -> tuple[Pairs, Profile]:
    """Both sides ready for fitting, and the profile of the whole of them.

    `layout` names their axes; without it the usual ones are taken.
    """
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
    if not layout or names or reference.dim() != len(layout):
        layout = (*names, *usual_axes(reference.dim() - len(names)))
    order = _channels_last(layout)
    if order:
        reference, candidate = reference.permute(order), candidate.permute(order)
        given = None if given is None else given.permute(order)
        layout = [layout[axis] for axis in order]
    exponent = exponent_of(reference, candidate)
    reference, candidate = (scaled(side, exponent) for side in (reference, candidate))
    given = None if given is None else scaled(given, exponent)
    found = profile(reference, candidate)
    assert found is not None
    sizes = tuple(reference.shape)
    places, whole = chosen(sizes, found), (reference, candidate, given)
    made = Pairs(
        axes=tuple(layout),
        places=places,
        sizes=sizes,
        floor=floor,
        dtypes=dtypes,
        exponent=exponent,
        whole=whole,
        found=found,
        order=order,
        **_values(whole, places),
    )
    return made, found


def _values(whole: Whole, places: Places) -> dict[str, Any]:
    """Both sides and the input at some places, ready for fitting."""
    reference, candidate = (taken(side, places) for side in whole[:2])
    finite = torch.isfinite(reference) & torch.isfinite(candidate)
    raw = None
    if not bool(finite.all()):
        raw = (reference, candidate)
        reference, candidate = (torch.where(finite, side, 0.0) for side in raw)
    given = None if whole[2] is None else taken(whole[2], places)
    if given is not None and not bool(torch.isfinite(given).all()):
        given = None
    return {
        "reference": reference,
        "candidate": candidate,
        "difference": candidate - reference,
        "finite": None if raw is None else finite,
        "input": given,
        "raw": raw,
    }


def _parts(tensor: Tensor) -> Tensor:
    """The real and the imaginary part, as a first axis."""
    if not tensor.is_complex():
        return torch.stack((tensor, torch.zeros_like(tensor)))
    return torch.view_as_real(tensor.resolve_conj()).movedim(-1, 0)


def _channels_last(layout: Sequence[str]) -> tuple[int, ...]:
    """The order of axes in which the channels are last; empty where they are."""
    if "channel" not in layout or layout[-1] == "channel":
        return ()
    at = list(layout).index("channel")
    return (*range(at), *range(at + 1, len(layout)), at)


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(axis) for axis in range(len(order))]
