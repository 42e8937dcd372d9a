"""The ruler: a run in higher precision says which of two sides is nearer to it.

It may be the candidate: the reference is what somebody trusts, not what is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..numerics.difference import Difference, difference_of
from ..recording.reader import Record, Recording
from .align import LayerPair, align
from .checks import third_warnings
from .moments import MomentPair
from .place import HERE, Place
from .precision import precision_of, roundoff, unit_of
from .sentences import name_of
from .sites import SitePair, SitePairer
from .transforms import Transform

__all__ = ["UNKNOWN", "Nearness", "Truth"]

_EVEN = 1.05  # two errors within this factor of each other are the same
_OWN = 4.0  # roundings of the truth itself: below, it cannot tell two sides apart
_SAME = Transform("")

_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # reference, candidate, truth


@dataclass(frozen=True)
class Nearness:
    """How far both sides are from the truth: relative L2 errors, NaN where it cannot be known.

    A side that has NaN or Inf where the truth has none is infinitely far.
    """

    nearer: str | None
    reference: float
    candidate: float


UNKNOWN = Nearness(None, math.nan, math.nan)


@dataclass(frozen=True)
class _Site:
    """Where the truth has a leaf of the reference: moment by moment, in a layout of its own."""

    moments: Mapping[tuple[int, int, int], list[MomentPair]]
    transform: Transform | None


class Truth:
    """A recording that both sides are measured against."""

    def __init__(
        self,
        reference: Recording,
        candidate: Recording,
        truth: Recording,
        pairs: Sequence[LayerPair],
        names: Sequence[str] | None = None,
        place: Place = HERE,
    ) -> None:
        self.path = truth.path
        self._place = place
        self._sides = {"reference": reference, "candidate": candidate}
        self._truth = truth
        self._sites: dict[tuple[str, str, str], _Site] = {}
        self._known: dict[object, Nearness] = {}
        self._holes: dict[str, None] = {}  # the layers where the truth itself is not a number
        pairer = SitePairer(reference, truth)
        for pair in _paired(reference, truth, pairs, names):
            assert pair.reference is not None
            for site in pairer.pair(pair):
                if not site.problem and not site.missing:
                    where = pair.reference.name, site.port, site.leaf
                    self._sites[where] = _Site(_by_moment(site.moments), site.transform)

    @property
    def notes(self) -> list[str]:
        """That the truth says nothing, if it does not."""
        pairs = (p for site in self._sites.values() for m in site.moments.values() for p in m)
        if any(pair.candidate.stored for pair in pairs):
            return []
        return [
            f"The truth {self.path} has no tensor in common with the reference: it says nothing."
        ]

    @property
    def warnings(self) -> list[str]:
        """That the truth saw other inputs, or is no more precise than what it is to measure."""
        others = third_warnings(self._sides["reference"], self._truth, "truth")
        others = [] if others and self._same_inputs() else others
        if self._holes:
            first = name_of(next(iter(self._holes)))
            layers = "1 layer" if len(self._holes) == 1 else f"{len(self._holes)} layers"
            others.append(
                f"The truth {self.path} itself has NaN at {layers} (first at {first}): what is NaN "
                "in it measures nothing."
            )
        own = _precision(self._truth)
        found = {side: _precision(run) for side, run in self._sides.items()}
        alike = [s for s, name in found.items() if name and own and unit_of(name) <= unit_of(own)]
        if not alike:
            return others
        sides = " and ".join(f"the {side} ({found[side]})" for side in alike)
        return [
            *others,
            f"The truth {self.path} computes in {own}, no more precisely than {sides}: what it "
            "calls nearer may only be more like it. Record one with --dtype float64.",
        ]

    def _same_inputs(self) -> bool:
        """Whether other bytes are the same inputs, cast: what the first layer was given tells."""
        given = [(layer, site) for (layer, port, _), site in self._sites.items() if port == "input"]
        pairs = [
            pair
            for layer, site in given
            if layer == given[0][0]
            for moment in site.moments.values()
            for pair in moment
        ]
        return bool(pairs) and all(_cast_alike(pair, self._place) for pair in pairs)

    def nearer(self, layer: str, site: SitePair) -> Nearness:
        """Which side is nearer at one site, and how far both are."""
        here = self._sites.get((layer, site.port, site.leaf))
        if here is None or not site.moments or site.problem:
            return UNKNOWN
        key = _content(site, here)
        if key not in self._known:
            found, holes = self._place.run(lambda at: _near(lambda: _triples(site, here, at)))
            if holes:
                self._holes.setdefault(layer)
            self._known[key] = found
        return self._known[key]


def _paired(
    reference: Recording,
    truth: Recording,
    pairs: Sequence[LayerPair],
    names: Sequence[str] | None,
) -> Iterator[LayerPair]:
    """The reference's layers with the truth's; also where the truth has the candidate's names."""
    partners = {
        pair.reference.name: pair.candidate.name
        for pair in pairs
        if pair.reference is not None and pair.candidate is not None
    }
    for pair in align(reference, truth, names=names):
        if pair.reference is None:
            continue
        other = partners.get(pair.reference.name)
        if pair.matched_by != "name" and other is not None and other in truth.layers:
            yield LayerPair(pair.reference, truth[other], "map")
        elif pair.candidate is not None:
            yield pair


def _cast_alike(pair: MomentPair, place: Place) -> bool:
    """Whether two tensors hold the same values but for the rounding of a cast."""
    if not (pair.reference.stored and pair.candidate.stored) or pair.shapes[0] != pair.shapes[1]:
        return False
    found = place.run(lambda at: difference_of([pair.tensors(None, at)], percentiles=False))
    unit = max(roundoff(dtype) for dtype in found.dtypes)
    return found.identical or (not found.disagreeing and found.error <= 2 * unit)


