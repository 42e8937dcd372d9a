"""`compare`: two recordings in, a comparison out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from ..recording.reader import Layer, Record, Recording
from ..recording.series import summary_table
from ..selection.recorded import choose_layers
from ..taps.unseen import unseen
from ..targets.floor_run import FloorRun
from .absent import Absences
from .align import LayerPair, align
from .apart import judge_apart
from .cancelling import cancelled
from .carried import Carrying
from .causes.layer import explained
from .checks import (
    Run,
    about_steps,
    check_compared,
    check_paired,
    check_third,
    notes_of,
    opened,
    third_warnings,
    warnings_of,
)
from .environment import environment_differences, same_input
from .epochs import steps_compared
from .estimates import Estimates
from .floor import Floor, FloorHere
from .floor_runs import floor_beside, floor_notes, given_floor
from .generation import Writing, without_other_inputs
from .judge import AGAINST_ESTIMATE, Expectation, Judgement, judge
from .measure import MomentMeasurement, SiteMeasurement, measure
from .mixtures import Mixtures, Taken
from .parts import (
    compared_part,
    incomparable_part,
    is_identical,
    layer_row,
    missing_part,
    missing_row,
    summary_part,
    unpaired_part,
)
from .place import HERE, Device, Place, placed
from .precision import offset_of, roundoff
from .results import BAD, Comparison, LayerComparison, Part
from .routing import Known, choice_of, judge_choice
from .rules import Rule, parse_rules, preset_of, rule_for
from .shapes import changed_shapes
from .sites import MomentPair, SitePair, SitePairer
from .summaries import judge_rows
from .touched import Apart, Touched, joined
from .truth import UNKNOWN, Nearness, Truth
from .turns import Turns

__all__ = ["Run", "Work", "compare", "floor_words", "inputs_of", "verdicts"]


def compare(
    reference: Run,
    candidate: Run,
    *,
    layers: str | Sequence[str] | None = None,
    floor: Run | None = None,
    rules: str | Sequence[str] = (),
    map: str | Sequence[str] = (),
    preset: str | None = None,
    truth: Run | None = None,
    metrics: Sequence[str] = (),
    partial: bool = False,
    device: Device | Place | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Align two recordings, measure every pair of tensors, and judge layer by layer.

    `floor` is a run whose distance from the reference is the noise to expect: a repeat run, or
    the reference in the candidate's precision; "auto" makes one of the reference's own
    target. `rules` (`REGEX: max_abs < 1e-2 and cosine > 0.99`) overrule everything but equal bits
    and NaN; `map` (`regex=>template`) pairs layers by hand;
    `preset` judges by the limits of the documents; `truth` is a run in higher precision that says
    which side is nearer to it. `metrics` adds some of `register_metric` to every row. `partial`
    takes recordings that were not closed or are damaged. `device` ("cuda") brings the tensors there
    and compares them there: the same numbers. `progress` is told how many layers of how many are
    done.
    """
    with placed(device) as place, unseen():
        return _compare(
            reference,
            candidate,
            layers=layers,
            floor=floor,
            rules=rules,
            map=map,
            preset=preset,
            truth=truth,
            metrics=metrics,
            partial=partial,
            place=place,
            progress=progress,
        )[0]


def verdicts(
    reference: Run, candidate: Run, *, floor: FloorRun | None, maps: Sequence[str]
) -> tuple[Comparison, Mixtures]:
    """The same comparison without the causes, and with a floor run that is made already.

    With what it found of mixtures of experts.
    """
    with unseen():
        return _compare(reference, candidate, floor=floor, map=maps, causes=False)


