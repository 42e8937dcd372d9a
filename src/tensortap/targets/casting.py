"""`--dtype` for a target whose function takes none: the model and its inputs, cast once built.

Only what is floating point changes: token ids, masks and quantised weights stay what they are. A
model that casts on its way (`x.float()` in a norm) is no more precise than that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError, TargetError
from ..taps.patching import leaves_of, put
from ..taps.plain import is_plain
from .options import parse_dtype
from .target import Batch, Target

__all__ = ["cast_target", "unheeded"]

_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def cast_target(
    target: Target, dtype: torch.dtype, spec: str, why: str = "takes no dtype"
) -> Target:
    """The target with its weights, tables and inputs in another precision, and a note of it."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(target.model, nn.Module):
        raise OptionError(
            f"The function of {spec!r} takes no dtype, and its model is no torch.nn.Module that "
            "could be cast. Give the function a parameter 'dtype'."
        )
    try:
        apply: Any = target.model._apply  # untyped in torch; what `.to` does, complex kept
        apply(lambda tensor: _cast(tensor, dtype))
        _cast_attributes(target.model, dtype)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TargetError(
            f"The model of {spec!r} cannot be cast to {name}: {reason}. Give the function a "
            "parameter 'dtype' and cast there what can be cast."
        ) from error
    note = (
        f"The function of {spec!r} {why}: its model and its floating-point inputs were "
        f"cast to {name} behind it."
    )
    batches = [
        Batch(_casted(batch.args, dtype), _casted(batch.kwargs, dtype)) for batch in target.batches
    ]
    return replace(target, inputs=batches, notes=(*target.notes, note))


def unheeded(target: Target, asked: object) -> torch.dtype | None:
    """The dtype that was asked for, where nothing that the model computes with has it."""
    try:
        dtype = parse_dtype(asked) if isinstance(asked, str) else asked
    except OptionError:  # a word that means something to the function alone
        return None
    if not isinstance(dtype, torch.dtype) or not isinstance(target.model, nn.Module):
        return None
    tensors = (*target.model.parameters(), *target.model.buffers())
    found = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return dtype if found and dtype not in found else None


def _cast_attributes(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what modules keep beside their buffers: tables and masks as plain tensors."""
    own = vars(nn.Module()).keys()
    done: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name in own or not _holds_tensors(value):
                continue
            if id(value) not in done:
                done[id(value)] = value, _casted(value, dtype)
            vars(module)[name] = done[id(value)][1]


def _holds_tensors(value: Any) -> bool:
    if type(value) is dict:
        value = tuple(value.values())
    return isinstance(value, Tensor) or (
        type(value) in (list, tuple) and any(isinstance(item, Tensor) for item in value)
    )


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor cast; the lowest number of its dtype, as masks hold it, stays the lowest."""
    if tensor.is_floating_point():
        cast = tensor.to(dtype)
        end, limit = torch.finfo(tensor.dtype).max, torch.finfo(dtype).max
        if end > limit and is_plain(tensor) and tensor.numel():
            low, high = tensor.detach().aminmax()
            if low == -end or high == end:
                cast = torch.where(tensor.abs() == end, tensor.sign().to(dtype) * limit, cast)
        return cast
    if tensor.is_complex() and dtype in _COMPLEX:
        return tensor.to(_COMPLEX[dtype])
    return tensor


def _casted(value: Any, dtype: torch.dtype) -> Any:
    """A nested value with its floating-point tensors cast; containers are copied, not changed."""
    return put(value, {leaf: _cast(tensor, dtype) for leaf, tensor in leaves_of(value).items()})
