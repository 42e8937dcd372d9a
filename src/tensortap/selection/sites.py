"""The places of a model: every module, once, with all the names it goes by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

__all__ = ["Site", "children", "is_called", "is_leaf", "sites", "type_name", "unwrap"]

_COMPILED = "_orig_mod"
# Children that hold a module's weights rather than take part in its forward.
_INTERNAL = frozenset({"parametrizations", "_packed_params"})


@dataclass(frozen=True)
class Site:
    """One module and its names; the first is the one that `named_modules()` would give."""

    name: str
    module: nn.Module = field(repr=False)
    type: str
    names: tuple[str, ...]


def unwrap(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped: the wrapper is no place of its own."""
    inner = module._modules.get(_COMPILED) if _COMPILED in module._modules else None
    return module if inner is None else unwrap(inner)


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The direct children, compiled ones unwrapped, a shared one as often as it is named."""
    return [(name, unwrap(child)) for name, child in module._modules.items() if child is not None]


def is_leaf(module: nn.Module) -> bool:
    """Whether a module has no children but those that hold its weights."""
    return all(name in _INTERNAL for name, _ in children(module))


def is_internal(name: str) -> bool:
    """Whether a name lies inside what holds another module's weights."""
    return not _INTERNAL.isdisjoint(name.split("."))


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward; a ModuleList or ModuleDict only holds others."""
    if isinstance(module, torch.jit.ScriptModule):  # its class cannot be asked
        return True
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def type_name(module: nn.Module) -> str:
    """The class name, for TorchScript that of the class it was made from."""
    return str(getattr(module, "original_name", None) or type(module).__name__)


def sites(model: nn.Module) -> list[Site]:
    """Every module of a model in the order of `named_modules()`, the root `""` first.

    A module that is registered twice is one site with two names. `_orig_mod`, which
    `torch.compile` adds, is no part of a name, so a model has the same names compiled and not.
    """
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in _walk("", unwrap(model), ()):
        modules.setdefault(id(module), module)
        names.setdefault(id(module), []).append(name)
    return [
        Site(names[key][0], module, type_name(module), tuple(names[key]))
        for key, module in modules.items()
    ]


def _walk(name: str, module: nn.Module, path: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    # named_modules(remove_duplicate=False) never ends on a module that holds its own parent.
    if id(module) in path:
        return
    yield name, module
    for key, child in children(module):
        yield from _walk(f"{name}.{key}" if name else key, child, (*path, id(module)))
