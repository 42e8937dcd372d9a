"""Findings: what is unhealthy in one recording.

Errors are facts (NaN, Inf, a self-check that failed, a run that left its history for good).
Warnings are judgements, so every limit can be moved: large language models have healthy massive
activations.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import RecordingError
from ..numerics.summary import Summary
from .excursions import Excursion, excursions_of, quantity_of
from .pieces import pieces
from .series import Series, series_of

if TYPE_CHECKING:
    from .reader import Layer, Record, Recording

__all__ = [
    "Finding",
    "Limits",
    "check",
    "first_abnormal",
    "first_bad",
    "in_time",
    "largest_change",
    "mean_change",
    "onset",
]

Kind = Literal[
    "nan",
    "inf",
    "self-check",
    "exploding",
    "dead",
    "saturated",
    "underflow",
    "jump",
    "abnormal",
    "incomplete",
]
_PIECE = 4 << 20  # elements
_MAY_BE_CONSTANT = ("param", "grad_param", "update", "scalar")
_STILL = {
    "grad_param": "nothing reaches the parameter, it is frozen or has no part in the loss",
    "update": "the parameter never moved, it is frozen or its learning rate is zero",
}


@dataclass(frozen=True)
class Finding:
    """Something unhealthy, where it is, and the sentence that says it."""

    layer: str
    kind: str
    severity: Literal["error", "warning"]
    text: str
    moment: tuple[int, int, int] | None = None  # epoch, batch and call of the first that shows it
    port: str = ""
    leaf: str = ""
    excursion: Excursion | None = None  # of an abnormal step: the numbers
    order: int = field(default=-1, repr=False, compare=False)
    always: bool = field(default=False, repr=False, compare=False)  # so in every record: a mask

    def to_dict(self) -> dict[str, Any]:
        names = ("layer", "kind", "severity", "text", "port", "leaf")
        moment = None if self.moment is None else list(self.moment)
        numbers = {} if self.excursion is None else {"excursion": self.excursion.to_dict()}
        return {**{name: getattr(self, name) for name in names}, "moment": moment, **numbers}

    @property
    def step(self) -> tuple[int, int]:
        """Epoch and batch; after all others where there is none."""
        return self.moment[:2] if self.moment else (1 << 62, 0)


def first_bad(findings: Sequence[Finding]) -> Finding | None:
    """The NaN or Inf that came first in time and in order of execution.

    A mask that is infinite from the first step on is not it, when something else broke later.
    """
    bad = [f for f in findings if f.kind in ("nan", "inf") and f.moment is not None]
    born = min((f.step for f in bad if f.always and f.kind == "inf"), default=None)
    newly = [f for f in bad if not f.always]
    if born is not None and newly and all(f.step > born or f.always for f in bad):
        bad = newly
    step = min((f.step for f in bad), default=None)
    bad = sorted((f for f in bad if f.step == step), key=lambda f: f.order)
    if bad and bad[0].port not in ("input", "output", "scalar"):
        # what is logged is written last, and the loss was there before its gradients
        bad = [f for f in bad if f.port == "scalar" and quantity_of(f.layer) == "loss"] or bad
    return bad[0] if bad else None


def first_abnormal(findings: Sequence[Finding]) -> Finding | None:
    """The first step that was far outside the run's own history; one for good goes first."""
    found = [(f.severity != "error", f.excursion.rank, f) for f in findings if f.excursion]
    return min(found, key=lambda item: item[:2])[2] if found else None


def in_time(findings: Sequence[Finding]) -> list[Finding]:
    """Errors before warnings, and each as they came; what has no moment comes last."""
    return sorted(findings, key=lambda f: (f.severity != "error", f.step, f.order))


def onset(findings: Sequence[Finding]) -> list[Finding]:
    """How it began, in time: abnormal steps, the first NaN or Inf, and what was there before.

    NaN spreads, and so do large numbers: the places that follow say nothing new.
    """
    first, abnormal = first_bad(findings), first_abnormal(findings)
    began = [f.step for f in (first, abnormal) if f is not None]
    return [
        f
        for f in in_time(findings)
        if f is first
        or f.excursion is not None
        or f.kind in ("self-check", "incomplete")
        or (f.kind not in ("nan", "inf") and (not began or f.step < min(began)))
    ]


