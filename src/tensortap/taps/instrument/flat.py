"""An instrumented model as compilers want it: tensors in, tensors out.

A user calls a model with numbers, flags and None among the tensors, and gets a ModelOutput with
None in it. Here the tensors alone are parameters, under their own names; the rest is fixed. What is
no plain nest of tensors in the output is left to the manifest, which knows where each one stood.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from inspect import Parameter
from typing import Any

import torch
from torch import nn

from ..leaves import flatten, holds_tensor
from .wrapper import Instrumented

__all__ = ["Flat", "flatten_model"]

_FIXED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Flat(nn.Module):
    """Calls an instrumented model with tensors by name; `names` are its parameters in order."""

    def __init__(
        self,
        wrapped: Instrumented,
        names: tuple[str, ...],
        places: dict[str, Any],
        fixed: Any,
        bare: bool,
    ) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.names = names
        self._places = places  # name -> position in *args, or the name of the keyword
        self._args, self._kwargs = fixed
        self._bare = bare
        self.training = wrapped.training

    def _run(self, values: tuple[Any, ...]) -> Any:
        args, kwargs = list(self._args), dict(self._kwargs)
        for name, value in zip(self.names, values, strict=True):
            place = self._places[name]
            if isinstance(place, int):
                args[place] = value
            else:
                kwargs[place] = value
        if self._bare:
            return _plain(self.wrapped.model(*args, **kwargs))
        output, taps = self.wrapped(*args, **kwargs)
        return _plain(output), taps


def flatten_model(
    wrapped: Instrumented,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    bare: bool = False,
) -> tuple[Flat, dict[str, Any]]:
    """The model whose parameters are what holds tensors in this call, and their values.

    A `bare` one has no taps: it is what the other would be, had it not been instrumented.
    """
    bound = inspect.signature(wrapped.forward).bind(*args, **kwargs)
    fixed_args: list[Any] = []
    fixed: dict[str, Any] = {}
    values: dict[str, Any] = {}
    places: dict[str, Any] = {}

    def add(name: str, value: Any, place: int | str) -> Any:
        if _is_fixed(value):
            return value
        while name in values:
            name += "_"
        values[name], places[name] = value, place
        return None

    starred = any(
        p.kind is Parameter.VAR_POSITIONAL and p.name in bound.arguments
        for p in bound.signature.parameters.values()
    )
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is Parameter.VAR_POSITIONAL:
            for index, item in enumerate(value):
                fixed_args.append(add(f"{name}_{index}", item, len(fixed_args)))
        elif kind is Parameter.VAR_KEYWORD:
            for key, item in value.items():
                fixed[key] = add(key, item, key)
        elif kind is Parameter.POSITIONAL_ONLY or (
            starred and kind is Parameter.POSITIONAL_OR_KEYWORD
        ):
            fixed_args.append(add(name, value, len(fixed_args)))
        else:
            fixed[name] = add(name, value, name)
    names = tuple(values)
    listed = "".join(f"{name}, " for name in names)
    source = f"def forward(self, {listed}):\n    return self._run(({listed}))"
    scope: dict[str, Any] = {}
    exec(compile(source, "<tensortap.instrument>", "exec"), scope)
    kind_of = type("Flat", (Flat,), {"forward": scope["forward"]})
    kind_of.__module__ = __name__
    return kind_of(wrapped, names, places, (fixed_args, fixed), bare), values


def _is_fixed(value: Any) -> bool:
    """Whether a compiler may take this for a constant: no tensor, and nothing that may hold one."""
    if isinstance(value, tuple | list):
        return all(_is_fixed(item) for item in value)
    if isinstance(value, dict):
        return all(_is_fixed(item) for item in value.values())
    return isinstance(value, _FIXED) and not holds_tensor(value)


def _plain(output: Any) -> Any:
    """The output where every compiler takes it as it is, else its tensors in order."""
    if _is_nest(output):
        return output
    tensors = tuple(tensor for _, tensor in flatten(output) if tensor is not None)
    return tensors[0] if len(tensors) == 1 else tensors


def _is_nest(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if type(value) in (tuple, list):
        return len(value) > 0 and all(_is_nest(item) for item in value)
    if type(value) is dict:
        return len(value) > 0 and all(
            isinstance(key, str) and _is_nest(item) for key, item in value.items()
        )
    return False
