"""Layers of an exported program that are one module under several names."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..aliases import Earlier, Module, find_aliases, join_calls, likely_order
from ..scopes import ModuleCall
from .graph import Reading
from .nodes import eager_name

__all__ = ["Joined", "join_names"]


class Joined:
    """The names that others stand for, and those whose calls may be numbered wrongly."""

    def __init__(
        self, first: dict[str, str], doubts: set[str], calls: dict[ModuleCall, ModuleCall]
    ) -> None:
        self.first = first
        self.doubts = doubts
        self._calls = calls

    def call(self, call: ModuleCall) -> ModuleCall:
        """A call by the first name of its module."""
        return self._calls.get(call, call)


def join_names(reading: Reading, module: fx.GraphModule, exported: Any) -> Joined:
    """Call every module in a reading by its first name, as the eager model does."""
    calls = [call for step in reading.steps for call in step.calls]
    modules = _modules(reading, module, exported)
    found = find_aliases(modules, calls, _order(modules, exported))
    joined = Joined(found.first, found.doubts, join_calls(calls, found.first))
    if not found.first:
        return joined
    reading.steps = [
        replace(step, calls=tuple(joined.call(call) for call in step.calls))
        for step in reading.steps
    ]
    reading.last = {(joined.call(call), path): n for (call, path), n in reading.last.items()}
    for path, name in found.first.items():
        if path in reading.types:
            reading.types.setdefault(name, reading.types[path])
        if path in reading.stock:
            reading.stock.add(name)
    return joined


def _order(modules: dict[str, Module], exported: Any) -> Earlier:
    if not _listed(exported):
        return likely_order(path for path, module in modules.items() if module.tensors)
    place = {path: index for index, path in enumerate(modules)}
    return lambda one, other: place[one] < place[other]


def _listed(exported: Any) -> list[str]:
    """All names of modules in the model's order; none where a graph was exported again."""
    entries = [] if exported is None else exported.module_call_graph
    names = [eager_name(str(entry.fqn).partition("@")[0]) for entry in entries]
    return names if any(names) else []


def _modules(reading: Reading, module: fx.GraphModule, exported: Any) -> dict[str, Module]:
    """Every name in the model's own order, as far as the export knows it."""
    tensors: dict[str, set[tuple[str, Hashable]]] = {}
    for name, tensor in _tensors(module, exported):
        parts = eager_name(name).split(".")
        for depth in range(1, len(parts)):
            relative = ".".join(parts[depth:])
            tensors.setdefault(".".join(parts[:depth]), set()).add((relative, _identity(tensor)))
    names = _listed(exported)
    reads = dict.fromkeys(reading.types, False)
    called = dict.fromkeys(call[0] for step in reading.steps for call in step.calls)
    for step in reading.steps:
        node, spot = reading.nodes[step.name], reading.spots[step.name]
        if any(
            reading.resolve("/".join((*spot.graph, value.name))) in reading.weights
            for value in node.all_input_nodes
        ):
            reads.update((path, True) for path, _ in step.calls)
    return {
        path: Module(
            type=reading.types.get(path, ""),
            tensors=frozenset(tensors.get(path, ())),
            objects=frozenset(reading.objects.get(path, ())),
            bare=not reads.get(path, False),
        )
        for path in dict.fromkeys([*names, *([] if names else tensors), *called])
    }


def _tensors(module: fx.GraphModule, exported: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if exported is not None:
        held = {**exported.state_dict, **exported.constants}
    else:
        held = dict(module.named_parameters(remove_duplicate=False))
        held.update(module.named_buffers(remove_duplicate=False))
    for name, value in held.items():
        if isinstance(value, torch.Tensor) and value.numel():
            yield name, value


def _identity(tensor: torch.Tensor) -> Hashable:
    """What two names of one tensor have in common, also when it was loaded from a file."""
    try:
        start = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without storage of its own
        return id(tensor)
    if not start:
        return id(tensor)
    return start, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())
