"""What was measured of one pair of tensors, before anybody judges it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import OptionError
from ..numerics import summarize
from ..numerics.difference import Difference, difference, difference_of
from ..numerics.profile import Profile, profile
from ..numerics.summary import Summary
from .metrics import evaluate
from .place import HERE, Place
from .results import Moment
from .sites import MomentPair, SitePair

__all__ = ["MomentMeasurement", "SiteMeasurement", "measure", "picked"]


@dataclass(frozen=True)
class MomentMeasurement:
    """One moment of a site: the difference where tensors are stored, else two summaries."""

    moment: Moment
    difference: Difference | None
    reference: Summary | None
    candidate: Summary | None
    _pair: MomentPair
    _site: SitePair
    _place: Place = HERE
    _only: tuple[tuple[int, ...], NDArray[np.int64]] | None = None  # axes, and places along them

    @property
    def dtypes(self) -> tuple[str, str]:
        return self._pair.reference.dtype, self._pair.candidate.dtype

    @property
    def whole(self) -> bool:
        """Whether both sides' records are compared all at once, not some samples or tokens."""
        pair = self._pair
        parts = (pair.reference_samples, pair.candidate_samples, pair.tokens, self._only)
        return all(part is None for part in parts)

    @property
    def rmse(self) -> float:
        """The error in the tensor's own units; NaN without tensors."""
        return self.difference.rmse if self.difference is not None else math.nan

    def with_percentiles(self) -> Difference | None:
        """The difference with its percentiles, which one of several moments is measured without."""
        if self.difference is None or self.difference.percentiles is not None:
            return self.difference
        return self._place.run(lambda place: difference(*self._tensors(place)))

    def summaries(self) -> tuple[Summary, Summary]:
        """The summaries of what was compared of both sides."""
        return _summaries(self._site, self._pair, self._place)

    def added(self, metric: str) -> float:
        """A metric that is not of a difference; reads the tensors once more."""
        if self.difference is None:
            return math.nan
        try:
            return self._place.run(lambda place: evaluate(metric, *self._tensors(place)))
        except OptionError:
            if self._place is HERE:
                raise
        return evaluate(metric, *self._tensors(HERE))  # it may be one of numpy

    def profile(self) -> Profile | None:
        """Errors by token and by channel; reads the tensors once more."""
        if self.difference is None:
            return None
        return self._place.run(lambda place: profile(*self._tensors(place)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the two tensors, side by side."""
        if self._site.transform is None:
            return self._pair.shapes[0]
        return tuple(self._pair.tensors(self._site.transform)[0].shape)

    def only(self, axes: tuple[int, ...], places: NDArray[np.int64]) -> MomentMeasurement:
        """The same of some places along some axes, as certain tokens."""
        if not axes or self.difference is None:
            return self
        some = replace(self, _only=(axes, places), reference=None, candidate=None)
        found = self._place.run(lambda at: difference(*some._tensors(at), percentiles=False))
        return replace(some, difference=found)

    @property
    def fleeting(self) -> bool:
        """Whether the candidate's tensor is there for a while alone."""
        return self._pair.candidate.fleeting

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tensors, here."""
        return self._tensors(HERE)

    def _tensors(self, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        both = self._pair.tensors(self._site.transform, place)
        if self._only is None:
            return both
        axes, places = self._only
        ours, theirs = (picked(tensor, axes, places) for tensor in both)
        return ours, theirs


@dataclass(frozen=True)
class SiteMeasurement:
    """A site over all its moments."""

    site: SitePair
    moments: tuple[MomentMeasurement, ...]
    difference: Difference | None
    max_abs_moment: Moment | None = None

    def at(self, site: SitePair) -> SiteMeasurement:
        """The same tensors, met again at another place and other moments."""
        pairs = zip(self.moments, site.moments, strict=True)
        moments = tuple(
            replace(m, moment=(p.epoch, p.batch, p.call), _pair=p, _site=site) for m, p in pairs
        )
        new = {old.moment: m.moment for old, m in zip(self.moments, moments, strict=True)}
        place = None if self.max_abs_moment is None else new[self.max_abs_moment]
        return replace(self, site=site, moments=moments, max_abs_moment=place)

    def summaries(self) -> tuple[Summary, Summary]:
        """The summaries of what was compared of both sides, merged over the moments."""
        pairs = [moment.summaries() for moment in self.moments]
        left = reduce(Summary.merge, (pair[0] for pair in pairs))
        return left, reduce(Summary.merge, (pair[1] for pair in pairs))


def picked(tensor: torch.Tensor, axes: tuple[int, ...], places: NDArray[np.int64]) -> torch.Tensor:
    """Places along some axes, which are put first and flattened."""
    front = tensor.movedim(axes, tuple(range(len(axes)))).flatten(0, len(axes) - 1)
    return front[torch.from_numpy(places).to(front.device)]


def _summaries(site: SitePair, pair: MomentPair, place: Place) -> tuple[Summary, Summary]:
    stored = pair.reference.stored and pair.candidate.stored
    if not stored or (pair.whole and site.transform is None):
        return pair.reference.summary, pair.candidate.summary

    def both(at: Place) -> tuple[Summary, Summary]:
        reference, candidate = pair.tensors(site.transform, at)
        return summarize(reference), summarize(candidate)

    return place.run(both)


def measure(site: SitePair, *, percentiles: bool = True, place: Place = HERE) -> SiteMeasurement:
    """Measure every moment of a site, and all of them together.

    Several moments are read twice, since the percentiles are those of all values, not a mean of
    percentiles.
    """
    single = len(site.moments) == 1
    moments = tuple(_moment(site, pair, percentiles and single, place) for pair in site.moments)
    if any(m.difference is None for m in moments):
        return SiteMeasurement(site, moments, None)
    if single:
        return SiteMeasurement(site, moments, moments[0].difference, moments[0].moment)
    if not percentiles:
        whole = reduce(Difference.merge, (m.difference for m in moments if m.difference))
        return SiteMeasurement(site, moments, whole)
    whole = place.run(lambda at: difference_of(_stream(site, at), percentiles=True))
    worst = None
    if whole.max_abs_index is not None:
        number, *index = whole.max_abs_index
        worst = moments[number].moment
        whole = replace(whole, max_abs_index=tuple(index))
    return SiteMeasurement(site, moments, whole, worst)


def _moment(site: SitePair, pair: MomentPair, percentiles: bool, place: Place) -> MomentMeasurement:
    moment = (pair.epoch, pair.batch, pair.call)
    if not (pair.reference.stored and pair.candidate.stored):
        left, right = pair.reference.summary, pair.candidate.summary
        return MomentMeasurement(moment, None, left, right, pair, site, place)
    found = place.run(
        lambda at: difference(*pair.tensors(site.transform, at), percentiles=percentiles)
    )
    return MomentMeasurement(moment, found, None, None, pair, site, place)


def _stream(
    site: SitePair, place: Place
) -> Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    def tensors() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for pair in site.moments:
            yield pair.tensors(site.transform, place)

    return tensors
