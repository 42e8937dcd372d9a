# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""Triton's side of triton_summary.py: spans of a tensor to partials, partials to a row.

Every program takes a span of the tensor and leaves a partial (`PARTIAL` columns); the program that
finishes last reduces the partials, always in the same order, and merges the result into the row.

A span is read once. Deviations from its first element are summed in float64: since that element is
one of the span's own, what cancels is bounded by the span's length, so offsets do no harm, and l2
follows from mean and std. Formats are told apart by their bits: the largest magnitude alone says
whether a span holds anything that is NaN, infinite or saturated; only such spans are read again,
with care.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from tensortap.numerics.summary import COLUMNS, FIRST, WIDTH

__all__ = ["FORMATS", "PARTIAL", "Format", "accumulate_many", "accumulate_one"]

PARTIAL = 11  # finite, nan, posinf, neginf, zeros, subnormal, saturated, mean, m2, min, max

_MOMENTS = tl.constexpr(len(COLUMNS))
_FIRST = tl.constexpr(FIRST)
_WIDTH = tl.constexpr(WIDTH)
_WIDE = tl.constexpr(256)


@dataclass(frozen=True, eq=False)
class Format:
    """What the kernels must know of a float format; magnitudes are bits without the sign."""

    name: str
    element: Any  # what the kernels load; a byte where it is float8
    bits: int
    mantissa: int
    bias: int
    normal: int  # the smallest normal magnitude
    top: int  # the largest finite one
    nan: int  # the smallest that is NaN; between the two lies infinity, if there is one
    torch: torch.dtype  # what the kernels are given

    def __repr__(self) -> str:  # Triton makes it part of the names of its functions
        return self.name


FORMATS = {
    torch.float32: Format(
        "f32", tl.float32, 32, 23, 127, 0x00800000, 0x7F7FFFFF, 0x7F800001, torch.float32
    ),
    torch.bfloat16: Format("bf16", tl.bfloat16, 16, 7, 127, 0x0080, 0x7F7F, 0x7F81, torch.bfloat16),
    torch.float16: Format("f16", tl.float16, 16, 10, 15, 0x0400, 0x7BFF, 0x7C01, torch.float16),
    torch.float8_e5m2: Format("e5m2", tl.uint8, 8, 2, 15, 0x04, 0x7B, 0x7D, torch.uint8),
    torch.float8_e4m3fn: Format("e4m3", tl.uint8, 8, 3, 7, 0x08, 0x7E, 0x7F, torch.uint8),
}


@triton.jit
def _decode(raw, F: tl.constexpr):
    """An element's value as float32 (meaningless where it is not finite) and its magnitude."""
    if F.bits == 32:
        magnitude = raw.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        value = raw
    elif F.bits == 16:
        magnitude = raw.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        value = raw.to(tl.float32)
    else:  # an exponent and a mantissa, moved to where float32 has them
        wide = raw.to(tl.int32)
        magnitude = wide & 0x7F
        moved = (magnitude << (23 - F.mantissa)) | ((wide & 0x80) << 24)
        value = moved.to(tl.float32, bitcast=True) * (2.0 ** (127 - F.bias))
    return value, magnitude


@triton.jit
def _add(s, q, low, high, top, zeros, small, s2, q2, low2, high2, top2, zeros2, small2):
    """Two sets of sums and limits as one."""
    return (
        s + s2,
        q + q2,
        tl.minimum(low, low2),
        tl.maximum(high, high2),
        tl.maximum(top, top2),
        zeros + zeros2,
        small + small2,
    )


@triton.jit
def _fold(raw, shift, s, q, low, high, top, zeros, small, F: tl.constexpr):
    """Add a tile to each lane's sums; a lane's elements are one thread's, so nothing is moved."""
    value, magnitude = _decode(raw, F)
    away = value.to(tl.float64) - shift
    null = (magnitude == 0).to(tl.int32)
    below = (magnitude < F.normal).to(tl.int32)
    s2, q2, low2, high2, top2, zeros2, small2 = tl.reduce(
        (away, away * away, value, value, magnitude, null, below), 1, _add
    )
    return _add(s, q, low, high, top, zeros, small, s2, q2, low2, high2, top2, zeros2, small2)


