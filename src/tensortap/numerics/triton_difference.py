"""Differences of tensors on CUDA, without bringing them over. The kernels:
triton_difference_kernels.py.

Each pair is four launches: one pass over both, a second over those spans that the first was not
sure of, a look into the spans that hold the largest difference, and one that makes a row of the
spans' partial sums. That row comes back. Device -1 is Triton's interpreter.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.numerics import triton_difference_kernels as kernels
from tensortap.numerics.difference_row import EMPTY, STATE, State, merge_rows, tolerances
from tensortap.numerics.histogram import Histogram
from tensortap.numerics.layout import paired_pieces, plain
from tensortap.numerics.triton_difference_kernels import FOUND, KINDS, PARTIAL, Kind
from tensortap.numerics.triton_pairs import as_read, run
from tensortap.numerics.triton_percentiles import Distances
from tensortap.numerics.triton_profile import profile_on

__all__ = ["TritonDifference", "readable", "suits_pair"]

Pair = tuple[torch.Tensor, torch.Tensor]
Stream = Callable[[], Iterator[Pair]]
Table = NDArray[np.float64]

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.parameter.Buffer)
_COPY_LIMIT = 1 << 26  # elements of a view that are put in order at once
_MOST = (64, 512, 2048)  # spans of a small, a middling and a large pair
_FINDERS = 1024  # that look for the largest difference
_PENDING = 64  # rows that wait on the device to be fetched together
_HUGE = 1e30  # tolerances that float32 is not asked about


class Shape(NamedTuple):
    """How the kernels are cut: what was quickest on an H200."""

    lanes: int = 128
    warps: int = 4
    unroll: int = 2
    unroll_words: int = 4
    stages: int = 1
    per_sm: int = 15
    careful_lanes: int = 256
    careful_each: int = 4
    last_warps: int = 8


SHAPE = Shape()
INTERPRETED = Shape(lanes=32, warps=1, unroll_words=2, per_sm=3, careful_lanes=64, careful_each=4)


def suits_pair(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Whether the kernels read both, on one device."""
    return (
        reference.is_cuda
        and candidate.is_cuda
        and reference.get_device() == candidate.get_device()
        and readable(reference)
        and readable(candidate)
    )


def readable(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype in KINDS
        and type(tensor) in _PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


class TritonDifference:
    """What the Triton backend knows about pairs."""

    def difference_row(
        self, stream: Stream, *, percentiles: bool, rtol: float | None, atol: float | None
    ) -> tuple[Sequence[float], Sequence[float] | None, Histogram | None]:
        row, pending = EMPTY, list[torch.Tensor]()
        distances = Distances() if percentiles else None
        with torch.no_grad():
            for reference, candidate in stream():
                usual = tolerances(reference.dtype, candidate.dtype)
                limits = (usual[0] if rtol is None else rtol, usual[1] if atol is None else atol)
                for one, two in ordered_pieces(reference, candidate):
                    pending.append(launch(one, two, *limits))
                    if distances is not None:
                        distances.sample(one, two)
                    if len(pending) >= _PENDING:
                        row = _collected(row, pending)
            row = _collected(row, pending)
            if distances is None:
                return row, None, None
            found = distances.values(int(row.finite), lambda: _ordered(stream))
            return row, found, distances.histogram(int(row.finite))

    def profile_rows(self, reference: torch.Tensor, candidate: torch.Tensor) -> tuple[Table, Table]:
        width = reference.shape[-1]
        with torch.no_grad():
            return profile_on(ordered_pieces(reference, candidate, width), width)


def ordered_pieces(
    reference: torch.Tensor, candidate: torch.Tensor, width: int = 1
) -> Iterator[Pair]:
    """Both flat and in order: as they are, or in copies of some times `width` elements."""
    left, right = reference.detach(), candidate.detach()
    whole = left.is_contiguous() and right.is_contiguous()
    if whole and left.numel() and not (left.is_neg() or right.is_neg()):
        yield left.view(-1), right.view(-1)
        return
    limit = max(1, left.numel()) if whole else max(1, _COPY_LIMIT // width) * width
    for one, two in paired_pieces(left, right, limit):
        yield plain(one), plain(two)


def _ordered(stream: Stream) -> Iterator[Pair]:
    for reference, candidate in stream():
        yield from ordered_pieces(reference, candidate)


def launch(one: torch.Tensor, two: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    """Enqueue the kernels for two flat contiguous tensors that have elements."""
    index = one.get_device()
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(one, two, rtol, atol)
    shape = SHAPE if index >= 0 else INTERPRETED
    left, right = KINDS[one.dtype], KINDS[two.dtype]
    r, c = as_read(one), as_read(two)
    size = r.numel()
    each = min(8, 128 // min(left.bits, right.bits))
    r_words, c_words, words = _in_words(r, c, left, right)
    unroll = shape.unroll_words if words else shape.unroll
    step = shape.lanes * each * unroll
    tiles = -(-size // (step * _most_programs(index, shape)))
    programs = -(-size // (step * tiles))
    span = tiles * step
    lanes, some = shape.careful_lanes, shape.careful_each
    finders = min(_FINDERS, -(-size // (lanes * some)))
    sizes = (len(PARTIAL) * programs, FOUND * finders, len(STATE))
    room = torch.empty(sum(sizes), dtype=torch.float64, device=r.device)
    table, found, row = torch.split(room, list(sizes))
    limits = _bits(rtol), _bits(atol)
    careful = left.wide or right.wide or max(rtol, atol) > _HUGE
    if not careful:
        ptx = index >= 0 and torch.version.hip is None
        whole = (r, c, r_words, c_words, table, programs, size, tiles, *limits)
        ways = (shape.lanes, each, unroll, words, left, right, ptx, shape.stages)
        run(kernels.measure, index, programs, whole, ways, shape.warps)
    args = (r, c, table, programs, size, span, *limits)
    run(kernels.repair, index, programs, args, (lanes, some, left, right, careful))
    search = (r, c, table, programs, found, size, span)
    most = next(few for few in _MOST if programs <= few)
    run(kernels.locate, index, finders, search, (lanes, some, most, left, right))
    ends = (table, programs, found, finders, row, size)
    same = one.dtype == two.dtype
    run(kernels.finish, index, 1, ends, (same, most, _FINDERS), shape.last_warps)
    return row


def _in_words(
    r: torch.Tensor, c: torch.Tensor, left: Kind, right: Kind
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Two bfloat16 tensors as words of two each, where they can be."""
    if left.name != "bf16" or right.name != "bf16" or r.data_ptr() % 16 or c.data_ptr() % 16:
        return r, c, False
    size = r.numel()
    if size < 2 or r.storage_offset() % 2 or c.storage_offset() % 2:
        return r, c, False
    if size % 2:
        r, c = r[:-1], c[:-1]
    return r.view(torch.int32), c.view(torch.int32), True


def _bits(value: float) -> int:
    """A float64 as an integer, since Triton would round it to float32."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


@cache
def _most_programs(index: int, shape: Shape) -> int:
    if index < 0:
        return shape.per_sm
    units = int(torch.cuda.get_device_properties(index).multi_processor_count)
    return min(_MOST[-1], shape.per_sm * units)


def _collected(row: State, pending: list[torch.Tensor]) -> State:
    """All rows in one copy, merged in order."""
    if not pending:
        return row
    if len(pending) == 1:
        only = State(*pending[0].tolist())
        row = merge_rows(row, only) if row.count else only
    else:
        home = pending[0].device  # a stream may have several
        for part in torch.stack([one.to(home) for one in pending]).tolist():
            row = merge_rows(row, part)
    pending.clear()
    return row
