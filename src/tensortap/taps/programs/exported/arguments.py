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
        self._what = "The exported program"
        self._declared: list[_Declared] | None = None
        names = [str(node.target) for node in holders]
        if info is not None:
            constants = [_constant(node) for node in holders]
            self._declared = _declared(info.in_spec, list(info.orig_args), constants)
            names = [leaf for item in self._declared for leaf in item.leaves]
        self.arguments: list[Argument] = [
            _argument(name, node) for name, node in zip(names, holders, strict=True)
        ]

    @classmethod
    def of_spec(cls, spec: Any, what: str) -> Binder:
        """From how the inputs are nested alone; positional ones are called by their numbers."""
        found = cls.__new__(cls)
        found._what = what
        names = [str(index) for index in range(len(_children(_children(spec)[0])))]
        found._declared = _declared(spec, names, [_MISSING] * spec.num_leaves)
        found.arguments = [Argument(leaf) for item in found._declared for leaf in item.leaves]
        return found

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the export wants them."""
        if self._declared is None:
            return args, dict(kwargs)
        if len(args) > len(self._declared):
            raise TargetError(
                f"{self._what} takes {len(self._declared)} arguments "
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
                f"{self._what} takes no argument '{next(iter(given))}'. It takes: {self._names()}."
            )
        absent = [name for name, value in bound.items() if value is _MISSING]
        if absent:
            raise TargetError(
                f"{self._what} was not given '{absent[0]}'. It takes: {self._names()}."
            )
        return (
            tuple(bound[item.name] for item in self._declared if not item.keyword),
            {item.name: bound[item.name] for item in self._declared if item.keyword},
        )

    def _names(self) -> str:
        return ", ".join(item.name for item in self._declared or ()) or "none"


def _declared(spec: Any, names: Sequence[str], constants: Sequence[Any]) -> list[_Declared]:
    """The arguments of a forward whose inputs are nested like this."""
    positional, keyword = _children(spec)
    specs = [(child, False) for child in _children(positional)]
    specs += [(child, True) for child in _children(keyword)]
    keys = [*names[: len(_children(positional))], *keyword.context]
    found: list[_Declared] = []
    start = 0
    for name, (child, is_keyword) in zip(keys, specs, strict=True):
        leaves = tuple(f"{name}{tail}" for tail in _tails(child))
        mine = tuple(constants[start : start + child.num_leaves])
        start += child.num_leaves
        found.append(_Declared(str(name), is_keyword, child, leaves, mine))
    return found


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
