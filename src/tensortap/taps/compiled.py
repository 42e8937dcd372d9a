"""Listening inside `torch.compile`.

A hook that is there before the first call is traced into the graph. It must then do nothing that a
graph cannot hold, so it clones and appends; the graph stays whole, and the clones come out as extra
outputs. Dynamo does not look at hooks again once a module is compiled, so hooks that come later
would never fire, silently: therefore compiled code is thrown away when a recording starts and when
it ends, and the model compiles anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["Entry", "contains_compiled", "forget", "prepare", "stash"]

Entry = tuple[int, str, Any]
"""(index of the slot, port, cloned value)"""


def contains_compiled(model: nn.Module) -> bool:
    """Whether the model, or a part of it, was handed to `torch.compile`."""
    return any(
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def prepare(grads: bool) -> str:
    """Make sure that hooks fire, whatever was compiled before; a note that says so."""
    forget()
    note = (
        "The model is compiled: it compiles anew for this recording, and again after it. Layer "
        "outputs leave the graph as extra outputs, so fused kernels may differ in the last bits."
    )
    if grads:
        note += (
            " Gradients inside compiled parts are not recorded; record the eager model for them."
        )
    return note


def forget() -> None:
    """Throw compiled code away, so that hooks are looked at again."""
    torch._dynamo.reset()


def stash(into: list[Entry], index: int, port: str, value: Any) -> None:
    """Called while the graph is traced: keep a copy of every tensor in a nested value."""
    copied = pytree.tree_map(
        lambda item: item.detach().clone() if isinstance(item, torch.Tensor) else item, value
    )
    into.append((index, port, copied))
