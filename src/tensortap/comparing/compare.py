"""`compare`: two recordings in, a comparison out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

from ..errors import ComparisonError
from ..recording.reader import Layer, Recording
from ..recording.reader import open as open_recording
from ..selection.recorded import choose_layers
from .align import LayerPair, align
from .environment import environment_differences, same_input
from .floor import Floor
from .judge import Expectation, Judgement, judge
from .measure import MomentMeasurement, SiteMeasurement, measure
from .precision import depth_of, estimated_floor, precision_of
from .results import Comparison, LayerComparison, Origin, Part, Verdict, worst
from .rules import Rule, parse_rules, preset_of, rule_for
from .sentences import name_of
from .sites import SitePair, SitePairer
from .truth import Truth

__all__ = ["Run", "compare"]

Run = str | os.PathLike[str] | Recording

_FEW = 0.25  # of the smaller recording's layers: below, the models look unrelated


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
    partial: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Align two recordings, measure every pair of tensors, and judge layer by layer.

    `floor` is a run whose distance from the reference is the noise to expect: a repeat run, or
    the reference in the candidate's precision. `rules` (`REGEX: max_abs < 1e-2 and cosine > 0.99`)
    overrule everything but equal bits and NaN; `map` (`regex=>template`) pairs layers by hand;
    `preset` judges by the limits of the documents; `truth` is a run in higher precision that says
    which side is nearer to it. `partial` takes recordings that were not closed or are damaged.
    `progress` is told how many layers of how many are done.
    """
    left, right = _open(reference, partial), _open(candidate, partial)
    chosen = preset_of(preset)
    names = None if layers is None else choose_layers(left, _texts(layers))
    pairs = align(left, right, maps=_texts(map), names=names)
    paired = [pair for pair in pairs if pair.reference is not None and pair.candidate is not None]
    _check_paired(left, right, names, paired)
    judges = parse_rules(_texts(rules), [pair.reference.name for pair in paired if pair.reference])
    third = None if floor is None else Floor(left, _open(floor, partial), names)
    work = _Work(
        left,
        right,
        SitePairer(left, right),
        judges,
        None if chosen is None else chosen.rule(),
        third,
        None if truth is None else Truth(left, _open(truth, partial), names),
    )
    rows = []
    for number, pair in enumerate(pairs):
        rows.append(work.row(pair))
        if progress is not None:
            progress(number + 1, len(pairs))
    _check_compared(left, right, rows)
    same = same_input(left, right)
    return Comparison(
        reference=left.path,
        candidate=right.path,
        layers=tuple(rows),
        environment=environment_differences(left, right),
        same_input=same,
        floor=_floor_words(third, work),
        preset=preset,
        truth=None if work.truth is None else work.truth.path,
        warnings=tuple(_warnings(left, right, same, names, paired)),
        notes=tuple(_notes(left, right, third)),
    )