@triton.jit
def _span(x, start, stop, out, stride, LANES: tl.constexpr, F: tl.constexpr):
    """Leave the partial of the elements from `start` to `stop`, of which there is at least one."""
    EACH: tl.constexpr = 128 // F.bits
    TILE: tl.constexpr = LANES * EACH
    cell = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    pad = tl.load(x + start)
    value, magnitude = _decode(pad, F)
    shift = value.to(tl.float64)
    total = tl.zeros([LANES], tl.float64)
    square = tl.zeros([LANES], tl.float64)
    low = tl.full([LANES], float("inf"), tl.float32)
    high = tl.full([LANES], float("-inf"), tl.float32)
    top = tl.zeros([LANES], tl.int32)
    zeros = tl.zeros([LANES], tl.int32)
    small = tl.zeros([LANES], tl.int32)
    whole = start + (stop - start) // TILE * TILE
    for at in range(start, whole, TILE):
        total, square, low, high, top, zeros, small = _fold(
            tl.load(x + at + cell), shift, total, square, low, high, top, zeros, small, F
        )
    padded = tl.full([], 0, tl.int32)
    if whole < stop:  # filled up with the first element, which is the one that adds nothing
        total, square, low, high, top, zeros, small = _fold(
            tl.load(x + whole + cell, mask=whole + cell < stop, other=pad),
            shift,
            total,
            square,
            low,
            high,
            top,
            zeros,
            small,
            F,
        )
        padded = (whole + TILE - stop).to(tl.int32)
    s, q, least, most, peak, nulls, below = tl.reduce(
        (total, square, low, high, top, zeros, small), 0, _add
    )
    nulls -= tl.where(magnitude == 0, padded, 0)
    below -= tl.where(magnitude < F.normal, padded, 0)
    n = (stop - start).to(tl.float64)
    nans = tl.full([], 0, tl.int32)
    ups, downs, full = nans, nans, nans
    if peak >= F.top:
        nans, ups, downs, full, least, most = _count_special(x, start, stop, LANES, F)
        n -= (nans + ups + downs).to(tl.float64)
        shift = tl.where(n > 0, most, 0.0).to(tl.float64)
        s, q = _sum_finite(x, start, stop, shift, LANES, F)
    mean = s / tl.maximum(n, 1.0)
    tl.store(out, n)
    tl.store(out + stride, nans.to(tl.float64))
    tl.store(out + 2 * stride, ups.to(tl.float64))
    tl.store(out + 3 * stride, downs.to(tl.float64))
    tl.store(out + 4 * stride, nulls.to(tl.float64))
    tl.store(out + 5 * stride, (below - nulls).to(tl.float64))
    tl.store(out + 6 * stride, full.to(tl.float64))
    tl.store(out + 7 * stride, shift + mean)
    tl.store(out + 8 * stride, tl.maximum(q - s * mean, 0.0))
    tl.store(out + 9 * stride, least.to(tl.float64))
    tl.store(out + 10 * stride, most.to(tl.float64))


@triton.jit
def _count_special(x, start, stop, LANES: tl.constexpr, F: tl.constexpr):
    """NaN, +Inf, -Inf and saturated values of a span, and the limits of the finite ones."""
    lane = tl.arange(0, LANES)
    nans = tl.zeros([LANES], tl.int32)
    ups = tl.zeros([LANES], tl.int32)
    downs = tl.zeros([LANES], tl.int32)
    full = tl.zeros([LANES], tl.int32)
    low = tl.full([LANES], float("inf"), tl.float32)
    high = tl.full([LANES], float("-inf"), tl.float32)
    for at in range(start, stop, LANES):
        raw = tl.load(x + at + lane, mask=at + lane < stop, other=0)
        value, magnitude = _decode(raw, F)
        infinite = (magnitude > F.top) & (magnitude < F.nan)
        finite = (magnitude <= F.top) & (at + lane < stop)
        nans += (magnitude >= F.nan).to(tl.int32)
        ups += (infinite & (value > 0)).to(tl.int32)
        downs += (infinite & (value < 0)).to(tl.int32)
        full += (magnitude == F.top).to(tl.int32)
        low = tl.minimum(low, tl.where(finite, value, float("inf")))
        high = tl.maximum(high, tl.where(finite, value, float("-inf")))
    return tl.sum(nans), tl.sum(ups), tl.sum(downs), tl.sum(full), tl.min(low), tl.max(high)


