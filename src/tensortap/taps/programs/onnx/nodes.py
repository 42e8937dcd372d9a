"""An ONNX graph node by node: for files whose exporter wrote no layers' names.

Every node that makes an activation is a layer. It is called as the node is, where no other node has
that name, else as the first value that it makes, else by its operator and its number. These names
are the file's own, so two files of one model, or a model and its quantised twin, have the same.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .graph import Block, Chain, Node
from .layers import Call, Layers
from .values import spelled

__all__ = ["name_nodes", "read_nodes", "weights_of"]

_LAST = 1 << 40  # an If ends behind the nodes of its branches
_LONGEST = 200


def read_nodes(blocks: Sequence[Block], typed: Any) -> Layers:
    """Every node that computes, as a layer of one call; what cannot be taken is gone."""
    layers = Layers(style="nodes")
    odd = _odd_values(typed)
    names = name_nodes(blocks)
    for block in blocks:
        outside = _around(block, blocks)
        for node, name in ((node, names[node]) for node in block.nodes if node in names):
            layers.types[name] = node.op
            outputs = [value for value in node.outputs if value not in block.constants]
            kept = [value for value in outputs if value not in odd]
            why = outside or _why_not(block, outputs, kept, odd)
            if why is not None:
                layers.gone[name] = why
                continue
            depth = tuple(index for index, _ in block.chain)
            layers.calls.append(
                Call(
                    name,
                    tuple(kept),
                    tuple(value for value in node.inputs if block.is_data(value)),
                    (*depth, node.index, _LAST),
                    block.chain,
                    (node,),
                    leaves=_leaves(node, kept),
                )
            )
    layers.calls.sort(key=lambda call: call.order)
    return layers


def name_nodes(blocks: Sequence[Block]) -> dict[Node, str]:
    """The nodes that make activations, or where none does all that compute, with their names."""
    found = [(block, node) for block in blocks for node in block.nodes if block.computes(node)]
    if not found:
        found = [
            (block, node)
            for block in blocks
            for node in block.nodes
            if any(value not in block.constants for value in node.outputs)
        ]
    own = Counter(_cleaned(node.proto.name) for block in blocks for node in block.nodes)
    taken: set[str] = set()
    names: dict[Node, str] = {}
    for number, (_, node) in enumerate(found):
        called = _cleaned(node.proto.name)
        choices = [called] if called and own[called] == 1 else []
        choices += [_cleaned(value) for value in node.outputs[:1]]
        name = next((n for n in choices if n and n not in taken), f"{node.op}_{number}")
        while name in taken:  # a stranger may call a node so
            name = f"{name}_{number}"
        taken.add(name)
        names[node] = name
    return _apart(names)


def weights_of(layers: Layers, block: Block) -> dict[str, tuple[int, ...]]:
    """The sizes of the weights that each node reads, the first as `weight`."""
    found: dict[str, tuple[int, ...]] = {}
    held = {tensor.name: tuple(tensor.dims) for tensor in block.graph.initializer}
    for call in layers.calls:
        inputs = [value for node in call.nodes for value in node.inputs]
        read = [held[value] for value in inputs if held.get(value)]
        for key, shape in zip(("weight", "bias"), read, strict=False):
            found[f"{call.layer}.{key}"] = shape
    return found


def _cleaned(text: str) -> str:
    """A name without empty parts between its dots, and of bearable length."""
    name = re.sub(r"\.{2,}", ".", str(text)).strip(".")
    if len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}…{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _apart(names: Mapping[Node, str]) -> dict[Node, str]:
    """The names, where one that others begin with has its operator behind it.

    A node `a` beside a node `a.b` is not what holds it.
    """
    holders = {
        ".".join(parts[:end])
        for name in names.values()
        for parts in [name.split(".")]
        for end in range(1, len(parts))
    }
    taken = set(names.values())
    found = {}
    for node, name in names.items():
        while name in holders:
            name = f"{name}.{node.op}"
            if name in taken:
                name = f"{name}_{node.index}"
        taken.add(name)
        found[node] = name
    return found


def _leaves(node: Node, kept: Sequence[str]) -> tuple[str, ...]:
    """Where each value stands in what the node returns: an operator's outputs have an order."""
    if len(node.outputs) == 1:
        return ("",)
    places = {value: index for index, value in enumerate(node.proto.output)}
    return tuple(f"[{places[value]}]" for value in kept)


def _why_not(
    block: Block, outputs: Sequence[str], kept: Sequence[str], odd: Mapping[str, str]
) -> str | None:
    """Why none of a node's values can be taken; None where one can."""
    if not kept:
        return f"it makes {odd[outputs[0]]}"
    if block.chain and any(value not in block.types for value in kept):
        return "it stands in a branch, out of which a value is handed by its type, and has none"
    return None


def _around(block: Block, blocks: Sequence[Block]) -> str | None:
    """Why nothing in this block can be taken: it is run once a turn."""
    if not block.in_loop:
        return None
    by_chain: dict[Chain, Block] = {other.chain: other for other in blocks}
    depth = next(
        i for i, (_, name) in enumerate(block.chain) if name not in ("then_branch", "else_branch")
    )
    holder = by_chain[block.chain[:depth]].nodes[block.chain[depth][0]]
    called = _cleaned(holder.proto.name) or holder.outputs[0]
    return (
        f"it stands in the body of the {holder.op} '{called}', which runs it once a turn: values "
        "inside are not taken"
    )


def _odd_values(typed: Any) -> dict[str, str]:
    """The values that no tensor can hold, with what they are."""
    found: dict[str, str] = {}
    stack = [typed]
    while stack:
        graph = stack.pop()
        for info in [*graph.value_info, *graph.output]:
            told = spelled(info.type)
            if told is not None:
                found[info.name] = told
        for node in graph.node:
            stack += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return found
