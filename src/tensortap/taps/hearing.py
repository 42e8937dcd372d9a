"""The operators through which compiled graphs speak to us.

A forward hook that is traced by `torch.compile` may hold nothing but operators. `hear` is one: the
graph stays whole (`fullgraph=True`), and at run time the tensor's values arrive in a Python
function, eager or compiled, in the forward pass or the backward one. Whether anything is done with
them is decided there, so one graph serves every cadence. A call costs about two microseconds.

What a CUDA graph replays runs no Python, so `hear` keeps a compiled graph out of CUDA graphs.
`hear_captured` is the same without that: whoever listens by it must know what to do when he is
called while a graph is captured, and how to learn of its replays (`in_graph`, `replays`).

The operators return nothing and write nowhere; torch is told that they have a side effect, which
keeps them in the graph. (One that pretends to write to a tensor makes that tensor an input of the
graph, with its version and its place: torch 2.11 then refuses gradient hooks that use it.)

Dynamo shares graphs among instances of a class and does not look at their hooks when it does so:
a watched model would get the graph of one that is not. `HooksGuarded` makes it look.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch

__all__ = ["Ear", "HooksGuarded", "graphs_exist", "recomputing"]

Listen = Callable[[int, torch.Tensor], None]
ListenByLeaf = Callable[[int, torch.Tensor, str], None]

_EARS: weakref.WeakValueDictionary[int, Ear] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_LIBRARY: list[Any] = []
_LIMITS = ("recompile_limit", "accumulated_recompile_limit")  # of dynamo


def _hear(tensor: torch.Tensor, ear: int, site: int, leaf: str) -> None:
    found = _EARS.get(ear)
    if found is not None:
        found.hear(site, tensor, leaf)


@cache
def _operators() -> tuple[Any, Any]:
    """Both operators, defined on first use: importing this module changes nothing in torch."""
    make: Any = torch.library.Library  # untyped in torch
    library = make("tensortap", "DEF")
    apart = getattr(torch.Tag, "cudagraph_unsafe", None)  # what is replayed runs no Python
    for name, tags in (("hear", () if apart is None else (apart,)), ("hear_captured", ())):
        library.define(f"{name}(Tensor tensor, int ear, int site, str leaf) -> ()", tags=tags)
        library.impl(name, _hear, "CompositeExplicitAutograd")
        library.impl(name, lambda tensor, ear, site, leaf: None, "Meta")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # nothing to differentiate
    _LIBRARY.append(library)  # they are undefined when their library is collected
    spaces = torch.ops.tensortap
    for operator in (spaces.hear.default, spaces.hear_captured.default):
        torch.fx.node.has_side_effect(operator)
    return spaces.hear.default, spaces.hear_captured.default


class Ear:
    """Hears tensors from inside compiled graphs: `listen(site, tensor)` is called at run time.

    `listen` must not raise, must not keep the tensor without copying it, and must be quick. Speak
    to it from a hook while `torch.compiler.is_compiling()`: `ear.speak(tensor, site)`. With
    `by_leaf` it also gets the leaf that was spoken with: `listen(site, tensor, leaf)`. `captured`:
    it is called while CUDA graphs are captured, too.
    """

    def __init__(
        self,
        listen: Listen | None = None,
        *,
        by_leaf: ListenByLeaf | None = None,
        captured: bool = False,
    ) -> None:
        self._listen = listen
        self._by_leaf = by_leaf
        self.number = next(_NUMBERS)
        self.operator = _operators()[captured]
        _EARS[self.number] = self

    def hear(self, site: int, tensor: torch.Tensor, leaf: str) -> None:
        """What the operator does at run time."""
        if self._by_leaf is not None:
            self._by_leaf(site, tensor, leaf)
        elif self._listen is not None:
            self._listen(site, tensor)

    def speak(self, tensor: torch.Tensor, site: int, leaf: str = "") -> None:
        """Send a tensor to `listen`; traceable."""
        self.operator(tensor.detach(), self.number, site, leaf)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ear:
        return self


class HooksGuarded:
    """While it is held, graphs are compiled so that they notice when a module's hooks change.

    Blocks of one class that are compiled one by one then get a graph each, so dynamo is allowed
    that many more of them: at its limit it would give up, and with `fullgraph=True` raise.
    """

    _held: ClassVar[list[HooksGuarded]] = []
    _before: ClassVar[dict[str, Any]] = {}

    def __init__(self, graphs: int = 0) -> None:
        self._graphs = graphs

    def hold(self) -> None:
        if self not in HooksGuarded._held:
            HooksGuarded._held.append(self)
            self._set()

    def release(self) -> None:
        if self in HooksGuarded._held:
            HooksGuarded._held.remove(self)
            self._set()

    @staticmethod
    def _set() -> None:
        import torch._dynamo.config as config

        held, before = HooksGuarded._held, HooksGuarded._before
        for name in ("skip_nnmodule_hook_guards", *_LIMITS):
            if hasattr(config, name):
                before.setdefault(name, getattr(config, name))
        more = sum(guarded._graphs for guarded in held)
        for name, value in before.items():
            if name in _LIMITS:
                value = value + more
            elif held:
                value = False
            setattr(config, name, value)
        if not held:
            before.clear()


def graphs_exist() -> bool:
    """Whether anything was compiled in this process: such graphs do not look at hooks."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    made = getattr(getattr(dynamo, "output_codes", None), "seen", None)
    return dynamo is not None and (made is None or len(made) > 0)


def recomputing() -> bool:
    """Whether this runs inside a backward pass; in a forward hook: activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
