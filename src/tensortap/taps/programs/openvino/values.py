"""Tensors on their way into OpenVINO and out of it, and arguments on their way to its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....errors import OptionError
from ...leaves import flatten
from ..base import Argument

__all__ = ["DTYPES", "arguments", "bind", "from_openvino", "to_openvino"]

DTYPES: dict[str, torch.dtype] = {
    "boolean": torch.bool,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
}


def arguments(model: Any, names: Sequence[str]) -> list[Argument]:
    """What a model takes, by these names."""
    found = []
    for name, port in zip(names, model.inputs, strict=True):
        shape = port.get_partial_shape()
        sizes = None
        if not shape.rank.is_dynamic:
            sizes = tuple(dim.get_length() if dim.is_static else None for dim in shape)
        dtype = DTYPES.get(port.get_element_type().get_type_name())
        found.append(Argument(name, dtype, sizes))
    return found


def bind(
    declared: Sequence[Argument], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """A tensor for each input: by name, or by position, where nested values lie flat.

    `past` of a model that declares `past.0` and `past.1` is taken apart for them.
    """
    given: dict[str, torch.Tensor] = {}
    unknown: list[str] = []
    for key, value in kwargs.items():
        tensors = [tensor for _, tensor in flatten(value) if tensor is not None]
        inner = [a.name for a in declared if a.name.startswith((f"{key}.", f"{key}["))]
        if any(a.name == key for a in declared) and len(tensors) == 1:
            given[key] = tensors[0]
        elif inner and len(inner) == len(tensors):
            given.update(zip(inner, tensors, strict=True))
        elif tensors:
            unknown.append(key)
    flat = [tensor for _, tensor in flatten(args) if tensor is not None]
    free = [a.name for a in declared if a.name not in given]
    if unknown or len(flat) != len(free):
        raise OptionError(_misfit(declared, free, len(flat), unknown))
    given.update(zip(free, flat, strict=True))
    for argument in declared:
        _check(argument, given[argument.name])
    return [given[argument.name] for argument in declared]


def _misfit(
    declared: Sequence[Argument], free: Sequence[str], count: int, unknown: Sequence[str]
) -> str:
    names = ", ".join(f"'{a.name}'" for a in declared)
    if unknown:
        what = f"it has no input {', '.join(repr(name) for name in unknown)}"
    elif count < len(free):
        what = f"nothing was given for {', '.join(repr(name) for name in free[count:])}"
    else:
        what = f"{count} tensors were given by position where {len(free)} are expected"
    return f"The inputs do not fit the OpenVINO model: {what}. It takes {names}."


def _check(argument: Argument, tensor: torch.Tensor) -> None:
    if argument.dtype is not None and tensor.dtype != argument.dtype:
        raise OptionError(
            f"The input '{argument.name}' is {tensor.dtype}, but the OpenVINO model takes "
            f"{argument.dtype}. Convert it: tensor.to({argument.dtype})."
        )
    shape = argument.shape
    if shape is None:
        return
    fits = tensor.dim() == len(shape) and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("?" if size is None else str(size) for size in shape)
        raise OptionError(
            f"The input '{argument.name}' has the shape {list(tensor.shape)}, but the OpenVINO "
            f"model takes [{wanted}], where ? is any size."
        )


def to_openvino(tensor: torch.Tensor) -> Any:
    """The same memory as an OpenVINO tensor, where that can be."""
    import openvino

    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        kind = openvino.Type.bf16
        array = plain.view(torch.int16).numpy()
        return openvino.Tensor(array.view("float16"), openvino.Shape(list(plain.shape)), kind)
    return openvino.Tensor(plain.numpy(), shared_memory=True)


def from_openvino(tensor: Any) -> tuple[torch.Tensor, Any]:
    """A torch tensor over OpenVINO's memory, and the array that lives as long as it is used."""
    kind = tensor.get_element_type().get_type_name()
    if kind not in DTYPES:
        raise OptionError(
            f"A value of OpenVINO's type {kind} has no torch dtype; it cannot be recorded."
        )
    array = tensor.data
    if kind == "bf16":
        array = array.view("int16")
        return torch.from_numpy(array).view(torch.bfloat16), array
    return torch.from_numpy(array), array