class _Work:
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
    ) -> None:
        self.pairer = pairer
        self.rules = rules
        self.preset = preset
        self.floor = floor
        self.truth = truth
        self.precisions = (precision_of(reference), precision_of(candidate))
        self._blocks = reference.manifest.structure.blocks
        self._positions = {name: number for number, name in enumerate(reference.layers)}

    def row(self, pair: LayerPair) -> LayerComparison:
        left, right = pair.reference, pair.candidate
        if left is None or right is None:
            return _missing(pair)
        depth = depth_of(left.name, self._positions[left.name], self._blocks)
        parts = tuple(self._part(left, site, depth) for site in self.pairer.pair(pair))
        inputs = [part for part in parts if part.port == "input"]
        others = [part for part in parts if part.port != "input"]
        verdict = _overall(others) or _overall(inputs) or "incomparable"
        into = _overall(inputs)
        gaps = [part for part in parts if part.verdict == "missing"]
        return LayerComparison(
            layer=left.name,
            candidate_layer=right.name,
            matched_by=pair.matched_by,
            verdict=verdict,
            parts=parts,
            input_verdict=into,
            origin=_origin(verdict, into if others else None),
            order=left.order,
            type=left.type,
            candidate_type=right.type,
            note="; ".join(part.why for part in gaps),
        )

    def _part(self, layer: Layer, site: SitePair, depth: int) -> Part:
        if site.missing:
            where = f"{site.port}{' ' + site.leaf if site.leaf else ''}"
            return Part(site.port, site.leaf, "missing", f"the {site.missing} has no {where}")
        if site.problem or not site.moments:
            return _incomparable(site)
        measured = measure(site)
        judged = [self._judge(layer, site, moment, depth) for moment in measured.moments]
        return _part(measured, judged, self._nearer(layer, site, measured))

    def _judge(
        self, layer: Layer, site: SitePair, moment: MomentMeasurement, depth: int
    ) -> Judgement:
        pair = moment._pair
        dtypes = (pair.reference.dtype, pair.candidate.dtype)
        here = None
        identical = moment.difference is not None and moment.difference.identical
        if self.floor is not None and not identical:
            found = self.floor.here(layer.name, site.port, site.leaf)
            here = None if found is None else found.at(moment.moment)
        return judge(
            moment,
            Expectation(
                estimate=estimated_floor(dtypes, self.precisions, depth),
                basis=self.basis(dtypes),
                floor=here,
                rule=rule_for(self.rules, layer.name),
                preset=self.preset,
            ),
        )

    def basis(self, dtypes: tuple[str, str]) -> str:
        """What an estimate of the floor rests on, in words."""
        named = [name for name in (*dtypes, *self.precisions) if name is not None]
        return f"{' and '.join(dict.fromkeys(named))} and the depth"

    def _nearer(self, layer: Layer, site: SitePair, measured: SiteMeasurement) -> str | None:
        found = measured.difference
        if self.truth is None or found is None or found.identical:
            return None
        return self.truth.nearer(layer.name, site)


def _open(run: Run, partial: bool) -> Recording:
    recording = run if isinstance(run, Recording) else open_recording(run, partial=partial)
    if recording.status != "complete" and not partial:
        state = "was not closed" if recording.status == "recording" else "failed"
        raise ComparisonError(
            f"The recording {recording.path} {state}: it holds {len(recording)} layers, and more "
            "may have been to come. Record it again, or compare what is there with --partial "
            "(partial=True)."
        )
    return recording