def _compare(
    reference: Run,
    candidate: Run,
    *,
    layers: str | Sequence[str] | None = None,
    floor: Run | FloorRun | None = None,
    rules: str | Sequence[str] = (),
    map: str | Sequence[str] = (),
    preset: str | None = None,
    truth: Run | None = None,
    metrics: Sequence[str] = (),
    partial: bool = False,
    place: Place = HERE,
    progress: Callable[[int, int], None] | None = None,
    causes: bool = True,
) -> tuple[Comparison, Mixtures]:
    writing = Writing(opened(reference, partial), opened(candidate, partial))
    left, right = writing.reference, writing.candidate
    chosen = preset_of(preset)
    names = None if layers is None else choose_layers(left, _texts(layers))
    pairs = align(left, right, maps=_texts(map), names=names)
    paired = [pair for pair in pairs if pair.reference is not None and pair.candidate is not None]
    check_paired(left, right, names, paired)
    judges = parse_rules(_texts(rules), [pair.reference.name for pair in paired if pair.reference])
    run = floor_beside(floor, left, right, partial)
    if run is not None:
        run = replace(run, recording=without_other_inputs(writing.whole[0], run.recording))
    beside = None if run is None else run.recording
    beyond = None if truth is None else opened(truth, partial)
    check_third(left, right, beside, "floor")
    check_third(left, right, beyond, "truth")
    third = None if run is None else Floor(left, run, names, place)
    work = Work(
        left,
        right,
        SitePairer(left, right, pairs),
        judges,
        None if chosen is None else chosen.rule(),
        third,
        None if beyond is None else Truth(left, right, beyond, pairs, names, place),
        tuple(metrics),
        place,
    )
    both = [(p.reference.name, p.candidate.name) for p in paired if p.reference and p.candidate]
    work.absences = Absences(left, right, both)
    given = same_input(left, right)
    work.agreed = True if given else None

    def coming(number: int) -> None:
        for pair in pairs[number + 1 : number + 2] if number else pairs[:2]:
            place.expect(records_of(pair))

    def done(number: int) -> None:
        if progress is not None:
            progress(number + 1, len(pairs))

    rows = work.rows(pairs, coming, done)
    check_compared(left, right, rows)
    conditions = [
        *(["Rules"] if judges else []),
        *([f"The preset {preset}"] if preset is not None else []),
    ]
    differing, in_common = environment_differences(left, right)
    same, about_inputs = inputs_of(given, rows)
    comparison = Comparison(
        reference=left.path,
        candidate=right.path,
        layers=tuple(rows),
        environment=differing,
        in_common=in_common,
        same_input=same,
        floor=floor_words(third, work, rows),
        preset=preset,
        truth=None if work.truth is None else work.truth.path,
        measured_on=place.name,
        generations=writing.judged(rows),
        warnings=(
            *warnings_of(left, right, same, names, paired),
            *third_warnings(left, given_floor(run), "floor"),
            *([] if work.truth is None else work.truth.warnings),
        ),
        notes=(
            *about_inputs,
            *floor_notes(run),
            *notes_of(left, right, third, conditions, rows),
            *([] if work.truth is None else work.truth.notes),
        ),
    )
    more = about_steps(left, right, steps_compared(comparison))
    if causes:
        comparison = explained(comparison, work.sites, place)
    notes = (*more, *comparison.notes, *place.notes())
    return replace(comparison, notes=notes), work.mixtures


def records_of(pair: LayerPair) -> Iterator[Record]:
    """What will be read of two layers, in about that order: inputs first, side by side."""
    if pair.reference is None or pair.candidate is None:
        return
    sides = [
        sorted(layer.records, key=lambda record: record.port != "input")
        for layer in (pair.reference, pair.candidate)
    ]
    for records in zip_longest(*sides):
        yield from (record for record in records if record is not None)


_Content = tuple[object, ...]


def _content(site: SitePair) -> _Content | None:
    """The pairs of tensors that are compared, by what they hold; None where that is not known."""
    found: list[_Content] = []
    for pair in site.moments:
        content = _pair_content(site, pair)
        if content is None:
            return None
        found.append(content)
    return tuple(found)


def _pair_content(site: SitePair, pair: MomentPair) -> _Content | None:
    """What one pair of tensors holds, and how they are set side by side."""
    ids = pair.reference.tensor_id, pair.candidate.tensor_id
    if None in ids:
        return None
    layout = None if site.transform is None else site.transform.name
    parts = (
        pair.reference_samples,
        pair.candidate_samples,
        pair.reference_rows,
        pair.candidate_rows,
    )
    return (*ids, *parts, layout, site.cut)


def _call(record: Record) -> tuple[str, int, int, int, int]:
    return record.layer, record.rank, record.epoch, record.batch, record.call


@dataclass(eq=False)
class _Draft:
    """A site that is being compared: what was measured, and what has been said of it so far.

    `limit` is what a summary may change by, where all moments are judged by summaries at once.
    """

    layer: str
    site: SitePair
    measured: SiteMeasurement | None = None
    judged: list[Judgement | None] = field(default_factory=list)
    limit: NDArray[np.float64] | None = None
    floor: tuple[FloorHere | None] | None = None


