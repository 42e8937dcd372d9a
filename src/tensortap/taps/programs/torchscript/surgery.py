"""Taps in the graph of a TorchScript model: its methods put into one graph, with copies taken.

A method's graph calls the methods of submodules; the chain of attributes from `self` to the one
that is called is the layer's name. Each such call is replaced by a copy of the callee's graph in
which the same was done before, so a layer is tapped in its own graph: copies of what came in at its
start, of what it returns at its end. All of them are appended to one list, each behind the number
of its site, which is how they come out of branches and loops, and in the order of the run.

The module itself stays the first argument of the graph, so weights and buffers are its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .copies import append, copy_of, holds_tensors, list_of_any
from .graphs import (
    ALIASES,
    CASTS,
    Linear,
    Owner,
    by_age,
    elements,
    is_hooked,
    is_traced,
    linear,
    links,
    nodes_of,
    only_passes,
    origin,
    product,
)
from .tree import Node, Tree

__all__ = ["UNUSED", "Passage", "Site", "Surgeon"]

IDENTITY = "it passes its input on and makes no value of its own"
UNUSED = "nothing reads what it returns, so the compiler dropped it"
HOOKED = "a hook that was compiled into the model changes what it returns"
MISSED = "it may be called where the model chooses a module while it runs, which taps cannot follow"
FORKED = "it runs in a task of its own (torch.jit.fork), where taps cannot follow"


@dataclass(frozen=True)
class Passage:
    """What a traced call returned: for each value, the flags that say whether it is an input.

    A value is one that was given if all its flags are true; it has none if it was made inside.
    `order` are the values by the time at which they were made, the last first. `pure`: the layer
    does nothing else, so that handing on its input is what it is for.
    """

    flags: tuple[tuple[int, ...] | None, ...]
    order: tuple[int, ...]
    pure: bool


@dataclass(frozen=True)
class Site:
    """One place in the graph that appends to the list of taps."""

    node: Node
    what: Literal["enter", "operand", "exit"]
    passage: Passage | None = None  # None: the values are in the layer's own structure


@dataclass(frozen=True)
class _Given:
    """What of the model a method is given, by position: whose weight and which, which module."""

    weights: dict[int, tuple[str, str]] = field(default_factory=dict)
    modules: dict[int, Node] = field(default_factory=dict)


@dataclass
class Surgeon:
    """Makes the graph of a model with taps, and learns what the model has on the way.

    `layers`, `inputs_of` and `linears` are names; None for layers means every one.
    """

    tree: Tree
    layers: Collection[str] | None
    inputs: bool = False
    linears: Collection[str] = ()
    sites: list[Site] = field(default_factory=list)
    finished: list[Node] = field(default_factory=list)  # calls in the order in which they end
    lost: dict[str, str] = field(default_factory=dict)  # layers that return nothing to copy
    missed: dict[str, str] = field(default_factory=dict)  # layers of which a call is not heard
    doubted: set[str] = field(default_factory=set)  # layers that may have returned something else
    traced: dict[str, bool] = field(default_factory=dict)  # paths that have calls
    found: dict[str, Linear | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def graph(self) -> Any:
        """The graph of the model's forward; its outputs are the model's own and the list."""
        made = self._method(self.tree.root, "forward", _Given(), None)
        taps = list(made.inputs())[-1]
        start = made.create("prim::ListConstruct", [], 1)
        made.prependNode(start)
        start.output().setType(list_of_any())
        taps.replaceAllUsesWith(start.output())
        made.eraseInput(len(list(made.inputs())) - 1)
        made.registerOutput(start.output())
        made.makeMultiOutputIntoTuple()
        return made

    def _wants(self, node: Node) -> bool:
        names = self.layers
        return any(names is None or n.name in names or n.name in self.linears for n in node.walk())

    def _method(self, node: Node, method: str, given: _Given, layer: Node | None) -> Any:
        """A method's graph with everything in it inlined and tapped; the list is its last input."""
        graph = node.cpp._get_method(method).graph.copy()
        inputs = list(graph.inputs())
        traced = is_traced(graph)
        taps = graph.addInput("taps")
        taps.setType(list_of_any())
        owner = Owner(
            node,
            inputs[0].unique(),
            {inputs[index].unique(): weight for index, weight in given.weights.items()},
            {inputs[index].unique(): module for index, module in given.modules.items()},
        )
        if layer is not None and traced and _is_doubtful(graph, owner):
            self.doubted.add(layer.name)
        for call in list(nodes_of(graph)):
            if call.kind() == "prim::CallMethod":
                self._inline(graph, call, owner, taps)
            elif call.kind() == "prim::fork":
                self._leave_out(call, owner)
        if layer is not None:
            self._learn(graph, owner, layer)
            self._tap(graph, inputs, owner, layer, taps, traced)
        return graph

    def _inline(self, graph: Any, call: Any, owner: Owner, taps: Any) -> None:
        arguments = list(call.inputs())
        target = owner.module(arguments[0])
        method = str(call.s("name"))
        if target is None:
            self._note(
                f"A call of '{method}' in '{owner.node.path or 'the model'}' is of a module that "
                "is chosen while the model runs: the layers in it cannot be told."
            )
            self._miss(arguments[0].type(), method)
            return
        given = _given(arguments, owner)
        if not target.has_method(method):
            return
        if not any(self._wants(module) for module in (target, *given.modules.values())):
            return
        layer = target if method in target.forwards else None
        if layer is not None and is_hooked(call):
            self.lost[layer.name] = self.missed[layer.name] = HOOKED
            self.finished.append(layer)
            layer = None
        callee = self._method(target, method, given, layer)
        with graph.insert_point_guard(call):
            if arguments[0].type().kind() == "InterfaceType":
                cast = graph.create("prim::unchecked_cast", [arguments[0]], 1)
                graph.insertNode(cast)
                cast.output().setType(target.cpp._type())
                arguments[0] = cast.output()
            results = list(graph.insertGraph(callee, [*arguments, taps]))
        for old, new in zip(list(call.outputs()), results, strict=True):
            old.replaceAllUsesWith(new)
        call.destroy()

    def _miss(self, kind: Any, method: str) -> None:
        """A call that is not heard makes those behind it count wrong, of every module it may be."""
        name = str(kind.annotation_str)
        for node in self.tree.root.walk():
            like = kind.kind() == "InterfaceType" or str(node.cpp._type().annotation_str) == name
            if node.path and like and node.has_method(method):
                self.missed.update({inner.name: MISSED for inner in node.walk()})

    def _leave_out(self, fork: Any, owner: Owner) -> None:
        """What runs beside the model may append at any time: its order would not be known."""
        for value in fork.inputs():
            module = owner.module(value) if value.type().kind() == "ClassType" else None
            for node in () if module is None else module.walk():
                self.lost.setdefault(node.name, FORKED)
                self.missed[node.name] = FORKED

    def _learn(self, graph: Any, owner: Owner, layer: Node) -> None:
        found = linear(graph, owner)
        known = self.found.setdefault(layer.name, found)
        if known != found:
            self.found[layer.name] = None

    def _tap(
        self, graph: Any, inputs: list[Any], owner: Owner, layer: Node, taps: Any, traced: bool
    ) -> None:
        self.finished.append(layer)
        self.traced[layer.path] = traced
        wanted = self.layers is None or layer.name in self.layers
        operand = layer.name in self.linears
        if not wanted and not operand:
            return
        end = graph.return_node()
        first = next(iter(graph.nodes()), end)
        if wanted and self.inputs:
            values = [
                value
                for value in inputs[1:]
                if value.unique() not in owner.weights and holds_tensors(value.type())
            ]
            with graph.insert_point_guard(first):
                copies = [copy_of(graph, value) for value in values]
                kept = [copy for copy in copies if copy is not None]
                append(graph, taps, self._site(Site(layer, "enter")), kept)
        if operand:
            node = product(graph, owner)
            if node is not None:
                with graph.insert_point_guard(node):
                    copy = copy_of(graph, node.inputsAt(0))
                    append(graph, taps, self._site(Site(layer, "operand")), [copy])
        with graph.insert_point_guard(end):
            self._tap_results(graph, inputs, layer, taps, traced)

    def _tap_results(
        self, graph: Any, inputs: list[Any], layer: Node, taps: Any, traced: bool
    ) -> None:
        results = list(graph.outputs())
        if traced and (not results or results[0].type().kind() == "NoneType"):
            self.lost[layer.name] = IDENTITY if layer.type == "Identity" else UNUSED
            self.missed[layer.name] = self.lost[layer.name]
            return
        if not traced:
            copy = copy_of(graph, results[0])
            if copy is None:
                kind = results[0].type().annotation_str
                self.lost[layer.name] = f"it returns a {kind}, which cannot be copied"
            else:
                append(graph, taps, self._site(Site(layer, "exit")), [copy])
            return
        values = elements(results[0])
        order = by_age(graph, values)
        known = {value.unique() for value in inputs}
        flags: list[Any] = []
        numbers: list[tuple[int, ...] | None] = []
        casts = True
        for value in values:
            chain = links(value, known)
            if chain is None:
                numbers.append(None)
                continue
            casts = casts and all(kind in CASTS for kind, _, _ in chain)
            mine = []
            for kind, out, source in chain:
                if kind not in ALIASES:
                    node = graph.create("aten::__is__", [out, source], 1)
                    graph.insertNode(node)
                    node.output().setType(torch._C.BoolType.get())
                    mine.append(len(values) + len(flags))
                    flags.append(node.output())
            numbers.append(tuple(mine))
        passage = Passage(tuple(numbers), order, not casts and only_passes(graph))
        copies = [copy_of(graph, value) for value in values]
        append(graph, taps, self._site(Site(layer, "exit", passage)), [*copies, *flags])

    def _site(self, site: Site) -> int:
        self.sites.append(site)
        return len(self.sites) - 1

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _is_doubtful(graph: Any, owner: Owner) -> bool:
    """Whether a layer with weights went on from what a traced call seems to return.

    A trace returns what others read. If nobody reads what a layer returned, but somebody what it
    left in an attribute on the way, that is all there is, and looks the same.
    """
    values = elements(next(iter(graph.outputs())))
    reached = {origin(values[by_age(graph, values)[0]]).unique()}
    for node in nodes_of(graph):
        if not any(value.unique() in reached for value in node.inputs()):
            continue
        reached.update(value.unique() for value in node.outputs())
        if node.kind() == "prim::CallMethod" and node.output().type().kind() == "NoneType":
            target = owner.module(node.inputsAt(0))
            if target is not None and any(inner.parameters() for inner in target.walk()):
                return True
    return False


def _given(arguments: list[Any], owner: Owner) -> _Given:
    """What of the model stands among the arguments of a call, the module itself left out."""
    found = _Given()
    for index, value in enumerate(arguments[1:], start=1):
        weight = owner.weight(value)
        module = owner.module(value) if value.type().kind() == "ClassType" else None
        if weight is not None:
            found.weights[index] = weight
        elif module is not None:
            found.modules[index] = module
    return found
