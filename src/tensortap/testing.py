"""For tests: two runs, or two tensors, match, or an AssertionError says where they part.

    from tensortap.testing import assert_matches

    assert_matches("runs/fp32", "runs/int8", floor="runs/bf16")  # recordings, layer by layer
    assert_matches(expected, model(x))                           # tensors, dicts, lists

The sentences are torch.testing's, with the layer, port, leaf and moment beside them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .comparing.compare import compare
from .comparing.judge import AGAINST_FLOOR
from .comparing.metrics import evaluate
from .comparing.precision import smallest_step
from .comparing.results import BAD, Comparison, LayerComparison, Part
from .comparing.rules import Rule, parse_rules, preset_of, rule_for
from .comparing.sentences import name_of
from .errors import OptionError
from .numerics import summarize
from .numerics.difference import METRICS, Difference, difference, tolerances
from .recording.dtypes import dtype_name
from .recording.reader import Layer, Record, Recording
from .taps.leaves import flatten

__all__ = ["assert_matches"]

_MOST_NAMED = 8


def assert_matches(
    reference: Any,
    candidate: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    complete: bool = False,
    **options: Any,
) -> None:
    """Raise an AssertionError unless the candidate matches the reference.

    Recordings, or paths of them, are compared as `tap.compare` does and take its options: `layers`,
    `floor`, `rules`, `map`, `preset`, `truth`, `partial`. With `complete`, a layer that is missing
    on one side fails too.

    Tensors, and dicts, lists or dataclasses of them, are compared element by element, as
    `torch.testing.assert_close` does: `rtol` and `atol` are by default those of the looser of the
    two dtypes, which need not be the same; for a tensor of small numbers `atol` is times its root
    mean square. They take `floor` (the same structure from another run:
    up to twice its error is allowed), `rules` (on names such as `['logits']`) and `preset`.
    """
    __tracebackhide__ = True
    runs = [_is_run(side) for side in (reference, candidate)]
    if runs[0] != runs[1]:
        raise OptionError(
            "assert_matches compares two recordings (or their paths), or two tensors (or dicts and "
            f"lists of them), got {type(reference).__name__} and {type(candidate).__name__}."
        )
    if not runs[0]:
        failure = tensor_failure(reference, candidate, rtol=rtol, atol=atol, **options)
    elif rtol is not None or atol is not None:
        raise OptionError(
            "rtol and atol are for tensors. Recordings are judged against the floor; say what you "
            "allow with floor=RUN, or rules='REGEX: max_abs < 1e-2'."
        )
    else:
        failure = run_failure(compare(reference, candidate, **options), complete=complete)
    if failure is not None:
        raise AssertionError(failure)


def _is_run(value: Any) -> bool:
    return isinstance(value, str | os.PathLike | Recording)


# Recordings.


def run_failure(
    result: Comparison, *, complete: bool = False, title: str | None = None
) -> str | None:
    """What an assertion says of a comparison; None when it holds."""
    first = result.first_divergence
    bad = [row for row in result.layers if row.verdict in BAD]
    if complete:
        bad += [row for row in result.layers if row.verdict == "missing"]
    if not bad:
        return None
    title = title or f"{result.candidate} does not match {result.reference}."
    lines = [f"{title} {result.sentence}"]
    lines += [f"Warning: {warning}" for warning in result.warnings]
    shown = first or bad[0]
    lines += ["", *_about(shown, result.sentence)]
    others = [row for row in bad if row is not shown]
    if others:
        lines += ["", _others(others)]
    return "\n".join(lines)


def _about(row: LayerComparison, said: str) -> list[str]:
    part = row.main
    if part is None:
        return [f"Layer {name_of(row.layer)}: {row.verdict}, {row.why}."]
    why = "" if part.why in said else f", {part.why}"
    lines = [f"Layer {name_of(row.layer)}, {_where(part)}: {row.verdict}{why}."]
    if part.difference is not None:
        lines += sentences(part.difference)
        if part.max_abs_moment not in (None, part.worst_moment):
            lines.append(f"The greatest absolute difference is at {_moment(part.max_abs_moment)}.")
    return [*lines, *(f"Hint: {hint}" for hint in row.hints)]


def _where(part: Part) -> str:
    leaf = f" {part.leaf}" if part.leaf else ""
    when = part.diverged_at[0] if part.diverged_at else part.worst_moment
    moment = f", {_moment(when)}" if when is not None else ""
    return f"{part.port}{leaf}{moment}"


def _moment(moment: tuple[int, int, int] | None) -> str:
    epoch, batch, call = moment or (0, 0, 0)
    return f"epoch {epoch}, batch {batch}, call {call}"


def _others(rows: Sequence[LayerComparison]) -> str:
    verdicts = " or ".join(dict.fromkeys(row.verdict for row in rows))
    names = ", ".join(name_of(row.layer) for row in rows[:_MOST_NAMED])
    more = ", …" if len(rows) > _MOST_NAMED else ""
    word = "layer is" if len(rows) == 1 else "layers are"
    return f"{len(rows)} other {word} {verdicts}: {names}{more}"


# Tensors.


def tensor_failure(
    reference: Any,
    candidate: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    floor: Any = None,
    rules: str | Sequence[str] = (),
    preset: str | None = None,
    **unknown: Any,
) -> str | None:
    """What an assertion says of two tensors, or structures of them; None when it holds."""
    if unknown:
        raise OptionError(
            f"{', '.join(unknown)}: no such option for tensors. They take rtol, atol, floor, "
            "rules and preset."
        )
    left, right = leaves_of(reference), leaves_of(candidate)
    if not left and not right:
        raise OptionError("There is nothing to compare: neither side holds a tensor.")
    noise = {} if floor is None else leaves_of(floor)
    texts = [rules] if isinstance(rules, str) else list(rules)
    judges = parse_rules(texts, [leaf for leaf in left if leaf in right])
    chosen = preset_of(preset)
    failures = []
    for leaf in dict.fromkeys((*left, *right)):
        rule = rule_for(judges, leaf) or (None if chosen is None else chosen.rule())
        pair = (left.get(leaf), right.get(leaf))
        said = _tensor_sentences(*pair, noise.get(leaf), rule, rtol, atol)
        if said:
            failures.append((leaf, said))
    if not failures:
        return None
    leaf, said = failures[0]
    lines = ["The tensors do not match.", "", *said]
    if leaf:
        lines += ["", f"The failure occurred for item {leaf}"]
    if len(failures) > 1:
        names = ", ".join(leaf for leaf, _ in failures[1 : 1 + _MOST_NAMED])
        more = ", …" if len(failures) > 1 + _MOST_NAMED else ""
        rest = len(failures) - 1
        words = "1 other item does" if rest == 1 else f"{rest} other items do"
        lines += ["", f"{words} not match either: {names}{more}"]
    return "\n".join(lines)


def leaves_of(value: Any) -> dict[str, torch.Tensor]:
    """The tensors in a value, and numpy's arrays, by leaf."""
    if isinstance(value, Layer | Record):
        raise OptionError(
            f"A {type(value).__name__} is a part of a recording. Compare its tensor (layer.output, "
            "record.tensor()), or the recordings with layers='NAME'."
        )
    return {leaf: item for leaf, item in flatten(_torch(value)) if item is not None}


