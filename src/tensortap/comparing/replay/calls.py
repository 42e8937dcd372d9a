"""How a layer was called: from the names of recorded leaves back to arguments.

`flatten_call` names tensors as one would write them behind the call: nothing for the only argument,
`[0]` by place, `['mask']` by name. A single tuple or dict looks like several arguments, so there
may be two ways to read the names; the layer's own signature tells most of them apart. Names are
parsed, never evaluated.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Arguments", "access", "parse_leaf", "unrecorded", "ways_to_call"]

_STEP = re.compile(r"""\[(?:(\d{1,6})|('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))\]""")
_FIELD = re.compile(r"\.(?!__)[A-Za-z_][A-Za-z0-9_]*(?![A-Za-z0-9_(])")
_MOST_PLACES = 256

Step = int | str


@dataclass(frozen=True)
class Arguments:
    """What a layer is called with."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def parse_leaf(leaf: str) -> tuple[Step, ...] | None:
    """The steps of a leaf: places and keys; None where it goes through anything else."""
    steps: list[Step] = []
    at = 0
    while at < len(leaf):
        found = _STEP.match(leaf, at)
        if found is None:
            return None
        if found[1] is not None:
            steps.append(int(found[1]))
        else:
            try:
                steps.append(str(ast.literal_eval(found[2])))  # a string literal, by the pattern
            except (ValueError, SyntaxError):
                return None
        at = found.end()
    return tuple(steps)


def access(leaf: str) -> str | None:
    """A leaf as it stands behind a value in Python; None for what no plain access reaches."""
    text, at = "", 0
    while at < len(leaf):
        found = _FIELD.match(leaf, at)
        if found is not None:
            text += found[0]
        else:
            found = _STEP.match(leaf, at)
            steps = None if found is None else parse_leaf(found[0])
            if found is None or steps is None:
                return None
            text += f"[{steps[0]!r}]"
        at = found.end()
    return text


def ways_to_call(module: nn.Module, leaves: Mapping[str, torch.Tensor]) -> list[Arguments]:
    """The calls that have these leaves and that the layer's forward takes, the likeliest first."""
    paths = {leaf: parse_leaf(leaf) for leaf in leaves}
    known = {path: leaves[leaf] for leaf, path in paths.items() if path is not None}
    if len(known) < len(leaves) or not known:
        return []
    if () in known:
        return [Arguments((known[()],))] if len(known) == 1 else []
    tree = _tree(known)
    if tree is None:
        return []
    options = [_as_call(module, tree), Arguments((_value(tree),))]
    return [option for option in options if option is not None and _takes(module, option)]


def unrecorded(module: nn.Module, given: Arguments) -> list[str]:
    """The parameters of a layer's forward that a call leaves to their defaults."""
    signature = _signature(module)
    if signature is None:
        return ["…"]
    try:
        bound = signature.bind(*given.args, **given.kwargs)
    except TypeError:
        return list(signature.parameters)
    kinds = inspect.Parameter
    return [
        name
        for name, parameter in signature.parameters.items()
        if name not in bound.arguments and parameter.kind is not kinds.VAR_POSITIONAL
    ]


def _tree(known: Mapping[tuple[Step, ...], Any]) -> dict[Step, Any] | None:
    """The leaves as nested dicts by step; None where a leaf stands inside another."""
    root: dict[Step, Any] = {}
    for path, tensor in known.items():
        here = root
        for step in path[:-1]:
            here = here.setdefault(step, {})
            if not isinstance(here, dict):
                return None
        if path[-1] in here:
            return None
        here[path[-1]] = tensor
    return root


def _value(node: Any) -> Any:
    """A node as a container: a tuple where its steps are places, a dict where they are keys."""
    if not isinstance(node, dict):
        return node
    if all(isinstance(step, int) for step in node):
        last = max(node)
        if last >= _MOST_PLACES:
            return None
        return tuple(_value(node.get(place)) for place in range(last + 1))
    return {step: _value(item) for step, item in node.items()}


def _as_call(module: nn.Module, tree: Mapping[Step, Any]) -> Arguments | None:
    places = {step: item for step, item in tree.items() if isinstance(step, int)}
    names = {step: _value(item) for step, item in tree.items() if isinstance(step, str)}
    if max(places, default=0) >= _MOST_PLACES:
        return None
    defaults = _defaults(module)
    args = tuple(
        _value(places[at]) if at in places else _default(defaults, at)
        for at in range(max(places, default=-1) + 1)
    )
    return Arguments(args, names)


def _defaults(module: nn.Module) -> list[Any]:
    signature = _signature(module)
    return [] if signature is None else [p.default for p in signature.parameters.values()]


def _default(defaults: list[Any], at: int) -> Any:
    """What stands at a place that holds no tensor: what the layer takes for nothing."""
    found = defaults[at] if at < len(defaults) else None
    return None if found is inspect.Parameter.empty else found


def _takes(module: nn.Module, given: Arguments) -> bool:
    signature = _signature(module)
    if signature is None:
        return True
    try:
        signature.bind(*given.args, **given.kwargs)
    except TypeError:
        return False
    return True


def _signature(module: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None
