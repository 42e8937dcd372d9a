"""The built-in modes: what can be made of any eager model, once it is built.

| mode | is |
|---|---|
| fp32, fp16, bf16, fp64 | weights, tables and floating-point inputs cast |
| int8 | torchao: int8 weights, activations quantised as they come, integer products |
| int8wo, int4wo, fp8wo | torchao: weights alone |
| fp8 | torchao: float8 weights, activations quantised as they come, where the device can |
| fake:w8a8… | simulated quantisation, see `fake` |
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...errors import OptionError, TargetError
from ...taps.compiled import contains_compiled, forget
from ...taps.plain import is_plain
from ..casting import cast_target
from ..target import Target, describe
from .ao import AO_MODES, apply_ao, package, why_not
from .fake import apply_fake, parse_fake
from .layers import find_layers, same_device

__all__ = ["CASTS", "GROUPS", "apply_mode", "in_mode", "is_builtin", "unavailable"]

CASTS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
GROUPS: dict[str, tuple[str, ...]] = {
    "all": ("fp32", "fp16", "bf16", *AO_MODES, "fake:w8a8"),
    "essential": ("fp32", "bf16", "int8"),
    "quant_only": (*AO_MODES, "fake:w8a8"),
    "fp_only": ("fp32", "fp16", "bf16"),
}
_TRIED = (torch.float32, torch.bfloat16, torch.float16)
_INSTEAD = {"fp8": "fp8wo", "int8": "fake:w8a8", "int4wo": "fake:w4"}


def is_builtin(name: str) -> bool:
    """Whether a name means a built-in mode; also a `fake:…` that is yet to be read."""
    return name in CASTS or name in AO_MODES or name == "fake" or name.startswith("fake:")


def unavailable(name: str, device: torch.device) -> str | None:
    """Why a built-in mode cannot run on this device, found out by trying; None where it can."""
    _known(name)
    if name not in AO_MODES:
        return None
    reasons = {dtype: why_not(name, device, dtype) for dtype in _TRIED[:1]}
    for dtype in _TRIED[1:]:
        if None in reasons.values():
            break
        reasons[dtype] = why_not(name, device, dtype)
    if None in reasons.values():
        return None
    return _sentence(name, device, str(reasons[torch.float32]))


def _sentence(name: str, device: torch.device, reason: str) -> str:
    if reason.startswith("The mode"):  # a sentence already: the package is missing
        return reason
    instead = f" Near it: {_INSTEAD[name]}." if name in _INSTEAD else ""
    return f"The mode {name!r} cannot run on {device.type} here: {reason}.{instead}"


def _known(name: str) -> None:
    if name == "fake" or name.startswith("fake:"):
        parse_fake(name)
    elif not is_builtin(name):
        raise OptionError(
            f"There is no built-in mode {name!r}. There are {', '.join((*CASTS, *AO_MODES))} and "
            "fake:w8a8 with other numbers of bits."
        )


def apply_mode(target: Target, name: str, *, calib: int | None = None) -> Target:
    """The target with its model converted in place, its mode named and notes of what was done.

    `calib` is how many of the target's batches a mode with static scales is calibrated on; all of
    them by default.
    """
    return _applied(target, name, calib, has_inputs=True)


def _applied(target: Target, name: str, calib: int | None, *, has_inputs: bool) -> Target:
    _known(name)
    if calib is not None and calib < 1:
        raise OptionError(f"Calibration is over {calib} batches, expected a whole number from 1.")
    model = target.model
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise OptionError(
            f"The mode {name!r} converts an eager torch.nn.Module, and the target's model is "
            f"{describe(model)}: a compiled model cannot be changed any more. Convert the eager "
            "model, and compile that."
        )
    try:
        if name in CASTS:
            made = _cast(target, name)
        elif name in AO_MODES:
            package(name)
            _check_device(model, name)
            notes = apply_ao(target, name, rehearse=has_inputs)
            made = replace(target, notes=(*target.notes, *notes))
        else:
            mode = parse_fake(name)
            if mode.activations is not None and not has_inputs:
                raise OptionError(
                    f"The mode {name!r} has static scales for activations, which are calibrated on "
                    f"inputs, and none were given. Give inputs=…, or quantise weights alone, as "
                    f"fake:w{mode.weights or 8}."
                )
            notes = apply_fake(target, mode, calib)
            made = replace(target, notes=(*target.notes, *notes))
    finally:
        if contains_compiled(model):
            forget()
    return replace(made, mode=name)


def _cast(target: Target, name: str) -> Target:
    dtype = CASTS[name]
    tensors = (*target.model.parameters(), *target.model.buffers())
    before = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    for place, tensor in target.model.named_parameters():
        if tensor.is_floating_point() and not is_plain(tensor) and not before <= {dtype}:
            raise OptionError(
                f"The mode {name!r} casts plain weights, and {place!r} is {describe(tensor.data)}: "
                "the model is quantised already, or its weights are spread over devices. Make the "
                "mode of the model as it was before."
            )
    made = cast_target(target, dtype, target.name or type(target.model).__name__)
    if before <= {dtype}:
        return replace(made, notes=target.notes)
    kinds = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in before))
    note = (
        f"The mode {name!r} cast the model's weights and tables and its floating-point inputs from "
        f"{kinds} to {str(dtype).removeprefix('torch.')}."
    )
    return replace(made, notes=(*target.notes, note))


def _check_device(model: nn.Module, name: str) -> None:
    """Refuse a mode that cannot run where the model's linears are, in their dtype."""
    linears = find_layers(model, lambda module: isinstance(module, nn.Linear)).layers
    if not linears:
        return
    device = same_device(linears.values())
    dtype = next(iter(linears.values())).get_parameter("weight").dtype
    reason = why_not(name, device, dtype)
    if reason is None:
        return
    works = [kind for kind in _TRIED if why_not(name, device, kind) is None]
    text = _sentence(name, device, reason)
    if works:
        text = (
            f"The mode {name!r} cannot run on a model in {str(dtype).removeprefix('torch.')}: "
            f"{reason}. It runs in {str(works[0]).removeprefix('torch.')}; cast the model first."
        )
    raise OptionError(text)


def in_mode(
    model: nn.Module, mode: str, *, inputs: Any = None, calib: int | None = None
) -> nn.Module:
    """A copy of the model in a built-in mode; the model itself is left as it is.

    `inputs` are what a Target takes: a tensor, a tuple of arguments, a dict of keyword arguments,
    or a list of those, one a batch. Modes with static scales are calibrated on the first `calib`
    of them, by default on all. A cast to another dtype is of the model alone: hand it inputs of
    that dtype.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"in_mode converts a torch.nn.Module, got {describe(model)}.")
    if not isinstance(mode, str):
        raise OptionError(f"The mode is {describe(mode)}, expected a name, such as 'int8'.")
    try:
        twin = copy.deepcopy(model)
    except Exception as error:  # deepcopy runs the user's code
        reason = " ".join(str(error).split())
        raise TargetError(
            f"{type(model).__name__} cannot be copied, and a mode is made of a copy: "
            f"{type(error).__name__}: {reason}. Build it anew and use a target's --mode."
        ) from error
    target = Target(twin, () if inputs is None else inputs)
    result: nn.Module = _applied(target, mode, calib, has_inputs=inputs is not None).model
    return result
