"""Which layers of a model a mode converts, which it leaves as they are, and how it changes one.

A layer is changed where it stands: its class, its name and its hooks stay, so a tap sees the same
layers in every mode. A weight is bound anew and never written into, so an embedding that shares it
with the head keeps its own numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...taps.grids import GRID
from ...taps.plain import is_plain

__all__ = [
    "Found",
    "bind_weights",
    "find_layers",
    "is_matrix",
    "is_transposed",
    "kinds",
    "left_notes",
    "listed",
    "replace_forward",
    "same_device",
    "weight_notes",
    "with_operand",
]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_OPERANDS = ("input", "x")  # what torch and transformers call the operand of these layers


def is_matrix(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D: a linear whose weight lies the other way round."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
        for kind in type(module).__mro__
    )


def is_transposed(module: nn.Module) -> bool:
    return isinstance(module, TRANSPOSED)


def kinds(module: nn.Module) -> bool:
    """Whether simulated quantisation knows this kind of layer."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)) or is_matrix(module)


@dataclass(frozen=True)
class Found:
    """The layers to convert by name, and by reason the names of those that stay."""

    layers: dict[str, nn.Module]
    left: dict[str, list[str]] = field(default_factory=dict)


def find_layers(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> Found:
    """The wanted layers of a model, each once, and those that cannot be converted."""
    inside = {
        id(part)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for part in module.modules()
    }
    layers: dict[str, nn.Module] = {}
    left: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if not wanted(module):
            continue
        reason = _why_not(module, inside)
        if reason:
            left.setdefault(reason, []).append(name)
        else:
            layers[name] = module
    return Found(layers, left)


def _why_not(module: nn.Module, inside: set[int]) -> str:
    if id(module) in inside:
        return (
            "nn.MultiheadAttention reads its weights itself and never calls it, so all its "
            "projections stay floats"
        )
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed (a parametrisation)"
    if weight.is_meta:
        return "its weight is on the meta device; load the weights first"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight has no shape before the first run"
    if GRID in vars(module) or not is_plain(weight) or not weight.is_floating_point():
        return "it is quantised already"
    return "" if weight.numel() else "its weight is empty"


def bind_weights(
    layers: Mapping[str, nn.Module], make: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """Give layers new weights; layers of one kind that shared a weight share the new one."""
    made: dict[tuple[int, type], tuple[Tensor, nn.Parameter]] = {}
    for layer in layers.values():
        weight = layer._parameters["weight"]
        assert weight is not None
        key = id(weight), type(layer)
        if key not in made:
            values = make(layer, weight.detach())
            # The old one is held, so that no new tensor gets its id.
            made[key] = weight, nn.Parameter(values, requires_grad=weight.requires_grad)
        layer._parameters["weight"] = made[key][1]


def replace_forward(layer: nn.Module, forward: Callable[..., Any]) -> None:
    """Run `forward(layer, original, args, kwargs)` in place of a layer's own forward.

    As a bound method of the instance, it follows the layer into a deep copy, and the layer's class
    and its signature stay what they are.
    """
    own = vars(layer).get("forward", type(layer).forward)
    if isinstance(own, MethodType) and own.__self__ is layer:
        own = own.__func__
    elif "forward" in vars(layer):  # another tool's, which knows its layer by itself
        own = functools.partial(_leave_out_self, own)

    @functools.wraps(type(layer).forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, functools.partial(own, self), args, kwargs)

    vars(layer)["forward"] = MethodType(run, layer)


def _leave_out_self(forward: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def with_operand(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer's call with its operand changed, wherever it was given."""
    if args:
        return (_changed(change, args[0]), *args[1:]), kwargs
    for key in _OPERANDS:
        if key in kwargs:
            return args, {**kwargs, key: _changed(change, kwargs[key])}
    return args, kwargs


def _changed(change: Callable[[Tensor], Tensor], operand: Any) -> Any:
    return change(operand) if isinstance(operand, Tensor) else operand


def listed(names: Iterable[str], most: int = 4) -> str:
    """A few names, for a sentence."""
    names = [repr(name) if name else "the model itself" for name in names]
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def left_notes(mode: str, left: Mapping[str, list[str]]) -> list[str]:
    """What a mode did not convert, and why."""
    return [
        f"The mode {mode!r} leaves {len(names)} {'layer' if len(names) == 1 else 'layers'} as "
        f"{'it is' if len(names) == 1 else 'they are'} ({listed(names)}): {reason}."
        for reason, names in left.items()
    ]


def weight_notes(model: nn.Module, mode: str, converted: Mapping[str, nn.Module]) -> list[str]:
    """What was converted, with its share of the model's weights, and which ties that cut.

    To be asked for before weights are bound anew: ties are no longer seen afterwards.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    weights = {id(layer.weight): layer.weight for layer in converted.values()}
    share = sum(weight.numel() for weight in weights.values() if isinstance(weight, Tensor))
    notes = [
        f"The mode {mode!r} quantises the weights of {len(converted)} "
        f"{'layer' if len(converted) == 1 else 'layers'}, {share / max(total, 1):.0%} of the "
        "model's parameters."
    ]
    own = {id(layer) for layer in converted.values()}
    tied = [
        f"{place}.{key}" if place else key
        for place, module in model.named_modules()
        if id(module) not in own
        for key, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in weights
    ]
    if tied:
        one = len(tied) == 1
        notes.append(
            f"{listed(tied)} shared {'its' if one else 'their'} values with a layer that is "
            f"quantised now, and {'keeps' if one else 'keep'} them as they were."
        )
    return notes


def same_device(layers: Iterable[nn.Module]) -> torch.device:
    """The device of the first layer's weight: where its products are computed."""
    for layer in layers:
        weight = layer._parameters.get("weight")
        if weight is not None:
            return weight.device
    return torch.device("cpu")
