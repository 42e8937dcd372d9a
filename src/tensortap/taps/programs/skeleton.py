"""A model without its forward: modules that have the names and types of a compiled model's layers.

Selecting layers, and finding the repeated blocks among them, is written for trees of modules. A
compiled model has only names; hung up as modules that compute nothing, they are chosen by the same
words and patterns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .base import Place

__all__ = ["skeleton"]

_WEIGHTLESS = ("act", "drop", "identity", "relu", "gelu", "silu", "pool", "softmax", "rotary")


def skeleton(
    places: Sequence[Place], weights: Mapping[str, tuple[int, ...]] | None = None
) -> nn.Module:
    """The tree of these places. `weights` are the shapes of the parameters by name, where known."""
    by_name = {place.name: place for place in places}
    paths = dict.fromkeys(["", *(_prefix for place in places for _prefix in _prefixes(place.name))])
    inside: dict[str, list[str]] = {path: [] for path in paths}
    for path in paths:
        if path:
            inside[path.rpartition(".")[0]].append(path)
    kinds: dict[object, type[nn.Module]] = {}
    modules: dict[str, nn.Module] = {}
    for path in sorted(paths, key=lambda name: (name.count(".") + 1) * bool(name), reverse=True):
        children = {child.rpartition(".")[2]: modules[child] for child in inside[path]}
        modules[path] = _module(by_name.get(path), children, kinds)
    for name, shape in (weights or {}).items():
        owner, _, key = name.rpartition(".")
        if owner in modules and key not in modules[owner]._modules:
            modules[owner]._parameters[key] = _weight(shape)
    if not weights:
        for name, module in modules.items():
            if not module._modules and name in by_name and not _is_weightless(by_name[name]):
                module._parameters["weight"] = _weight((2, 2))
    return modules[""]


def _prefixes(name: str) -> list[str]:
    """A name and the names above it, the outermost first."""
    parts = name.split(".") if name else []
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _module(
    place: Place | None, children: Mapping[str, nn.Module], kinds: dict[object, type[nn.Module]]
) -> nn.Module:
    if place is None:
        numbered = bool(children) and all(key.isdecimal() for key in children)
        kind: type[nn.Module] = nn.ModuleList if numbered else nn.Module
    else:
        kind = _kind(place.type, tuple(children), kinds)
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    module._modules.update(children)
    return module


def _kind(
    name: str, children: tuple[str, ...], kinds: dict[object, type[nn.Module]]
) -> type[nn.Module]:
    """torch's own class of that name, else one of ours; without a name, children tell kinds."""
    known = getattr(nn, name, None) if name else None
    if isinstance(known, type) and issubclass(known, nn.Module) and known is not nn.Module:
        return known
    key: object = name or children
    if key not in kinds:
        kinds[key] = type(name or "Module", (nn.Module,), {"forward": _never})
    return kinds[key]


def _never(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("this module stands for a layer of a compiled model")


def _is_weightless(place: Place) -> bool:
    text = place.type.lower()
    return any(word in text for word in _WEIGHTLESS)


def _weight(shape: Sequence[int]) -> nn.Parameter:
    return nn.Parameter(torch.empty(tuple(shape), device="meta"), requires_grad=False)
