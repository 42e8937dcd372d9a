"""Summaries that stay on the device: a tensor is merged into a row there, and nobody waits.

While a model trains, the host must not ask the device for a number: the question alone stops the
queue. So a row (`summary.COLUMNS`, then the first values) lives beside the tensors it sums up,
`accumulate_on` enqueues the work on the current stream, and whoever wants the numbers copies all
rows over at once, later. A row whose count is 0 is empty; into any other, a tensor is merged as
`Summary.merge` would.

`accumulate` is plain torch: any device, any dtype, many small launches. `accumulate_on` picks the
quickest way there is: one Triton launch on CUDA, the compiled core on a CPU. Neither reads a value
back, so both may stand in a CUDA graph and on any stream; nothing enters an autograd graph, and
tensor and random state stay as they are.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.errors import OptionError
from tensortap.numerics import native
from tensortap.numerics.backend import pick
from tensortap.numerics.layout import check_summarizable, first_elements, pieces, plain
from tensortap.numerics.summary import COLUMNS, FIRST, WIDTH

__all__ = [
    "accumulate",
    "accumulate_many",
    "accumulate_on",
    "empty_rows",
    "merge_into",
    "merge_rows",
    "reset",
]

CHUNK = 1 << 22
_COUNTS, _MOMENTS = 7, len(COLUMNS)

# Beyond these, squares leave the range of the type that is worked in (see reference.py).
_LIMITS = {torch.float64: (1e150, 1e-140, 2.0**600), torch.float32: (1e15, 1e-12, 2.0**80)}


def empty_rows(n: int, device: torch.device | str) -> torch.Tensor:
    """`n` empty rows on a device: float64, or float32 where there is no float64 (mps)."""
    dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
    with torch.inference_mode(False):  # so that rows may be written in any mode later
        rows = torch.empty(n, WIDTH, dtype=dtype, device=device)
        reset(rows)
    return rows


def reset(rows: torch.Tensor) -> None:
    """Empty rows again, without waiting for the device."""
    with torch.no_grad():
        rows.fill_(math.nan)
        rows[..., :_COUNTS] = 0.0
        rows[..., _MOMENTS - 1] = 0.0  # l2


def accumulate_on(tensor: torch.Tensor, row: torch.Tensor) -> None:
    """Merge a tensor into a row of its own device, by the quickest way there is."""
    if tensor.is_cuda:
        kernels = _triton()
        if kernels is None or not kernels.accumulate(tensor, row):
            accumulate(tensor, row)
        return
    _check(tensor, row)
    if tensor.is_cpu and row.dtype == torch.float64 and pick(tensor).name == "native":
        _accumulate_native(tensor, row)
    else:
        accumulate(tensor, row)


def accumulate_many(tensors: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
    """Merge each tensor into the row of its number; small CUDA tensors share one launch."""
    if rows.dim() != 2 or rows.shape[0] != len(tensors):
        raise OptionError(
            f"Rows for {len(tensors)} tensors have the shape ({len(tensors)}, {WIDTH}), "
            f"but got {tuple(rows.shape)}."
        )
    left: Sequence[int] = range(len(tensors))
    kernels = _triton() if rows.is_cuda else None
    if kernels is not None:
        left = kernels.accumulate_many(tensors, rows)
    for i in left:
        accumulate_on(tensors[i], rows[i])


def accumulate(tensor: torch.Tensor, row: torch.Tensor) -> None:
    """Merge a tensor into a row of its own device, by torch operations alone.

    Chunks bound the extra memory. The row's dtype is the one that is worked in: float64, or float32
    on a device that has nothing wider (mps), where counts are exact up to 2**24 and the moments
    have float32's seven digits.
    """
    _check(tensor, row)
    check_summarizable(tensor)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        values = plain(tensor)
        if values.is_complex():
            values = torch.view_as_real(values)
        if not values.numel():
            return
        parts = [_columns(piece, row.dtype) for piece in pieces(values, CHUNK)]
        first = first_elements(values, FIRST).to(row.dtype)
        merged = _merged(torch.stack([row[:_MOMENTS], *parts]))
        row[_MOMENTS:] = _joined_first(row[:1], row[_MOMENTS:], first)
        row[:_MOMENTS] = merged


def merge_rows(rows: torch.Tensor, others: torch.Tensor) -> None:
    """Merge rows into rows of the same device, in place, without waiting for it."""
    with torch.no_grad():
        both = torch.stack([rows[..., :_MOMENTS], others[..., :_MOMENTS]], dim=-2)
        first = _joined_first(rows[..., :1], rows[..., _MOMENTS:], others[..., _MOMENTS:])
        rows[..., _MOMENTS:] = first
        rows[..., :_MOMENTS] = _merged(both)


def merge_into(row: NDArray[np.float64], other: NDArray[np.float64]) -> None:
    """Merge a row (or a table of them, row by row) into another in host memory, in place."""
    if row.ndim > 1:
        merge_rows(torch.from_numpy(row), torch.from_numpy(other))
    elif not row[0]:
        row[:] = other
    elif other[0]:
        row[:] = _merged_numbers(row.tolist(), other.tolist())


def _merged_numbers(a: list[float], b: list[float]) -> list[float]:
    """`Summary.merge` on bare rows that are not empty, for the loop of every layer and step."""
    known = int(min(a[0], FIRST))
    first = (a[_MOMENTS : _MOMENTS + known] + b[_MOMENTS:])[:FIRST]
    l2 = math.hypot(a[-1 - FIRST], b[-1 - FIRST])
    counts = [x + y for x, y in zip(a[:_COUNTS], b[:_COUNTS], strict=True)]
    many, few = a[0] - a[1] - a[2] - a[3], b[0] - b[1] - b[2] - b[3]
    if many < few:
        many, few, a, b = few, many, b, a
    if not few:
        return [*counts, *a[_COUNTS : _MOMENTS - 1], l2, *first]
    mean, std, low, high, absmax = a[_COUNTS : _MOMENTS - 1]
    mean2, std2, low2, high2, absmax2 = b[_COUNTS : _MOMENTS - 1]
    share, rest = few / (many + few), many / (many + few)
    half = mean2 / 2 - mean / 2
    between = half * (2 * math.sqrt(share * rest))
    moments = (
        mean + 2 * (half * share),
        math.hypot(std * math.sqrt(rest), std2 * math.sqrt(share), between),
        low if low <= low2 else low2,
        high if high >= high2 else high2,
        absmax if absmax >= absmax2 else absmax2,
    )
    return [*counts, *moments, l2, *first]


@cache
def _triton() -> ModuleType | None:
    """The kernels, where Triton is installed. Imported on first use: it takes half a second."""
    try:
        from tensortap.numerics import triton_summary
    except ImportError:
        return None
    return triton_summary


def _check(tensor: torch.Tensor, row: torch.Tensor) -> None:
    if row.shape[-1:] != (WIDTH,) or row.dtype not in _LIMITS or row.stride(-1) != 1:
        raise OptionError(
            f"A summary row is {WIDTH} float64 numbers side by side, "
            f"but got {row.dtype} of shape {tuple(row.shape)}. Make rows with empty_rows()."
        )
    if row.device != tensor.device:
        raise OptionError(
            f"A tensor on {tensor.device} is summed up there, but its row is on {row.device}. "
            "Make rows with empty_rows(n, tensor.device)."
        )


def _accumulate_native(tensor: torch.Tensor, row: torch.Tensor) -> None:
    into = row.detach().numpy()
    if not into[0] and native.summarize_into(tensor, row.data_ptr()):
        return
    other = array("d", bytes(8 * WIDTH))
    if native.summarize_into(tensor, other.buffer_info()[0]):
        merge_into(into, np.frombuffer(other))
    else:
        merge_into(into, np.asarray(pick(tensor).summarize_row(tensor, False)[0]))


def _columns(piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`COLUMNS` of a flat piece that has elements, as one tensor."""
    values = piece.to(dtype)
    whole = not piece.dtype.is_floating_point  # then nothing is NaN, infinite or subnormal
    none = values.new_zeros(())
    count = values.new_full((), values.numel())
    magnitudes = values.abs()
    finite = torch.ones_like(values, dtype=torch.bool) if whole else torch.isfinite(values)
    n = count if whole else finite.sum(dtype=dtype)
    nan = none if whole else torch.isnan(values).sum(dtype=dtype)
    posinf = none if whole else (values == math.inf).sum(dtype=dtype)
    subnormal = none
    if not whole:
        tiny = torch.finfo(piece.dtype).smallest_normal
        subnormal = ((magnitudes > 0) & (magnitudes < tiny)).sum(dtype=dtype)
    low = torch.where(finite, values, math.inf).amin() + 0.0  # never -0.0
    high = torch.where(finite, values, -math.inf).amax() + 0.0
    absmax = torch.maximum(low.abs(), high.abs())
    mean, std, l2 = _moments(values, finite, n, low, high, absmax, piece.dtype)
    found = [
        count,
        nan,
        posinf,
        count - n - nan - posinf,
        (values == 0).sum(dtype=dtype),
        subnormal,
        _saturated(piece, magnitudes).sum(dtype=dtype),
        mean,
        std,
        *(torch.where(n > 0, x, math.nan) for x in (low, high, absmax)),
        l2,
    ]
    return torch.stack(found)


