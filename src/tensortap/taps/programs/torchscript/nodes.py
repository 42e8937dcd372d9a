"""Taps on single nodes of a TorchScript graph: for graphs whose modules are no more.

A node is known by its number: the position in the graph, inner blocks behind the node that holds
them. Copies of a graph have the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...leaves import flatten
from ..base import HeardCall, Leaves, Place, Provenance, Run, loose_leaves
from .base import TorchScript, detached, function_of
from .copies import append, copy_of, holds_tensors, list_of_any
from .graphs import nodes_of
from .state import STATELESS, State

__all__ = ["GraphProgram", "NodeTap"]


@dataclass(frozen=True)
class NodeTap:
    """A layer that is one node, or a few: what `start` reads and `end` makes.

    `reads` are the positions of what comes in at the start, `operand` that of what a linear layer
    multiplies.
    """

    name: str
    end: int
    start: int
    reads: tuple[int, ...] = ()
    operand: int | None = None
    type: str = ""
    provenance: Provenance = "weight"


@dataclass(frozen=True)
class _Site:
    tap: NodeTap
    what: str


class GraphProgram(TorchScript):
    """A TorchScript graph with its layers at single nodes."""

    def __init__(
        self,
        runtime: str,
        model: Any,
        graph: Any,
        taps: Sequence[NodeTap],
        places: Sequence[Place],
        *,
        absent: str,
        notes: Sequence[str] = (),
        linears: Mapping[str, tuple[torch.Tensor, torch.Tensor | None]] | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
        state: State = STATELESS,
        file: str | None = None,
    ) -> None:
        super().__init__(model, state, lambda: weights or {}, file)
        self.runtime = runtime
        self.places: Sequence[Place] = places
        self.absent = absent
        self.notes: list[str] = list(notes)
        self._graph = graph
        self._taps = taps
        self._linears = dict(linears or {})

    def tapped(
        self, layers: Sequence[str], *, inputs: bool, linears: Sequence[str]
    ) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Run]:
        names, checked = frozenset(layers), frozenset(linears)
        wanted = [tap for tap in self._taps if tap.name in names or tap.name in checked]
        graph, sites = _with_taps(self._graph, wanted, names if inputs else (), checked)
        function = function_of(graph)

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
            output, taps = self._heard(function, args, kwargs)
            return Run(output, _calls(taps, sites))

        return run

    def linears(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]:
        return self._linears


def _with_taps(
    original: Any, taps: Sequence[NodeTap], inputs_of: Collection[str], operands_of: Collection[str]
) -> tuple[Any, list[_Site]]:
    """A copy of a graph that also returns the list of what its taps heard, and what they are."""
    graph = original.copy()
    nodes = list(nodes_of(graph))
    after = _followers(graph)
    sites: list[_Site] = []
    start = graph.create("prim::ListConstruct", [], 1)
    graph.prependNode(start)
    start.output().setType(list_of_any())
    heard = start.output()
    for tap in taps:
        first, last = nodes[tap.start], nodes[tap.end]
        if tap.name in inputs_of:
            with graph.insert_point_guard(first):
                copies = [copy_of(graph, first.inputsAt(index)) for index in tap.reads]
                append(graph, heard, len(sites), [copy for copy in copies if copy is not None])
            sites.append(_Site(tap, "enter"))
        if tap.name in operands_of and tap.operand is not None:
            with graph.insert_point_guard(first):
                append(graph, heard, len(sites), [copy_of(graph, first.inputsAt(tap.operand))])
            sites.append(_Site(tap, "operand"))
        with graph.insert_point_guard(after[tap.end]):
            outputs = [value for value in last.outputs() if holds_tensors(value.type())]
            copies = [copy_of(graph, value) for value in outputs]
            append(graph, heard, len(sites), [copy for copy in copies if copy is not None])
        sites.append(_Site(tap, "exit"))
    graph.registerOutput(heard)
    graph.makeMultiOutputIntoTuple()
    return graph, sites


def _followers(graph: Any) -> list[Any]:
    """For each node the one that comes behind it in its block."""
    found: list[Any] = []

    def walk(block: Any, end: Any) -> None:
        nodes = list(block.nodes())
        for node, following in zip(nodes, [*nodes, end][1:], strict=True):
            found.append(following)
            for inner in node.blocks():
                walk(inner, inner.returnNode())

    walk(graph, graph.return_node())
    return found


def _calls(taps: Sequence[tuple[int, tuple[Any, ...]]], sites: Sequence[_Site]) -> list[HeardCall]:
    calls: list[HeardCall] = []
    entered: dict[NodeTap, Leaves] = {}
    operands: dict[NodeTap, torch.Tensor] = {}
    for number, values in taps:
        tap, what = sites[number].tap, sites[number].what
        if what == "enter":
            tensors = [tensor for _, tensor in flatten(values) if tensor is not None]
            entered[tap] = detached(loose_leaves(tensors))
        elif what == "operand":
            operands[tap] = values[0].detach()
        else:
            outputs = flatten(values[0] if len(values) == 1 else values)
            calls.append(
                HeardCall(
                    tap.name, detached(outputs), entered.pop(tap, ()), operands.pop(tap, None)
                )
            )
    return calls
