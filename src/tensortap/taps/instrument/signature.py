"""A forward with another module's signature, written out.

Compilers read the names of parameters off the function itself, and some refuse `*args`, so the
function is generated with real parameters. What was not given is not handed on, so the model is
called as it would be without the wrapper; parameters without a default go by position, as hooks of
the model may expect them there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from torch import nn

__all__ = ["forward_like", "parameter_names"]

_SELF = "_tensortap_self"


def parameter_names(model: nn.Module) -> tuple[str, ...]:
    """The names of a model's arguments, `*args` and `**kwargs` left out."""
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    found = inspect.signature(model.forward).parameters.values()
    return tuple(p.name for p in found if p.kind not in kinds)


def forward_like(model: nn.Module) -> Callable[..., Any]:
    """`forward(self, …)` with the model's parameters, which calls `self._run(args, kwargs)`."""
    signature = inspect.signature(model.forward)
    source, defaults = _source(signature)
    scope: dict[str, Any] = {"_defaults": defaults}
    exec(compile(source, "<tensortap.instrument>", "exec"), scope)
    forward: Any = scope["forward"]
    owner = Parameter(_SELF, Parameter.POSITIONAL_ONLY)
    given = list(signature.parameters.values())
    forward.__signature__ = signature.replace(parameters=[owner, *given])
    forward.__doc__ = "The model's own forward; returns (output, taps)."
    result: Callable[..., Any] = forward
    return result


def _source(signature: inspect.Signature) -> tuple[str, list[Any]]:
    """The function's text, and the defaults that it refers to by number."""
    parameters = list(signature.parameters.values())
    starred = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)
    only = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_ONLY]
    defaults: list[Any] = []
    head, args, body = [_SELF], [], []
    if not only:
        head.append("/")
    keyword_only = False
    for parameter in parameters:
        name = parameter.name
        if parameter.kind is Parameter.VAR_POSITIONAL:
            head.append(f"*{name}")
            args.append(f"*{name}")
            keyword_only = True
            continue
        if parameter.kind is Parameter.VAR_KEYWORD:
            head.append(f"**{name}")
            body.append(f"    _given.update({name})")
            continue
        if parameter.kind is Parameter.KEYWORD_ONLY and not keyword_only:
            head.append("*")
            keyword_only = True
        positional = parameter.kind is Parameter.POSITIONAL_ONLY or (
            starred and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
        )
        if parameter.default is Parameter.empty:
            head.append(name)
            if parameter.kind is Parameter.KEYWORD_ONLY:
                body.append(f"    _given[{name!r}] = {name}")
            else:
                args.append(name)
        else:
            default = f"_defaults[{len(defaults)}]"
            defaults.append(parameter.default)
            head.append(f"{name}={default}")
            if positional:
                args.append(name)
            else:
                body.append(f"    if {name} is not {default}: _given[{name!r}] = {name}")
        if only and name == only[-1]:
            head.append("/")
    lines = [
        f"def forward({', '.join(head)}):",
        "    _given = {}",
        *body,
        f"    return {_SELF}._run(({''.join(f'{arg}, ' for arg in args)}), _given)",
    ]
    return "\n".join(lines), defaults
