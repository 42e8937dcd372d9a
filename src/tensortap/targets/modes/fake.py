"""Simulated quantisation: floats rounded to the grid of a few bits, computed in floats.

    fake:w8a8               weights and activations on 8 bits
    fake:w4a8:0.9999        activations clipped at the 0.9999 percentile of |x|
    fake:w4                 weights alone;  fake:a8  activations alone
    fake:w8a8:tensor        weights with one scale a tensor, not one an output channel

A grid is symmetric: the integers from -(2**(bits - 1) - 1) to 2**(bits - 1) - 1, times the scale.
Values are divided by the scale, rounded half to even, clamped, and multiplied again. Weights are
rounded once and for all; a layer's operand at each call, by the static scale of its calibration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import OptionError
from ...taps.grids import GRID, OPERAND
from ..target import Target
from .layers import (
    bind_weights,
    find_layers,
    is_matrix,
    is_transposed,
    kinds,
    left_notes,
    listed,
    replace_forward,
    weight_notes,
    with_operand,
)
from .observing import Range, no_fast_path, observe

__all__ = ["FakeMode", "apply_fake", "fake_quantise", "parse_fake", "symmetric_scale"]

SYNTAX = (
    "fake:w8a8, fake:w4 or fake:a8, with 2 to 16 bits each, and behind that :PERCENTILE, as "
    "fake:w8a8:0.9999, or :tensor, for weights with one scale a tensor"
)


@dataclass(frozen=True)
class FakeMode:
    """What a `fake:…` says; `weights` and `activations` are bits, None where floats stay."""

    name: str
    weights: int | None
    activations: int | None
    percentile: float | None = None
    per_tensor: bool = False


def parse_fake(name: str) -> FakeMode:
    """Read the name of a simulated mode, or say how it is written."""
    match = re.fullmatch(r"fake:(?:w(\d{1,4}))?(?:a(\d{1,4}))?((?::[^:]*)*)", name)
    if match is None or not (match[1] or match[2]):
        raise OptionError(f"{name!r} is no mode of simulated quantisation. Write {SYNTAX}.")
    bits = [None if text is None else int(text) for text in match.group(1, 2)]
    for what, number in zip(("weights", "activations"), bits, strict=True):
        if number is not None and not 2 <= number <= 16:
            raise OptionError(f"{name!r} gives {what} {number} bits, expected 2 to 16.")
    percentile: float | None = None
    per_tensor = False
    for word in match[3].split(":")[1:]:
        if word == "tensor" and not per_tensor:
            per_tensor = True
        elif percentile is None and word != "tensor":
            percentile = _percentile(word, name)
        else:
            raise OptionError(
                f"{name!r} says {word!r} beside what was said already. Write {SYNTAX}."
            )
    if percentile is not None and bits[1] is None:
        raise OptionError(
            f"{name!r} has a percentile, which clips activations, and quantises none. Write "
            f"fake:w{bits[0]}, or fake:w{bits[0]}a8:{percentile}."
        )
    if per_tensor and bits[0] is None:
        raise OptionError(
            f"{name!r} says 'tensor', which is about weights, and quantises none. Activations "
            f"always have one scale a tensor: write fake:a{bits[1]}."
        )
    return FakeMode(name, bits[0], bits[1], percentile, per_tensor)


def _percentile(word: str, name: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise OptionError(
            f"{name!r} has {word!r} where a percentile may be. Write {SYNTAX}."
        ) from None
    if not 0 < value <= 1:
        hint = f" Write {value / 100:g} for {value:g} %." if 1 < value <= 100 else ""
        raise OptionError(f"{name!r} clips at {word}, expected more than 0, at most 1.{hint}")
    return value


def top_of(bits: int) -> int:
    """The largest integer of a symmetric grid."""
    return int(2 ** (bits - 1) - 1)


def symmetric_scale(absmax: Tensor, bits: int) -> Tensor:
    """What one step is worth so that the grid reaches `absmax`, in at least float32.

    Zeros keep a scale that divides; and no step is so wide that the top would be infinite.
    """
    wide = absmax if absmax.dtype == torch.float64 else absmax.float()
    kind, top = torch.finfo(wide.dtype), top_of(bits)
    return (wide / top).clamp(kind.tiny, kind.max / top * (1 - 4 * kind.eps))


def fake_quantise(x: Tensor, scale: Tensor | float, bits: int) -> Tensor:
    """The values on the grid that are nearest to x, in x's dtype; computed in at least float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    # A tensor, since CUDA multiplies by the reciprocal of a number.
    step = torch.as_tensor(scale, dtype=wide.dtype, device=wide.device)
    top = top_of(bits)
    return (torch.round(wide / step).clamp(-top, top) * step).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    """Gradients as if nothing had been rounded; none for what was clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, bits: int) -> Tensor:
        limit = scale * (top_of(bits) + 0.5)
        ctx.save_for_backward(x.abs() <= limit)
        return fake_quantise(x, scale, bits)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (inside,) = ctx.saved_tensors
        return grads[0] * inside, None, None


def _on_grid(scale: float, bits: int) -> Callable[[Tensor], Tensor]:
    def quantise(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        if x.requires_grad and torch.is_grad_enabled():
            result: Tensor = _StraightThrough.apply(x, scale, bits)  # type: ignore[no-untyped-call]
            return result
        return fake_quantise(x, scale, bits)

    return quantise


def quantised_weight(layer: nn.Module, weight: Tensor, mode: FakeMode) -> Tensor:
    """A layer's weight on its grid: one scale an output channel, or one for all."""
    assert mode.weights is not None
    if mode.per_tensor:
        return fake_quantise(
            weight, symmetric_scale(weight.abs().amax(), mode.weights), mode.weights
        )
    values, kept = weight, [0]
    if is_matrix(layer):
        kept = [1]
    elif is_transposed(layer):  # (in, out / groups, …): a channel is a group's and one of its own
        groups = int(layer.groups)  # type: ignore[arg-type]
        values, kept = weight.reshape(groups, -1, *weight.shape[1:]), [0, 2]
    over = [axis for axis in range(values.ndim) if axis not in kept]
    absmax = values.abs().amax(over, keepdim=True)
    scaled = fake_quantise(values, symmetric_scale(absmax, mode.weights), mode.weights)
    return scaled.reshape(weight.shape)


