"""Finds the tensors inside whatever a layer takes or returns.

A leaf is named as one would write it in Python behind the value: `[0]`, `.logits`, `['mask']`, and
nothing for a plain tensor. `None` is handed over too: where a tensor is expected, its absence is
worth a word. Everything else that is no tensor and no container is passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = [
    "children",
    "flatten",
    "flatten_call",
    "holds_tensor",
    "shortened",
    "signature_order",
    "traceable",
]

_DEEPEST = 64
_LONGEST = 200


def flatten(value: Any, leaf: str = "") -> list[tuple[str, torch.Tensor | None]]:
    """Every tensor and every None in a nested value, in order, with its leaf."""
    if isinstance(value, torch.Tensor):
        return [(leaf, value)]
    return list(_walk(value, leaf, 0))


def _walk(value: Any, leaf: str, depth: int) -> Iterator[tuple[str, torch.Tensor | None]]:
    if value is None or isinstance(value, torch.Tensor):
        yield shortened(leaf), value
        return
    if depth >= _DEEPEST:
        return
    for name, item in children(value):
        yield from _walk(item, leaf + name, depth + 1)


def shortened(leaf: str) -> str:
    """A leaf of bearable length that still tells two long ones apart."""
    if len(leaf) <= _LONGEST:
        return leaf
    tail = hashlib.blake2b(leaf.encode(), digest_size=4).hexdigest()
    return f"{leaf[:_LONGEST]}…{tail}"


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, each item with the piece of a leaf that leads to it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # ModelOutput is a dict too, but leaves out what is None; the fields know everything.
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{key!r}]", item
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield f".{name}", getattr(value, name)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield f"[{index}]", item


def traceable(value: Any, leaf: str = "") -> Iterator[tuple[str, torch.Tensor | None]]:
    """`flatten` in terms that torch.compile can trace; leaves are as long as they are."""
    if isinstance(value, torch.Tensor):
        yield leaf, value
    elif value is None:
        yield leaf, None
    elif isinstance(value, bool | int | float | str):
        return  # torch 2.11 cannot trace the question below of these
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from traceable(getattr(value, item.name, None), f"{leaf}.{item.name}")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from traceable(inner, f"{leaf}[{key!r}]")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield from traceable(getattr(value, name), f"{leaf}.{name}")
    elif isinstance(value, tuple | list):
        for index, inner in enumerate(value):
            yield from traceable(inner, f"{leaf}[{index}]")


def flatten_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor | None]]:
    """The tensors of a call; a single positional value stands for the whole input.

    Keyword arguments come in the order of the module's own signature, so that the first leaf is the
    first thing the module asks for, whatever the order in which it was passed.
    """
    if len(args) == 1 and not any(holds_tensor(item) for item in kwargs.values()):
        return flatten(args[0])
    found = [pair for i, item in enumerate(args) for pair in flatten(item, f"[{i}]")]
    if kwargs:
        rank = _parameter_order(type(module).forward)
        last = len(rank)
        for name in sorted(kwargs, key=lambda n: rank.get(n, last)):
            found += flatten(kwargs[name], f"[{name!r}]")
    return [pair for pair in found if pair[1] is not None]


def holds_tensor(value: Any) -> bool:
    """Whether there is a tensor anywhere inside."""
    return any(tensor is not None for _, tensor in flatten(value))


def signature_order(module: torch.nn.Module) -> dict[str, int]:
    """The parameters of a module's forward, by name, in order; `self` is the first."""
    return _parameter_order(type(module).forward)


@functools.lru_cache(maxsize=1024)
def _parameter_order(forward: Callable[..., Any]) -> dict[str, int]:
    try:
        names = list(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        return {}
    return {name: index for index, name in enumerate(names)}
