"""Symmetric int8 per tensor: codes and scales, and sums of products in int32.

A code is round(x / scale), half to even, cut at ±127, so that the grid is symmetric; -128 is not
made here but summed correctly. Everything that is multiplied is int8, everything that is summed
is int32; floats come in only when the sum is scaled.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

__all__ = [
    "conv_sums",
    "dequantise",
    "int8_matmul_is_exact",
    "on_grid",
    "product_sums",
    "quantise",
    "scale_for",
]

LIMIT = 127
_NARROW = 8  # torch 2.13 reads past the end of an int8 product of width 1: narrow ones are int32
_TINY = torch.finfo(torch.float32).tiny


def scale_for(bound: Tensor | float) -> Tensor:
    """The scale that puts `bound` at code 127; 1 where there is nothing to scale.

    Never subnormal: a code times such a scale would lose the digits that bring the code back.
    """
    bound = torch.as_tensor(bound, dtype=torch.float32)
    scale = (bound / LIMIT).clamp(min=_TINY)
    return torch.where(bound > 0, scale, torch.ones_like(scale))


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    """The int8 codes of a float tensor."""
    return torch.round(x / scale).clamp_(-LIMIT, LIMIT).to(torch.int8)


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """The floats that the codes stand for."""
    return codes.float() * scale


def on_grid(x: Tensor, scale: Tensor) -> Tensor:
    """Floats moved to the nearest ones that a code stands for."""
    return dequantise(quantise(x, scale), scale)


def product_sums(codes: Tensor, weight: Tensor) -> Tensor:
    """`codes @ weight.T` of int8 [..., k] and [n, k], as int32 sums: exact."""
    if codes.dtype != torch.int8 or weight.dtype != torch.int8:
        raise TypeError(f"int8 codes are multiplied here, got {codes.dtype} and {weight.dtype}")
    rows = codes.reshape(math.prod(codes.shape[:-1]), codes.shape[-1])
    if rows.shape[-1] >= _NARROW and int8_matmul_is_exact():
        sums = torch._int_mm(rows.contiguous(), weight.t())
    else:
        sums = rows.int() @ weight.int().t()
    return sums.reshape(*codes.shape[:-1], weight.shape[0])


@lru_cache(maxsize=1)
def int8_matmul_is_exact() -> bool:
    """Whether torch's int8 product is exact on this machine, also at the ends of the range.

    CPUs without the dot-product instructions add pairs of products in 16 bits, where
    (-128)² + (-128)² does not fit. Those get a slower product in int32.
    """
    ends = torch.tensor([-128, 127, -127, -128], dtype=torch.int8)
    for rows, width, columns in ((1, 8, 1), (3, 9, 7), (17, 64, 33)):
        a = ends[torch.arange(rows * width) % 4].reshape(rows, width)
        b = ends[torch.arange(columns * width) % 3].reshape(columns, width)
        try:
            found = torch._int_mm(a, b.t())
        except RuntimeError:
            return False
        if not torch.equal(found, a.int() @ b.int().t()):
            return False
    return True


def conv_sums(codes: Tensor, weight: Tensor) -> Tensor:
    """The causal depthwise convolution of int8 [b, channels, length] and [channels, k], in int32.

    One shifted multiply-add a tap of the kernel; what lies before the first token is zero.
    """
    if codes.dtype != torch.int8 or weight.dtype != torch.int8:
        raise TypeError(f"int8 codes are multiplied here, got {codes.dtype} and {weight.dtype}")
    taps, length = weight.shape[-1], codes.shape[-1]
    x, w = codes.int(), weight.int()
    sums = torch.zeros_like(x)
    for tap in range(taps):
        back = taps - 1 - tap
        if back < length:
            sums[..., back:] += x[..., : length - back] * w[:, tap, None]
    return sums