def apply_fake(target: Target, mode: FakeMode, calib: int | None) -> list[str]:
    """Convert the target's model in place; notes of what was done."""
    model: nn.Module = target.model
    found = find_layers(model, kinds)
    if not found.layers:
        reasons = "; ".join(f"{listed(names)}: {why}" for why, names in found.left.items())
        raise OptionError(
            f"The mode {mode.name!r} quantises linears and convolutions, and the model has none "
            f"that it could.{f' It leaves {reasons}.' if reasons else ''}"
        )
    notes = left_notes(mode.name, found.left)
    ranges: dict[str, Range] = {}
    if mode.activations is not None:
        batches = target.batches if calib is None else target.batches[:calib]
        ranges = observe(target, found.layers, batches, mode.percentile)
        notes.extend(_calibration_notes(target, mode, calib, len(batches), ranges, found.layers))
    if mode.weights is not None:
        notes[:0] = weight_notes(model, mode.name, found.layers)
        with torch.no_grad():
            bind_weights(found.layers, lambda layer, w: quantised_weight(layer, w, mode))
    bits = [number for number in (mode.weights, mode.activations) if number is not None]
    for name, layer in found.layers.items():
        vars(layer)[GRID] = f"fake int{min(bits)}"
        if name in ranges:
            _quantise_operand(layer, ranges[name], mode)
    if ranges:
        notes.extend(_unfuse(model, found.layers, ranges))
    return notes


def _quantise_operand(layer: nn.Module, found: Range, mode: FakeMode) -> None:
    assert mode.activations is not None
    clip = torch.tensor(found.clip, dtype=torch.float64)
    if found.dtype != torch.float64:
        clip = clip.float()
    scale = float(symmetric_scale(clip, mode.activations))
    change = _on_grid(scale, mode.activations)
    vars(layer)[OPERAND] = scale

    def forward(_: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = with_operand(change, args, kwargs)
        return original(*args, **kwargs)

    replace_forward(layer, forward)


def _unfuse(
    model: nn.Module, layers: Mapping[str, nn.Module], ranges: Mapping[str, Range]
) -> list[str]:
    """Make torch's fused encoder call its layers: the fused operation would read weights alone."""
    changed = {id(layers[name]) for name in ranges}

    def converted(module: nn.Module) -> bool:
        return any(id(part) in changed for part in module.modules())

    fused = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and converted(module):
            module.register_forward_pre_hook(no_fast_path)
            fused += 1
        elif isinstance(module, nn.TransformerEncoder) and converted(module):
            module.use_nested_tensor = False
    if not fused:
        return []
    return [
        f"{fused} nn.TransformerEncoderLayer run layer by layer in this mode and not as one "
        "fused operation: last bits, and what stands at padded positions, differ by that too."
    ]


def _calibration_notes(
    target: Target,
    mode: FakeMode,
    calib: int | None,
    used: int,
    ranges: Mapping[str, Range],
    layers: Mapping[str, nn.Module],
) -> list[str]:
    how = (
        "the largest |x|" if mode.percentile is None else f"the {mode.percentile} percentile of |x|"
    )
    there = len(target.batches)
    more = f"; {calib} were asked for, there are no more" if (calib or 0) > there else ""
    notes = [
        f"The mode {mode.name!r} was calibrated on {used} "
        f"{'batch' if used == 1 else 'batches'} (of {there}{more}): activations of {len(ranges)} "
        f"{'layer' if len(ranges) == 1 else 'layers'}, clipped at {how}."
    ]
    silent = [name for name in layers if name not in ranges]
    if silent:
        notes.append(
            f"Calibration never reached {len(silent)} of {len(layers)} layers, whose activations "
            f"stay floats: {listed(silent)}."
        )
    empty = [name for name, found in ranges.items() if found.clip == 0]
    if empty:
        notes.append(
            f"The calibrated range of {len(empty)} {'layer' if len(empty) == 1 else 'layers'} is "
            f"zero, so all that comes there becomes zero: {listed(empty)}."
        )
    return notes
