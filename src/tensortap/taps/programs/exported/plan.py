"""Which nodes of an exported graph are to be copied, and when, to know what its layers returned.

A value is copied when the call that returned it has ended, as a hook would: by then the call itself
may still have written to it, and nobody else has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..base import Provenance
from ..scopes import ModuleCall, entering, leaving
from .graph import Reading
from .nodes import eager_name, operator_of, writes

__all__ = [
    "CallPlan",
    "Linear",
    "Pick",
    "Signature",
    "attribute",
    "linear_of",
    "plan_calls",
    "plan_weights",
]


@dataclass(frozen=True)
class Pick:
    """A node to be copied: in which graph, and after (or before) which other node of it."""

    graph: tuple[str, ...]
    node: str
    anchor: str
    before: bool = False
    copy: int = 0  # tells apart copies of the same that are to be outputs of their own


@dataclass(frozen=True)
class Signature:
    """What a call returned, where the export was told to keep it; None is no tensor's name."""

    outputs: tuple[str | None, ...]
    spec: Any


@dataclass(frozen=True)
class CallPlan:
    """One call of a layer: what to copy for it. `spec` gives the outputs' exact leaves."""

    layer: str
    number: int
    end: int
    depth: int
    outputs: tuple[Pick | None, ...]
    inputs: tuple[Pick, ...] = ()
    operand: Pick | None = None
    spec: Any = None
    provenance: Provenance = "scope"


@dataclass(frozen=True)
class Linear:
    """The node of a linear layer, and the attributes that hold its weight and bias."""

    node: str
    weight: str
    bias: str | None


def plan_calls(
    reading: Reading, signatures: Mapping[ModuleCall, Signature]
) -> tuple[list[CallPlan], list[Linear | None]]:
    """Every call of a graph in the order in which calls end, with the linear that it is."""
    members = reading.members()
    left = leaving(reading.steps, reading.results)
    entered = entering(reading.steps)
    read = {name for step in reading.steps for name in step.inputs} | set(reading.results)
    plans = []
    for call, inside in members.items():
        exact = signatures.get(call)
        names: Sequence[str | None] = left[call] or _unread(reading, call, inside)
        if left[call]:
            names = [*names, *_dropped(reading, inside, left[call][0], read)]
        if exact is not None and _known(exact, reading):
            names = exact.outputs
        else:
            exact = None
        linear = linear_of(reading, inside)
        plans.append(
            (
                CallPlan(
                    layer=call[0],
                    number=call[1],
                    end=max(reading.order[name] for name in inside),
                    depth=call[0].count("."),
                    outputs=tuple(
                        None if name is None else _after(reading, call, name) for name in names
                    ),
                    inputs=tuple(_before(reading, inside, name) for name in entered.get(call, ())),
                    operand=_operand(reading, linear),
                    spec=None if exact is None else exact.spec,
                ),
                linear,
            )
        )
    plans.sort(key=lambda pair: (pair[0].end, -pair[0].depth))
    return [plan for plan, _ in plans], [linear for _, linear in plans]


def plan_weights(reading: Reading) -> list[CallPlan]:
    """The layers of a graph without names: those whose weights its nodes read."""
    plans: list[CallPlan] = []
    counts: dict[str, int] = {}
    for step in reading.steps:
        layer = _owner(reading, step.name)
        if layer is None or step.calls:
            continue
        number = counts.get(layer, 0)
        counts[layer] = number + 1
        spot = reading.spots[step.name]
        reading.types.setdefault(layer, _CLASSES.get(operator_of(reading.nodes[step.name]), ""))
        plans.append(
            CallPlan(
                layer=layer,
                number=number,
                end=reading.order[step.name],
                depth=layer.count("."),
                outputs=(Pick(spot.graph, spot.node, spot.node),),
                inputs=tuple(_before(reading, [step.name], name) for name in step.inputs),
                provenance="weight",
            )
        )
    return plans


def linear_of(reading: Reading, inside: Sequence[str]) -> Linear | None:
    """The linear that a call is, when it does nothing else; its weight is then surely its own."""
    if len(inside) != 1 or operator_of(reading.nodes[inside[0]]) != "linear":
        return None
    weight, bias = (attribute(reading, inside[0], index) for index in (1, 2))
    return Linear(inside[0], weight, bias) if weight else None


