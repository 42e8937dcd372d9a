"""Tensors as numpy arrays and back, bit for bit.

numpy has no bfloat16 and no float8. Their values are kept as float32, which holds each of them
exactly; a NaN keeps its bits in the float32's payload, so that coming back loses nothing. What
float32 cannot stand for (half-precision complex, packed float4) is kept as plain bytes. The true
dtype is said beside the array.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

from ...errors import LayoutError
from ..dtypes import dtype_name

__all__ = ["from_numpy", "numpy_twin", "to_numpy"]

Array = np.ndarray[Any, Any]

_SAME = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}
_NAN = 0x7FC00000


def numpy_twin(dtype: torch.dtype) -> str:
    """The name of the numpy dtype under which values of this dtype are kept."""
    if dtype in _SAME:
        return dtype_name(dtype)
    return "float32" if _as_float32(dtype) else "uint8"


def _as_float32(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 or (
        dtype.is_floating_point and dtype.itemsize == 1 and _table(dtype) is not None
    )


@cache
def _table(dtype: torch.dtype) -> Array | None:
    """The float32 of each of an 8-bit float's 256 codes; None where torch cannot widen it."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    try:
        values: Array = codes.view(dtype).to(torch.float32).numpy().copy()
    except (RuntimeError, NotImplementedError):
        return None
    bits = values.view(np.uint32)
    nan = np.isnan(values)
    index = np.arange(256, dtype=np.uint32)
    bits[nan] = _NAN | index[nan]
    values.setflags(write=False)
    return values


def to_numpy(tensor: torch.Tensor) -> Array:
    """An array with the tensor's values, each exact."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _SAME:
        return tensor.numpy()
    if tensor.dtype == torch.bfloat16:
        wide = tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    if _as_float32(tensor.dtype):
        table = _table(tensor.dtype)
        assert table is not None
        return np.asarray(table[tensor.view(torch.uint8).numpy()])
    return tensor.reshape(-1).view(torch.uint8).numpy()


def from_numpy(
    array: Array, dtype: torch.dtype | None, shape: tuple[int, ...], where: str
) -> torch.Tensor:
    """The tensor that `to_numpy` made an array of; without a dtype, the array's own."""
    if array.dtype.byteorder == ">" or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    array = np.ascontiguousarray(array)
    if not array.flags.writeable:
        array = array.copy()
    try:
        tensor = torch.from_numpy(array)
    except TypeError:
        raise LayoutError(
            f"{where} holds values of numpy's type '{array.dtype}', which torch cannot hold. "
            "Expected numbers or booleans."
        ) from None
    if dtype is None or dtype == tensor.dtype:
        return _shaped(tensor, shape, where)
    expected = numpy_twin(dtype)
    if dtype_name(tensor.dtype) != expected:
        raise LayoutError(
            f"{where} holds {array.dtype}, but is described as {dtype_name(dtype)}, which is kept "
            f"as {expected}."
        )
    if dtype == torch.bfloat16:
        bits = (array.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return _shaped(torch.from_numpy(bits.view(np.int16)).view(dtype), shape, where)
    if _as_float32(dtype):
        return _shaped(_narrow(array, dtype), shape, where)
    if tensor.numel() != math.prod(shape) * dtype.itemsize:
        raise LayoutError(f"{where} has {tensor.numel()} bytes, too few or many for {list(shape)}.")
    return tensor.reshape(-1).view(dtype).reshape(shape)


def _narrow(array: Array, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(array).to(dtype)
    nan = np.isnan(array)
    if nan.any():
        codes = tensor.view(torch.uint8).numpy()
        payload = (array.view(np.uint32) & np.uint32(0xFF)).astype(np.uint8)
        table = _table(dtype)
        assert table is not None
        known = nan & np.isnan(table)[payload]
        np.copyto(codes, payload, where=known)
    return tensor


def _shaped(tensor: torch.Tensor, shape: tuple[int, ...], where: str) -> torch.Tensor:
    if tensor.numel() != math.prod(shape):
        raise LayoutError(
            f"{where} has {tensor.numel()} values, but is described as {list(shape)}."
        )
    return tensor.reshape(shape)
