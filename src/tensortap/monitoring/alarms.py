"""An alarm: a rule that became true, where and when, in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..recording.schema import Port
from .conditions import Action, Rule, Term
from .metrics import NORMS, Layout, Rows, Values
from .step import Key, Step

__all__ = ["Alarm", "bad_alarm", "logged_alarm", "place_alarm", "step_alarm"]


@dataclass(frozen=True)
class Alarm:
    """A rule that became true at a step.

    It stands at the first place in order of execution where it did; `also` are the other places at
    which it became true in the same step. A rule on the whole step stands at the layer "". `call`
    is None where the calls of a layer were judged together.
    """

    rule: str
    action: Action
    layer: str
    port: Port
    leaf: str
    epoch: int
    batch: int
    call: int | None
    value: float
    text: str
    also: tuple[Key, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold: a number that is not finite is None, a function its name."""
        action = self.action
        return {
            "rule": self.rule,
            "action": action if isinstance(action, str) else getattr(action, "__name__", "call"),
            "layer": self.layer,
            "port": self.port,
            "leaf": self.leaf,
            "epoch": self.epoch,
            "batch": self.batch,
            "call": self.call,
            "value": self.value if math.isfinite(self.value) else None,
            "text": self.text,
            "also": [{"layer": a, "port": b, "leaf": c} for a, b, c in self.also],
        }

    def __str__(self) -> str:
        return self.text


def bad_alarm(rule: Rule, step: Step, layout: Layout, row: int, rows: Rows) -> Alarm:
    """The first row that holds what is not finite, and what it knows of how that came about.

    `rows` are all rows that do, in order of execution; `row` is one of them.
    """
    key = layout.row_keys[row]
    layer, port, leaf = key
    nan, inf = step.column("nan")[row], (step.column("posinf") + step.column("neginf"))[row]
    found = " and ".join(
        f"{_count(number)} {name}" for number, name in ((nan, "NaN"), (inf, "Inf")) if number
    )
    call = layout.calls[row]
    several = layout.several(key)
    calls = f", call {call} of {several}" if several > 1 else ""
    text = (
        f"{_when(step)}: {found} of {_count(step.column('count')[row])} values in the "
        f"{where(key)}{calls}, {_pass(port)}. {_standing(layout, row, rows)}"
        f"{_before(step, layout, row)}"
    )
    also = tuple(k for k in dict.fromkeys(layout.row_keys[i] for i in rows.tolist()) if k != key)
    return Alarm(
        rule.text,
        rule.action,
        layer,
        port,
        leaf,
        step.epoch,
        step.batch,
        call,
        float(nan + inf),
        text,
        also,
    )


def place_alarm(
    rule: Rule, step: Step, term: Term, key: Key, value: float, new: list[Key]
) -> Alarm:
    """A rule that became true at places, `key` the first of them."""
    layer, port, leaf = key
    others = [other for other in new if other != key]
    more = ""
    if others:
        more = f"; in the same step at {_more(len(others))}, the next the {where(others[0])}"
    text = (
        f"{_when(step)}: the {where(key)} has {term.metric} {_number(value)} "
        f"(rule: {rule.text}){more}."
    )
    return Alarm(
        rule.text,
        rule.action,
        layer,
        port,
        leaf,
        step.epoch,
        step.batch,
        None,
        value,
        text,
        tuple(others),
    )


def step_alarm(rule: Rule, term: Term, value: float, values: Values, rows: Rows) -> Alarm:
    """A rule on a norm over the step; `rows` are the places that it is over."""
    step, layout = values.step, values.layout
    port = NORMS[term.metric]
    sizes = values.stored("l2")[rows].tolist()
    if math.isfinite(value):
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        said = (
            f"the largest is the {where(layout.keys[rows[largest]])} with {_number(sizes[largest])}"
        )
    else:
        bad = rows[values.place("bad")[rows] > 0].tolist()
        said = f"the first that is not finite is the {where(layout.keys[bad[0]])}"
    text = (
        f"{_when(step)}: {term.metric} is {_number(value)} over {len(sizes)} "
        f"{'tensor' if len(sizes) == 1 else 'tensors'} (rule: {rule.text}); {said}."
    )
    return Alarm(rule.text, rule.action, "", port, "", step.epoch, step.batch, None, value, text)


def logged_alarm(rule: Rule, step: Step, name: str, fine: bool = False) -> Alarm:
    """A rule on a number that was logged; `fine`: all that was watched is finite."""
    value = float(step.scalars[name])
    rows = "; every watched tensor of the step is finite" if fine and len(step) else ""
    text = f"{_when(step)}: the logged '{name}' is {_number(value)} (rule: {rule.text}){rows}."
    return Alarm(
        rule.text, rule.action, name, "scalar", "", step.epoch, step.batch, None, value, text
    )


def where(key: Key) -> str:
    """A place in words."""
    layer, port, leaf = key
    return f"{port}{f' {leaf}' if leaf else ''} of '{layer}'"


def _when(step: Step) -> str:
    return f"Step {step.batch} of epoch {step.epoch}" if step.epoch else f"Step {step.batch}"


def _pass(port: Port) -> str:
    if port in ("input", "output"):
        return "in the forward pass"
    return "in the backward pass" if port.startswith("grad") else "among the parameters"


def _standing(layout: Layout, row: int, rows: Rows) -> str:
    """Where the row stands among the bad ones."""
    first_bad: dict[Key, int] = {}
    for index in rows.tolist():
        first_bad.setdefault(layout.row_keys[index], index)
    bad = list(first_bad)
    earlier = [key for key in bad if key != layout.row_keys[row] and first_bad[key] < row]
    if earlier:
        return f"It is newly so; before it the {_listed(earlier)} was so already"
    if len(bad) == 1:
        return "It is the only one"
    return f"It is the first of {len(bad)} bad places"


def _before(step: Step, layout: Layout, row: int) -> str:
    """What came just before it: an overflow announces itself."""
    bad = step.bad
    good = [index for index in range(row) if not bad[index]]
    if not good:
        return "; nothing that is watched comes before it."
    said = "; everything before it is finite" if len(good) == row else ""
    last = good[-1]
    size = float(step.column("absmax")[last])
    between = _between(layout, last, row) if len(good) == row else ""
    if math.isnan(size):
        return f"{said}.{between}"
    return (
        f"{said}, the {where(layout.row_keys[last])} just before it at most {_number(size)}"
        f"{_limit(step.sites[last].dtype, size)}.{between}"
    )


def _between(layout: Layout, last: int, row: int) -> str:
    """Which stretch of the forward pass made it: a layer may be given what is not finite."""
    (before, port, _), (layer, bad_port, _) = layout.row_keys[last], layout.row_keys[row]
    if (port, bad_port) != ("output", "output") or before == layer:
        return ""
    return (
        f" It came about between '{before}' and '{layer}': in '{layer}', or in code before it that "
        "is in no watched layer."
    )


def _limit(dtype: str, size: float) -> str:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        return ""
    largest = torch.finfo(kind).max
    return f" (the largest {dtype} is {_number(largest)})" if size > largest / 1e3 else ""


def _listed(keys: Sequence[Key]) -> str:
    more = f" (and {_more(len(keys) - 1)})" if len(keys) > 1 else ""
    return f"{where(keys[0])}{more}"


def _more(count: int) -> str:
    return f"{count} more place{'s' * (count != 1)}"


def _count(number: float) -> str:
    return str(int(number))


def _number(value: float) -> str:
    return f"{value:.4g}"
