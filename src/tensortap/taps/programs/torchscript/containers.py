"""Guesses of what modules return in a graph without their names: where all that they made meets.

Only the weights below a module are known. What it returns is taken to be the first value that all
ways from them lead through, and there are rules for when not to guess: some weights were not found;
an op without weights follows, of which nobody knows whether it is the module's (an activation, a
reshape); a layer is called twice. Still a guess: nothing here is better than `inferred`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..postdom import END, nearest_common, post_dominators
from .anchors import Anchored
from .copies import holds_tensors
from .graphs import nodes_of
from .nodes import NodeTap

__all__ = ["containers"]

_ADDS = ("aten::add", "aten::add_")
_CASTS = ("aten::to", "aten::detach", "aten::alias")


def containers(graph: Any, found: Anchored, modules: Collection[str]) -> list[NodeTap]:
    """Taps for the modules above the layers that own weights."""
    flow = _Flow(graph, found.reading)
    points: dict[str, list[tuple[str, int]]] = {}
    for tap in found.taps:
        points.setdefault(tap.name, []).append((tap.name, tap.end))
    calls = {name: len(ends) for name, ends in points.items()}
    for name, readers in found.readers.items():
        if name not in points:
            points[name] = [(name, index) for index in readers]
    starts = {tap.start: tap.name for tap in found.taps}
    guesses = []
    for parent in _parents(modules):
        inside = [name for name in modules if name == parent or name.startswith(f"{parent}.")]
        if all(name[len(parent) + 1 :].split(".")[0].isdigit() for name in inside):
            continue  # a list of modules, most likely, which is no layer
        whole = all(name in points and calls.get(name, 1) == 1 for name in inside)
        ends = [index for name in inside for _, index in points.get(name, ())]
        if not whole or not ends or not all(index in flow.outer for index in ends):
            continue
        end = flow.result(ends, parent, starts)
        last = max(ends)
        beyond = any(
            last < tap.start and tap.end <= (end or 0) and tap.name not in inside
            for tap in found.taps
        )  # other layers run before it: something of its own is kept for later
        if end is not None and not beyond:
            guesses.append(NodeTap(parent, end, end, (), None, "", "inferred"))
    return guesses


def _parents(modules: Collection[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in modules:
        while "." in name:
            name = name.rpartition(".")[0]
            found.setdefault(name)
    return list(found)


class _Flow:
    """Which node reads what which other made."""

    def __init__(self, graph: Any, reading: Collection[int]) -> None:
        self._reading = reading
        self.nodes = list(nodes_of(graph))
        self._number = {
            value.unique(): index
            for index, node in enumerate(self.nodes)
            for value in node.outputs()
        }
        top = {value.unique() for node in graph.nodes() for value in node.outputs()}
        self.outer = {self._number[unique] for unique in top}
        self._readers: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for value in node.outputs():
                if holds_tensors(value.type()):
                    self._readers.setdefault(index, []).extend(
                        self._index(use.user) for use in value.uses()
                    )
        self._nearest = post_dominators(self._readers, len(self.nodes))

    def _index(self, node: Any) -> int:
        first = next(iter(node.outputs()), None)
        return END if first is None else self._number.get(first.unique(), END)

    def result(self, ends: Sequence[int], parent: str, starts: Mapping[int, str]) -> int | None:
        """The node whose value a module returns, or None where that is anybody's guess."""
        end = nearest_common(ends, self._nearest)
        if end == END:
            return None
        only = self._only_reader(end)
        if only != END and self.nodes[only].kind() in _ADDS:
            if self._is_residual(end, only, min(ends)):
                end = only
        elif only != END and not self._is_outside(only, parent, starts):
            return None  # an op without weights follows: whose it is cannot be told
        outputs = list(self.nodes[end].outputs())
        plain = len(outputs) == 1 and isinstance(outputs[0].type(), torch._C.TensorType)
        return end if plain else None

    def _only_reader(self, index: int) -> int:
        """What alone reads a value, casts looked through; END where there are several."""
        while True:
            readers = set(self._readers.get(index, ()))
            if len(readers) != 1:
                return END
            (index,) = readers
            if index == END or self.nodes[index].kind() not in _CASTS:
                return index

    def _is_outside(self, index: int, parent: str, starts: Mapping[int, str]) -> bool:
        name = starts.get(index)
        return name is not None and not name.startswith(f"{parent}.")

    def _is_residual(self, end: int, add: int, first: int) -> bool:
        """Whether an addition adds what the module was given: its first layer reads that too, and
        no other layer stands between."""
        sources = [
            self._number.get(value.unique(), END) for value in list(self.nodes[add].inputs())[:2]
        ]
        others = [source for source in sources if source != end]
        if len(others) != 1 or others[0] == END or others[0] >= first:
            return False
        seen: set[int] = set()
        waiting = [others[0]]
        while waiting:
            for index in self._readers.get(waiting.pop(), ()):
                if index == END or index in seen or index > end:
                    continue
                seen.add(index)
                if index == first:
                    return True
                if index not in self._reading:
                    waiting.append(index)
        return False
