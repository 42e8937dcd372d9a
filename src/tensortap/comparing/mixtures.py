"""Mixtures of experts in one comparison: their choices, their groups, and what follows from them.

A choice is read as soon as its layer is paired, so that the groups of tokens that the experts get
can be set side by side by token. It is judged when its turn comes, with what the router was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..recording.reader import Layer, Record, Recording
from .align import LayerPair
from .flips import Flips
from .groups import (
    Family,
    Grouping,
    Rows,
    chosen_like,
    expert_of,
    family_choice,
    family_of,
    family_read,
    grouped_rows,
    in_place,
    listed_rows,
    with_rows,
)
from .judge import Judgement
from .maker import contains
from .measure import MomentMeasurement, SiteMeasurement
from .moments import MomentPair, by_moment
from .results import Part
from .routing import Choice, choice_of, chooses, rows_of
from .sites import SitePair
from .touched import Touched
from .transforms import Transform

__all__ = ["Mixtures", "Seen", "Taken"]

_MOST_EXPERTS = 1024
_MOST_COPIED = 1 << 18
_MOST_KEPT = 8  # tensors that may be scores of a choice which another layer makes
_PLAIN = Transform("")
_OTHERWISE = (
    "Tokens chose other experts, so the rows are those of other tokens, and nothing tells which "
    "row is which token."
)
_Step = tuple[int, int, int]
_Rows = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Seen:
    """Two tensors of one moment, and what was measured of them."""

    pair: MomentPair
    moment: MomentMeasurement

    @property
    def record(self) -> Record:
        return self.pair.reference


@dataclass(eq=False)
class Taken:
    """A choice at one call of a router that waits to be judged.

    `record` is what its turn goes by. `scored` is what holds the scores or values that are known,
    `scores` and `values` are theirs; `inputs` is what the router was given.
    """

    choice: Choice
    record: Record
    where: Seen | None = None
    scored: Seen | None = None
    scores: _Rows | None = None
    values: _Rows | None = None
    inputs: list[Seen] = field(default_factory=list)

    @property
    def span(self) -> tuple[int, int]:
        """The first token of the choice among those of the reference's call, and how many it has.

        They are more than those of the choice where the two runs have other batches.
        """
        if self.where is None or self.where.pair.whole:
            return 0, self.choice.tokens
        return _first(self.record, self.where.pair.reference_samples), _count(self.record)

    @property
    def dtypes(self) -> tuple[str, str]:
        """The dtypes in which the scores were made."""
        for seen in (self.scored, *self.inputs):
            if seen is not None and _is_float(seen.record.dtype):
                return seen.record.dtype, seen.pair.candidate.dtype
        if _is_float(self.record.dtype):
            return self.record.dtype, self.record.dtype
        return "float32", "float32"


class Mixtures:
    """The experts of one comparison; a model without any costs a look at the dtypes."""

    def __init__(
        self, reference: Recording, candidate: Recording, *, thorough: bool = False
    ) -> None:
        """`thorough` asks for choices too in which both runs agree: a floor run may not."""
        self._thorough = thorough
        self.touched = Touched(reference)
        self.routers: set[str] = set()  # the layers that return a choice
        self._sides = (reference, candidate)
        self._partners: dict[str, str] = {}
        self._waiting: dict[_Step, list[Taken]] = {}
        self._held: set[tuple[object, ...]] = set()
        self._groupings: dict[_Step, list[Grouping]] = {}
        self._small: list[tuple[Seen, _Rows | None]] = []
        self._read: set[tuple[str, _Step]] = set()  # lists of experts whose groups were read
        self._order: dict[tuple[object, ...], Rows | None] = {}
        self._flat = False  # whether the rows of a token stand together, as one mixture showed
        self._judged: dict[tuple[object, ...], tuple[Record, Judgement]] = {}
        self._shown: dict[str, Flips] = {}
        self._told: set[tuple[str, _Step]] = set()  # mixtures whose choice was recorded

    def begin(self, pairs: Sequence[LayerPair]) -> None:
        """The layers that will be compared."""
        for pair in pairs:
            if pair.reference is not None and pair.candidate is not None:
                self._partners[pair.reference.name] = pair.candidate.name

    # Reading choices.

    def look(self, sites: Sequence[tuple[SitePair, SiteMeasurement]]) -> None:
        """Find the choices in what a layer was given and returned."""
        calls: dict[tuple[object, ...], list[Seen]] = {}
        for site, measured in sites:
            laid_out = site.transform is not None and replace(site.transform, name="") != _PLAIN
            if laid_out or site.port not in ("input", "output"):
                continue
            for pair, moment in zip(site.moments, measured.moments, strict=True):
                if moment.difference is not None and pair.reference_rows is None:
                    key = (_step(pair.reference), pair.reference.call, _step(pair.candidate))
                    calls.setdefault(key, []).append(Seen(pair, moment))
        for found in calls.values():
            for seen in found:
                if all(_is_whole(side.dtype) for side in (seen.record, seen.pair.candidate)):
                    self._take(seen, found)
            self._keep(found)

    def _take(self, seen: Seen, call: Sequence[Seen]) -> None:
        step = _step(seen.record)
        key = _key(seen.pair)
        found = seen.moment.difference
        if key in self._held or found is None:  # a router's output is the input of the experts
            return
        choice = choice_of(*seen.moment.pair())
        if choice is None:
            return
        taken = Taken(choice, seen.record, seen)
        taken.inputs = [other for other in call if other.record.port == "input"]
        if not self._explained(taken, call):
            return
        self._held.add(key)
        if seen.record.port == "output":
            self.routers.add(seen.record.layer)
        scope = seen.record.layer.rpartition(".")[0]
        self._told.add((scope, step))
        if self._thorough or not found.identical:
            self._waiting.setdefault(step, []).append(taken)
        if choice.reference is not None and choice.candidate is not None:
            start, tokens = taken.span
            sides = (choice.reference, choice.candidate)
            part = None
            if not seen.pair.whole:
                whole = choice_of(seen.record.tensor(), seen.record.tensor())
                other = choice_of(seen.pair.candidate.tensor(), seen.pair.candidate.tensor())
                if whole is None or other is None or whole.reference is None:
                    return
                assert other.reference is not None
                sides = (whole.reference, other.reference)
                theirs = _first(seen.pair.candidate, seen.pair.candidate_samples)
                end = start + choice.tokens
                part = (_step(seen.pair.candidate), start, end, start - theirs)
            record = seen.record
            self._groupings.setdefault(step, []).append(
                Grouping(scope, record.layer, record.call, record.order, tokens, sides, part=part)
            )

    def _explained(self, taken: Taken, call: Sequence[Seen]) -> bool:
        """Find what a choice was made of; False where it is none."""
        assert taken.where is not None
        record, shape = taken.record, taken.record.shape
        own = [o for o in call if o.record.port == "output" and _may_score(o, taken.choice)]
        if any(_take_scores(taken, other, _both(other)) for other in own):
            return True
        for other, rows in self._near(record, record.layer.rpartition(".")[0]):
            if _may_score(other, taken.choice) and _take_scores(taken, other, rows):
                return True
        if own and own[0].record.shape != shape and record.port == "output":
            taken.scored = own[0]  # chosen by these and by more: biases, groups of experts
            return True
        beside = [o for o in call if _is_float(o.record.dtype) and o.record.port == record.port]
        for other in beside:
            if other.record.shape == shape:
                taken.scored, taken.values = other, _both(other)
                return True
        wide = [o for o in call if _is_float(o.record.dtype) and len(o.record.shape) > 1]
        fits = any(_count(o.record) == taken.choice.tokens for o in wide)
        return fits and record.port == "output" and shape[-1] > 1

    def _near(self, record: Record, scope: str) -> Iterator[tuple[Seen, _Rows]]:
        """What was kept of layers inside of a module, at the step of a record."""
        for seen, rows in reversed(self._small):
            if contains(scope, seen.record.layer) and _step(seen.record) == _step(record):
                yield seen, rows or _both(seen)

    def _keep(self, call: Sequence[Seen]) -> None:
        """Remember what may be the scores of a choice that is made after it."""
        for seen in call:
            record = seen.record
            small = len(record.shape) > 1 and 1 < record.shape[-1] <= _MOST_EXPERTS
            if small and record.port == "output" and _is_float(record.dtype):
                if not seen.pair.candidate.fleeting:
                    self._small.append((seen, None))
                elif np.prod(record.shape) <= _MOST_COPIED:  # its tensor will be gone
                    self._small.append((seen, _both(seen)))
        del self._small[:-_MOST_KEPT]

    def due(self, record: Record) -> Iterator[Taken]:
        """The choices that are judged before a tensor is: those of its call, and all before it."""
        waiting = self._waiting.get(_step(record))
        if not waiting:
            return
        for taken in list(waiting):
            same = taken.record.layer == record.layer and taken.record.call == record.call
            now = record.port == "output" and (same or taken.record.order <= record.order)
            if now or record is taken.record:
                waiting.remove(taken)
                yield taken

    def settle(self, taken: Taken, judged: Judgement, explained: Sequence[int]) -> None:
        """A choice was judged: what it explains is touched from here on."""
        self.touched.add(taken.record, taken.choice, explained, *taken.span)
        if taken.where is not None:
            self._judged[_key(taken.where.pair)] = (taken.record, judged)
        elif judged.flips is not None and taken.choice.changes:  # no tensor holds the choice
            layer = taken.record.layer
            if taken.scored is not None:
                layer = taken.scored.record.layer
            known = self._shown.get(layer)
            self._shown[layer] = judged.flips if known is None else known.merge(judged.flips)

    def chosen(self, pair: MomentPair) -> Judgement | None:
        """What was said of a choice that two tensors hold; it is told once."""
        if not self._judged or pair.reference_rows is not None:
            return None
        record, judged = self._judged.get(_key(pair), (None, None))
        if record is None or judged is None or judged.flips is None:
            return None
        if not judged.flips.changed and not judged.flips.reordered:
            return None
        return judged if record is pair.reference else replace(judged, flips=None, hints=())

    def told(self, layer: str, parts: Sequence[Part]) -> list[Part]:
        """The parts of a layer, with the choice that was made of its scores but not recorded."""
        flips = self._shown.get(layer)
        if flips is None:
            return list(parts)
        found = list(parts)
        for at, part in enumerate(found):
            if part.port == "output":
                found[at] = replace(part, flips=flips, hints=(*part.hints, flips.words))
                break
        return found

    def partner(self, layer: str) -> str:
        """What the candidate calls a layer."""
        return self._partners.get(layer, layer)

    # Groups.

    def divides(self, layer: str, step: _Step) -> bool:
        """Whether a layer gets tokens in groups which the two runs may have divided otherwise."""
        self._read_family(layer, step)
        return bool(self._scoped(layer, step))

    def regrouped(self, pair: LayerPair, sites: Sequence[SitePair]) -> list[SitePair]:
        """The sites of a layer, with the rows of groups paired by token."""
        left, right = pair.reference, pair.candidate
        if left is None or right is None:
            return list(sites)
        steps = {_step(record) for record in left.records}
        for step in {_step(record) for record in left.records if record.stored}:
            self._read_family(left.name, step)  # by what the rows hold
        if not any(self._scoped(left.name, step) for step in steps):
            return list(sites)
        return [self._regrouped(pair, site) for site in sites]

    def _scoped(self, layer: str, step: _Step) -> list[Grouping]:
        return [
            grouping
            for grouping in self._groupings.get(step, ())
            if contains(grouping.scope, layer) and layer not in (grouping.scope, grouping.router)
        ]

    def _regrouped(self, pair: LayerPair, site: SitePair) -> SitePair:
        assert pair.reference is not None and pair.candidate is not None
        if site.missing:
            return site
        plain = by_moment(
            [r for r in pair.reference.records if (r.port, r.leaf) == (site.port, site.leaf)],
            [
                r
                for r in pair.candidate.records
                if (r.port, r.leaf) == (site.port, site.candidate_leaf)
            ],
        )
        split = [g for g in self._groupings_of(pair.reference) if g.part is not None]
        if split:
            return self._split(site, pair, split)
        moments, changed, lost = [], False, False
        for moment in plain.pairs:
            grouping = self._grouping(moment.reference)
            if grouping is None or not moment.reference.shape:
                moments.append(moment)
                continue
            rows = self._rows(moment, grouping)
            if rows is not None:
                changed = True
                if rows.reference:
                    moments.append(with_rows(moment, rows, grouping))
                continue
            moments.append(moment)
            lost = lost or (not grouping.same and grouping.divides(moment.reference.shape))
        if lost:
            return replace(site, moments=plain.pairs, problem=_OTHERWISE, grouped=True)
        if not changed:
            return site
        problem = "" if moments else "No token chose this expert in both runs."
        return replace(
            site,
            moments=tuple(moments),
            transform=None,
            problem=problem,
            unpaired=plain.unpaired,
            hint="",
            cut="",
            grouped=True,
        )

    def _groupings_of(self, layer: Layer) -> list[Grouping]:
        steps = dict.fromkeys(_step(record) for record in layer.records)
        return [grouping for step in steps for grouping in self._scoped(layer.name, step)]

    def _split(self, site: SitePair, pair: LayerPair, groupings: Sequence[Grouping]) -> SitePair:
        """The rows of a site by token where the two runs have other batches."""
        assert pair.reference is not None and pair.candidate is not None
        ours, theirs = (
            [r for r in layer.records if (r.port, r.leaf) == (site.port, leaf) and r.shape]
            for layer, leaf in ((pair.reference, site.leaf), (pair.candidate, site.candidate_leaf))
        )
        numbered = expert_of(pair.reference.name, groupings[0].scope) is not None
        if not (numbered or any(groupings[0].divides(record.shape) for record in ours)):
            return site
        if numbered and all(grouping.same for grouping in groupings):
            return site  # one expert's tokens stand in a row, whatever the batches
        moments = []
        for record in ours:
            for other in theirs:
                for grouping in groupings:
                    assert grouping.part is not None
                    here = _step(other) == grouping.part[0] and other.call == record.call
                    if not here or not self._belongs(grouping, record):
                        continue
                    made = MomentPair(record.epoch, record.batch, record.call, record, other)
                    rows = grouped_rows(made, grouping)
                    if rows is None:
                        return replace(site, problem=_OTHERWISE, grouped=True)
                    if rows.reference:
                        moments.append(with_rows(made, rows, grouping))
        problem = "" if moments else "No token chose this expert in both runs."
        return replace(
            site, moments=tuple(moments), transform=None, problem=problem, hint="", grouped=True
        )

    def _belongs(self, grouping: Grouping, record: Record) -> bool:
        return grouping in self._groupings.get(_step(record), ())

    def _rows(self, moment: MomentPair, grouping: Grouping) -> Rows | None:
        """The rows of two records by token; what a layer returns has those of what it was given."""
        record = moment.reference
        if grouping.same:
            if expert_of(record.layer, grouping.scope) or not grouping.divides(record.shape):
                return None
            if in_place(moment):
                return self._listed(moment, grouping)
        key = (record.layer, _step(record), record.call, *(shape[0] for shape in moment.shapes))
        if key not in self._order:
            self._order[key] = found = grouped_rows(moment, grouping)
            self._flat = self._flat or (found is not None and found.flat)
        return self._order[key]

    def _listed(self, moment: MomentPair, grouping: Grouping) -> Rows | None:
        """The tokens of rows that agree as they stand, where a choice before has touched some."""
        before = self._groupings.get(_step(moment.reference), ())
        if all(other.same for other in before):
            return None
        return listed_rows(moment, grouping, flat=self._flat)

    def _grouping(self, record: Record) -> Grouping | None:
        """The choice that the groups of a record follow, if any."""
        found = [
            grouping
            for grouping in self._scoped(record.layer, _step(record))
            if grouping.order < record.order
        ]
        return max(found, key=lambda grouping: grouping.order, default=None)

    def _read_family(self, layer: str, step: _Step) -> None:
        """The choice of a mixture that shows in its experts' groups alone."""
        if expert_of(layer, "") is None:
            return
        if any(at == step and contains(scope, layer) for scope, at in self._told):
            return
        names = family_of(self._sides[0], layer, step)
        if not names or (names[0], step) in self._read:
            return
        self._read.add((names[0], step))
        ours = family_read(self._sides[0], names, step)
        if ours is None:
            return
        recorded = next((n for n in _around(ours.outer) if n in self._sides[0]), "")
        sets = tuple(tuple(sorted(experts)) for experts in ours.sets)
        taken = Taken(Choice(ours.tokens, ours.experts, (), sets=sets), ours.first)
        for other, rows in self._near(ours.first, recorded):
            if _may_score(other, taken.choice) and _take_scores(taken, other, rows):
                break
        partners = [self._partners.get(name, "") for name in names]
        theirs: Family | list[set[int]] | None = None
        if all(name in self._sides[1] for name in partners):
            theirs = family_read(self._sides[1], partners, step)
        if theirs is None and taken.scores is not None:  # nobody stored what the experts got
            theirs = chosen_like(ours.sets, taken.scores[1])
        if theirs is None or (isinstance(theirs, Family) and theirs.tokens != ours.tokens):
            return
        taken.choice, grouping = family_choice(ours, theirs, recorded)
        self._waiting.setdefault(step, []).append(taken)
        self._groupings.setdefault(step, []).append(grouping)


