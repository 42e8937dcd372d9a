"""The built-in modes: what can be made of any eager model, once it is built.

| mode | is |
|---|---|
| fp32, fp16, bf16, fp64 | weights, tables and floating-point inputs cast |
| int8 | torchao: int8 weights, activations quantised as they come, integer products |
| int8wo, int4wo | torchao: weights alone |
| fp8 | torchao: float8 weights, activations quantised as they come |
| fake:w8a8… | simulated quantisation, see `fake` |
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...errors import OptionError
from ..casting import cast_target
from ..target import Target, describe

__all__ = ["CASTS", "GROUPS", "apply_mode", "in_mode", "is_builtin", "unavailable"]

CASTS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
_QUANTISED = ("int8", "int8wo", "int4wo", "fp8")
GROUPS: dict[str, tuple[str, ...]] = {
    "all": ("fp32", "fp16", "bf16", *_QUANTISED, "fake:w8a8"),
    "essential": ("fp32", "bf16", "int8"),
    "quant_only": (*_QUANTISED, "fake:w8a8"),
    "fp_only": ("fp32", "fp16", "bf16"),
}


def is_builtin(name: str) -> bool:
    """Whether a name means a built-in mode; also a `fake:…` that is yet to be read."""
    return name in CASTS or name in _QUANTISED or name == "fake" or name.startswith("fake:")


def unavailable(name: str, device: torch.device) -> str | None:
    """Why a built-in mode cannot run on this device; None where it can."""
    if name in _QUANTISED or name.startswith("fake"):
        return f"the mode {name!r} is not there yet"
    return None


def apply_mode(target: Target, name: str, *, calib: int | None = None) -> Target:
    """The target with its model converted in place, its mode named and notes of what was done."""
    if not isinstance(target.model, nn.Module):
        raise OptionError(
            f"The mode {name!r} converts a torch.nn.Module, and the target's model is "
            f"{describe(target.model)}: a compiled model cannot be changed any more. Convert the "
            "eager model before it is compiled."
        )
    if name not in CASTS:
        raise OptionError(f"There is no built-in mode {name!r}. There are {', '.join(CASTS)}.")
    made = cast_target(target, CASTS[name], target.name or type(target.model).__name__)
    note = f"The mode {name!r} cast the model and its floating-point inputs."
    return replace(made, mode=name, notes=(*target.notes, note))


def in_mode(
    model: nn.Module, mode: str, *, inputs: Any = None, calib: int | None = None
) -> nn.Module:
    """A copy of the model in a built-in mode; the model itself is left as it is.

    `inputs` are what a Target takes: a tensor, a tuple of arguments, a dict of keyword arguments,
    or a list of those, one a batch. Modes with static scales are calibrated on the first `calib`
    of them, by default on all.
    """
    target = Target(copy.deepcopy(model), () if inputs is None else inputs)
    result: nn.Module = apply_mode(target, mode, calib=calib).model
    return result
