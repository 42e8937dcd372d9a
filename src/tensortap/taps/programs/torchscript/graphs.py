"""What can be read off a TorchScript graph: whose values are whose, and what made it."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from .tree import Node

__all__ = [
    "ALIASES",
    "CASTS",
    "Linear",
    "Owner",
    "by_age",
    "elements",
    "is_hooked",
    "is_traced",
    "linear",
    "links",
    "nodes_of",
    "only_passes",
    "origin",
    "product",
]

# What may hand its first input on unchanged; of an alias that is sure.
PASSING = ("aten::to", "aten::contiguous", "aten::dropout", "aten::dropout_")
ALIASES = ("aten::detach", "aten::alias")
CASTS = ("aten::to", *ALIASES)
_STACK = re.compile(r"^\S.*\(\d+\): \S+", re.MULTILINE)


@dataclass(frozen=True)
class Linear:
    """The names of a layer's own weight and bias, where all it does is to multiply by them."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class Owner:
    """The module whose method a graph is: what its attributes lead to.

    A trace hands a method what it cannot reach itself: weights, and modules that stand elsewhere.
    """

    node: Node
    self_value: int
    weights: dict[int, tuple[str, str]]
    modules: dict[int, Node] = field(default_factory=dict)

    def chain(self, value: Any) -> tuple[Node, tuple[str, ...]] | None:
        """A module that is known, and the attributes from there to a value; None for others."""
        names: list[str] = []
        while value.unique() != self.self_value and value.unique() not in self.modules:
            node = value.node()
            if node.kind() != "prim::GetAttr":
                return None
            names.append(str(node.s("name")))
            value = node.inputsAt(0)
        return self.modules.get(value.unique(), self.node), tuple(reversed(names))

    def module(self, value: Any) -> Node | None:
        chain = self.chain(value)
        return None if chain is None else chain[0].find(chain[1])

    def weight(self, value: Any) -> tuple[str, str] | None:
        """Whose weight a value is, and which: (the module's path, the attribute)."""
        if value.unique() in self.weights:
            return self.weights[value.unique()]
        if value.type().kind() != "TensorType":
            return None
        chain = self.chain(value)
        if chain is None or not chain[1]:
            return None
        holder = chain[0].find(chain[1][:-1])
        return None if holder is None else (holder.path, chain[1][-1])


def is_hooked(call: Any) -> bool:
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


def links(value: Any, inputs: Collection[int]) -> list[tuple[str, Any, Any]] | None:
    """The ops through which a value comes from an input, or None where it was made inside."""
    found = []
    value = origin(value)
    while value.unique() not in inputs:
        node = value.node()
        if node.kind() not in (*PASSING, *ALIASES):
            return None
        source = origin(node.inputsAt(0))
        found.append((node.kind(), value, source))
        value = source
    return found


def only_passes(graph: Any) -> bool:
    """Whether nothing in a graph makes a tensor but what may hand its input on."""
    ours = ("aten::append", "aten::clone", "aten::__is__")
    return all(
        node.kind() in (*PASSING, *ALIASES, *ours)
        for node in nodes_of(graph)
        if node.kind().startswith("aten::")
        and any(output.type().kind() == "TensorType" for output in node.outputs())
    )


def product(graph: Any, owner: Owner) -> Any | None:
    """The node that multiplies by the module's own weight and makes what it returns."""
    result = next(iter(graph.outputs()))
    node = origin(result).node()
    if node.kind() != "aten::linear" or result.type().kind() != "TensorType":
        return None
    weight = owner.weight(node.inputsAt(1))
    return node if weight is not None and weight[0] in _places(owner.node) else None


def linear(graph: Any, owner: Owner) -> Linear | None:
    node = product(graph, owner)
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
