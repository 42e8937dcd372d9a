"""Reads an exported graph: which values there are, and in which module calls each was made.

A region under `no_grad` or `autocast` is a graph of its own inside the graph. It always runs, so
its nodes are read as if they stood where it is called. The branches of a `torch.cond` do not always
run: they are read as graphs by themselves (`exported_branches.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..scopes import ModuleCall, Step, adopted
from .nodes import (
    Region,
    is_data,
    is_quantising,
    mutates_first,
    operator_of,
    passes_on,
    region,
    scopes_of,
    writes,
)

__all__ = ["Reading", "Spot", "read", "tensor_at"]


@dataclass(frozen=True)
class Spot:
    """A node: its name, and the names of the graphs inside graphs that lead to it."""

    graph: tuple[str, ...]
    node: str


@dataclass
class Reading:
    """What a graph holds, flattened: every value once, under a name of its own."""

    steps: list[Step] = field(default_factory=list)
    spots: dict[str, Spot] = field(default_factory=dict)
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)  # of all nodes, also of those without value
    results: list[str] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)
    stock: set[str] = field(default_factory=set)  # layers whose class is one of torch's own
    objects: dict[str, set[str]] = field(default_factory=dict)  # which modules a strict export saw
    weights: dict[str, str] = field(default_factory=dict)  # value of a constant -> attribute
    conds: list[str] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)  # the order of nodes that write in place
    last: dict[tuple[ModuleCall, tuple[str, ...]], str] = field(default_factory=dict)
    quantised: bool = False
    alias: dict[str, str] = field(default_factory=dict)

    def resolve(self, name: str) -> str:
        """The value that a name stands for, through the borders of graphs inside graphs."""
        while name in self.alias:
            name = self.alias[name]
        return name

    def members(self) -> dict[ModuleCall, list[str]]:
        """The values made in each call, in order."""
        found: dict[ModuleCall, list[str]] = {}
        for step in self.steps:
            for call in step.calls:
                found.setdefault(call, []).append(step.name)
        return found


def read(
    module: fx.GraphModule,
    constants: Mapping[str, str] | None = None,
    numbers: dict[str, list[tuple[str, ...]]] | None = None,
) -> Reading:
    """The reading of a graph; `constants`: those of its placeholders that are weights, by name.

    `numbers` counts the calls of each path, so that branches go on where others stopped.
    """
    reader = _Reader({} if numbers is None else numbers)
    reader.graph(module, (), constants or {})
    reading = reader.reading
    reading.steps = adopted(reading.steps, reader.orphans, reading.results)
    return reading


class _Reader:
    def __init__(self, numbers: dict[str, list[tuple[str, ...]]]) -> None:
        self.reading = Reading()
        self.orphans: list[str] = []
        self._numbers = numbers
        self._states: set[str] = set()  # buffers as they are after a write

    def graph(
        self, module: fx.GraphModule, path: tuple[str, ...], constants: Mapping[str, str]
    ) -> list[str | None]:
        """Read one graph; of a region, the names of the values that it returns."""
        read = self.reading
        returned: list[str | None] = []
        for node in module.graph.nodes:
            name = _name(path, node)
            read.order[name] = len(read.order)
            read.nodes[name] = node
            read.spots[name] = Spot(path, node.name)
            if node.op == "placeholder":
                if node.name in constants:
                    read.weights[name] = constants[node.name]
                elif name not in read.alias:
                    read.steps.append(Step(name, (), data=is_data(node)))
            elif node.op == "get_attr":
                read.weights[name] = str(node.target)
            elif node.op == "output":
                if path:
                    returned = [
                        read.resolve(_name(path, value)) if isinstance(value, fx.Node) else None
                        for value in _items(node.args[0])
                    ]
                else:
                    names = [_name(path, value) for value in node.all_input_nodes]
                    read.results.extend(read.resolve(name) for name in names)
            elif node.op == "call_function":
                self._function(module, node, path)
        return returned

    def _function(self, module: fx.GraphModule, node: fx.Node, path: tuple[str, ...]) -> None:
        read = self.reading
        name = _name(path, node)
        for call in self._calls(node):
            read.last[(call, path)] = name
        if writes(node):
            read.writes.append(read.order[name])
        inner = region(module, node)
        if inner is not None:
            self._region(node, inner, path)
            return
        if node.target is operator.getitem:
            source = node.args[0]
            whole = _name(path, source) if isinstance(source, fx.Node) else ""
            item = read.alias.get(f"{whole}#{node.args[1]}")
            if item is not None:
                read.alias[name] = item
                return
        if str(node.target) == "_export_tracepoint":  # left behind by preserved signatures
            for index, value in enumerate(node.args):
                if isinstance(value, fx.Node):
                    read.alias[f"{name}#{index}"] = read.resolve(_name(path, value))
            return
        calls = self._calls(node)
        if operator_of(node) == "copy_" and not node.users and not calls:
            return  # what a run leaves in a buffer or an input
        if str(node.target) == "cond":
            read.conds.append(name)
        inputs = [read.resolve(_name(path, value)) for value in node.all_input_nodes]
        if mutates_first(node) and inputs:
            first = read.resolve(_name(path, node.args[0]))  # type: ignore[arg-type]
            if self._is_state(first):
                # The next state of a buffer is written, not handed to whoever writes next.
                inputs = inputs[1:]
                self._states.add(name)
        data = is_data(node)
        quantising = is_quantising(node)
        read.quantised = read.quantised or quantising
        plain = tuple(value for value in inputs if value not in read.weights)
        if quantising and not plain:
            read.weights[name] = ""  # a weight that is dequantised when it is used
            return
        if quantising and not calls:
            self.orphans.append(name)
        passing = bool(plain) and plain[0] == inputs[0] and passes_on(node)
        read.steps.append(Step(name, plain, calls, passes_on=passing, data=data))

    def _is_state(self, name: str) -> bool:
        return name in self.reading.weights or name in self._states

    def _region(self, node: fx.Node, inner: Region, path: tuple[str, ...]) -> None:
        """Read a graph that is called here and always runs."""
        read = self.reading
        name = _name(path, node)
        inside = (*path, inner.attribute)
        constants: dict[str, str] = {}
        holders = [n for n in inner.graph.graph.nodes if n.op == "placeholder"]
        for holder, value in zip(holders, inner.operands, strict=False):
            if not isinstance(value, fx.Node):
                continue
            outer = read.resolve(_name(path, value))
            if outer in read.weights:
                constants[holder.name] = read.weights[outer]
            else:
                read.alias[_name(inside, holder)] = outer
        for index, made in enumerate(self.graph(inner.graph, inside, constants)):
            if made is not None:
                read.alias[f"{name}#{index}"] = made

    def _calls(self, node: fx.Node) -> tuple[ModuleCall, ...]:
        """The calls that a node stands in: one for each module of its stack but the root."""
        found: list[ModuleCall] = []
        chain: list[str] = []
        for key, path, kind in scopes_of(node):
            self.reading.types.setdefault(path, kind.rsplit(".", 1)[-1])
            if kind.startswith("torch.nn.modules."):
                self.reading.stock.add(path)
            if not path:
                continue
            which = key.partition("@")[0]
            if which.isdigit():
                self.reading.objects.setdefault(path, set()).add(which)
            chain.append(key)
            known = self._numbers.setdefault(path, [])
            mark = tuple(chain)
            if mark not in known:
                known.append(mark)
            found.append((path, known.index(mark)))
        return tuple(found)


def _name(path: tuple[str, ...], node: fx.Node) -> str:
    return "/".join((*path, node.name))


def _items(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def tensor_at(module: torch.nn.Module, attribute: str) -> Any:
    """What stands at a dotted name; None if nothing does."""
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
        if value is None:
            return None
    return value
