"""A step as the plain numbers that sinks get: one name for each statistic of each place.

A sink draws lines, so a number that does not exist is left out rather than sent as NaN; the counts
of NaN and infinities are always there, and a gap in a line beside such a count says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized

from ...numerics.summary import Summary
from ...recording.schema import PORTS
from ..step import Key, Step

__all__ = ["ALARMS", "GRAD_NORM", "name_of", "values_of", "without_scalars"]

ROOT = "(root)"
GRAD_NORM = "grad_norm"
ALARMS = "alarms"
_OURS = (GRAD_NORM, ALARMS)
_PREFIXES = tuple(f"{port}/" for port in PORTS if port != "scalar")


def values_of(step: Step, alarms: Sized | None = None) -> dict[str, float]:
    """Every number of a step: "output/blocks.0/rms", "grad_norm", and what the user logged.

    The calls of a layer in one step (micro-batches) count as one tensor. `grad_norm` is left out
    when a gradient holds NaN or Inf. A scalar keeps its name, save the names that are ours:
    Hugging Face's `grad_norm`, taken before clipping, becomes "scalar/grad_norm".
    """
    values: dict[str, float] = {}
    merged = step.merged
    for key, summary in merged.items():
        if key[1] != "scalar":
            for statistic, value in _statistics(key, summary, merged).items():
                if math.isfinite(value):
                    values[name_of(key, statistic)] = value
    norm = _grad_norm(merged)
    if norm is not None:
        values[GRAD_NORM] = norm
    if alarms is not None and len(step):  # a step that holds what was logged alone was not judged
        values[ALARMS] = float(len(alarms))
    for name, value in step.scalars.items():
        if math.isfinite(value):
            values[f"scalar/{name}" if name in _OURS else name] = value
    return values


def name_of(key: Key, statistic: str) -> str:
    """The name of a place's statistic: port/layer[leaf]/statistic."""
    layer, port, leaf = key
    return f"{port}/{layer or ROOT}{leaf}/{statistic}"


def without_scalars(values: Mapping[str, float]) -> dict[str, float]:
    """What was watched, without what the user logged: for a logger that has had that already."""
    return {
        name: value for name, value in values.items() if name.startswith(_PREFIXES) or name in _OURS
    }


def _statistics(key: Key, summary: Summary, merged: Mapping[Key, Summary]) -> dict[str, float]:
    found = {
        "rms": summary.rms,
        "mean": summary.mean,
        "std": summary.std,
        "absmax": summary.absmax,
        "nan": float(summary.nan),
        "inf": float(summary.posinf + summary.neginf),
    }
    if summary.count:
        found["dead"] = summary.zeros / summary.count
    layer, port, leaf = key
    if port == "grad_param":
        found["l2"] = summary.l2
    elif port == "update":
        parameter = merged.get((layer, "param", leaf))
        if parameter is not None and parameter.l2 > 0:
            found["ratio"] = summary.rms / parameter.rms  # by value: it may be that of a sample
    return found


def _grad_norm(merged: Mapping[Key, Summary]) -> float | None:
    gradients = [summary for key, summary in merged.items() if key[1] == "grad_param"]
    if not gradients or any(summary.finite < summary.count for summary in gradients):
        return None
    return math.hypot(*(summary.l2 for summary in gradients))
