"""A model that is converted may be one that the target's function returns again, or its owner's.

So a twin of it is converted: its modules anew, its weights shared, which a conversion replaces and
never writes to. Nothing is held twice where nobody else holds the model.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import TargetError
from ...taps.compiled import contains_compiled
from ..target import Target

__all__ = ["check_not_spoilt", "collect", "spared"]

_LARGE = 64 << 20
_spoilt: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def spared(target: Target, what: str) -> Target:
    """The target with a twin of its model; where none can be made, the model is marked as spoilt.

    `what` is what will be made of it, for the sentence if it comes again.
    """
    model = target.model
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return target
    twin = _twin(model, target.run)
    if twin is None:
        _spoilt[model] = what
        return target
    return replace(target, model=twin)


def check_not_spoilt(target: Target, spec: str) -> None:
    """Refuse a model that was converted in place before: it is not what the function built."""
    model = target.model
    if isinstance(model, nn.Module) and model in _spoilt:
        raise TargetError(
            f"The target {spec!r} returned the same model again, which was converted in place "
            f"({_spoilt[model]}). Build it anew in every call, or return a copy of it: "
            "copy.deepcopy(model)."
        )


def collect(model: object) -> None:
    """Let the model that a large twin was made of go now, if nobody else holds it."""
    if (
        isinstance(model, nn.Module)
        and sum(tensor.numel() * tensor.element_size() for tensor in model.parameters()) > _LARGE
    ):
        gc.collect()


def _twin(model: nn.Module, run: object) -> nn.Module | None:
    if contains_compiled(model) or _closes(run) or any(map(_closes, _attributes(model))):
        return None  # a function that was made around the model would go on with the old one
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if type(parameter) is not nn.Parameter:  # one that is not initialised, or another tool's
            return None
        same = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        same.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = same
    for value in _attributes(model):
        if isinstance(value, Tensor) and id(value) not in memo:
            memo[id(value)] = value.detach().clone()
    try:
        made: nn.Module = copy.deepcopy(model, memo)
    except Exception:  # deepcopy runs the user's code
        return None
    return None if made is model else made


def _attributes(model: nn.Module) -> Iterator[object]:
    """All that modules hold: buffers, plain tensors, hooks, replaced methods."""
    for module in model.modules():
        for value in vars(module).values():
            yield from value.values() if isinstance(value, dict) else (value,)


def _closes(value: object) -> bool:
    """Whether a function holds on to what stood around it when it was made."""
    function = getattr(value, "__func__", value)
    return isinstance(function, FunctionType) and bool(function.__closure__)
