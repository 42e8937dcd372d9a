"""Puts tensors into what a layer takes or returns: the other way round of `leaves`.

Leaves are named as `flatten` and `flatten_call` name them, so that what was recorded can be put
back where it was heard. Containers are copied, never changed: they may be the model's own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch

from .leaves import children, flatten, flatten_call, holds_tensor, shortened, signature_order

__all__ = [
    "absent_arguments",
    "call_with",
    "cast_like",
    "leaves_of",
    "leaves_of_call",
    "match_leaves",
    "put",
    "put_call",
    "why_not_put",
]

_DEEPEST = 64


def put(value: Any, leaves: Mapping[str, torch.Tensor], leaf: str = "") -> Any:
    """The value with the tensors at these leaves in place of its own; it stays as it was."""
    return _put(value, leaves, leaf, 0)


def put_call(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    leaves: Mapping[str, torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the tensors at these leaves in place of their own."""
    if len(args) == 1 and not any(holds_tensor(item) for item in kwargs.values()):
        return (put(args[0], leaves),), dict(kwargs)
    new_args = tuple(put(item, leaves, f"[{i}]") for i, item in enumerate(args))
    return new_args, {name: put(item, leaves, f"[{name!r}]") for name, item in kwargs.items()}


def match_leaves(
    module: torch.nn.Module,
    own: Mapping[str, torch.Tensor | None],
    recorded: Mapping[str, Any],
) -> dict[str, str]:
    """The leaves of a call, each with the name under which a recording has it.

    One argument may have been passed by place in one run and by keyword in the other, and the only
    argument of a call has no name at all.
    """
    found = {leaf: leaf for leaf in own if leaf in recorded}
    free = {_canonical(module, leaf): leaf for leaf in recorded if leaf not in found}
    for leaf in own:
        if leaf not in found:
            other = free.get(_canonical(module, leaf))
            if other is not None:
                found[leaf] = other
    return found


def absent_arguments(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    recorded: Collection[str],
) -> dict[str, dict[str, str]]:
    """The parameters that a recording has tensors for, and this call none or `None`.

    Each comes with its leaves: what is behind the parameter's name, and the recorded leaf.
    """
    order = list(signature_order(module))[1:]
    own = leaves_of_call(module, args, kwargs)
    used = set(match_leaves(module, own, dict.fromkeys(recorded)).values())
    found: dict[str, dict[str, str]] = {}
    for leaf in recorded:
        head, _, rest = _canonical(module, leaf).partition("]")
        name = head[2:-1]
        if leaf in used or name not in order:
            continue
        at = order.index(name)
        value = args[at] if at < len(args) else kwargs.get(name)
        if value is None:
            found.setdefault(name, {})[rest] = leaf
    return found


def call_with(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    more: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with these parameters in place of what was `None` or left out."""
    order = list(signature_order(module))[1:]
    places = {order.index(name): value for name, value in more.items()}
    new_args = tuple(places.get(at, item) for at, item in enumerate(args))
    by_name = {name: value for name, value in more.items() if order.index(name) >= len(args)}
    return new_args, {**kwargs, **by_name}


def why_not_put(reference: torch.Tensor, own: torch.Tensor) -> str:
    """Why a recorded tensor cannot stand in another's place; empty when it can."""
    if reference.shape != own.shape:
        return (
            f"the reference has the shape {list(reference.shape)}, the candidate {list(own.shape)}"
        )
    inexact = [t.is_floating_point() or t.is_complex() for t in (reference, own)]
    if inexact[0] and not inexact[1]:
        return f"the reference is {reference.dtype}, the candidate {own.dtype}, which is no float"
    return ""


def cast_like(reference: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A fresh tensor with the reference's values in the dtype and on the device of `own`.

    Finite values stay finite: an attention mask holds the lowest number of its dtype, which in a
    narrower one would become an infinity, and NaN behind a softmax.
    """
    value = reference.detach().to(device=own.device, copy=True)
    if value.dtype == own.dtype:
        return value
    if value.is_floating_point() and own.is_floating_point():
        limit = torch.finfo(own.dtype).max
        if torch.finfo(value.dtype).max > limit:
            wide = value if value.dtype.itemsize >= 4 else value.float()
            value = torch.where(wide.isinf(), wide, wide.clamp(-limit, limit))
    return value.to(own.dtype)


def _canonical(module: torch.nn.Module, leaf: str) -> str:
    """A leaf by the name of its parameter: `[0]`, `['x']` and nothing may be the same."""
    order = list(signature_order(module))[1:]  # the first is the module itself
    head, bracket, rest = leaf.partition("]")
    place = head.removeprefix("[") if bracket else "0"
    if not bracket:
        rest = leaf
    if place.isdigit() and int(place) < len(order):
        place = repr(order[int(place)])
    return f"[{place}]{rest}"


def _put(value: Any, leaves: Mapping[str, torch.Tensor], leaf: str, depth: int) -> Any:
    if value is None or isinstance(value, torch.Tensor):
        return leaves.get(shortened(leaf), value)
    if depth >= _DEEPEST:
        return value
    changed = {}
    for name, item in children(value):
        new = _put(item, leaves, leaf + name, depth + 1)
        if new is not item:
            changed[name] = new
    return _with(value, changed) if changed else value


def _with(value: Any, changed: Mapping[str, Any]) -> Any:
    """A copy of a container with some of its items changed, these by their leaf's name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for name, item in changed.items():
            field = name.removeprefix(".")
            try:
                setattr(made, field, item)
            except dataclasses.FrozenInstanceError:
                object.__setattr__(made, field, item)
        return made
    if isinstance(value, Mapping):
        twin: Any = copy.copy(value)
        for key in value:
            if (name := f"[{key!r}]") in changed:
                twin[key] = changed[name]
        return twin
    if hasattr(value, "_fields"):
        return value._replace(**{name.removeprefix("."): item for name, item in changed.items()})
    items = [changed.get(f"[{index}]", item) for index, item in enumerate(value)]
    return items if type(value) is list else type(value)(items)


def leaves_of_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The tensors of a call by leaf."""
    return {leaf: t for leaf, t in flatten_call(module, args, kwargs) if t is not None}


def leaves_of(value: Any) -> dict[str, torch.Tensor]:
    """The tensors of a value by leaf."""
    return {leaf: tensor for leaf, tensor in flatten(value) if tensor is not None}