def _torch(value: Any) -> Any:
    """The same with numpy's arrays as tensors."""
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value))
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: _torch(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_torch(item) for item in value)
    return value


def _tensor_sentences(
    reference: torch.Tensor | None,
    candidate: torch.Tensor | None,
    floor: torch.Tensor | None,
    rule: Rule | None,
    rtol: float | None,
    atol: float | None,
) -> list[str]:
    """Why two tensors do not match; nothing when they do."""
    if reference is None or candidate is None:
        return [f"It is only in the {'candidate' if reference is None else 'reference'}."]
    if reference.shape != candidate.shape:
        shapes = f"{list(reference.shape)} != {list(candidate.shape)}"
        return [f"The values for attribute 'shape' do not match: {shapes}"]
    if atol is None:  # small numbers are held to their own size, but for the steps of subnormals
        size = summarize(reference).rms
        atol = tolerances(reference.dtype, candidate.dtype)[1] * min(1.0, size or 1.0)
        atol = max(atol, *(smallest_step(dtype_name(t.dtype)) for t in (reference, candidate)))
    found = difference(reference, candidate, rtol=rtol, atol=atol)
    if found.identical:
        return []
    noise = None if floor is None else _noise(reference, floor)
    if found.disagreeing:
        why = f"{found.disagreeing} pairs disagree about NaN or Inf."
    elif rule is not None:
        values = {name: _value(name, found, reference, candidate, noise) for name in rule.metrics}
        if rule.holds(values):
            return []
        why = f"{rule.failing(values)} of {rule.text}."
    elif found.mismatched == 0:
        return []
    elif noise is None:
        return sentences(found)
    elif found.rmse <= AGAINST_FLOOR * noise:
        return []
    else:
        limit = f"{AGAINST_FLOOR:g} times the floor's {noise:.3g}"
        why = f"The error {found.rmse:.3g} (RMS) is more than {limit}."
    return [why, *sentences(found)]


def _noise(reference: torch.Tensor, floor: torch.Tensor) -> float:
    if floor.shape != reference.shape:
        raise OptionError(
            f"The floor has the shape {list(floor.shape)}, expected {list(reference.shape)}."
        )
    return difference(reference, floor, percentiles=False).rmse


def _value(
    name: str,
    found: Difference,
    reference: torch.Tensor,
    candidate: torch.Tensor,
    noise: float | None,
) -> float:
    """What a rule's metric is here; NaN where it is undefined."""
    if name == "floor_ratio":
        return found.rmse / noise if noise else math.nan
    if name not in METRICS:
        return evaluate(name, reference, candidate)
    value = getattr(found, name)
    return float(value) if isinstance(value, int | float) else math.nan


def sentences(found: Difference) -> list[str]:
    """A difference in the words of torch.testing."""
    share = 100 * found.mismatched / found.count if found.count else 0.0
    lines = [f"Mismatched elements: {found.mismatched} / {found.count} ({share:.1f}%)"]
    exact = found.rtol == 0 and found.atol == 0
    if found.max_abs_index is not None:
        allowed = "" if exact else f" (up to {found.atol:g} allowed)"
        lines.append(
            f"Greatest absolute difference: {found.max_abs:.6g} at index "
            f"{tuple(found.max_abs_index)}{allowed}"
        )
        allowed = "" if exact else f" (up to {found.rtol:g} allowed)"
        lines.append(f"Greatest relative difference: {found.max_relative:.6g}{allowed}")
    return lines