@triton.jit
def _sum_finite(x, start, stop, shift, LANES: tl.constexpr, F: tl.constexpr):
    """The sums of a span's finite deviations and of their squares."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    square = tl.zeros([LANES], tl.float64)
    for at in range(start, stop, LANES):
        raw = tl.load(x + at + lane, mask=at + lane < stop, other=0)
        value, magnitude = _decode(raw, F)
        finite = (magnitude <= F.top) & (at + lane < stop)
        away = tl.where(finite, value.to(tl.float64) - shift, 0.0)
        total += away
        square += away * away
    return tl.sum(total), tl.sum(square)


@triton.jit
def _hypot(a, b, c):
    size = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.abs(c))
    unit = tl.where((size > 0) & (size < float("inf")), size, 1.0)
    return unit * tl.sqrt(
        (a / unit) * (a / unit) + (b / unit) * (b / unit) + (c / unit) * (c / unit)
    )


@triton.jit
def _finish(parts, stride, first, programs, head, size, row, F: tl.constexpr, MERGE: tl.constexpr):
    """Reduce the partials of a tensor of `size` elements; merge them into its row, or fill it."""
    lane, column = tl.arange(0, _WIDE), tl.arange(0, 8)
    sums = tl.zeros([_WIDE, 8], tl.float64)
    low = tl.full([_WIDE], float("inf"), tl.float64)
    high = tl.full([_WIDE], float("-inf"), tl.float64)
    base = tl.full([_WIDE], float("-inf"), tl.float64)
    for at in range(0, programs, _WIDE):
        there = at + lane < programs
        part = parts + first + at + lane
        sums += tl.load(
            part[:, None] + column[None, :] * stride,
            mask=there[:, None] & (column < 7)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        n = tl.load(part, mask=there, other=0.0, cache_modifier=".cg")
        mean = tl.load(part + 7 * stride, mask=there, other=0.0, cache_modifier=".cg")
        least = tl.load(part + 9 * stride, mask=there, other=float("inf"), cache_modifier=".cg")
        most = tl.load(part + 10 * stride, mask=there, other=float("-inf"), cache_modifier=".cg")
        base = tl.maximum(base, tl.where(n > 0, mean, float("-inf")))
        low, high = tl.minimum(low, least), tl.maximum(high, most)
    counts = tl.sum(sums, 0)
    finite = tl.sum(tl.where(column == 0, counts, 0.0), 0)
    least, most = tl.min(low), tl.max(high)
    centre = tl.where(finite > 0, tl.max(base), 0.0)  # one of the means, so that little cancels
    s = tl.zeros([_WIDE], tl.float64)
    q = tl.zeros([_WIDE], tl.float64)
    for at in range(0, programs, _WIDE):
        there = at + lane < programs
        part = parts + first + at + lane
        n = tl.load(part, mask=there, other=0.0, cache_modifier=".cg")
        mean = tl.load(part + 7 * stride, mask=there, other=0.0, cache_modifier=".cg")
        m2 = tl.load(part + 8 * stride, mask=there, other=0.0, cache_modifier=".cg")
        away = tl.where(n > 0, mean - centre, 0.0)
        s += n * away
        q += m2 + n * away * away
    whole = tl.maximum(finite, 1.0)
    rest = tl.sum(s) / whole
    mean = centre + rest
    std = tl.sqrt(tl.maximum(tl.sum(q) / whole - rest * rest, 0.0))
    l2 = tl.sqrt(finite) * _hypot(mean, std, 0.0)

    # Merged as Summary.merge does it; a row whose count is 0 holds nothing, whatever stands there.
    # A row to fill is read as one that is empty.
    if MERGE:
        count = tl.load(row)
        held = count - tl.load(row + 1) - tl.load(row + 2) - tl.load(row + 3)
    else:
        count = tl.full([], 0.0, tl.float64)
        held = count
    mean2 = tl.where(held > 0, tl.load(row + 7), mean)
    std2 = tl.where(held > 0, tl.load(row + 8), 0.0)
    all_n = tl.maximum(finite + held, 1.0)
    share, share2 = finite / all_n, held / all_n
    half = mean / 2 - mean2 / 2
    both = tl.where(finite > held, mean - 2 * (half * share2), mean2 + 2 * (half * share))
    spread = _hypot(
        std * tl.sqrt(share), std2 * tl.sqrt(share2), half * (2 * tl.sqrt(share * share2))
    )
    absmax = tl.where(finite > 0, tl.maximum(tl.abs(least), tl.abs(most)), 0.0)
    least = tl.where(held > 0, tl.minimum(least, tl.load(row + 9)), least)
    most = tl.where(held > 0, tl.maximum(most, tl.load(row + 10)), most)
    absmax = tl.where(held > 0, tl.maximum(absmax, tl.load(row + 11)), absmax)
    l2 = _hypot(l2, tl.where(held > 0, tl.load(row + 12), 0.0), 0.0)
    known = finite + held > 0
    nothing = float("nan")
    counts = tl.where(column == 0, size, counts)
    if MERGE:
        counts += tl.load(row + column, mask=column < 7, other=0.0)
    tl.store(row + column, counts, mask=column < 7)
    tl.store(row + 7, tl.where(known, both, nothing))
    tl.store(row + 8, tl.where(known, spread, nothing))
    tl.store(row + 9, tl.where(known, least + 0.0, nothing))
    tl.store(row + 10, tl.where(known, most + 0.0, nothing))
    tl.store(row + 11, tl.where(known, absmax, nothing))
    tl.store(row + 12, l2)
    place = tl.arange(0, 16)
    taken = tl.minimum(count, 1.0 * _FIRST).to(tl.int32)
    fresh = (place >= taken) & (place < _FIRST)
    raw = tl.load(head + (place - taken), mask=fresh & (place - taken < size), other=0)
    value, magnitude = _decode(raw, F)
    infinity = tl.where(value > 0, float("inf"), float("-inf"))
    value = tl.where(magnitude > F.top, infinity, value)
    missing = (magnitude >= F.nan) | (place - taken >= size)
    tl.store(row + _MOMENTS + place, tl.where(missing, nothing, value.to(tl.float64)), mask=fresh)


@triton.jit(do_not_specialize=["parts", "stride", "counters", "size", "tiles", "head", "row"])
def accumulate_one(
    parts,
    stride,
    counters,
    size: tl.int64,
    tiles,
    head: tl.int64,
    LANES: tl.constexpr,
    F: tl.constexpr,
    MERGE: tl.constexpr,
    x,
    row,
):
    """One tensor: each program takes `tiles` tiles of it. The first elements are at `head`, or at
    `x` where that is 0; what a launch is told last is what differs from one to the next.
    """
    TILE: tl.constexpr = LANES * (128 // F.bits)
    program = tl.program_id(0)
    start = program.to(tl.int64) * tiles * TILE
    stop = tl.minimum(start + tiles * TILE, size)
    _span(x, start, stop, parts + program, stride, LANES, F)
    tl.debug_barrier()
    programs = tl.num_programs(0)
    if tl.atomic_add(counters, 1, sem="acq_rel") == programs - 1:
        where = tl.where(head == 0, x.to(tl.int64), head).to(tl.pointer_type(F.element))
        _finish(parts, stride, 0, programs, where, size, row, F, MERGE)
        tl.store(counters, 0)  # for the next launch on this stream


@triton.jit(do_not_specialize=["parts", "stride", "counters", "tiles", "rows"])
def accumulate_many(
    parts,
    stride,
    counters,
    tiles,
    LANES: tl.constexpr,
    F: tl.constexpr,
    MERGE: tl.constexpr,
    table,
    rows,
):
    """Many tensors: `table` says which one a program works on, and where that one lies."""
    TILE: tl.constexpr = LANES * (128 // F.bits)
    program = tl.program_id(0)
    tensor = tl.load(table + program)
    entry = table + tl.num_programs(0) + tensor * 5
    x = tl.multiple_of(tl.load(entry).to(tl.pointer_type(F.element)), 16)
    size = tl.load(entry + 1)
    first = tl.load(entry + 2)
    programs = tl.load(entry + 3)
    row = rows + tl.load(entry + 4) * _WIDTH
    start = (program - first) * tiles * TILE
    stop = tl.minimum(start + tiles * TILE, size)
    _span(x, start, stop, parts + program, stride, LANES, F)
    tl.debug_barrier()
    if tl.atomic_add(counters + tensor, 1, sem="acq_rel") == programs - 1:
        _finish(parts, stride, first, programs, x, size, row, F, MERGE)
        tl.store(counters + tensor, 0)