def _by_moment(pairs: Sequence[MomentPair]) -> dict[tuple[int, int, int], list[MomentPair]]:
    found: dict[tuple[int, int, int], list[MomentPair]] = {}
    for pair in pairs:
        found.setdefault((pair.epoch, pair.batch, pair.call), []).append(pair)
    return found


def _content(site: SitePair, here: _Site) -> object:
    """What is measured, by what it holds: one layer's output is the next one's input."""
    ids = []
    for m in site.moments:
        true = here.moments.get((m.epoch, m.batch, m.call), [])
        ids.append(
            (
                *(m.reference.tensor_id, m.candidate.tensor_id),
                *(m.reference_samples, m.candidate_samples),
                *((p.candidate.tensor_id, p.reference_samples, p.candidate_samples) for p in true),
            )
        )
    if any(None in item[:2] for item in ids):
        return (site.port, site.leaf, id(here))
    return (*ids, _name(site.transform), _name(here.transform))


def _name(transform: Transform | None) -> str | None:
    return None if transform is None else transform.name


def _triples(site: SitePair, here: _Site, place: Place) -> Iterator[_Tensors]:
    """Reference, candidate and truth in one layout, moment by moment, where all three are stored.

    Three runs have three layouts; two of them must be alike for the third to be brought to them.
    """
    for m in site.moments:
        for true in here.moments.get((m.epoch, m.batch, m.call), ()):
            if not all(_stored(r) for r in (m.reference, m.candidate, true.candidate)):
                continue
            found = _together(m, site.transform or _SAME, true, here.transform or _SAME, place)
            if found is not None and len({tensor.shape for tensor in found}) == 1:
                yield found


def _stored(record: Record) -> bool:
    return record.stored and roundoff(record.dtype) > 0


def _together(
    m: MomentPair, transform: Transform, true: MomentPair, other: Transform, place: Place
) -> _Tensors | None:
    records = (m.reference, m.candidate, true.candidate)
    reference, candidate, truth = (place.tensor(record) for record in records)
    ours, theirs = m.reference_samples, m.candidate_samples
    whole = ours is None and theirs is None
    plain = true.reference_samples is None and true.candidate_samples is None
    try:
        if other == _SAME and plain:  # the truth lies as the reference does
            left, right = transform.views(_rows(reference, ours), _rows(candidate, theirs))
            return left, right, transform.views(_rows(truth, ours), _rows(candidate, theirs))[0]
        if transform == _SAME and whole:  # the candidate lies as the reference does
            rows = true.reference_samples
            bent = _rows(truth, true.candidate_samples)
            left, right = other.views(_rows(reference, rows), bent)
            return left, other.views(_rows(candidate, rows), bent)[0], right
        if truth.shape == candidate.shape:  # the truth lies as the candidate does
            left, right = transform.views(_rows(reference, ours), _rows(candidate, theirs))
            return left, right, transform.views(_rows(reference, ours), _rows(truth, theirs))[1]
    except (RuntimeError, IndexError):
        return None
    return None


def _rows(tensor: torch.Tensor, rows: tuple[int, int] | None) -> torch.Tensor:
    return tensor if rows is None else tensor[rows[0] : rows[1]]


def _where_known(triple: _Tensors) -> _Tensors:
    """The values of three tensors where the truth is a number: it knows nothing of the others."""
    wide = [_wide(tensor) for tensor in triple]
    finite = wide[2].isfinite()
    left, right, true = (tensor[finite] for tensor in wide)
    return left, right, true


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Eight bits as more of them: torch asks narrower floats for nothing."""
    return tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor


def _near(triples: Callable[[], Iterator[_Tensors]]) -> tuple[Nearness, bool]:
    """How near both sides are, and whether the truth has NaN; the tensors are read one by one."""
    whole: list[bool] = []
    own, holes, known = 0.0, False, False
    for *_, true in triples():
        wide = _wide(true)
        finite = wide.isfinite()
        whole.append(bool(finite.all()))
        if bool(finite.any()):
            known = True
            own = max(own, roundoff(str(true.dtype).removeprefix("torch.")))
        holes = holes or (not whole[-1] and bool(wide.isnan().any()))
    if not known:
        return UNKNOWN, holes

    def told() -> Iterator[_Tensors]:
        for triple, every in zip(triples(), whole, strict=True):
            found = triple if every else _where_known(triple)
            if found[2].numel():
                yield found

    return _measured(told, own), holes


def _measured(triples: Callable[[], Iterator[_Tensors]], own: float) -> Nearness:
    ours = difference_of(lambda: ((true, left) for left, _, true in triples()), percentiles=False)
    theirs = difference_of(
        lambda: ((true, right) for _, right, true in triples()), percentiles=False
    )
    left, right = _distance(ours), _distance(theirs)
    if math.isnan(left) or math.isnan(right):
        return Nearness(None, left, right)
    if max(left, right) <= _OWN * own or max(left, right) <= _EVEN * min(left, right):
        return Nearness(None, left, right)
    return Nearness("reference" if left < right else "candidate", left, right)


def _distance(found: Difference) -> float:
    """The error against the truth; where the truth is zero, in its own units."""
    if found.disagreeing:
        return math.inf
    return found.rmse if math.isnan(found.error) else found.error


def _precision(recording: Recording) -> str | None:
    """What a run computes in: as its manifest says, else the coarsest float that it holds."""
    found = precision_of(recording)
    if found is not None:
        return found
    names = {r.dtype for r in recording.records if r.port == "output" and roundoff(r.dtype) > 0}
    return max(names, key=unit_of, default=None)