def _texts(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _check_paired(
    left: Recording,
    right: Recording,
    names: Sequence[str] | None,
    paired: Sequence[LayerPair],
) -> None:
    if paired:
        return
    ours = list(left.layers if names is None else names)
    raise ComparisonError(
        f"No layer of {left.path} pairs with a layer of {right.path}: nothing was compared. "
        f"The reference has {_some(ours)}, the candidate {_some(right.layers)}. "
        "Are these recordings of the same model? Pair layers by hand with --map 'regex=>template'."
    )


def _check_compared(left: Recording, right: Recording, rows: Sequence[LayerComparison]) -> None:
    if any(row.verdict not in ("missing", "incomparable") for row in rows):
        return
    reasons = list(dict.fromkeys(f"{name_of(r.layer)}: {r.why}" for r in rows if r.candidate_layer))
    raise ComparisonError(
        f"None of the {len(reasons)} paired layers of {left.path} and {right.path} could be "
        f"compared. {' '.join(reasons[:3])}"
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(name_of(name) for name in names[:3])
    return f"{shown}, … ({len(names)} layers)" if len(names) > 3 else (shown or "no layers")


def _missing(pair: LayerPair) -> LayerComparison:
    layer = pair.reference or pair.candidate
    assert layer is not None
    side = "candidate" if pair.candidate is None else "reference"
    return LayerComparison(
        layer=layer.name,
        candidate_layer=None if pair.candidate is None else layer.name,
        matched_by="",
        verdict="missing",
        order=layer.order,
        type="" if pair.reference is None else layer.type,
        candidate_type="" if pair.candidate is None else layer.type,
        note=f"missing in the {side}",
    )


def _incomparable(site: SitePair) -> Part:
    first = site.moments[0] if site.moments else None
    return Part(
        site.port,
        site.leaf,
        "incomparable",
        site.problem or "the two sides have no moment in common",
        shape=() if first is None else first.reference.shape,
        candidate_shape=() if first is None else first.candidate.shape,
        dtype="" if first is None else first.reference.dtype,
        candidate_dtype="" if first is None else first.candidate.dtype,
    )


def _overall(parts: Sequence[Part]) -> Verdict | None:
    """The worst verdict of what was compared; of what was not, if nothing was."""
    compared = [part.verdict for part in parts if part.verdict != "missing"]
    return worst(compared or [part.verdict for part in parts])


def _origin(verdict: Verdict, into: Verdict | None) -> Origin | None:
    if verdict != "diverged":
        return None
    if into in ("identical", "within"):
        return "made here"
    return "inherited" if into == "diverged" else "unknown"


def _part(measured: SiteMeasurement, judged: Sequence[Judgement], nearer: str | None) -> Part:
    site = measured.site
    order = ("identical", "within", "missing", "incomparable", "diverged")
    at = max(
        range(len(judged)),
        key=lambda k: (order.index(judged[k].verdict), judged[k].ratio or 0.0),
    )
    said, moment = judged[at], measured.moments[at]
    first = site.moments[0]
    why = said.why
    if len(judged) > 1 and said.verdict == "diverged":
        why = f"at {_moment_words(moment)} {why}"
    found = measured.difference
    left, right = measured.summaries()
    hints = list(said.hints)
    if nearer is not None and said.verdict == "diverged":
        hints.append(f"the {nearer} is nearer to the truth")
    if site.unpaired:
        hints.append(f"not compared: {', '.join(site.unpaired[:3])}")
    return Part(
        port=site.port,
        leaf=site.leaf,
        verdict=said.verdict,
        why=why,
        difference=found,
        reference_summary=left,
        candidate_summary=right,
        shape=first.reference.shape,
        candidate_shape=first.candidate.shape,
        dtype=first.reference.dtype,
        candidate_dtype=first.candidate.dtype,
        transform="" if site.transform is None else site.transform.name,
        error=math.nan if found is None else found.error,
        floor=said.floor,
        floor_ratio=said.ratio,
        hints=tuple(hints),
        moments=len(judged),
        worst_moment=moment.moment,
        max_abs_moment=measured.max_abs_moment,
        order=first.reference.order,
        nearer=nearer,
    )


def _moment_words(moment: MomentMeasurement) -> str:
    epoch, batch, call = moment.moment
    words = [f"epoch {epoch}"] if epoch else []
    words.append(f"batch {batch}")
    if call:
        words.append(f"call {call}")
    return ", ".join(words)


def _floor_words(floor: Floor | None, work: _Work) -> str:
    if floor is not None:
        return f"measured: the distance of {floor.path} from the reference"
    named = [name for name in dict.fromkeys(work.precisions) if name is not None]
    basis = f"of the models ({' and '.join(named)}) and " if named else ""
    return f"estimated from the dtypes {basis}of the tensors, and the depth; no floor run was given"


def _warnings(
    left: Recording,
    right: Recording,
    same: bool | None,
    names: Sequence[str] | None,
    paired: Sequence[LayerPair],
) -> list[str]:
    found = []
    if same is False:
        found.append(
            "The two runs were given different inputs: what differs below may be that alone."
        )
    total = min(len(left) if names is None else len(names), len(right))
    if len(paired) < _FEW * total:
        found.append(
            f"Only {len(paired)} of {total} layers align: these look like recordings of different "
            "models. Pair layers by hand with --map 'regex=>template'."
        )
    return found


def _notes(left: Recording, right: Recording, floor: Floor | None) -> list[str]:
    notes = [f"{run.path}: {text}" for run in (left, right) for text in run.notes]
    if floor is not None and not len(floor):
        notes.append(f"The floor run {floor.path} has no layer in common with the reference.")
    return notes
