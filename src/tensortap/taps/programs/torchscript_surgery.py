"""Taps in the graph of a TorchScript model: its methods put into one graph, with copies taken.

A method's graph calls the methods of submodules; the chain of attributes from `self` to the one
that is called is the layer's name. Each such call is replaced by a copy of the callee's graph in
which the same was done before, so a layer is tapped in its own graph: copies of what came in at its
start, of what it returns at its end. All of them are appended to one list, each behind the number
of its site, which is how they come out of branches and loops, and in the order of the run.

The module itself stays the first argument of the graph, so weights and buffers are its own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .torchscript_copies import append, copy_of, holds_tensors, list_of_any
from .torchscript_tree import Node, Tree

__all__ = [
    "UNUSED",
    "Linear",
    "Owner",
    "Passage",
    "Site",
    "Surgeon",
    "by_age",
    "elements",
    "is_traced",
    "nodes_of",
    "origin",
]

# What may hand its first input on unchanged. Of the last two that is sure.
_PASSING = ("aten::to", "aten::contiguous", "aten::dropout", "aten::dropout_")
_ALIASES = ("aten::detach", "aten::alias")
_CASTS = ("aten::to", *_ALIASES)
_FORWARD = re.compile(r"forward\d*")
IDENTITY = "it passes its input on and makes no value of its own"
UNUSED = "nothing reads what it returns, so the compiler dropped it"
HOOKED = "a hook that was compiled into the model changes what it returns"
FORKED = "it runs in a task of its own (torch.jit.fork), where taps cannot follow"
_STACK = re.compile(r"^\S.*\(\d+\): \S+", re.MULTILINE)


@dataclass(frozen=True)
class Linear:
    """The names of a layer's own weight and bias, where all it does is to multiply by them."""

    weight: str
    bias: str | None


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
    traced: dict[str, bool] = field(default_factory=dict)  # paths that have calls
    found: dict[str, Linear | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def graph(self) -> Any:
        """The graph of the model's forward; its outputs are the model's own and the list."""
        made = self._method(self.tree.root, "forward", {}, None)
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

    def _method(
        self, node: Node, method: str, given: dict[int, tuple[str, str]], layer: Node | None
    ) -> Any:
        """A method's graph with everything in it inlined and tapped; the list is its last input.

        `given` are the inputs that are weights: whose, and which.
        """
        graph = node.cpp._get_method(method).graph.copy()
        inputs = list(graph.inputs())
        traced = is_traced(graph)
        taps = graph.addInput("taps")
        taps.setType(list_of_any())
        weights = {inputs[index].unique(): weight for index, weight in given.items()}
        owner = Owner(node, inputs[0].unique(), weights)
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
            return
        if not self._wants(target) or not target.has_method(method):
            return
        layer = target if _FORWARD.fullmatch(method) else None
        if layer is not None and _is_hooked(call):
            self.lost[layer.name] = HOOKED
            self.finished.append(layer)
            layer = None
        given = {
            index: weight
            for index, value in enumerate(arguments)
            if (weight := owner.weight(value)) is not None
        }
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

    def _leave_out(self, fork: Any, owner: Owner) -> None:
        """What runs beside the model may append at any time: its order would not be known."""
        for value in fork.inputs():
            module = owner.module(value) if value.type().kind() == "ClassType" else None
            for node in () if module is None else module.walk():
                self.lost.setdefault(node.name, FORKED)

    def _learn(self, graph: Any, owner: Owner, layer: Node) -> None:
        linear = _linear(graph, owner)
        known = self.found.setdefault(layer.name, linear)
        if known != linear:
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
            node = _product(graph, owner)
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
            links = _links(value, known)
            if links is None:
                numbers.append(None)
                continue
            casts = casts and all(kind in _CASTS for kind, _, _ in links)
            mine = []
            for kind, out, source in links:
                if kind not in _ALIASES:
                    node = graph.create("aten::__is__", [out, source], 1)
                    graph.insertNode(node)
                    node.output().setType(torch._C.BoolType.get())
                    mine.append(len(values) + len(flags))
                    flags.append(node.output())
            numbers.append(tuple(mine))
        passage = Passage(tuple(numbers), order, not casts and _only_passes(graph))
        copies = [copy_of(graph, value) for value in values]
        append(graph, taps, self._site(Site(layer, "exit", passage)), [*copies, *flags])

    def _site(self, site: Site) -> int:
        self.sites.append(site)
        return len(self.sites) - 1

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class Owner:
    """The module whose method a graph is: what its attributes lead to."""

    node: Node
    self_value: int
    weights: dict[int, tuple[str, str]]

    def chain(self, value: Any) -> tuple[str, ...] | None:
        """The attributes from `self` to a value, or None where it is none of them."""
        names: list[str] = []
        while value.unique() != self.self_value:
            node = value.node()
            if node.kind() != "prim::GetAttr":
                return None
            names.append(str(node.s("name")))
            value = node.inputsAt(0)
        return tuple(reversed(names))

    def module(self, value: Any) -> Node | None:
        chain = self.chain(value)
        return None if chain is None else self.node.find(chain)

    def weight(self, value: Any) -> tuple[str, str] | None:
        """Whose weight a value is, and which: (the module's path, the attribute)."""
        if value.unique() in self.weights:
            return self.weights[value.unique()]
        if value.type().kind() != "TensorType":
            return None
        chain = self.chain(value)
        holder = self.node.find(chain[:-1]) if chain else None
        return None if holder is None or not chain else (holder.path, chain[-1])


def _is_hooked(call: Any) -> bool:
    """Whether a hook, which takes the module and what it returned, makes something else of it."""
    receiver = call.inputsAt(0).unique()
    return any(
        use.user.kind() == "prim::CallFunction"
        and use.user.inputsAt(1).unique() == receiver
        and use.user.output().type().kind() != "NoneType"
        for use in call.output().uses()
    )


def nodes_of(block: Any) -> Iterator[Any]:
    """Every node of a graph or block, those of inner blocks behind their own node."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from nodes_of(inner)


def is_traced(graph: Any) -> bool:
    """Whether a graph was made by a trace, which knows data flow alone.

    A trace leaves the stack of Python on its nodes, a script the lines of its source. What is
    neither is taken for a trace, unless it has types that no trace has.
    """
    values = [*list(graph.inputs())[1:], *graph.outputs()]
    if any(not _is_flat(value.type()) for value in values):
        return False
    inputs = {value.unique() for value in graph.inputs()}
    if any(value.unique() in inputs for value in graph.outputs()):
        return False  # a traced method returns what it made
    for node in nodes_of(graph):
        if node.kind() in ("prim::If", "prim::Loop"):
            return False
        own, _, _ = node.sourceRange().partition("Serialized ")
        if _STACK.search(own):
            return True
        if 'File "' in own and "<--- HERE" in own:
            return False
    return True


def _is_flat(kind: Any) -> bool:
    if kind.kind() == "TupleType":
        return all(item.kind() == "TensorType" for item in kind.elements())
    return kind.kind() in ("TensorType", "NoneType")


def origin(value: Any) -> Any:
    """The value itself, where it only went into a tuple and out again."""
    while True:
        node = value.node()
        if node.kind() != "prim::TupleUnpack":
            return value
        made = node.inputsAt(0).node()
        if made.kind() != "prim::TupleConstruct":
            return value
        value = made.inputsAt(value.offset())


def elements(result: Any) -> list[Any]:
    """What a traced method returns, one by one."""
    node = result.node()
    if result.type().kind() == "TupleType" and node.kind() == "prim::TupleConstruct":
        return list(node.inputs())
    return [result]


def by_age(graph: Any, values: list[Any]) -> tuple[int, ...]:
    """The positions of values that a graph returns, what was made last first."""
    inputs = {value.unique() for value in graph.inputs()}

    def compare(left: int, right: int) -> int:
        one, other = origin(values[left]), origin(values[right])
        given = [value.unique() in inputs for value in (one, other)]
        if any(given):
            return given[0] - given[1]
        if one.node() == other.node():
            return int(other.offset() - one.offset())
        return 1 if one.node().isBefore(other.node()) else -1

    return tuple(sorted(range(len(values)), key=functools.cmp_to_key(compare)))


def _links(value: Any, inputs: Collection[int]) -> list[tuple[str, Any, Any]] | None:
    """The ops through which a value comes from an input, or None where it was made inside."""
    links = []
    value = origin(value)
    while value.unique() not in inputs:
        node = value.node()
        if node.kind() not in (*_PASSING, *_ALIASES):
            return None
        source = origin(node.inputsAt(0))
        links.append((node.kind(), value, source))
        value = source
    return links


def _only_passes(graph: Any) -> bool:
    """Whether nothing in a graph makes a tensor but what may hand its input on."""
    ours = ("aten::append", "aten::clone", "aten::__is__")
    return all(
        node.kind() in (*_PASSING, *_ALIASES, *ours)
        for node in nodes_of(graph)
        if node.kind().startswith("aten::")
        and any(output.type().kind() == "TensorType" for output in node.outputs())
    )


def _product(graph: Any, owner: Owner) -> Any | None:
    """The node that multiplies by the module's own weight and makes what it returns."""
    result = next(iter(graph.outputs()))
    node = origin(result).node()
    if node.kind() != "aten::linear" or result.type().kind() != "TensorType":
        return None
    weight = owner.weight(node.inputsAt(1))
    return node if weight is not None and weight[0] in _places(owner.node) else None


def _linear(graph: Any, owner: Owner) -> Linear | None:
    node = _product(graph, owner)
    if node is None:
        return None
    weight = owner.weight(node.inputsAt(1))
    bias = owner.weight(node.inputsAt(2))
    nothing = node.inputsAt(2).type().kind() == "NoneType"
    if weight is None or not (nothing or (bias is not None and bias[0] == weight[0])):
        return None
    return Linear(_dotted(weight), None if bias is None else _dotted(bias))


def _dotted(weight: tuple[str, str]) -> str:
    return ".".join(part for part in weight if part)


def _places(node: Node) -> set[str]:
    return {node.path, *(() if node.same_as is None else (node.same_as.path,))}
