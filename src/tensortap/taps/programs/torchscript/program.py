"""A TorchScript model, scripted or traced, whose modules still have their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ....errors import TargetError
from ...leaves import flatten
from ..base import HeardCall, Leaves, Place, Provenance, Run, loose_leaves
from .base import TorchScript, cannot, detached, function_of
from .graphs import Linear
from .state import state_of
from .surgery import UNUSED, Site, Surgeon
from .tree import Node, Tree

__all__ = ["ScriptProgram"]

_UNCALLED = "the compiled model never calls it"
_CONTAINERS = {"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"}


class ScriptProgram(TorchScript):
    """Layers by the names of a model's submodules."""

    runtime = "torchscript"
    absent = (
        "The TorchScript model has no module of this name: it stood under another name when the "
        "model was compiled, or was not part of it."
    )

    def __init__(self, module: Any, file: str | None = None) -> None:
        self.notes: list[str] = []
        self._tree = Tree(module._c)
        learnt = self._learn()
        joined = self._tree.join(learnt.traced)
        if joined:
            learnt = self._learn()
        self.notes += [*joined, *learnt.notes]
        if module._c._get_forward_hooks() or module._c._get_forward_pre_hooks():
            self.notes.append(
                "The TorchScript model has hooks of its own: they run when it is called, not "
                "when a recording runs it by itself (rec.run)."
            )
        self.places: Sequence[Place] = _places(self._tree, learnt)
        self._found = learnt.found
        super().__init__(module, state_of(self._tree), self._tree.weights, file)

    def _learn(self) -> Surgeon:
        surgeon = Surgeon(self._tree, None)
        _graph_of(surgeon)
        return surgeon

    def tapped(
        self, layers: Sequence[str], *, inputs: bool, linears: Sequence[str]
    ) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Run]:
        surgeon = Surgeon(self._tree, frozenset(layers), inputs, frozenset(linears))
        function = function_of(_graph_of(surgeon))
        sites = tuple(surgeon.sites)

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
            output, taps = self._heard(function, args, kwargs)
            return Run(output, _calls(taps, sites))

        return run

    def linears(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]:
        found: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for name, linear in self._found.items():
            if linear is not None and (pair := self._pair(linear)) is not None:
                found[name] = pair
        return found

    def _pair(self, linear: Linear) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        weight = self._tensor(linear.weight)
        bias = None if linear.bias is None else self._tensor(linear.bias)
        if weight is None or not weight.is_floating_point() or weight.dim() != 2:
            return None
        if linear.weight in self._state.names:  # behind the run it is no more what it was in it
            return None
        return weight, bias

    def _tensor(self, name: str) -> torch.Tensor | None:
        path, _, attribute = name.rpartition(".")
        node = self._tree.root.find(tuple(path.split(".")) if path else ())
        value = node.cpp.getattr(attribute) if node and node.cpp.hasattr(attribute) else None
        return value if isinstance(value, torch.Tensor) else None


def _graph_of(surgeon: Surgeon) -> Any:
    try:
        return surgeon.graph()
    except (AttributeError, RuntimeError) as error:
        raise TargetError(cannot(error)) from error


def _calls(taps: Sequence[tuple[int, tuple[Any, ...]]], sites: Sequence[Site]) -> list[HeardCall]:
    """What was heard, call by call: what came in waits for the call to end."""
    calls: list[HeardCall] = []
    entered: dict[str, list[Leaves]] = {}
    operands: dict[str, torch.Tensor] = {}
    for number, values in taps:
        site = sites[number]
        name = site.node.name
        if site.what == "enter":
            tensors = [tensor for _, tensor in flatten(values) if tensor is not None]
            entered.setdefault(name, []).append(detached(loose_leaves(tensors)))
        elif site.what == "operand":
            operands[name] = values[0].detach()
        else:
            waiting = entered.get(name)
            inputs = waiting.pop() if waiting else ()
            calls.append(
                HeardCall(name, detached(_outputs(site, values)), inputs, operands.pop(name, None))
            )
    return calls


def _outputs(site: Site, values: tuple[Any, ...]) -> Leaves:
    if site.passage is None:
        return flatten(values[0]) if values else ()
    passage = site.passage
    made = [
        index
        for index in passage.order
        if (flags := passage.flags[index]) is None or not all(values[flag] for flag in flags)
    ]
    if not made and passage.pure:
        made = list(passage.order[:1])
    return loose_leaves([values[index] for index in made])


def _places(tree: Tree, learnt: Surgeon) -> list[Place]:
    """Every module, in the order in which first calls end; what is never called by its parent.

    Lists of modules are no layers: nothing can call them.
    """
    order = list(dict.fromkeys(node.name for node in learnt.finished))
    called = set(order)
    nodes = {node.name: node for node in tree.nodes()}
    heard = {site.node.name for site in learnt.sites if site.what == "exit"}
    before: dict[str, list[Node]] = {}
    for node in nodes.values():
        if node.name and node.name not in called and node.type not in _CONTAINERS:
            before.setdefault(_holder(node.name, called), []).append(node)
    found: list[Place] = []
    for name in [*order, ""]:
        found += [
            Place(n.name, n.type, gone=learnt.lost.get(n.name, _UNCALLED))
            for n in reversed(before.get(name, []))
        ]
        node = nodes.get(name, tree.root)
        if not name:
            found.append(Place("", node.type, "hook"))
        else:
            gone = None if name in heard else learnt.lost.get(name, UNUSED)
            known: Provenance = "inferred" if name in learnt.doubted else "scope"
            found.append(Place(name, node.type, known, gone=learnt.missed.get(name, gone)))
    return found


def _holder(name: str, called: set[str]) -> str:
    while name:
        name = name.rpartition(".")[0]
        if name in called:
            return name
    return ""