class Work:
    """What every row of one comparison needs."""

    def __init__(
        self,
        reference: Recording,
        candidate: Recording,
        pairer: SitePairer,
        rules: tuple[Rule, ...],
        preset: Rule | None,
        floor: Floor | None,
        truth: Truth | None,
        metrics: tuple[str, ...],
        place: Place = HERE,
    ) -> None:
        self.pairer = pairer
        self.rules = rules
        self.preset = preset
        self.floor = floor
        self.truth = truth
        self.metrics = metrics
        self.place = place
        self.absences = Absences(reference, candidate)
        self.sites: dict[str, list[SitePair]] = {}  # of the diverged layers
        self.agreed: bool | None = (
            None  # whether all layers so far do, and what the model was given
        )
        self.measured: dict[_Content, SiteMeasurement] = {}
        self.judged: dict[_Content, Judgement] = {}
        self.estimates = Estimates(reference, candidate)
        self.carrying = Carrying()
        self.mixtures = Mixtures(reference, candidate, thorough=floor is not None)
        self.following = self.estimates.beside()  # of tokens that follow another choice of expert
        self.noise = Touched(reference)  # the tokens that chose otherwise in the floor run
        self.off: set[tuple[str, int, int, int, int]] = set()  # calls that were given bad inputs

    def row(self, pair: LayerPair) -> LayerComparison:
        """One layer against its partner, whose tensors may be gone afterwards."""
        self.carrying = Carrying()
        found = self.rows([pair])[0]
        self.carrying = Carrying()
        return found

    def rows(
        self,
        pairs: Sequence[LayerPair],
        coming: Callable[[int], None] = lambda _: None,
        done: Callable[[int], None] = lambda _: None,
    ) -> list[LayerComparison]:
        """A row for each pair; its tensors are judged in the order in which the model made them.

        `coming` and `done` are told the number of each pair before and after it is measured.
        """
        turns: Turns[tuple[_Draft, int]] = Turns(pairs)
        drafts: list[list[_Draft]] = []
        self.mixtures.begin(pairs)
        for number, pair in enumerate(pairs):
            coming(number)
            sites = self.mixtures.regrouped(pair, self.pairer.pair(pair))
            drafts.append([self._draft(pair, site) for site in sites])
            self.mixtures.look([(d.site, d.measured) for d in drafts[-1] if d.measured is not None])
            for draft in drafts[-1]:
                for at in range(len(draft.judged)):
                    turns.add(draft.site.moments[at].reference, (draft, at))
            for draft, at in turns.due(number):
                self._judge_one(draft, at)
            done(number)
        return [self._row(pair, found) for pair, found in zip(pairs, drafts, strict=True)]

    def _row(self, pair: LayerPair, drafts: Sequence[_Draft]) -> LayerComparison:
        left, right = pair.reference, pair.candidate
        if left is None or right is None:
            return missing_row(pair, self.absences)
        inputs_first = sorted(drafts, key=lambda draft: draft.site.port != "input")
        sites = [draft.site for draft in inputs_first]
        compared = [self._part(left, draft) for draft in inputs_first]
        types = (left.type, right.type)
        compared = changed_shapes(types, sites, compared, self.agreed is True)
        compared = self.mixtures.told(left.name, compared)
        parts = (*compared, *(unpaired_part(d.site) for d in drafts if d.site.unpaired))
        row = layer_row(left, right, pair.matched_by, parts, pair.note)
        if row.verdict != "missing":
            self.agreed = self.agreed is not False and row.verdict not in BAD
        if row.verdict == "diverged":
            self.sites[row.layer] = [draft.site for draft in drafts]
        return row

    def _draft(self, pair: LayerPair, site: SitePair) -> _Draft:
        """A site with its tensors measured, where they can be, and yet to be judged."""
        assert pair.reference is not None
        if site.missing or site.problem or not site.moments:
            return _Draft(pair.reference.name, site)
        limit = self._summary_limit(site)
        if limit is not None:
            return _Draft(pair.reference.name, site, limit=limit)
        key = _content(site)
        known = None if key is None or self.rules else self.measured.get(key)
        if known is not None:  # one layer's output is the next one's input, and measured once
            measured = known.at(site)
        else:
            measured = measure(site, place=self.place)
            if key is not None:
                self.measured[key] = measured
        judged: list[Judgement | None] = [None] * len(measured.moments)
        return _Draft(pair.reference.name, site, measured, judged)

    def _part(self, layer: Layer, draft: _Draft) -> Part:
        site = draft.site
        if site.missing:
            return missing_part(site)
        if draft.limit is not None:
            ours = summary_table([pair.reference for pair in site.moments])
            theirs = summary_table([pair.candidate for pair in site.moments])
            rows, near = judge_rows(ours, theirs, draft.limit), self._nearer(layer, site)
            if rows.diverged.any():  # or it is a sum that cancels, of which rounding is left
                records = [pair.reference for pair in site.moments]
                unit = max(
                    roundoff(r.dtype) for p in site.moments for r in (p.reference, p.candidate)
                )
                growth = self.estimates.growth(records)
                room = AGAINST_ESTIMATE * growth * cancelled(layer, records, unit)
                rows = judge_rows(ours, theirs, draft.limit + room)
            return summary_part(site, rows, near.nearer, self.metrics)
        if draft.measured is None:
            return incomparable_part(site)
        judged = [one for one in draft.judged if one is not None]
        true = self._nearer(layer, site)
        part = compared_part(draft.measured, judged, true.nearer, self.metrics)
        return replace(part, reference_error=true.reference, candidate_error=true.candidate)

    def _summary_limit(self, site: SitePair) -> NDArray[np.float64] | None:
        """What each summary may change by, where all of a site's moments are judged at once."""
        pairs = site.moments
        dtypes = {(pair.reference.dtype, pair.candidate.dtype) for pair in pairs}
        if self.floor is not None or len(dtypes) > 1:
            return None
        if any(pair.reference.stored and pair.candidate.stored for pair in pairs):
            return None
        if not all(self.estimates.plain(pair.reference) for pair in pairs):
            return None
        first = pairs[0]
        floor = self.estimates.at(first.reference, first.candidate.layer, next(iter(dtypes)))
        growth = self.estimates.growth([pair.reference for pair in pairs])
        return AGAINST_ESTIMATE * floor * growth

    def _judge_one(self, draft: _Draft, at: int) -> None:
        """Judge one moment of a site, and learn from it."""
        assert draft.measured is not None
        pair, moment = draft.site.moments[at], draft.measured.moments[at]
        for taken in self.mixtures.due(pair.reference):
            self._choose(taken)
        here = self._floor_here(draft)
        chosen = self.mixtures.chosen(pair)
        if chosen is not None and self.preset is None and not self.rules:
            draft.judged[at] = chosen
            return
        key = None if self.rules else _pair_content(draft.site, pair)
        one = None if key is None else self.judged.get(key)
        if one is None:  # the same two tensors are not good here and bad there
            estimate = self.estimates.at(pair.reference, pair.candidate.layer, moment.dtypes)
            one = self._judge(draft.layer, pair, moment, here, estimate)
            if key is not None:
                self.judged[key] = one
        draft.judged[at] = one
        if one.verdict == "within" and one.errors is None:
            self.carrying.learn(pair.reference, moment)
        found = moment.difference
        error = math.nan if found is None else max(found.error, one.spread)
        good = one.verdict in ("identical", "within")
        if not good and pair.reference.port == "input":
            self.off.add(_call(pair.reference))
        own, apart = one.errors or (error, error)
        for estimates, known in ((self.estimates, own), (self.following, apart)):
            estimates.learn(
                pair.reference,
                pair.candidate.layer,
                error if math.isnan(known) else known,
                offset_of(found),
                good=good,
            )

    def _choose(self, taken: Taken) -> None:
        """Judge a choice of experts, and note what follows from it."""
        record = taken.record
        start, tokens = taken.span
        touched = self.mixtures.touched.before(record, tokens)
        touched = touched[start : start + taken.choice.tokens]
        known = Known(self._expected(taken), taken.scores, taken.values)
        given = _call(record) not in self.off
        judged, explained = judge_choice(taken.choice, known, touched, given)
        self.mixtures.settle(taken, judged, explained)
        if self.floor is not None and taken.where is not None:
            here = self.floor.here(record.layer, record.port, record.leaf)
            noise = None if here is None else here.at((record.epoch, record.batch, record.call))
            other = None if noise is None else choice_of(*noise.pair())
            if other is not None:
                self.noise.add(record, other)

    def _expected(self, taken: Taken) -> float:
        """The relative error to be expected of the scores that a choice was made of."""
        seen, record = taken.scored or taken.where, taken.record
        partner = self.mixtures.partner(record.layer)
        dtypes = taken.dtypes
        if taken.scored is not None and seen is not None:
            record, partner = seen.record, seen.pair.candidate.layer
        expected = self.estimates.at(record, partner, dtypes)
        here = None
        if self.floor is not None and taken.scored is not None:
            here = self.floor.here(record.layer, record.port, record.leaf)
        noise = None if here is None else here.at((record.epoch, record.batch, record.call))
        found = None if noise is None else noise.difference
        if found is not None and found.error > 0:
            return max(found.error, roundoff(found.dtypes[0]))
        return expected

    def _apart(self, pair: MomentPair, moment: MomentMeasurement) -> Apart | None:
        """The tokens that follow another choice of expert, in this run or in the floor run."""
        if moment.difference is None or not (self.mixtures.touched or self.noise):
            return None
        found = [
            touched.apart(pair.reference, moment.shape, pair.tokens, pair.reference_samples)
            for touched in (self.mixtures.touched, self.noise)
        ]
        return joined(*found)

    def _floor_here(self, draft: _Draft) -> FloorHere | None:
        """The floor run at a site, measured when it is first asked for."""
        assert draft.measured is not None
        if self.floor is None or is_identical(draft.measured):
            return None
        if draft.floor is None:
            site = draft.site
            draft.floor = (self.floor.here(draft.layer, site.port, site.leaf),)
        return draft.floor[0]

    def _judge(
        self,
        layer: str,
        pair: MomentPair,
        moment: MomentMeasurement,
        here: FloorHere | None,
        estimate: float,
    ) -> Judgement:
        """By the floor, and where that is a guess, by what good inputs bring along."""
        grouped = pair.tokens is not None  # the floor run's tokens are grouped in their own way
        expected = Expectation(
            estimate=estimate,
            basis=self.estimates.basis(moment.dtypes),
            floor=None if here is None or grouped else here.at(moment.moment),
            rule=rule_for(self.rules, layer),
            preset=self.preset,
        )
        apart = self._apart(pair, moment)
        if apart is not None:
            following = self.following.at(pair.reference, pair.candidate.layer, moment.dtypes)
            return judge_apart(moment, expected, apart, max(estimate, following))
        one = judge(moment, expected)
        guessed = expected.measured is None and not expected.rule and not expected.preset
        if one.verdict == "diverged" and guessed:
            carried = self.carrying.into(pair.reference, moment, estimate)
            again = one if carried is None else judge(moment, replace(expected, floor=carried))
            one = again if again.verdict == "within" else one
        return one

    def _nearer(self, layer: Layer, site: SitePair) -> Nearness:
        return UNKNOWN if self.truth is None else self.truth.nearer(layer.name, site)


def _texts(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def inputs_of(same: bool | None, rows: Sequence[LayerComparison]) -> tuple[bool | None, list[str]]:
    """Other bytes may be the same inputs, cast or batched otherwise: the first layer can tell."""
    given = next((row.input_verdict for row in rows if row.input_verdict is not None), None)
    if same is False and given in ("identical", "within"):
        return True, [
            "The inputs are not the same bytes, as after a cast or in other batches, but what the "
            "first layer was given agrees."
        ]
    return same, []


def floor_words(floor: Floor | None, work: Work, rows: Sequence[LayerComparison]) -> str:
    """Where the floor is from, in words."""
    measured = floor is not None and any(
        (row.layer, part) in floor for row in rows for part in row.parts
    )
    if floor is not None and measured:
        return f"measured: the distance of {floor.name} from the reference"
    named = [name for name in dict.fromkeys(work.estimates.precisions) if name is not None]
    basis = f"of the models ({' and '.join(named)}) and " if named else ""
    given = "no floor run was given" if floor is None else f"{floor.name} has no tensors for it"
    return f"estimated from the dtypes {basis}of the tensors, and the depth; {given}"
