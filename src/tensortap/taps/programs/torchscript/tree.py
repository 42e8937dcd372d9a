"""The modules of a TorchScript model: their names, as the eager model had them.

A module that stands at two places has two names here and one there: scripting and tracing make two
objects of it, which have nothing but their weights in common.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

__all__ = ["Node", "Tree"]

# A trace numbers the calls of a module (forward1), a script its overloads (forward__0).
_FORWARD = re.compile(r"forward(__)?\d*")
_MANGLED = re.compile(r"\.___torch_mangle_\d+")


@dataclass(eq=False)
class Node:
    """One module at one place in the tree. `name` is where eager mode would list it."""

    path: str
    name: str
    type: str
    cpp: Any
    children: dict[str, Node]
    same_as: Node | None = None  # the first place of the same module

    def walk(self) -> Iterator[Node]:
        """This and all below, in the order of `named_modules`."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def find(self, parts: tuple[str, ...]) -> Node | None:
        """The module behind a chain of attributes."""
        node: Node | None = self
        for part in parts:
            node = None if node is None else node.children.get(part)
        return node

    def has_method(self, name: str) -> bool:
        return bool(self.cpp._has_method(name))

    @cached_property
    def forwards(self) -> Collection[str]:
        """The methods that calls of the module run: its forward, or each overload of it."""
        overloads = _overloads(str(self.cpp._type().qualified_name()))
        names = [str(name) for name in self.cpp._method_names()]
        return [name for name in names if _FORWARD.fullmatch(name) or name in overloads]

    def parameters(self) -> dict[str, torch.Tensor]:
        """The module's own parameters."""
        return dict(_items(torch._C.ParameterDict(self.cpp)))

    def buffers(self) -> dict[str, torch.Tensor]:
        """The module's own buffers."""
        return dict(_items(torch._C.BufferDict(self.cpp)))


class Tree:
    """All modules of a model."""

    def __init__(self, cpp: Any) -> None:
        self.root = _node(cpp, "")

    def join(self, called: Mapping[str, bool]) -> list[str]:
        """Give modules that stand at several places the name of the first, as eager mode does.

        `called` are the paths that have calls, and whether these were traced. What was joined is
        told in sentences, since two modules whose weights are all tied look just like one.
        """
        alike: dict[tuple[Any, ...], list[Node]] = {}
        for node in self.root.walk():
            weights = _weights_below(node)
            if node.path and weights:
                alike.setdefault((node.type, weights), []).append(node)
        notes = []
        for group in alike.values():
            if len(group) < 2 or any(node.same_as for node in group) or not _one(group, called):
                continue
            for node in group[1:]:
                for inner, origin in zip(node.walk(), group[0].walk(), strict=False):
                    inner.name, inner.same_as = origin.name, origin
            others = ", ".join(f"'{node.path}'" for node in group[1:])
            notes.append(
                f"'{group[0].path}' and {others} have the same weights: they are taken for one "
                "module with several names, and recorded under the first."
            )
        return notes

    def nodes(self) -> list[Node]:
        """Every module once, under its first name, in the order of `named_modules`."""
        return [node for node in self.root.walk() if node.same_as is None]

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters by name."""
        return {
            f"{node.path}.{key}" if node.path else key: tensor
            for node in self.nodes()
            for key, tensor in node.parameters().items()
        }

    def buffers(self) -> list[torch.Tensor]:
        return [tensor for node in self.nodes() for tensor in node.buffers().values()]


def _items(named: Any) -> list[tuple[str, Any]]:
    return list(named.items())


def _node(cpp: Any, path: str) -> Node:
    children = {
        str(key): _node(child, f"{path}.{key}" if path else str(key))
        for key, child in _items(torch._C.ModuleDict(cpp))
    }
    return Node(path, path, str(cpp._type().name()), cpp, children)


def _overloads(qualified: str) -> Collection[str]:
    """The overloads of forward that have names of their own, as those of torch's quantised LSTM.

    The class lists them, and compiled code forgets the list. A file may name any class: only
    torch's own are looked up, since importing others would run code.
    """
    module, _, name = _MANGLED.sub("", qualified).removeprefix("__torch__.").rpartition(".")
    if not module.startswith("torch."):
        return ()
    try:
        known = getattr(importlib.import_module(module), name, None)
    except ImportError:  # another version of torch has it elsewhere
        return ()
    return tuple(getattr(known, "__overloads__", {}).get("forward", ()))


def _one(group: list[Node], called: Mapping[str, bool]) -> bool:
    """Whether places with the same weights are one module.

    Scripting makes an object a place, each with its calls. A trace puts all calls of a module at
    its last place: calls at several are those of several modules, whose weights are tied.
    """
    active = [n for n in group if any(inner.path in called for inner in n.walk())]
    traced = any(called.get(inner.path, False) for node in active for inner in node.walk())
    return bool(active) and (not traced or active == group[-1:])


def _weights_below(node: Node) -> tuple[tuple[str, int, int], ...]:
    """Where the weights below a module lie: the same for two names of one module."""
    start = len(node.path)
    return tuple(
        (f"{inner.path[start:]}.{key}", tensor.data_ptr(), tensor.numel())
        for inner in node.walk()
        for key, tensor in inner.parameters().items()
        if tensor.numel()
    )
