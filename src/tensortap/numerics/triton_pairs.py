"""Launching Triton's kernels for pairs, and what of a tensor they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tensortap.numerics.triton_launch import Entry, entry

__all__ = ["as_read", "run"]

_WAYS: dict[Any, Entry] = {}


def as_read(flat: torch.Tensor) -> torch.Tensor:
    """What the kernels load: 8-bit floats and bools as bytes."""
    if flat.dtype == torch.bool or (flat.dtype.is_floating_point and flat.element_size() == 1):
        return flat.view(torch.uint8)
    return flat


def run(
    jit: Any,
    index: int,
    programs: int,
    args: Sequence[Any],
    ways: Sequence[Any],
    warps: int = 8,
) -> None:
    """Launch a kernel on the current stream; it must bear to be run twice, as it is at first.

    `ways` are what it is compiled for; device -1 is Triton's interpreter.
    """
    seen = [arg >= 1 << 31 if type(arg) is int else not arg.data_ptr() % 16 for arg in args]
    key = (jit, index, warps, *ways, *seen)
    way = _WAYS.get(key)
    stream = torch._C._cuda_getCurrentRawStream(index) if index >= 0 else 0
    if way is None:
        _WAYS[key] = entry(jit, programs, stream, [*args, *ways], num_warps=warps)
        return
    call, front = way
    plain = args
    if index >= 0:
        plain = [arg if type(arg) is int else arg.data_ptr() for arg in args]
    call(programs, 1, 1, stream, *front, *plain, *ways)
