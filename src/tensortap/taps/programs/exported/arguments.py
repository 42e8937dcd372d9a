"""What an exported program takes, and the user's arguments brought into that form.

An export fixes how its inputs were handed over: `f(x=…)` is refused where it was exported with
`f(…)`. Here every argument may come by name or by position, and a nested one in one piece or leaf
by leaf (`past_key_values.0.key`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ....errors import TargetError
from ..base import Argument

__all__ = ["Binder"]

_MISSING = object()


@dataclass(frozen=True)
class _Declared:
    """One argument of the exported forward: its leaves by name, and those that are constants."""

    name: str
    keyword: bool
    spec: Any
    leaves: tuple[str, ...]
    constants: tuple[Any, ...]  # a value a leaf, or _MISSING where it is a tensor


class Binder:
    """Knows the arguments of an exported graph."""

    def __init__(self, module: fx.GraphModule) -> None:
        info = getattr(module.graph._codegen, "pytree_info", None)
        holders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.arguments: list[Argument] = []
        self._declared: list[_Declared] | None = None if info is None else []
        if info is None:
            self.arguments = [_argument(str(node.target), node) for node in holders]
            return
        positional, keyword = _children(info.in_spec)
        names = list(info.orig_args)
        specs = [(spec, False) for spec in _children(positional)]
        specs += [(spec, True) for spec in _children(keyword)]
        keys = [*names[: len(_children(positional))], *keyword.context]
        start = 0
        for name, (spec, is_keyword) in zip(keys, specs, strict=True):
            count = spec.num_leaves
            mine = holders[start : start + count]
            start += count
            leaves = tuple(name + tail for tail in _tails(spec))
            assert self._declared is not None
            self._declared.append(
                _Declared(str(name), is_keyword, spec, leaves, tuple(map(_constant, mine)))
            )
            self.arguments += [
                _argument(leaf, node) for leaf, node in zip(leaves, mine, strict=True)
            ]

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the export wants them."""
        if self._declared is None:
            return args, dict(kwargs)
        if len(args) > len(self._declared):
            raise TargetError(
                f"The exported program takes {len(self._declared)} arguments "
                f"({self._names()}), but was given {len(args)}."
            )
        given = dict(zip((item.name for item in self._declared), args, strict=False))
        twice = sorted(set(given) & set(kwargs))
        if twice:
            raise TargetError(f"The argument '{twice[0]}' was given by position and by name.")
        given.update(kwargs)
        bound = {item.name: _take(item, given) for item in self._declared}
        if given:
            raise TargetError(
                f"The exported program takes no argument '{next(iter(given))}'. "
                f"It takes: {self._names()}."
            )
        absent = [name for name, value in bound.items() if value is _MISSING]
        if absent:
            raise TargetError(
                f"The exported program was not given '{absent[0]}'. It takes: {self._names()}."
            )
        return (
            tuple(bound[item.name] for item in self._declared if not item.keyword),
            {item.name: bound[item.name] for item in self._declared if item.keyword},
        )

    def _names(self) -> str:
        return ", ".join(item.name for item in self._declared or ()) or "none"


def _take(item: _Declared, given: dict[str, Any]) -> Any:
    """An argument's value, taken out of what was given."""
    if item.name in given:
        return given.pop(item.name)
    values = [given.pop(leaf, constant) for leaf, constant in _pairs(item)]
    return _MISSING if _MISSING in map(_known, values) else pytree.tree_unflatten(values, item.spec)


def _known(value: Any) -> Any:
    return value if value is _MISSING else None


def _pairs(item: _Declared) -> Iterator[tuple[str, Any]]:
    return zip(item.leaves, item.constants, strict=True)


def _children(spec: Any) -> list[Any]:
    children = getattr(spec, "children", None)
    return list(children() if callable(children) else spec.children_specs)


def _tails(spec: Any) -> list[str]:
    """What is to be written behind an argument's name for each of its leaves."""
    children = _children(spec)
    if not children:
        return [""] * spec.num_leaves
    keys: Sequence[Any] = range(len(children))
    context = spec.context
    named = isinstance(context, list | tuple) and len(context) == len(children)
    if named and all(isinstance(key, str | int) for key in context):
        keys = context
    return [
        f".{key}{tail}" for key, child in zip(keys, children, strict=True) for tail in _tails(child)
    ]


def _constant(node: fx.Node) -> Any:
    value = node.meta.get("val", _MISSING)
    symbolic = isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    return _MISSING if symbolic else value


def _argument(name: str, node: fx.Node) -> Argument:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        shape = tuple(size if isinstance(size, int) else None for size in value.shape)
        return Argument(name, value.dtype, shape)
    return Argument(name, required=_constant(node) is _MISSING)
