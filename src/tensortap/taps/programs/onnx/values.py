"""Values on their way to ONNX Runtime and back: tensors of torch, sequences, text."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ....errors import TargetError

__all__ = ["DTYPES", "from_numpy", "from_runtime", "spelled", "to_numpy", "to_runtime"]

# By the numbers of onnx.TensorProto.DataType.
DTYPES: dict[int, torch.dtype] = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16,
    6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64,
    12: torch.uint32, 13: torch.uint64, 14: torch.complex64, 15: torch.complex128,
    16: torch.bfloat16, 17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz,
}  # fmt: skip
_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
_BYTES = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
_RAW = {1: np.uint8, 2: np.uint16}
_FOREIGN = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, *_BYTES)}
_TEXT = 8  # onnx.TensorProto.STRING


def from_numpy(array: Any) -> torch.Tensor:
    """A tensor of an array's values; it shares their memory where torch can write there.

    Torch knows the array's numbers by numpy's own types alone: one of the same size under another
    letter, the other order of bytes, and what ml_dtypes adds are brought to these first.
    """
    array = np.asarray(array, order="C")  # np.ascontiguousarray makes an axis of a number
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable:
        array = array.copy()
    foreign = _FOREIGN.get(array.dtype.name)
    if foreign is not None:
        return torch.from_numpy(array.view(_RAW[array.dtype.itemsize])).view(foreign)
    if array.dtype.kind in "iu":
        array = array.view(array.dtype.name)
    return torch.from_numpy(array)


def to_runtime(runtime: Any, value: Any) -> Any:
    """What ONNX Runtime is fed with: tensors as its own values, all else as numpy has it."""
    if isinstance(value, torch.Tensor):
        if value.dtype in _FOREIGN.values():
            raw = value.view(torch.int16 if value.dtype == torch.bfloat16 else torch.uint8).numpy()
            raw = raw.view(_RAW[raw.itemsize])
            return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, _NUMBERS[value.dtype])
        return runtime.OrtValue.ortvalue_from_numpy(value.numpy())
    if isinstance(value, list):
        return [item.numpy() if isinstance(item, torch.Tensor) else item for item in value]
    return value


def from_runtime(value: Any) -> Any:
    """What ONNX Runtime returned, with tensors of torch for its own: these are their memory."""
    if hasattr(value, "element_type"):
        return _tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        return value if value.dtype.kind in "OUS" else from_numpy(value)
    if isinstance(value, list):
        return [from_runtime(item) for item in value]
    if isinstance(value, Mapping):
        return {key: from_runtime(item) for key, item in value.items()}
    return value


def to_numpy(value: Any) -> Any:
    """What a session returns to its user: arrays; of floats that numpy has not, their bits."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in _FOREIGN.values():
            return value.numpy()
        wide = value.element_size() == 2
        held = value.view(torch.int16 if wide else torch.uint8).numpy()
        return held.view(_RAW[held.itemsize])
    if isinstance(value, list):
        return [to_numpy(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_numpy(item) for key, item in value.items()}
    return value


def spelled(kind: Any) -> str | None:
    """What a value of this onnx.TypeProto is that no tensor of torch can be; else None."""
    import onnx

    form = kind.WhichOneof("value")
    if form == "tensor_type":
        number = kind.tensor_type.elem_type
        if not number or number in DTYPES:
            return None
        name = onnx.TensorProto.DataType.Name(number) if _is_named(number) else f"type {number}"
        return "text" if number == _TEXT else f"{name.lower()}, which torch does not have"
    if form == "sequence_type":
        return spelled(kind.sequence_type.elem_type)
    if form == "optional_type":
        return spelled(kind.optional_type.elem_type)
    if form is None:
        return None
    return "a map" if form == "map_type" else "a sparse tensor"


def _is_named(number: int) -> bool:
    import onnx

    return number in onnx.TensorProto.DataType.values()


def _tensor(value: Any) -> torch.Tensor:
    """A value of ONNX Runtime's as a tensor; it is the value's memory, which nobody else has."""
    if not value.has_value():
        raise TargetError("The ONNX model returned an output without a value.")
    dtype = DTYPES.get(value.element_type())
    if dtype is None:
        raise TargetError(f"The ONNX model made a {value.data_type()}, which torch does not have.")
    if dtype is torch.bfloat16:
        return torch.utils.dlpack.from_dlpack(value._ortvalue)
    if dtype in _BYTES:  # numpy has none of these
        shape = tuple(value.shape())
        raw = bytearray(ctypes.string_at(value.data_ptr(), math.prod(shape)))
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)
    return from_numpy(value.numpy())
