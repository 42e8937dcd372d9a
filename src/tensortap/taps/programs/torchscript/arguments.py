"""What a TorchScript method takes, and a call's arguments in its order.

A tuple (a cache) is declared item by item, `past.0`, `past.1`, since a file of inputs holds tensors
alone; it may be given whole or in such pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..base import Argument

__all__ = ["arguments_of", "bound"]


def arguments_of(method: Any, skip: int = 1) -> list[Argument]:
    """What a method takes behind `self`, tuples item by item."""
    return [
        Argument(name, required=not argument.has_default_value())
        for argument in method.schema.arguments[skip:]
        for name in _pieces(argument.name, argument.type)
    ]


def _pieces(name: str, kind: Any) -> Iterator[str]:
    if kind.kind() == "TupleType" and kind.elements():
        for index, item in enumerate(kind.elements()):
            yield from _pieces(f"{name}.{index}", item)
    else:
        yield name


def bound(
    method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], skip: int = 1
) -> list[Any] | None:
    """The arguments of a call in order, with defaults; None where they do not fit."""
    declared = method.schema.arguments[skip:]
    if len(args) > len(declared):
        names = [name for a in declared for name in _pieces(a.name, a.type)]
        if len(args) > len(names) or any(name in kwargs for name in names[: len(args)]):
            return None
        kwargs, args = {**dict(zip(names, args, strict=False)), **kwargs}, ()
    left = dict(kwargs)
    found = list(args)
    if any(argument.name in left for argument in declared[: len(args)]):
        return None
    for argument in declared[len(args) :]:
        pieces = list(_pieces(argument.name, argument.type))
        if argument.name in left:
            found.append(left.pop(argument.name))
        elif pieces != [argument.name] and all(piece in left for piece in pieces):
            found.append(_joined(argument.name, argument.type, left))
        elif argument.has_default_value():
            found.append(argument.default_value)
        else:
            return None
    return None if left else found


def _joined(name: str, kind: Any, left: dict[str, Any]) -> Any:
    if kind.kind() != "TupleType" or not kind.elements():
        return left.pop(name)
    items = enumerate(kind.elements())
    return tuple(_joined(f"{name}.{index}", item, left) for index, item in items)
