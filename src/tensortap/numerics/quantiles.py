"""Exact quantiles of a tensor of any size, where `torch.quantile` stops at 16 M elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from tensortap.errors import OptionError
from tensortap.numerics.layout import check_summarizable, plain

__all__ = ["exact_quantiles"]

_ORDERED = {
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}


def exact_quantiles(tensor: torch.Tensor, qs: Sequence[float]) -> list[float]:
    """The q-quantiles of the finite values, interpolated linearly as in `torch.quantile`.

    Selects only the order statistics that are asked for. NaN when nothing is finite; complex
    tensors are taken as their real and imaginary parts.
    """
    for q in qs:
        if not 0.0 <= q <= 1.0:
            raise OptionError(f"A quantile lies between 0 and 1, but got {q!r}.")
    check_summarizable(tensor)
    with torch.no_grad():
        values = plain(tensor)
        if values.is_complex():
            values = torch.view_as_real(values)
        values = values.cpu()
        if values.dtype not in _ORDERED:
            values = values.to(torch.float32)
        data = values.reshape(-1).numpy()
    if data.dtype.kind == "f":
        finite = np.isfinite(data)
        data = data[finite] if not finite.all() else data
    if not data.size:
        return [math.nan] * len(qs)
    last = data.size - 1
    positions = [q * last for q in qs]
    ranks = sorted({r for p in positions for r in (math.floor(p), min(math.floor(p) + 1, last))})
    data = np.partition(data, ranks)
    return [_interpolate(data, p, last) for p in positions]


def _interpolate(data: np.ndarray, position: float, last: int) -> float:
    below = math.floor(position)
    share = position - below
    low = float(data[below])
    if not share:
        return low
    high = float(data[min(below + 1, last)])
    return low * (1 - share) + high * share
