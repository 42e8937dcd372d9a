"""What must hold before and behind a comparison, and what a reader is told of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import ComparisonError, OptionError
from ..recording.reader import Recording
from ..recording.reader import open as open_recording
from ..recording.training_mode import effects_in_words, effects_of, training_note
from .absent import runtime_of
from .align import LayerPair
from .environment import same_input
from .floor import Floor
from .moments import in_words
from .precision import is_quantised, precision_of, unit_of
from .results import LayerComparison
from .sentences import name_of
from .sudden import sudden_note, sudden_rise
from .weights.recorded import other_weights, weights_note

__all__ = [
    "Run",
    "about_steps",
    "check_compared",
    "check_paired",
    "check_third",
    "notes_of",
    "opened",
    "third_warnings",
    "warnings_of",
]

Run = str | os.PathLike[str] | Recording

_THIRD = {
    "floor": "a repeat of the reference, or the reference in the candidate's precision",
    "truth": "the same model in higher precision",
}
_FEW = 0.25  # of the smaller recording's layers: below, the models look unrelated


def opened(run: Run, partial: bool) -> Recording:
    """A whole recording; half of one only when that was asked for."""
    recording = run if isinstance(run, Recording) else open_recording(run, partial=partial)
    if recording.status != "complete" and not partial:
        state = "was not closed" if recording.status == "recording" else "failed"
        raise ComparisonError(
            f"The recording {recording.path} {state}: it holds {len(recording)} layers, and more "
            "may have been to come. Record it again, or compare what is there with --partial "
            "(partial=True)."
        )
    return recording


def check_paired(
    left: Recording,
    right: Recording,
    names: Sequence[str] | None,
    paired: Sequence[LayerPair],
) -> None:
    """Refuse to compare nothing."""
    if paired:
        return
    ours = list(left.layers if names is None else names)
    for run, other in ((left, right), (right, left)):
        if run.layers == [""] and "" not in other.layers:
            raise ComparisonError(_outputs_alone(run, other))
    raise ComparisonError(
        f"No layer of {left.path} pairs with a layer of {right.path}: nothing was compared. "
        f"The reference has {_some(ours)}, the candidate {_some(right.layers)}. "
        "Are these recordings of the same model? Pair layers by hand with --map 'regex=>template'."
    )


def _outputs_alone(run: Recording, other: Recording) -> str:
    runtime = runtime_of(run)
    program = "" if runtime == "eager" else f", a program of the runtime {runtime},"
    return (
        f"{run.path}{program} holds the model's own outputs alone, recorded as the root, and "
        f"{other.path} has {_some(other.layers)} but not the root: nothing was compared. Record "
        "that run again with its root: --layers '' (or --layers all, or --layers blocks "
        "--layers '')."
    )


def check_compared(left: Recording, right: Recording, rows: Sequence[LayerComparison]) -> None:
    """Refuse a comparison of which no pair could be measured."""
    if any(row.verdict not in ("missing", "incomparable") for row in rows):
        return
    ours, theirs = left.steps, right.steps
    if ours and theirs and not set(ours) & set(theirs):
        raise ComparisonError(
            f"{left.path} and {right.path} have no step in common, so nothing could be compared: "
            f"the reference has {_span(ours)}, the candidate {_span(theirs)}. Record or watch the "
            "same steps of both runs."
        )
    reasons = list(
        dict.fromkeys(f"{name_of(r.layer)}: {r.why}" for r in rows if r.candidate_layer is not None)
    )
    raise ComparisonError(
        f"None of the {len(reasons)} paired layers of {left.path} and {right.path} could be "
        f"compared. {' '.join(reasons[:3])}"
    )


def about_steps(
    left: Recording, right: Recording, compared: Sequence[tuple[int, int]]
) -> list[str]:
    """That one of two runs has steps that the other has not, said once for all layers."""
    ours, theirs = left.steps, right.steps
    common = set(ours) & set(theirs)
    if ours == theirs or common != set(compared):
        return []  # where samples were divided otherwise, steps are no measure
    text = f"{len(common)} {'step is' if len(common) == 1 else 'steps are'} in both runs"
    for side, steps in (("reference", ours), ("candidate", theirs)):
        alone = [step for step in steps if step not in common]
        if alone:
            text += f"; only in the {side}: {_span(alone)}"
    return [f"{text}. What one run alone has was not compared."]


def _span(steps: Sequence[tuple[int, int]]) -> str:
    first, last = (in_words(*step, 0) for step in (steps[0], steps[-1]))
    return first if len(steps) == 1 else f"{len(steps)} steps from {first} to {last}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(name_of(name) for name in names[:3])
    return f"{shown}, … ({len(names)} layers)" if len(names) > 3 else (shown or "no layers")


def check_third(left: Recording, right: Recording, third: Recording | None, role: str) -> None:
    """Refuse a floor or truth that is one of the two sides: it would judge itself."""
    for side, run in (("reference", left), ("candidate", right)):
        if third is not None and third.path == run.path and left.path != right.path:
            raise OptionError(
                f"The {role} {third.path} is the {side} itself, which says nothing. Give another "
                f"run: {_THIRD[role]}."
            )


def third_warnings(left: Recording, third: Recording | None, role: str) -> list[str]:
    """That a floor or truth saw other inputs, and is no measure then."""
    if third is None or same_input(left, third) is not False:
        return []
    return [f"The {role} {third.path} was given other inputs than the reference."]


def warnings_of(
    left: Recording,
    right: Recording,
    same: bool | None,
    names: Sequence[str] | None,
    paired: Sequence[LayerPair],
) -> list[str]:
    """What may explain everything below it."""
    found = _about_modes(left, right)
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
    for run in (left, right):
        found += [*_failed_checks(run), *_guesses(run)]
    return found


def _about_modes(left: Recording, right: Recording) -> list[str]:
    """That a run was in training mode, where that alone makes its layers return other values."""
    effects = [effects_of(run.manifest) for run in (left, right)]
    if all(effects):
        drawn = {what: names for what, names in effects[0].items() if what != "batch statistics"}
        return (
            [
                f"Both runs were recorded in training mode: {effects_in_words(drawn)}, and their "
                "values agree only where both runs drew the same random numbers."
            ]
            if drawn and any(what in effects[1] for what in drawn)
            else []
        )
    for side, other, found in (("reference", "candidate", 0), ("candidate", "reference", 1)):
        if effects[found]:
            return [
                f"The {side} was recorded in training mode and the {other} was not: in the {side}, "
                f"{effects_in_words(effects[found])}. That alone makes the runs differ. Record the "
                f"{side} with --eval (model.eval() in Python)."
            ]
    return []


def _failed_checks(run: Recording) -> list[str]:
    failed = [item for item in run.manifest.self_checks if item.get("passed") is False]
    if not failed:
        return []
    return [
        f"The self-check of {run.path} failed ({len(failed)} of {len(run.manifest.self_checks)} "
        f"checks; first: {str(failed[0].get('text', '')).rstrip('.')}): what it recorded may not "
        f"be what the model computes. See tensortap check {run.path}."
    ]


def _guesses(run: Recording) -> list[str]:
    """Layers that are known by a guess: a divergence there may be that of another layer."""
    sites = (site for segment in run._segments for site in segment.sites)
    names = list(dict.fromkeys(s.layer for s in sites if s.provenance == "inferred"))
    if not names:
        return []
    return [
        f"{len(names)} {'layer' if len(names) == 1 else 'layers'} of {run.path} "
        f"{'is' if len(names) == 1 else 'are'} known by a guess ({_some(names)}): the name is "
        "inferred from the shape of the graph, and what differs there may be another layer."
    ]


def _told(left: Recording, right: Recording) -> list[str]:
    """What the recordings say of themselves; what both say is said once."""
    first, second = (
        [text for text in dict.fromkeys(run.notes) if text != training_note(run.manifest)]
        for run in (left, right)  # a warning says that of both
    )
    both = f"{left.path} and {right.path}"
    told = [f"{both if text in second else left.path}: {text}" for text in first]
    return [*told, *(f"{right.path}: {text}" for text in second if text not in first)]


def notes_of(
    left: Recording,
    right: Recording,
    floor: Floor | None,
    conditions: Sequence[str],
    rows: Sequence[LayerComparison],
) -> list[str]:
    """What the recordings say of their weights and of themselves; where the floor run is silent."""
    others = other_weights(left.manifest.target, right.manifest.target)
    notes = [weights_note(others)] if others else []
    notes += _told(left, right)
    if conditions and any(row.by_summaries for row in rows):
        notes.append(
            f"{' and '.join(conditions)} cannot be applied where a side holds summaries alone: "
            "those layers are judged by their moments, range and counts. Record both sides with "
            "keep='tensors'."
        )
    if floor is not None:
        lacking = [
            name_of(row.layer)
            for row in rows
            if any(part.difference and (row.layer, part) not in floor for part in row.parts)
        ]
        if lacking:
            notes.append(
                f"The floor run {floor.name} lacks {len(lacking)} of {len(rows)} layers "
                f"({', '.join(lacking[:3])}{', …' if len(lacking) > 3 else ''}): the floor is "
                "estimated there."
            )
    precision = max((precision_of(run) or "" for run in (left, right)), key=unit_of)
    if floor is None and not conditions and is_quantised(precision):
        rise = sudden_rise(rows)
        notes += [] if rise is None else [sudden_note(rise, precision)]
    return notes
