"""How coarse each quantised layer of a model is: the grid of its weight, and that of its operand.

What a grid costs depends on the values that are put on it, so a recording keeps, for each such
layer, the rounding of its weight relative to the weight's own size, and the step of its operand's
grid, or what it is made of where that is decided at every call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GRID", "OPERAND", "grids_of"]

GRID = "tensortap_grid"
"""The attribute of a layer in a quantised mode that says what its weight is worth: `int4`."""
OPERAND = "tensortap_operand"
"""The attribute of a layer whose operand is put on a grid of static scale: its step."""

_ROUNDING = 1 / math.sqrt(12)  # the deviation of what rounding to whole numbers takes away
_TOP = 127.0  # of a symmetric grid of 8 bits
_REDUCED = 63.5  # torch's dynamic kernels: 7 bits from the smallest to the largest value


def grids_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The layers of a model that are quantised, each with its dtype and its roundings.

    `weight` is the relative rounding of the weight. Of the operand there is `step`, where its scale
    is static, or `top`, the largest number of the grid that is laid over each `token` or over the
    whole `tensor`. `result` is the step of the grid that the output is on.
    """
    found = {}
    for name, module in model.named_modules():
        grid = vars(module).get(GRID)
        weight = _weight(module)
        packed = None if weight is not None else _packed(module)
        if packed is not None:
            found[name] = _of_packed(module, packed)
        elif grid is not None and weight is not None:
            found[name] = {"dtype": grid, "weight": _rounding(weight, grid), **_operand(module)}
        elif step := _result(module):
            found[name] = {"dtype": "int8", **step}
    return found


def _weight(module: nn.Module) -> Tensor | None:
    """A module's own weight, where it is a parameter; also of a scripted module."""
    return dict(module.named_parameters(recurse=False)).get("weight")


def _operand(module: nn.Module) -> dict[str, Any]:
    step = vars(module).get(OPERAND)
    if step is not None:
        return {"step": step}
    kwargs = getattr(_weight(module), "act_quant_kwargs", None)
    if kwargs is None:
        return {}
    rows = type(getattr(kwargs, "granularity", None)).__name__ != "PerTensor"
    return {"top": _TOP, "over": "token" if rows else "tensor"}


def _rounding(weight: Tensor, grid: str) -> float:
    """What the grid took from a weight, relative to the weight."""
    scale = getattr(weight, "scale", None)
    with torch.no_grad():
        if isinstance(scale, Tensor) and isinstance(getattr(weight, "qdata", None), Tensor):
            size = _rms(weight.dequantize())
            return _relative(_rms(scale), size)
        if not grid.startswith("fake int"):
            return 0.0
        values = weight.detach().flatten(1).double()
        steps = values.abs().amax(1) / (2.0 ** (int(grid.removeprefix("fake int")) - 1) - 1)
        return _relative(_rms(steps), _rms(values))


def _packed(module: nn.Module) -> Tensor | None:
    """The weight of a module of torch's own quantisation, which is packed for its kernel."""
    weight = getattr(module, "weight", None)
    if not callable(weight) or isinstance(weight, Tensor) or not hasattr(module, "set_weight_bias"):
        return None
    value = weight()
    return value if isinstance(value, Tensor) and value.is_quantized else None


def _of_packed(module: nn.Module, weight: Tensor) -> dict[str, Any]:
    rows = weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
    scales = weight.q_per_channel_scales() if rows else torch.tensor(weight.q_scale())
    found: dict[str, Any] = {
        "dtype": "int8",
        "weight": _relative(_rms(scales), _rms(weight.dequantize())),
    }
    return {**found, **(_result(module) or {"top": _REDUCED, "over": "tensor"})}


def _result(module: nn.Module) -> dict[str, Any]:
    """The step of what a module of torch's own quantisation returns; nothing of any other."""
    scale = getattr(module, "scale", None)
    if not hasattr(module, "zero_point") or not isinstance(scale, int | float | Tensor):
        return {}
    if isinstance(scale, Tensor) and (scale.numel() != 1 or scale.is_meta):
        return {}
    return {"result": float(scale)}


def _rms(values: Tensor) -> float:
    return float(values.detach().double().square().mean().sqrt()) if values.numel() else 0.0


def _relative(step: float, size: float) -> float:
    found = _ROUNDING * step / size if size > 0 else 0.0
    return found if math.isfinite(found) else 0.0
