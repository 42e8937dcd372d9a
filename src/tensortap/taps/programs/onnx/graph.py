"""An ONNX graph as far as names need it: who makes which value, who reads it, what it is.

A graph may have branches, graphs of their own inside a node. Each is a `Block`; values of the
blocks around it may be read inside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

__all__ = ["Block", "Node", "read_blocks"]

_SHAPES = {"Shape", "Size"}
_INTEGERS = {2, 3, 4, 5, 6, 7, 9, 12, 13}  # of onnx.TensorProto: all that may be a size or an index
Chain = tuple[tuple[int, str], ...]
"""Where a block stands: (index of the node, name of its attribute), from the outermost inwards."""


@dataclass(frozen=True, eq=False)
class Node:
    """One node. `inputs` are all values that it reads, also inside its own branches."""

    index: int
    proto: Any
    inputs: tuple[str, ...]

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.proto.output if name)

    @property
    def op(self) -> str:
        return str(self.proto.op_type)

    @cached_property
    def metadata(self) -> dict[str, str]:
        return {entry.key: entry.value for entry in self.proto.metadata_props}

    def attribute(self, name: str) -> Any:
        return next((item for item in self.proto.attribute if item.name == name), None)


@dataclass(eq=False)
class Block:
    """A graph, or a branch of one.

    `constants` maps values that depend on no input to the weights they are made of. `numbers` are
    shapes, sizes and what is counted out from them: no activations.
    """

    graph: Any
    chain: Chain
    types: Mapping[str, int]
    shapes: Mapping[str, tuple[int | None, ...]]
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, frozenset[str]] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)

    @cached_property
    def maker(self) -> dict[str, Node]:
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def readers(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found[name].append(node)
        return found

    @property
    def results(self) -> list[str]:
        return [output.name for output in self.graph.output]

    @property
    def in_loop(self) -> bool:
        """Whether it is run once for each turn of a loop, not at most once."""
        return any(name not in ("then_branch", "else_branch") for _, name in self.chain)

    def computes(self, node: Node) -> bool:
        """Whether a node makes an activation, not a constant, a shape or a number."""
        return any(self.is_data(name) for name in node.outputs)

    def is_data(self, name: str) -> bool:
        return name not in self.constants and name not in self.numbers

    def weights_of(self, node: Node) -> frozenset[str]:
        """The initialisers that a node reads, also through casts and transposes."""
        return frozenset().union(*(self.constants.get(name, frozenset()) for name in node.inputs))


def read_blocks(graph: Any, types: Any) -> list[Block]:
    """The graph and, behind it, its branches; `types` is the same graph with types on values."""
    blocks: list[Block] = []
    _read(graph, types, (), None, blocks)
    return blocks


def _read(graph: Any, typed: Any, chain: Chain, outer: Block | None, into: list[Block]) -> None:
    known: dict[str, int] = dict(outer.types) if outer else {}
    shapes: dict[str, tuple[int | None, ...]] = dict(outer.shapes) if outer else {}
    for info in [*typed.input, *typed.value_info, *typed.output]:
        _note_type(info, known, shapes)
    for tensor in graph.initializer:
        known[tensor.name] = tensor.data_type
        shapes[tensor.name] = tuple(tensor.dims)
    block = Block(graph, chain, known, shapes)
    if outer is not None:
        block.constants.update(outer.constants)
        block.numbers.update(outer.numbers)
    held = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    for tensor in held:
        block.constants[tensor.name] = frozenset((tensor.name,))
    into.append(block)
    twins = typed.node if len(typed.node) == len(graph.node) else graph.node
    for index, proto in enumerate(graph.node):
        node = Node(index, proto, _reads(proto))
        block.nodes.append(node)
        _classify(node, block)
    for index, (proto, twin) in enumerate(zip(graph.node, twins, strict=True)):
        inner = {item.name: item.g for item in twin.attribute if item.HasField("g")}
        for attribute in proto.attribute:
            if attribute.HasField("g"):
                twin_graph = inner.get(attribute.name, attribute.g)
                _read(attribute.g, twin_graph, (*chain, (index, attribute.name)), block, into)


def _note_type(info: Any, known: dict[str, int], shapes: dict[str, tuple[int | None, ...]]) -> None:
    if not info.type.HasField("tensor_type"):
        return
    tensor = info.type.tensor_type
    if tensor.elem_type:
        known[info.name] = tensor.elem_type
    if tensor.HasField("shape"):
        shapes[info.name] = tuple(
            size.dim_value if size.HasField("dim_value") else None for size in tensor.shape.dim
        )


def _reads(proto: Any) -> tuple[str, ...]:
    names = [name for name in proto.input if name]
    for attribute in proto.attribute:
        if attribute.HasField("g"):
            names += _captured(attribute.g)
    return tuple(names)


def _captured(graph: Any) -> Sequence[str]:
    """What a branch reads of the graph around it."""
    own = {value.name for value in graph.input} | {item.name for item in graph.initializer}
    own |= {name for node in graph.node for name in node.output}
    read = [name for node in graph.node for name in _reads(node)]
    read += [value.name for value in graph.output]
    return [name for name in dict.fromkeys(read) if name not in own]


def _classify(node: Node, block: Block) -> None:
    """Say of a node's values whether they are constants, numbers or activations."""
    if node.op == "Constant" or (
        node.inputs and all(name in block.constants for name in node.inputs) and not _random(node)
    ):
        weights = block.weights_of(node)
        block.constants.update(dict.fromkeys(node.outputs, weights))
        return
    from_shapes = node.op in _SHAPES or (
        bool(node.inputs)
        and all(name in block.numbers or name in block.constants for name in node.inputs)
    )
    if not from_shapes:
        return
    for name in node.outputs:
        shape = block.shapes.get(name)
        small = shape is not None and all(size == 1 for size in shape)
        if node.op in _SHAPES or block.types.get(name) in _INTEGERS or small:
            block.numbers.add(name)


def _random(node: Node) -> bool:
    return node.op.startswith("Random") or node.op in ("Bernoulli", "Multinomial")