def _around(name: str) -> list[str]:
    """The modules around a layer, the innermost first."""
    found = []
    while name:
        name = name.rpartition(".")[0]
        found.append(name)
    return found


def _key(pair: MomentPair) -> tuple[object, ...]:
    """What the places have in common in which one choice is recorded."""
    ids = pair.reference.tensor_id, pair.candidate.tensor_id
    return (_step(pair.reference), *ids, pair.reference_samples, pair.candidate_samples)


def _take_scores(taken: Taken, seen: Seen, rows: _Rows) -> bool:
    """Whether the experts that were chosen have the largest of these scores, or the smallest."""
    for sign in (1.0, -1.0):
        if chooses(sign * rows[0], taken.choice.chosen):
            taken.scored, taken.scores = seen, (sign * rows[0], sign * rows[1])
            return True
    return False


def _both(seen: Seen) -> _Rows:
    ours, theirs = seen.moment.pair()
    return rows_of(ours), rows_of(theirs)


def _may_score(seen: Seen, choice: Choice) -> bool:
    record, shape = seen.record, seen.pair.shapes[0]
    wide = len(shape) > 1 and choice.experts <= shape[-1] <= _MOST_EXPERTS
    return wide and _is_float(record.dtype) and int(np.prod(shape[:-1])) == choice.tokens


def _first(record: Record, samples: tuple[int, int] | None) -> int:
    """The first row of some samples."""
    return 0 if samples is None else samples[0] * _count(record) // max(1, record.shape[0])


def _count(record: Record) -> int:
    """How many rows of the last axis a tensor has."""
    return int(np.prod(record.shape[:-1])) if record.shape else 0


def _is_whole(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _step(record: Record) -> _Step:
    return record.rank, record.epoch, record.batch
