"""Launching Triton's kernels for pairs, and what of a tensor they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["as_read", "run"]

_KERNELS: dict[Any, Any] = {}


def as_read(flat: torch.Tensor) -> torch.Tensor:
    """What the kernels load: 8-bit floats and bools as bytes."""
    if flat.dtype == torch.bool or (flat.dtype.is_floating_point and flat.element_size() == 1):
        return flat.view(torch.uint8)
    return flat


def run(
    jit: Any,
    index: int,
    grid: tuple[int, int, int],
    args: Sequence[Any],
    ways: Sequence[Any],
    warps: int = 8,
) -> None:
    """Launch a kernel on the current stream, by address where it ran before: Triton's own front
    door costs the host several times as much. `ways` are what it is compiled for; device -1 is
    Triton's interpreter.
    """
    seen = [arg >= 1 << 31 if type(arg) is int else not arg.data_ptr() % 16 for arg in args]
    key = (jit, index, warps, *ways, *seen)
    kernel = _KERNELS.get(key)
    if kernel is None:
        _KERNELS[key] = jit[grid](*args, *ways, num_warps=warps)
        return
    plain = [arg if type(arg) is int else arg.data_ptr() for arg in args]
    kernel[grid](*plain, *ways, stream=torch._C._cuda_getCurrentRawStream(index))
