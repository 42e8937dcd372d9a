"""How a torch dtype is named in a recording, and what safetensors calls it.

A dtype that older safetensors cannot name is stored as plain bytes, a complex one as pairs of
reals; the row keeps the true dtype, so that what comes back is what was recorded.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import DamagedError

__all__ = ["ITEM_SIZES", "dtype_name", "from_bytes", "storage_of", "torch_dtype"]

_CODES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_PAIRS: dict[torch.dtype, str] = {torch.complex64: "F32", torch.complex128: "F64"}
ITEM_SIZES: dict[str, int] = {code: dtype.itemsize for dtype, code in _CODES.items()}

_NAMES: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` as `float32`."""
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


def torch_dtype(name: str, where: str) -> torch.dtype:
    """`float32` as `torch.float32`; a name that is no dtype here is said with its place."""
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(
            f"{where} holds the dtype {name!r}, which torch {torch.__version__} does not know."
        )
    return dtype


def storage_of(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """The safetensors dtype and shape under which such a tensor is stored."""
    if dtype in _CODES:
        return _CODES[dtype], list(shape)
    if dtype in _PAIRS:
        return _PAIRS[dtype], [*shape, 2]
    return "U8", [math.prod(shape) * dtype.itemsize]


def from_bytes(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over these bytes, without a copy where the memory is aligned."""
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    flat: Any = torch.frombuffer(data, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)  # type: ignore[no-any-return]
