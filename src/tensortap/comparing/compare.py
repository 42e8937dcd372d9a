"""`compare`: two recordings in, a comparison out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from ..numerics.difference import Difference
from ..recording.reader import Layer, Record, Recording
from ..recording.series import summary_table
from ..selection.recorded import choose_layers
from ..taps.unseen import unseen
from .absent import Absences
from .align import LayerPair, align
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
from .floor import Floor, FloorHere
from .judge import AGAINST_ESTIMATE, Expectation, Judgement, judge
from .measure import MomentMeasurement, SiteMeasurement, measure
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
from .precision import depth_of, estimated_floor, offset_of, precision_of
from .results import Comparison, LayerComparison, Moment, Part
from .rules import Rule, parse_rules, preset_of, rule_for
from .sites import MomentPair, SitePair, SitePairer
from .summaries import judge_rows
from .truth import UNKNOWN, Nearness, Truth

__all__ = ["Run", "Work", "compare", "floor_words", "inputs_of"]


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
    the reference in the candidate's precision. `rules` (`REGEX: max_abs < 1e-2 and cosine > 0.99`)
    overrule everything but equal bits and NaN; `map` (`regex=>template`) pairs layers by hand;
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
        )


def _compare(
    reference: Run,
    candidate: Run,
    *,
    layers: str | Sequence[str] | None,
    floor: Run | None,
    rules: str | Sequence[str],
    map: str | Sequence[str],
    preset: str | None,
    truth: Run | None,
    metrics: Sequence[str],
    partial: bool,
    place: Place,
    progress: Callable[[int, int], None] | None,
) -> Comparison:
    left, right = opened(reference, partial), opened(candidate, partial)
    chosen = preset_of(preset)
    names = None if layers is None else choose_layers(left, _texts(layers))
    pairs = align(left, right, maps=_texts(map), names=names)
    paired = [pair for pair in pairs if pair.reference is not None and pair.candidate is not None]
    check_paired(left, right, names, paired)
    judges = parse_rules(_texts(rules), [pair.reference.name for pair in paired if pair.reference])
    beside = None if floor is None else opened(floor, partial)
    beyond = None if truth is None else opened(truth, partial)
    check_third(left, right, beside, "floor")
    check_third(left, right, beyond, "truth")
    third = None if beside is None else Floor(left, beside, names, place)
    work = Work(
        left,
        right,
        SitePairer(left, right),
        judges,
        None if chosen is None else chosen.rule(),
        third,
        None if beyond is None else Truth(left, right, beyond, pairs, names, place),
        tuple(metrics),
        place,
    )
    both = [(p.reference.name, p.candidate.name) for p in paired if p.reference and p.candidate]
    work.absences = Absences(left, right, both)
    rows = []
    for number, pair in enumerate(pairs):
        for coming in pairs[number + 1 : number + 2] if number else pairs[:2]:
            place.expect(records_of(coming))
        rows.append(work.row(pair))
        if progress is not None:
            progress(number + 1, len(pairs))
    check_compared(left, right, rows)
    conditions = [
        *(["Rules"] if judges else []),
        *([f"The preset {preset}"] if preset is not None else []),
    ]
    differing, in_common = environment_differences(left, right)
    same, about_inputs = inputs_of(same_input(left, right), rows)
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
        warnings=(
            *warnings_of(left, right, same, names, paired),
            *third_warnings(left, beside, "floor"),
            *([] if work.truth is None else work.truth.warnings),
        ),
        notes=(
            *about_inputs,
            *notes_of(left, right, third, conditions, rows),
            *([] if work.truth is None else work.truth.notes),
        ),
    )
    more = about_steps(left, right, steps_compared(comparison))
    comparison = explained(comparison, work.sites, place)
    return replace(comparison, notes=(*more, *comparison.notes, *place.notes()))


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


@dataclass(frozen=True)
class _Given:
    """What good inputs bring along: their own rounding, and an offset that a norm takes away."""

    error: float = 0.0
    offset: float = 1.0

    def with_input(self, found: Difference | None, judged: Judgement) -> _Given:
        offset = max(self.offset, offset_of(found))
        if judged.verdict != "within" or found is None or math.isnan(found.error):
            return replace(self, offset=offset)
        return _Given(max(self.error, found.error), offset)


_NOTHING = _Given()


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
    return (*ids, pair.reference_samples, pair.candidate_samples, layout, site.cut)


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
        self.measured: dict[_Content, SiteMeasurement] = {}
        self.judged: dict[_Content, Judgement] = {}
        self.precisions = (precision_of(reference), precision_of(candidate))
        self._positions = {name: number for number, name in enumerate(reference.layers)}
        blocks = reference.manifest.structure.blocks
        self._blocks = [self._positions[name] for name in blocks if name in self._positions]
        self._structure = reference.manifest.structure

    def row(self, pair: LayerPair) -> LayerComparison:
        left, right = pair.reference, pair.candidate
        if left is None or right is None:
            return missing_row(pair, self.absences)
        depth = depth_of(self._positions[left.name], self._blocks, self._unheard(left.name))
        sites = self.pairer.pair(pair)
        given: dict[Moment, _Given] = {}  # by moment: a call is given its own inputs
        inputs_first = sorted(sites, key=lambda site: site.port != "input")
        compared = [self._part(left, site, depth, given) for site in inputs_first]
        parts = (*compared, *(unpaired_part(site) for site in sites if site.unpaired))
        row = layer_row(left, right, pair.matched_by, parts)
        if row.verdict == "diverged":
            self.sites[row.layer] = sites
        return row

    def _unheard(self, layer: str) -> int:
        """How many blocks ran before a layer though none of them was recorded."""
        blocks, embedding = self._structure.blocks, self._structure.embedding
        if self._blocks or layer == embedding:
            return 0
        for number, block in enumerate(blocks):
            if layer.startswith(f"{block}."):
                return number
        return len(blocks)

    def _part(self, layer: Layer, site: SitePair, depth: int, given: dict[Moment, _Given]) -> Part:
        if site.missing:
            return missing_part(site)
        if site.problem or not site.moments:
            return incomparable_part(site)
        limit = self._summary_limit(site, depth, given)
        if limit is not None:
            ours = summary_table([pair.reference for pair in site.moments])
            theirs = summary_table([pair.candidate for pair in site.moments])
            rows, near = judge_rows(ours, theirs, limit), self._nearer(layer, site)
            return summary_part(site, rows, near.nearer, self.metrics)
        key = _content(site)
        known = None if key is None or self.rules else self.measured.get(key)
        if known is not None:  # one layer's output is the next one's input, and measured once
            measured = known.at(site)
        else:
            measured = measure(site, place=self.place)
            if key is not None:
                self.measured[key] = measured
        judged = self._judged(layer, measured, depth, given)
        if site.port == "input":
            for moment, one in zip(measured.moments, judged, strict=True):
                known_here = given.get(moment.moment, _NOTHING)
                given[moment.moment] = known_here.with_input(moment.difference, one)
        true = self._nearer(layer, site)
        part = compared_part(measured, judged, true.nearer, self.metrics)
        return replace(part, reference_error=true.reference, candidate_error=true.candidate)

    def _summary_limit(
        self, site: SitePair, depth: int, given: Mapping[Moment, _Given]
    ) -> float | None:
        """What a summary may change by, where all of a site's moments can be judged at once."""
        pairs = site.moments
        dtypes = {(pair.reference.dtype, pair.candidate.dtype) for pair in pairs}
        if self.floor is not None or len(dtypes) > 1:
            return None
        if any(pair.reference.stored and pair.candidate.stored for pair in pairs):
            return None
        if any(came != _NOTHING for came in given.values()):
            return None
        estimate = estimated_floor(next(iter(dtypes)), self.precisions, depth, _NOTHING.offset)
        return estimate * AGAINST_ESTIMATE

    def _judged(
        self,
        layer: Layer,
        measured: SiteMeasurement,
        depth: int,
        given: Mapping[Moment, _Given],
    ) -> list[Judgement]:
        site, here = measured.site, None
        judged: list[Judgement] = []
        for pair, moment in zip(site.moments, measured.moments, strict=True):
            key = None if self.rules else _pair_content(site, pair)
            known = None if key is None else self.judged.get(key)
            if known is not None:  # the same two tensors are not good here and bad there
                judged.append(known)
                continue
            if here is None and self.floor is not None and not is_identical(measured):
                here = self.floor.here(layer.name, site.port, site.leaf)
            came = given.get(moment.moment, _NOTHING)
            estimate = estimated_floor(moment.dtypes, self.precisions, depth, came.offset)
            if estimate:  # rounding that came in goes on
                estimate = max(estimate, came.error)
            judged.append(self._judge(layer.name, moment, here, estimate))
            if key is not None:
                self.judged[key] = judged[-1]
        return judged

    def _judge(
        self, layer: str, moment: MomentMeasurement, here: FloorHere | None, estimate: float
    ) -> Judgement:
        return judge(
            moment,
            Expectation(
                estimate=estimate,
                basis=self.basis(moment.dtypes),
                floor=None if here is None else here.at(moment.moment),
                rule=rule_for(self.rules, layer),
                preset=self.preset,
            ),
        )

    def basis(self, dtypes: tuple[str, str]) -> str:
        """What an estimate of the floor rests on, in words."""
        named = [name for name in (*dtypes, *self.precisions) if name is not None]
        return f"{' and '.join(dict.fromkeys(named))} and the depth"

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
        return f"measured: the distance of {floor.path} from the reference"
    named = [name for name in dict.fromkeys(work.precisions) if name is not None]
    basis = f"of the models ({' and '.join(named)}) and " if named else ""
    given = "no floor run was given" if floor is None else f"{floor.path} has no tensors for it"
    return f"estimated from the dtypes {basis}of the tensors, and the depth; {given}"
