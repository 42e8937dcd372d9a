"""TorchScript op by op: for what has no layers, or when the ops themselves are wanted.

Every op that makes a tensor is a layer `ops.0012.softmax`, numbered in the order of the graph. One
that surely is a whole layer, since it reads all of that layer's weights, has the layer's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..base import Options, Place, Program
from .anchors import Anchored, Weight, anchors
from .copies import holds_tensors
from .graphs import Owner, by_age, elements, nodes_of, origin
from .nodes import GraphProgram, NodeTap
from .state import STATELESS, state_of
from .tree import Tree

__all__ = ["KIND", "OpsKind", "function_program", "linears_of", "op_taps", "ops_program"]

ABSENT = (
    "The TorchScript model is recorded op by op: a layer has its name only where one op reads all "
    "of its weights."
)


class OpsKind:
    """Any TorchScript model, op by op; chosen with --runtime ops."""

    name = "ops"
    suffixes: tuple[str, ...] = ()
    uses: frozenset[str] = frozenset()

    def accepts(self, model: object) -> bool:
        return isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction)

    def recognises(self, path: Path) -> bool:
        return False

    def program(self, model: Any, options: Options) -> Program:
        from .kind import opened

        module, file = opened(model)
        return ops_program(module, file)


KIND = OpsKind()


def ops_program(
    model: Any, file: str | None, *, runtime: str = "ops", notes: Sequence[str] = ()
) -> GraphProgram:
    """A model op by op."""
    if isinstance(model, torch.jit.ScriptFunction):
        graph = model.graph.copy()
        torch._C._jit_pass_inline(graph)
        taps = op_taps(graph, ())
        return _program(runtime, model, graph, taps, {}, {}, notes, file)
    tree = Tree(model._c)
    graph = model._c._get_method("forward").graph.copy()
    torch._C._jit_pass_inline(graph)
    tensors = tree.weights()
    values = _weights(graph, tree)
    needed: dict[str, list[str]] = {}
    for weight in set(values.values()):
        module, _, key = weight.names[0].rpartition(".")
        needed.setdefault(module, []).append(key)
    needed.pop("", None)
    found = _confirmed(anchors(graph, values, needed, blind=False), graph, tree)
    linears = linears_of(found, tensors)
    types = {node.name: node.type for node in tree.nodes()}
    layers = [replace(tap, type=types.get(tap.name, tap.type)) for tap in found.taps]
    taps = [*layers, *op_taps(graph, [tap.end for tap in layers])]
    return _program(runtime, model, graph, taps, linears, tensors, notes, file)


def _confirmed(found: Anchored, graph: Any, tree: Tree) -> Anchored:
    """Layers whose own graph ends in the op that was taken for them."""
    nodes = list(nodes_of(graph))
    ends: dict[str, set[str]] = {}
    for node in tree.root.walk():
        for method in node.forwards:
            own = node.cpp._get_method(method).graph.copy()
            torch._C._jit_pass_inline(own)
            values = elements(next(iter(own.outputs())))
            last = values[by_age(own, values)[0]]
            ends.setdefault(node.path, set()).add(origin(last).node().kind())
    taps = [
        tap
        for tap in found.taps
        if tap.provenance == "weight" and nodes[tap.end].kind() in ends.get(tap.name, ())
    ]
    named = {tap.name for tap in taps}
    linears = {name: known for name, known in found.linears.items() if name in named}
    return replace(found, taps=taps, linears=linears)


def function_program(model: Any, file: str | None) -> GraphProgram:
    """A scripted or traced function: it has ops, and no layers."""
    return ops_program(model, file, runtime="torchscript")


def linears_of(
    found: Anchored, tensors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """The weights (out x in) and biases of the linear layers that are sure."""
    linears = {}
    for name, (weight, turned, bias) in found.linears.items():
        matrix = tensors.get(weight)
        if matrix is not None and matrix.is_floating_point() and matrix.dim() == 2:
            added = None if bias is None else tensors[bias]
            linears[name] = (matrix.t() if turned else matrix, added)
    return linears


def _program(
    runtime: str,
    model: Any,
    graph: Any,
    taps: Sequence[NodeTap],
    linears: dict[str, Any],
    weights: dict[str, torch.Tensor],
    notes: Sequence[str],
    file: str | None,
) -> GraphProgram:
    taps = sorted(taps, key=lambda tap: tap.end)
    places = {tap.name: Place(tap.name, tap.type, tap.provenance) for tap in taps}
    root = "" if isinstance(model, torch.jit.ScriptFunction) else str(model.original_name)
    return GraphProgram(
        runtime,
        model,
        graph,
        taps,
        [*places.values(), Place("", root, "hook")],
        absent=ABSENT,
        notes=notes,
        linears=linears,
        weights=weights,
        state=STATELESS
        if isinstance(model, torch.jit.ScriptFunction)
        else state_of(Tree(model._c)),
        file=file,
    )


def op_taps(graph: Any, taken: Sequence[int]) -> list[NodeTap]:
    """A tap for every op that makes tensors, but for those which are layers already."""
    found: list[NodeTap] = []
    count = 0
    for index, node in enumerate(nodes_of(graph)):
        space, _, op = node.kind().partition("::")
        if space == "prim" or not any(holds_tensors(value.type()) for value in node.outputs()):
            continue
        if index not in taken:
            reads = tuple(
                place
                for place, value in enumerate(node.inputs())
                if holds_tensors(value.type())
                and value.node().kind() not in ("prim::Constant", "prim::GetAttr")
            )
            name = f"ops.{count:04d}.{op.strip('_') or op}"
            found.append(NodeTap(name, index, index, reads, None, node.kind(), "value-name"))
        count += 1
    return found


def _weights(graph: Any, tree: Tree) -> dict[int, Weight]:
    """The values of a graph that are parameters or buffers of the model's own modules."""
    inputs = list(graph.inputs())
    owner = Owner(tree.root, inputs[0].unique(), {})
    found: dict[int, Weight] = {}
    for node in nodes_of(graph):
        if node.kind() == "prim::GetAttr":
            weight = owner.weight(node.output())
            if weight is not None:
                name = ".".join(part for part in weight if part)
                found[node.output().unique()] = Weight((name,))
    return found
