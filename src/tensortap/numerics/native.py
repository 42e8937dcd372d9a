"""The native backend: the compiled core, for tensors in CPU memory.

`summarize_into` is the hot path: a hook calls it hundreds of times a forward pass, so it only looks
up an address, a length and a dtype, and the core writes the row where it is told.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from tensortap.numerics.histogram import BUCKETS, Histogram
from tensortap.numerics.layout import check_summarizable, first_elements, pieces, plain
from tensortap.numerics.summary import COLUMNS, FIRST, WIDTH, Summary

try:
    from tensortap import _core
except ImportError as error:
    core: ModuleType | None = None
    missing = f"the compiled core could not be loaded ({error})"
else:
    core = _core
    missing = ""

__all__ = ["CODES", "NativeBackend", "core", "missing", "suits", "summarize_into"]

# dtype -> (the core's code, numbers an element): the order of codes is that of native/dtypes.hpp.
CODES: dict[torch.dtype, tuple[int, int]] = {
    torch.float32: (0, 1),
    torch.float64: (1, 1),
    torch.float16: (2, 1),
    torch.bfloat16: (3, 1),
    torch.int8: (4, 1),
    torch.uint8: (5, 1),
    torch.int16: (6, 1),
    torch.uint16: (7, 1),
    torch.int32: (8, 1),
    torch.uint32: (9, 1),
    torch.int64: (10, 1),
    torch.uint64: (11, 1),
    torch.bool: (12, 1),
    torch.float8_e4m3fn: (13, 1),
    torch.float8_e5m2: (14, 1),
    torch.float8_e4m3fnuz: (15, 1),
    torch.float8_e5m2fnuz: (16, 1),
    torch.complex32: (2, 2),
    torch.complex64: (0, 2),
    torch.complex128: (1, 2),
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    CODES[torch.float8_e8m0fnu] = (17, 1)

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.parameter.Buffer)
_COPY_LIMIT = 1 << 24


def suits(tensor: torch.Tensor) -> bool:
    """Whether the core can read this tensor's memory.

    Subclasses are left to torch: a wrapper's own address says nothing about its values.
    """
    return (
        core is not None
        and type(tensor) in _PLAIN_TYPES
        and tensor.is_cpu
        and tensor.dtype in CODES
        and tensor.layout is torch.strided
    )


def summarize_into(
    tensor: torch.Tensor, out_ptr: int, histogram_ptr: int = 0, threads: int = 0
) -> bool:
    """Write the raw row of a contiguous CPU tensor to `out_ptr` (WIDTH float64).

    With `histogram_ptr`, the counts are added to the BUCKETS int64 there. `threads` is a most; 0
    means as many as torch uses. Returns False, having written nothing, when the tensor is not one
    whose memory can be read in order: then `NativeBackend.summarize_row` takes the longer way.
    """
    code, parts = CODES[tensor.dtype]
    if not tensor.is_contiguous() or tensor.is_neg() or (parts == 2 and tensor.is_conj()):
        return False
    core.summarize(  # type: ignore[union-attr]
        tensor.data_ptr(), tensor.numel() * parts, code, out_ptr, histogram_ptr, threads
    )
    return True


class NativeBackend:
    """Summaries by the compiled core."""

    name = "native"

    def summarize_row(
        self, tensor: torch.Tensor, histogram: bool
    ) -> tuple[Sequence[float], Histogram | None]:
        row = array("d", bytes(8 * WIDTH))
        out, _ = row.buffer_info()
        counts = np.zeros(BUCKETS, dtype=np.int64) if histogram else None
        where = 0 if counts is None else counts.ctypes.data
        if summarize_into(tensor, out, where):
            return row, None if counts is None else Histogram(counts)
        return _summarize_view(tensor, row, out, counts)


def _summarize_view(
    tensor: torch.Tensor, row: array[float], out: int, counts: np.ndarray | None
) -> tuple[Sequence[float], Histogram | None]:
    """Views whose elements do not lie in order: piece by piece, or in the order of memory."""
    check_summarizable(tensor)
    where = 0 if counts is None else counts.ctypes.data
    with torch.no_grad():
        values = plain(tensor)
        by_stride = sorted(range(values.dim()), key=values.stride, reverse=True)
        dense = values.permute(by_stride)
        if dense.is_contiguous():
            summarize_into(dense, out, where)
        else:
            summary: Summary | None = None
            for piece in pieces(values, _COPY_LIMIT):
                summarize_into(piece, out, where)
                part = Summary.from_row(row)
                summary = part if summary is None else summary.merge(part)
            if summary is not None:
                row[:] = array("d", summary.to_row())
        parts = torch.view_as_real(values) if values.is_complex() else values
        head = first_elements(parts, FIRST).to(torch.float64).tolist()
    row[len(COLUMNS) : len(COLUMNS) + len(head)] = array("d", head)
    return row, None if counts is None else Histogram(counts)