def _moments(
    values: torch.Tensor,
    finite: torch.Tensor,
    n: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    absmax: torch.Tensor,
    given: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two passes, the second around the mean; what could overflow is scaled by a power of two."""
    too_large, too_small, power = _LIMITS[values.dtype]
    values = torch.where(finite, values, 0.0)
    scale = torch.ones_like(absmax)
    if _reaches(given, too_large, too_small):
        scale = torch.where(absmax > too_large, 1 / power, scale)
        scale = torch.where((absmax > 0) & (absmax < too_small), power, scale)
        values = values * scale
    mean = torch.where(low == high, low * scale, values.sum() / n)
    deviations = torch.where(finite, values - mean, 0.0)
    rest = deviations.sum() / n  # what rounding the mean left over
    variance = (deviations.square_().sum() / n - rest * rest).clamp_(min=0.0)
    l2 = values.square_().sum().sqrt()
    return (mean + rest) / scale, variance.sqrt() / scale, l2 / scale


def _reaches(dtype: torch.dtype, too_large: float, too_small: float) -> bool:
    """Whether the format holds numbers whose squares need care."""
    if dtype == torch.bool:
        return False
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).max > too_large
    info = torch.finfo(dtype)
    return info.max > too_large or info.smallest_normal * info.eps < too_small


def _saturated(piece: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    dtype = piece.dtype
    if dtype == torch.bool:
        return torch.zeros_like(piece)
    if dtype.is_floating_point:
        return magnitudes == torch.finfo(dtype).max
    info = torch.iinfo(dtype)
    if dtype == torch.uint64:  # of which torch compares nothing: as int64, the maximum is -1
        return piece.view(torch.int64) == -1
    if info.min == 0:
        return piece.to(torch.int64) == info.max
    return (piece == info.max) | (piece == info.min)


def _merged(parts: torch.Tensor) -> torch.Tensor:
    """`COLUMNS` of all parts (the last dimension but one) together.

    Chan's formula for many parts at once, around the largest part's mean. Halves, since the
    difference of two means may overflow; lengths are divided by the largest before squaring.
    """
    finite = parts[..., 0] - parts[..., 1:4].sum(-1)
    some = finite > 0
    total = finite.sum(-1, keepdim=True)
    share = torch.where(some, finite / total, 0.0)
    mean, std, low, high, absmax, l2 = (
        torch.where(some, parts[..., i], other)
        for i, other in zip(
            range(_COUNTS, _MOMENTS), (0.0, 0.0, math.inf, -math.inf, 0.0, 0.0), strict=True
        )
    )
    largest = finite.argmax(-1, keepdim=True)
    base, spread = mean.gather(-1, largest), std.gather(-1, largest)
    alone = share.amax(-1, keepdim=True) == 1  # then its moments stand as they are
    middle = base / 2 + ((mean / 2 - base / 2) * share).sum(-1, keepdim=True)
    away = torch.where(some, mean / 2 - middle, 0.0)
    root = share.sqrt()
    together = 2 * _hypot(torch.cat([std / 2 * root, away * root], -1))
    moments = [
        torch.where(alone, base, 2 * middle),
        torch.where(alone, spread, together),
        low.amin(-1, keepdim=True),
        high.amax(-1, keepdim=True),
        absmax.amax(-1, keepdim=True),
    ]
    known = torch.where(total > 0, torch.cat(moments, -1), math.nan)
    return torch.cat([parts[..., :_COUNTS].sum(-2), known, _hypot(l2)], -1)


def _hypot(lengths: torch.Tensor) -> torch.Tensor:
    """The root of the sum of squares along the last dimension, which stays, of size 1."""
    size = lengths.abs().amax(-1, keepdim=True)
    unit = torch.where((size > 0) & (size < math.inf), size, 1.0)
    return unit * (lengths / unit).square().sum(-1, keepdim=True).sqrt()


def _joined_first(count: torch.Tensor, held: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """The first values of a row of which `count` numbers are known, followed by others."""
    padding = held.new_full((*held.shape[:-1], FIRST - more.shape[-1]), math.nan)
    place = torch.arange(FIRST, device=held.device)
    known = count.clamp(max=FIRST).to(torch.int64)
    index = torch.where(place < known, place, FIRST + place - known)
    return torch.cat([held, more, padding], -1).gather(-1, index.expand(held.shape))
