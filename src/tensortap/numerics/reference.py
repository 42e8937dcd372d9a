"""The reference backend: torch in float64, two passes, any device and dtype.

It defines what the others must return, and does the work where no compiled core is at hand.
Chunks bound the extra memory; their summaries are merged in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tensortap.numerics.histogram import BUCKETS, Histogram
from tensortap.numerics.layout import check_summarizable, first_elements, pieces, plain
from tensortap.numerics.summary import FIRST, Summary

__all__ = ["CHUNK", "ReferenceBackend"]

CHUNK = 1 << 24
_FLOAT32_MAX = torch.finfo(torch.float32).max

# Squares of what lies outside leave the range of float64, so such data is scaled by a power of two.
_TOO_LARGE, _TOO_SMALL, _SCALE = 1e150, 1e-140, 2.0**600


class _Moments(NamedTuple):
    mean: float
    std: float
    l2: float


class ReferenceBackend:
    """Summaries by plain torch operations."""

    name = "reference"

    def summarize_row(
        self, tensor: torch.Tensor, histogram: bool
    ) -> tuple[Sequence[float], Histogram | None]:
        check_summarizable(tensor)
        with torch.no_grad():
            values = plain(tensor)
            if values.is_complex():
                values = torch.view_as_real(values)
            if values.device.type == "mps":  # which has no float64
                values = values.cpu()
            summary = _empty(histogram)
            for piece in pieces(values, CHUNK):
                summary = summary.merge(_summarize_piece(piece, histogram))
            head = first_elements(values, FIRST).to(torch.float64).tolist()
        row = summary.to_row()
        row[-FIRST:] = head + [math.nan] * (FIRST - len(head))
        return row, summary.histogram


def _empty(histogram: bool) -> Summary:
    import numpy as np

    counts = Histogram(np.zeros(BUCKETS, dtype=np.int64)) if histogram else None
    nan = math.nan
    return Summary(0, 0, 0, 0, 0, 0, 0, nan, nan, nan, nan, nan, 0.0, (), counts)


def _summarize_piece(piece: torch.Tensor, histogram: bool) -> Summary:
    values = piece.to(torch.float64)
    finite = values[torch.isfinite(values)]
    magnitudes = finite.abs()
    nan = int(torch.isnan(values).sum())
    posinf = int((values == math.inf).sum())
    count = values.numel()
    empty = finite.numel() == 0
    low, high = (math.nan, math.nan) if empty else (float(finite.min()), float(finite.max()))
    absmax = math.nan if empty else max(abs(low), abs(high))
    moments = _moments(finite, absmax, constant=low == high)
    return Summary(
        count=count,
        nan=nan,
        posinf=posinf,
        neginf=count - nan - posinf - finite.numel(),
        zeros=int((finite == 0).sum()),
        subnormal=_subnormal(piece.dtype, magnitudes),
        saturated=_saturated(piece, magnitudes),
        mean=moments.mean,
        std=moments.std,
        min=low + 0.0,  # never -0.0
        max=high + 0.0,
        absmax=absmax,
        l2=moments.l2,
        first=(),
        histogram=_histogram(finite) if histogram else None,
    )


def _moments(finite: torch.Tensor, absmax: float, *, constant: bool) -> _Moments:
    n = finite.numel()
    if not n:
        return _Moments(math.nan, math.nan, 0.0)
    scale = 1.0
    if absmax > _TOO_LARGE:
        scale = 1 / _SCALE
    elif 0 < absmax < _TOO_SMALL:
        scale = _SCALE
    scaled = finite * scale
    mean = float(scaled[0]) if constant else float(scaled.sum()) / n
    deviations = scaled - mean
    rest = float(deviations.sum()) / n  # what rounding the mean left over
    squares = max(0.0, float((deviations * deviations).sum()) / n - rest * rest)
    mean += rest
    std = math.sqrt(squares)
    l2 = math.sqrt(float((scaled * scaled).sum()))
    return _Moments(mean / scale, std / scale, l2 / scale)


def _subnormal(dtype: torch.dtype, magnitudes: torch.Tensor) -> int:
    if not dtype.is_floating_point:
        return 0
    tiny = torch.finfo(dtype).smallest_normal
    return int(((magnitudes > 0) & (magnitudes < tiny)).sum())


def _saturated(piece: torch.Tensor, magnitudes: torch.Tensor) -> int:
    dtype = piece.dtype
    if dtype == torch.bool:
        return 0
    if dtype.is_floating_point:
        return int((magnitudes == torch.finfo(dtype).max).sum())
    info = torch.iinfo(dtype)
    if dtype == torch.uint64:  # of which torch compares nothing: as int64, the maximum is -1
        return int((piece.view(torch.int64) == -1).sum())
    if info.min == 0:
        return int((piece.to(torch.int64) == info.max).sum())
    return int(((piece == info.max) | (piece == info.min)).sum())


def _histogram(finite: torch.Tensor) -> Histogram:
    narrow = finite.clamp(-_FLOAT32_MAX, _FLOAT32_MAX).to(torch.float32)
    keys = (narrow.view(torch.int32) >> 19) & (BUCKETS - 1)
    return Histogram(torch.bincount(keys, minlength=BUCKETS).cpu().numpy())
