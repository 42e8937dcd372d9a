"""Looks for compiled models inside a Python object, and changes them where they are held.

Only what lies in memory is looked at: instance attributes, lists, tuples, dicts and the children of
modules. No property is read and no method called, so looking changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..programs.kinds import kind_of

__all__ = ["Holder", "Part", "find_parts"]

_DEEPEST = 12
_MOST = 100_000  # objects looked at
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, torch.Tensor)
# Libraries whose own objects hold no model of the user's.
_FOREIGN = frozenset(
    (
        *("builtins", "torch", "numpy", "logging", "threading", "_thread", "pathlib", "re"),
        *("typing", "enum", "types", "functools", "weakref", "asyncio", "io", "_io", "queue"),
        *("concurrent", "multiprocessing", "collections", "datetime", "random", "tokenizers"),
    )
)
_MODULE_OWN = frozenset(vars(nn.Module())) - {"_modules"}


@dataclass(frozen=True, eq=False)
class Holder:
    """Where a value is held: in a container, under a key; tuples are made anew in their own."""

    container: Any
    key: Any
    kind: str  # "vars", "item", "slot", "tuple"
    outer: Holder | None = None

    def put(self, value: Any) -> None:
        """Hold another value here."""
        if self.kind == "vars":
            vars(self.container)[self.key] = value
        elif self.kind == "item":
            base: Any = dict if isinstance(self.container, dict) else list
            base.__setitem__(self.container, self.key, value)
        elif self.kind == "slot":
            object.__setattr__(self.container, self.key, value)
        elif self.outer is not None:
            items = list(self.container)
            items[self.key] = value
            make: Any = getattr(type(self.container), "_make", type(self.container))
            self.outer.put(make(items))

    def restore(self, value: Any) -> None:
        """Hold again what was held before."""
        if self.kind == "tuple" and self.outer is not None:
            self.outer.restore(self.container)
        else:
            self.put(value)

    @property
    def open(self) -> bool:
        """Whether another value can be put here."""
        return self.kind != "tuple" or (self.outer is not None and self.outer.open)


@dataclass(frozen=True, eq=False)
class Part:
    """A compiled model inside an object: its dotted name, and every place that holds it."""

    name: str
    model: Any
    holders: tuple[Holder, ...]
    names: tuple[str, ...]


def find_parts(root: Any) -> list[Part]:
    """The compiled models that an object holds, the nearest first; [] where it holds none."""
    found: dict[int, tuple[Any, list[tuple[str, Holder]]]] = {}
    known: dict[type, bool] = {}
    seen = {id(root)}
    waiting: deque[tuple[str, Any, Holder | None, int]] = deque([("", root, None, 0)])
    looked = 0
    while waiting and looked < _MOST:
        name, value, held, depth = waiting.popleft()
        for key, item, holder in _inside(value, held):
            looked += 1
            if issubclass(type(item), _PLAIN):
                continue
            path = name if key == "_orig_mod" else f"{name}.{key}" if name else key
            if _is_part(item, known):
                found.setdefault(id(item), (item, []))[1].append((path, holder))
            elif id(item) not in seen and depth < _DEEPEST and _is_searched(item):
                seen.add(id(item))
                waiting.append((path, item, holder, depth + 1))
    return [
        Part(places[0][0], item, tuple(h for _, h in places), tuple(path for path, _ in places))
        for item, places in found.values()
    ]


def _inside(value: Any, held: Holder | None) -> Iterator[tuple[str, Any, Holder]]:
    """What a value holds, each with its name and its place."""
    kinds = type(value)
    if issubclass(kinds, list):
        for index, item in enumerate(list.__iter__(value)):
            yield str(index), item, Holder(value, index, "item")
        return
    if issubclass(kinds, tuple):
        names = getattr(kinds, "_fields", None)
        for index, item in enumerate(tuple.__iter__(value)):
            key = str(names[index]) if isinstance(names, tuple) else str(index)
            yield key, item, Holder(value, index, "tuple", held)
        return
    if issubclass(kinds, dict):
        for key, item in list(dict.items(value)):
            yield str(key), item, Holder(value, key, "item")
    for key, item in list(_vars(value).items()):
        if issubclass(kinds, nn.Module):
            if key == "_modules" and isinstance(item, dict):
                for child, module in list(item.items()):
                    yield child, module, Holder(item, child, "item")
                continue
            if key in _MODULE_OWN:
                continue
        yield key, item, Holder(value, key, "vars")
    for kind in kinds.__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            member: Any = kind.__dict__.get(key)
            if type(member).__name__ == "member_descriptor":
                try:
                    yield key, member.__get__(value, kind), Holder(value, key, "slot")
                except AttributeError:  # a slot that was never filled
                    continue


def _vars(value: Any) -> dict[str, Any]:
    """The attributes that lie in the instance; what a class makes up is not asked for."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return own if type(own) is dict else {}


def _is_part(item: Any, known: dict[type, bool]) -> bool:
    """Whether this is a compiled model that can be run where it is."""
    kind = type(item)
    if issubclass(kind, nn.Module):
        compiled = issubclass(kind, torch.jit.ScriptModule | fx.GraphModule)
        return compiled and kind_of(item) is not None
    if kind not in known:
        runs = any(hasattr(kind, way) for way in ("__call__", "run", "module"))
        try:
            known[kind] = runs and kind_of(item) is not None
        except Exception:  # an object that cannot even be asked for its class is none of ours
            known[kind] = False
    return known[kind]


def _is_searched(item: Any) -> bool:
    if issubclass(type(item), list | tuple | dict | nn.Module):
        return True
    return str(type(item).__module__).partition(".")[0] not in _FOREIGN