@dataclass(frozen=True)
class Limits:
    """Beyond these a layer is worth a warning. The first two are the documents' own."""

    max_mean: float = 10.0
    max_jump: float = 10.0
    max_abs: float = math.inf
    max_saturated: float = 0.01
    max_underflow: float = 0.5

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(
    recording: Recording | str | os.PathLike[str], limits: Limits | None = None
) -> list[Finding]:
    """All findings, errors first within a layer, layers in order of execution."""
    if isinstance(recording, str | os.PathLike):
        from .reader import open

        recording = open(recording)
    limits = limits or Limits()
    findings: list[Finding] = []
    if not recording.layers:
        raise RecordingError(
            f"There is nothing to check in {recording.path}: no record of it could be read."
        )
    findings += [Finding("", "incomplete", "warning", text) for text in recording.damage]
    if recording.status != "complete":
        reason = recording.manifest.failure or "it was not closed"
        text = f"The recording is not complete: {reason}."
        findings.append(Finding("", "incomplete", "warning", text))
    findings += _self_checks(recording)
    for layer in recording.values():
        findings += _check_layer(layer, limits)
    findings += _jumps(recording, limits)
    if len(recording.steps) > 1:
        findings = _with_outputs(recording, findings)
        findings += _abnormal(recording, findings)
    order = {name: index for index, name in enumerate(recording.layers)}
    return sorted(findings, key=lambda f: (order.get(f.layer, -1), f.severity))


def _self_checks(recording: Recording) -> Iterator[Finding]:
    """What a compiled model with taps does otherwise than without; one finding a layer."""
    failed: dict[tuple[str, str], list[str]] = {}
    for item in recording.manifest.self_checks:
        if item.get("passed") is False:
            key = (str(item.get("layer", "")), str(item.get("check", "")))
            failed.setdefault(key, []).append(str(item.get("text", "")).rstrip("."))
    for (layer, _), texts in failed.items():
        more = f"; the same {len(texts) - 1} more times" if len(texts) > 1 else ""
        yield Finding(layer, "self-check", "error", f"{texts[0]}{more}.")


def _with_outputs(recording: Recording, findings: list[Finding]) -> list[Finding]:
    """The findings; of a loss that breaks first it is said that the model's outputs are well."""
    first = first_bad(findings)
    if first is None or first.port != "scalar":
        return findings
    there = any(
        record.port == "output" and (record.epoch, record.batch) == first.step
        for layer in recording.values()
        for record in layer.records
    )
    if not there:
        return findings
    text = f"{first.text} Every output that was recorded at that step is finite."
    return [replace(f, text=text) if f is first else f for f in findings]


