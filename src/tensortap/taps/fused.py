"""Modules that compute something else when they see a hook.

`nn.TransformerEncoderLayer` leaves its fused path, and with it the last bits of its result, as soon
as any module inside it has a hook of its own. Recording must not change a bit, so these are heard
through torch's global module hooks, which it does not look for. What the fused path never computes
layer by layer cannot be heard; a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils.hooks import RemovableHandle

__all__ = ["find_fused", "listen_globally", "why_silent"]


def find_fused(model: nn.Module) -> set[int]:
    """The ids of modules that must not carry hooks: fused layers that carry none yet."""
    found: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            inner = list(layer.modules())
            if not any(m._forward_hooks or m._forward_pre_hooks for m in inner):
                found.update(id(m) for m in inner)
    return found


def listen_globally(
    before: dict[int, list[Callable[..., None]]],
    after: dict[int, Callable[..., None]],
    keywords: Mapping[int, Callable[..., None]] = MappingProxyType({}),
) -> list[RemovableHandle]:
    """Call these, by the id of their module, from hooks that belong to no module.

    torch tells the keyword arguments of a call only when it is over: `keywords` are called then.
    """

    def pre_hook(module: nn.Module, args: Any) -> None:
        for listener in before.get(id(module), ()):
            listener(module, args if isinstance(args, tuple) else (args,), {})

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = keywords.get(id(module))
        if given is not None and kwargs:
            given(kwargs)
        listener = after.get(id(module))
        if listener is not None:
            listener(module, args, output)

    return [
        module_hooks.register_module_forward_pre_hook(pre_hook),
        module_hooks.register_module_forward_hook(hook, with_kwargs=True),
    ]


def why_silent(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:4]) + (", …" if len(names) > 4 else "")
    return (
        f"Nothing was heard from {len(names)} layers inside nn.TransformerEncoderLayer ({shown}): "
        "in eval mode it runs them as one fused operation. To see inside, at the price of other "
        "last bits: torch.backends.mha.set_fastpath_enabled(False)."
    )
