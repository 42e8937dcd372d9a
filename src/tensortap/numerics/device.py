"""Summaries that stay on the device: a tensor is merged into a row there, and nobody waits.

While a model trains, the host must not ask the device for a number: the question alone stops the
queue. So a row (`summary.COLUMNS`, then the first values) lives beside the tensors it sums up,
`accumulate_on` enqueues the work on the current stream, and whoever wants the numbers copies all
rows over at once, later. A row whose count is 0 is empty; into any other, a tensor is merged as
`Summary.merge` would.

`accumulate` is plain torch: any device, any dtype, many small launches. `accumulate_on` picks the
quickest way there is: one Triton launch on CUDA, the compiled core on a CPU. `fill_on` is the same
for a row that is to hold this tensor alone, whatever stood there. None reads a value back, so all
may stand in a CUDA graph and on any stream; nothing enters an autograd graph, and tensor and random
state stay as they are. `lean` is for the loop in which every microsecond of the host counts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tensortap.errors import OptionError
from tensortap.numerics import native
from tensortap.numerics.backend import pick
from tensortap.numerics.layout import check_summarizable, first_elements, pieces, plain
from tensortap.numerics.rows import (
    MOMENTS,
    empty_rows,
    joined_first,
    merge_into,
    merge_rows,
    merged,
    reset,
)
from tensortap.numerics.summary import FIRST, WIDTH

__all__ = [
    "accumulate",
    "accumulate_many",
    "accumulate_on",
    "bare",
    "empty_rows",
    "fill_many",
    "fill_on",
    "has_kernels",
    "lean",
    "leave_on",
    "merge_into",
    "merge_rows",
    "parts_on",
    "reset",
    "scratch_on",
    "settle",
    "warm",
]

CHUNK = 1 << 22

# Beyond these, squares leave the range of the type that is worked in (see reference.py).
_LIMITS = {torch.float64: (1e150, 1e-140, 2.0**600), torch.float32: (1e15, 1e-12, 2.0**80)}


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


def fill_on(
    tensor: torch.Tensor,
    row: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """`accumulate_on` for a row that holds nothing that counts: it is written over.

    A launch that is captured makes a scratch of its own, at the cost of a node in the graph, unless
    it is given one (`scratch_on`); of the launches that share it, no two may run at a time.
    """
    kernels = _triton() if tensor.is_cuda else None
    if kernels is None or not kernels.accumulate(tensor, row, False, scratch):
        _check(tensor, row)
        reset(row)
        accumulate_on(tensor, row)


def accumulate_many(tensors: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
    """Merge each tensor into the row of its number; small CUDA tensors share one launch."""
    for i in _left_of_many(tensors, rows, True):
        accumulate_on(tensors[i], rows[i])


def fill_many(tensors: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
    """`accumulate_many` for rows that hold nothing that counts: they are written over."""
    for i in _left_of_many(tensors, rows, False):
        fill_on(tensors[i], rows[i])


def _left_of_many(
    tensors: Sequence[torch.Tensor], rows: torch.Tensor, merge: bool
) -> Sequence[int]:
    if rows.dim() != 2 or rows.shape[0] != len(tensors):
        raise OptionError(
            f"Rows for {len(tensors)} tensors have the shape ({len(tensors)}, {WIDTH}), "
            f"but got {tuple(rows.shape)}."
        )
    kernels = _triton() if rows.is_cuda and len(tensors) else None
    if kernels is None:
        return range(len(tensors))
    left: Sequence[int] = kernels.accumulate_many(tensors, rows, merge)
    return left


def lean(tensor: torch.Tensor, stream: int) -> Any:
    """A launch that leaves a row behind, bound but for three addresses: `triton_summary.Lean`.

    `launch(parts, address, row_address)` is for any plain contiguous CUDA tensor of this size,
    dtype and device that lies at a multiple of 16, on this stream (its address), not while a graph
    is captured; it looks at nothing. The row is complete once `settle` ran behind it, for which
    `room` bytes of parts must stay as they are. None where there is no kernel for such a tensor.
    """
    kernels = _triton() if tensor.is_cuda else None
    return None if kernels is None else kernels.lean(tensor, stream)


def leave_on(tensor: torch.Tensor, row: torch.Tensor, parts: torch.Tensor) -> int:
    """`fill_on` by halves: the bytes of parts that it took for what `settle` is to complete.

    0, having done nothing, where it cannot be, or the parts are too small.
    """
    kernels = _triton() if tensor.is_cuda else None
    return 0 if kernels is None else int(kernels.leave(tensor, row, parts))


def settle(rows: torch.Tensor) -> None:
    """Complete the rows of a CUDA device that were left behind; others stay as they are."""
    kernels = _triton()
    if kernels is None:
        raise OptionError("Rows are left behind by Triton's kernels alone, and they are not here.")
    kernels.settle(rows)


def parts_on(device: torch.device | str, nbytes: int) -> torch.Tensor:
    """Memory for what rows leave behind."""
    with torch.inference_mode(False):
        return torch.empty(nbytes // 8, dtype=torch.float64, device=device)


def scratch_on(device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What `fill_on` works in, where that must outlive the launch; None where nothing is needed."""
    where = torch.device(device)
    kernels = _triton() if where.type == "cuda" else None
    return None if kernels is None else kernels.scratch(where)


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether kernels sum up CUDA tensors of this dtype; those that do are compiled when needed."""
    kernels = _triton()
    return kernels is not None and bool(kernels.knows(dtype))


def bare(tensor: torch.Tensor) -> Any:
    """`lean` for a launch by the driver itself: `triton_summary.Bare`, or None."""
    kernels = _triton() if tensor.is_cuda else None
    return None if kernels is None else kernels.bare(tensor)


def warm(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Compile the kernels for a dtype, as must be before a graph that holds them is captured.

    False where there are none: then torch does the work, in a graph as well.
    """
    where = torch.device(device)
    kernels = _triton() if where.type == "cuda" else None
    return kernels is not None and bool(kernels.warm(dtype, where))


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
        together = merged(torch.stack([row[:MOMENTS], *parts]))
        row[MOMENTS:] = joined_first(row[:1], row[MOMENTS:], first)
        row[:MOMENTS] = together


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
