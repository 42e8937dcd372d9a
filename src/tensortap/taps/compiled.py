"""Listening inside `torch.compile`.

A hook that is there before the first call is traced into the graph. It must then do nothing that a
graph cannot hold. Where summaries are wanted it puts an operator into the graph (`in_graph`); where
values are, it clones and appends: the graph stays whole, and the clones come out as extra outputs.
With `mode="reduce-overhead"` these are overwritten by the next run, so they are taken before it
begins. Dynamo does not look at hooks again once a module is compiled, so hooks that come later
would never fire, silently: therefore compiled code is thrown away when a recording starts and when
it ends, and the model compiles anew.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..recording.schema import Port
from .listener import Listener

__all__ = [
    "Entry",
    "around_each_run",
    "contains_compiled",
    "devices_of",
    "dtypes_of",
    "forget",
    "graphs_may_come",
    "prepare",
    "stash",
]

Entry = tuple[int, Port, Any]
"""(index of the slot, port, cloned value)"""


def contains_compiled(model: nn.Module) -> bool:
    """Whether the model, or a part of it, was handed to `torch.compile`."""
    return any(
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def graphs_may_come() -> bool:
    """Whether something may be compiled while we listen: what compiles is there."""
    return "torch._dynamo" in sys.modules


def devices_of(model: nn.Module) -> set[torch.device]:
    """Where the model's parameters and buffers are."""
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}


def dtypes_of(model: nn.Module) -> set[torch.dtype]:
    """What its parameters and buffers are."""
    return {tensor.dtype for tensor in (*model.parameters(), *model.buffers())}


def prepare(grads: bool, in_graph: bool = False) -> str:
    """Make sure that hooks fire, whatever was compiled before; a note that says so."""
    forget()
    how = "are summed up inside the graph" if in_graph else "leave the graph as extra outputs"
    note = (
        "The model is compiled: it compiles anew for this recording, and again after it. Layer "
        f"outputs {how}, so fused kernels may differ in the last bits."
    )
    if grads:
        note += (
            " Gradients inside compiled parts are not recorded; record the eager model for them."
        )
    return note


def forget() -> None:
    """Throw compiled code away, so that hooks are looked at again."""
    torch._dynamo.reset()


def around_each_run(model: nn.Module, act: Callable[[], None]) -> Callable[[], None]:
    """Call `act` whenever a compiled part of the model is about to run, and when it has run.

    Before, since the graph's memory is about to be written again; behind, since another compiled
    model may share that memory. Undone by the result.
    """
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        call = getattr(module, "_compiled_call_impl", None)
        if call is not None:
            own: Any = module
            own._compiled_call_impl = _around(act, call)
            undo.append(functools.partial(setattr, module, "_compiled_call_impl", call))
        elif "_orig_mod" in module._modules:
            listener = Listener(lambda *_: _act(act))
            undo.append(module.register_forward_pre_hook(listener).remove)
            undo.append(module.register_forward_hook(listener).remove)

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


def _around(act: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        _act(act)
        result = call(*args, **kwargs)
        _act(act)
        return result

    return run


def _act(act: Callable[[], None]) -> None:
    if not torch.compiler.is_compiling():
        act()


def stash(into: list[Entry], index: int, port: Port, value: Any) -> None:
    """Called while the graph is traced: keep a copy of every tensor in a nested value."""
    copied = pytree.tree_map(
        lambda item: item.detach().clone() if isinstance(item, torch.Tensor) else item, value
    )
    into.append((index, port, copied))