def _unread(reading: Reading, call: ModuleCall, inside: Sequence[str]) -> Sequence[str]:
    """What a layer of torch's own returned though nobody reads it: its one operation's value."""
    data = {step.name for step in reading.steps if step.data}
    alone = len(inside) == 1 and call[0] in reading.stock and inside[0] in data
    return inside if alone else ()


def _dropped(
    reading: Reading, inside: Sequence[str], main: str, read: Collection[str]
) -> list[str]:
    """What a call made last and nobody read: it, and not what was read, may be what it returned."""
    data = {step.name for step in reading.steps if step.data and not step.passes_on}
    later = [
        name
        for name in inside[inside.index(main) + 1 :]
        if name in data and name not in read and not writes(reading.nodes[name])
    ]
    return later[-1:]


def _known(exact: Signature, reading: Reading) -> bool:
    return all(name is None or name in reading.spots for name in exact.outputs)


def _after(reading: Reading, call: ModuleCall, name: str) -> Pick:
    """Copy a value when the call has ended; at once if nothing writes to anything before that."""
    spot = reading.spots[name]
    made = reading.order[name]
    last = reading.last.get((call, spot.graph), name)
    ended = reading.order[last]
    if ended > made and _written(reading, made, ended):
        return Pick(spot.graph, spot.node, reading.spots[last].node)
    return Pick(spot.graph, spot.node, spot.node)


def _written(reading: Reading, start: int, end: int) -> bool:
    return bisect_right(reading.writes, end) > bisect_right(reading.writes, start)


def _before(reading: Reading, inside: Sequence[str], name: str) -> Pick:
    """Copy what a call is given just before the first of its nodes that reads it."""
    for member in inside:
        node, spot = reading.nodes[member], reading.spots[member]
        for local in node.all_input_nodes:
            if reading.resolve("/".join((*spot.graph, local.name))) == name:
                return Pick(spot.graph, local.name, spot.node, before=True)
    spot = reading.spots[name]
    return Pick(spot.graph, spot.node, spot.node)


def _operand(reading: Reading, linear: Linear | None) -> Pick | None:
    if linear is None:
        return None
    node, spot = reading.nodes[linear.node], reading.spots[linear.node]
    given = node.args[0]
    assert isinstance(given, fx.Node)
    return Pick(spot.graph, given.name, spot.node, before=True)


def attribute(reading: Reading, name: str, index: int) -> str | None:
    """The attribute that an argument of a node is read from, where it is a weight."""
    node, spot = reading.nodes[name], reading.spots[name]
    value = node.args[index] if len(node.args) > index else None
    if not isinstance(value, fx.Node):
        return None
    return reading.weights.get(reading.resolve("/".join((*spot.graph, value.name)))) or None


_WEIGHT_AT: Mapping[str, tuple[int, int | None]] = {
    "linear": (1, 2),
    "conv1d": (1, 2),
    "conv2d": (1, 2),
    "conv3d": (1, 2),
    "embedding": (0, None),
    "layer_norm": (2, 3),
    "group_norm": (2, 3),
    "rms_norm": (2, None),
}
_CLASSES = {
    "linear": "Linear",
    "conv1d": "Conv1d",
    "conv2d": "Conv2d",
    "conv3d": "Conv3d",
    "embedding": "Embedding",
    "layer_norm": "LayerNorm",
    "group_norm": "GroupNorm",
    "rms_norm": "RMSNorm",
}


def _owner(reading: Reading, name: str) -> str | None:
    """The layer whose weight, and no other's, a node reads as its weight."""
    at = _WEIGHT_AT.get(operator_of(reading.nodes[name]))
    if at is None:
        return None
    weight = attribute(reading, name, at[0])
    bias = None if at[1] is None else attribute(reading, name, at[1])
    if weight is None or not weight.endswith(".weight"):
        return None
    owner = weight.removesuffix(".weight")
    return eager_name(owner) if bias in (None, f"{owner}.bias") else None