def _abnormal(recording: Recording, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Steps far outside the run's own history; errors where it broke or never came back."""
    for excursion in excursions_of(recording, _broke(recording, findings)):
        yield Finding(
            excursion.layer,
            "abnormal",
            "warning" if excursion.recovered else "error",
            str(excursion),
            (excursion.epoch, excursion.batch, 0),
            excursion.port,
            excursion.leaf,
            excursion,
            order=excursion.order,
        )


def _broke(recording: Recording, findings: Sequence[Finding]) -> tuple[int, int] | None:
    """The step from which on the run is not finite; None where it stays so or came through.

    A scaler of losses skips a step whose gradients overflow, and the run goes on.
    """
    first = first_bad(findings)
    if first is None:
        return None
    bad: set[tuple[int, int]] = set()
    good: set[tuple[int, int]] = set()
    for layer in recording.values():
        for series in series_of(layer.records):
            if series.port == "scalar" and quantity_of(series.layer) is None:
                continue
            wrong = series.bad > 0
            if wrong.all() and first.step != (series.first.epoch, series.first.batch):
                continue  # a mask
            steps = series.steps
            bad.update((epoch, batch) for epoch, batch in steps[wrong].tolist())
            good.update((epoch, batch) for epoch, batch in steps[~wrong].tolist())
    last_good = max(good - bad, default=(-1, -1))
    return min((step for step in bad if step > last_good), default=None)


def _check_layer(layer: Layer, limits: Limits) -> Iterator[Finding]:
    """One finding a kind, port and leaf: the first record that shows it, and how many do."""
    first: dict[tuple[str, str, str], tuple[Finding, int]] = {}
    records: dict[tuple[str, str], int] = {}
    for series in series_of(layer.records):
        yield from _still(series)
        place = (series.port, series.leaf)
        records[place] = records.get(place, 0) + len(series.records)
        for at in np.flatnonzero(_doubtful(series, limits)).tolist():
            record, summary = series.records[at], Summary.from_row(series.table[at].tolist())
            for kind, severity, what in _judge(record, summary, limits):
                key = (record.port, record.leaf, kind)
                if key in first:
                    first[key] = (first[key][0], first[key][1] + 1)
                    continue
                text = f"The {record.where()} {what}"
                moment = (record.epoch, record.batch, record.call)
                found = Finding(layer.name, kind, severity, text, moment, record.port, record.leaf)
                first[key] = (replace(found, order=record.order), 1)
    for finding, times in first.values():
        more = f"; the same in {times - 1} later records" if times > 1 else ""
        always = times == records[finding.port, finding.leaf]
        yield replace(finding, text=f"{finding.text}{more}.", always=always)


def _doubtful(series: Series, limits: Limits) -> NDArray[np.bool_]:
    """The records that may be worth a finding; most of a long run are not, and not looked at."""
    column, count = series.column, series.column("count")
    with np.errstate(invalid="ignore"):
        found: NDArray[np.bool_] = (
            (series.bad > 0)
            | (np.abs(column("mean")) > limits.max_mean)
            | (column("absmax") > limits.max_abs)
            | (column("zeros") == count)
            | (column("min") == column("max"))
            | (column("saturated") > limits.max_saturated * count)
            | (column("subnormal") > limits.max_underflow * count)
        )
    return found


def _still(series: Series) -> Iterator[Finding]:
    """A parameter that never got a gradient, or never moved, in a run of more than one step."""
    port, steps, first = series.port, len(series.records), series.first
    if port not in _STILL or steps < 2 or (series.column("zeros") < series.column("count")).any():
        return
    place = f"{port}{' ' + series.leaf if series.leaf else ''} of '{series.layer}'"
    text = f"The {place} is zero at all {steps} moments: {_STILL[port]}."
    moment = (first.epoch, first.batch, first.call)
    yield Finding(
        series.layer, "dead", "warning", text, moment, port, series.leaf, order=first.order
    )


def _judge(
    record: Record, summary: Summary, limits: Limits
) -> Iterator[tuple[Kind, Literal["error", "warning"], str]]:
    count = summary.count
    if record.port == "scalar" and not summary.finite:
        yield "nan" if summary.nan else "inf", "error", "is NaN" if summary.nan else "is infinite"
        return
    if summary.nan:
        yield "nan", "error", f"has NaN in {summary.nan} of {count} values"
    infinite = summary.posinf + summary.neginf
    if infinite:
        yield (
            "inf",
            "error",
            f"has Inf in {infinite} of {count} values ({summary.posinf} +Inf, "
            f"{summary.neginf} -Inf)",
        )
    if not record.dtype.startswith(("float", "bfloat", "complex")) or not summary.finite:
        return
    if abs(summary.mean) > limits.max_mean and record.port != "scalar":
        yield (
            "exploding",
            "warning",
            f"has a mean of {summary.mean:.6g}, beyond ±{limits.max_mean:g} (--max-mean)",
        )
    if summary.absmax > limits.max_abs:
        yield (
            "exploding",
            "warning",
            f"reaches {summary.absmax:.6g}, beyond {limits.max_abs:g} (--max-abs)",
        )
    is_grad = record.port.startswith("grad")  # that of a sum is constant, and fine
    may_be_constant = record.port in _MAY_BE_CONSTANT  # a bias begins as zeros, a norm as ones
    if summary.zeros == count and not may_be_constant:
        yield "dead", "warning", f"is zero in all {count} values"
    elif (
        summary.finite == count > 1
        and summary.min == summary.max
        and not (is_grad or may_be_constant)
    ):
        yield "dead", "warning", f"is constant: all {count} values are {summary.min:.6g}"
    if summary.saturated > limits.max_saturated * count:
        yield (
            "saturated",
            "warning",
            f"stands at the largest {record.dtype} in {_share(summary.saturated, count)} of its "
            f"values, beyond {limits.max_saturated:.2%} (--max-saturated)",
        )
    if summary.subnormal > limits.max_underflow * count:
        yield (
            "underflow",
            "warning",
            f"is subnormal in {_share(summary.subnormal, count)} of its values, beyond "
            f"{limits.max_underflow:.2%} (--max-underflow)",
        )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}"


def _jumps(recording: Recording, limits: Limits) -> Iterator[Finding]:
    """Adjacent blocks of equal shape that differ by more than the limit (the first record each)."""
    blocks = [name for name in recording.manifest.structure.blocks if name in recording]
    for before, after in pairwise(blocks):
        a, b = recording[before].port("output"), recording[after].port("output")
        if not (a and b and a[0].stored and b[0].stored and a[0].shape == b[0].shape):
            continue
        change = largest_change(a[0].tensor(), b[0].tensor())
        if change > limits.max_jump:
            yield Finding(
                after,
                "jump",
                "warning",
                f"The output of '{after}' differs from that of '{before}' by up to {change:.6g}, "
                f"beyond {limits.max_jump:g} (--max-jump).",
            )


def largest_change(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest |b - a| where both are finite, in pieces; 0 where nothing can be compared."""
    largest = 0.0
    for x, y in _pairs(a, b):
        d = (_wide(y) - _wide(x)).abs()
        d = d[torch.isfinite(d)]
        if d.numel():
            largest = max(largest, float(d.max()))
    return largest


def mean_change(a: torch.Tensor, b: torch.Tensor) -> float:
    """The mean |b - a| where both are finite, in float64; NaN where nothing can be compared."""
    total, count = 0.0, 0
    for x, y in _pairs(a, b):
        d = (_wide(y) - _wide(x)).abs()
        d = d[torch.isfinite(d)]
        total, count = total + float(d.sum()), count + d.numel()
    return total / count if count else math.nan


def _pairs(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    left = pieces(a, _PIECE * a.element_size())
    right = pieces(b, _PIECE * b.element_size())
    return zip(left, right, strict=True)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
