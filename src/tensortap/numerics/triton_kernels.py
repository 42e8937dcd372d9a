# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""Triton's side of triton_summary.py: spans of a tensor to partials, partials to a row.

Every program takes a span of the tensor and leaves a partial (see `PARTIAL`). The one that
finishes last reduces them all; where there are many, the last of each group of programs reduces the
group's partials to one, and the last of all those. Always the same ones in the same order, so the
bits are always the same.

That last program's work takes as long as reading a tensor of 10 MB does, while nothing else runs on
its stream. So where a row is not wanted at once, a launch may leave its partials where they are
(`leave`), and one launch later settles many rows (`settle`), to the same bits.

What bounds a kernel that reads two bytes a value is not the memory but the number of instructions.
So a span is read in chunks, of which a lane (16 bytes wide) sees `F.steps` times as much. Within a
chunk a lane sums deviations and their squares in float32, around the mean of its own first values:
what cancels is then bounded by how few values there are, whatever the data. From chunk to chunk, it
is all float64. NaN, infinity and squares out of range show in the sums, saturation in the limits;
such spans alone are read again, with care.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from tensortap.numerics.summary import COLUMNS, FIRST, WIDTH
from tensortap.numerics.triton_launch import INTERPRETED

__all__ = ["GROUP", "PARTIAL", "WIDE", "accumulate_many", "accumulate_one", "leave", "settle"]

# The interpreter is slow: there, few stand for many.
GROUP = 8 if INTERPRETED else 32  # programs of which one reduces: a warp's width, which is quick
WIDE = 8 if INTERPRETED else 256  # programs that need no groups
PARTIAL = 16  # finite, nan, posinf, neginf, zeros, subnormal, saturated, mean, m2, min, max; unused

_GROUP = tl.constexpr(GROUP)
_WIDE = tl.constexpr(WIDE)
_PARTIAL = tl.constexpr(PARTIAL)
_BLOCK = tl.constexpr(16)  # chunks after which counts are moved, before they outgrow a half
_MOMENTS = tl.constexpr(len(COLUMNS))
_FIRST = tl.constexpr(FIRST)
_WIDTH = tl.constexpr(WIDTH)


@triton.jit
def _bits(raw, F: tl.constexpr):
    """A float's bits without the sign."""
    if F.bits == 32:
        magnitude = raw.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    elif F.bits == 16:
        magnitude = raw.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    else:
        magnitude = raw.to(tl.int32) & 0x7F
    return magnitude


@triton.jit
def _odd(raw, F: tl.constexpr):
    """What is counted beside zeros: below the smallest normal float, or a saturated integer."""
    if F.whole:
        if F.bits < 32:
            raw = raw.to(tl.int32)
        odd = (raw == F.most) | (raw == F.least)
    else:
        odd = _bits(raw, F) < F.normal
    return odd


@triton.jit
def _value(raw, F: tl.constexpr):
    """An element as float32, as float64 where that is too narrow, as int32 where that is exact.

    Of float8, an exponent and a mantissa are moved to where float32 has them; what is not finite
    there comes out as some number.
    """
    if F.wide:
        value = raw.to(tl.float64)
    elif F.whole and F.bits == 8:
        value = raw.to(tl.int32)
    elif F.bits == 16 and F.mantissa == 7:  # the interpreter's own way loses subnormal values
        value = (raw.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif F.whole or F.bits > 8:
        value = raw.to(tl.float32)
    else:
        wide = raw.to(tl.int32)
        moved = ((wide & 0x7F) << (23 - F.mantissa)) | ((wide & 0x80) << 24)
        value = moved.to(tl.float32, bitcast=True) * (2.0 ** (127 - F.bias))
        value = tl.where((wide & 0x7F) > F.top, float("nan"), value)
    return value


@triton.jit
def _pair(raw, F: tl.constexpr):
    """Elements as halves, of which one instruction of the device takes two."""
    if F.bits == 16:
        half = raw
    elif F.mantissa == 3:
        half = raw.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        half = raw.to(tl.float8e5, bitcast=True).to(tl.float16)
    return half


@triton.jit
def _halves(TEXT: tl.constexpr, a, b, F: tl.constexpr):
    return tl.inline_asm_elementwise(TEXT, "=r,r,r", [a, b], dtype=F.half, is_pure=True, pack=2)


@triton.jit
def _chunk(
    x, ref, total, square, low, high, zeros, small,
    LANES: tl.constexpr, F: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Add a chunk that starts at `x` to the sums."""
    EACH: tl.constexpr = F.each
    STEPS: tl.constexpr = F.steps
    N: tl.constexpr = STEPS * EACH
    MINIMUM: tl.constexpr = F.minimum
    MAXIMUM: tl.constexpr = F.maximum
    ADD_ZERO: tl.constexpr = F.add_zero
    ADD_SMALL: tl.constexpr = F.add_small
    cell = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    for step in tl.static_range(STEPS):
        raw = tl.load(x + (cell + step * LANES * EACH))
        if PACKED:
            half = _pair(raw, F)
            value = half.to(tl.float32)
            low = _halves(MINIMUM, low, half, F)
            high = _halves(MAXIMUM, high, half, F)
            zeros = _halves(ADD_ZERO, zeros, half, F)
            small = _halves(ADD_SMALL, small, half, F)
        else:
            value = _value(raw, F)
            limit = raw.to(low.dtype) if F.whole else value
            low = tl.minimum(low, limit)
            high = tl.maximum(high, limit)
            zeros += (limit == 0).to(tl.int32)
            small += _odd(raw, F).to(tl.int32)
        if F.whole and F.bits == 8:
            away = value
            if step == 0:
                shift = tl.zeros([LANES], tl.int32)
        else:
            if step == 0:  # equal values have themselves as their mean: EACH is a power of two
                shift = tl.sum(value, 1) * (1.0 / EACH)
            away = value - shift[:, None]
        if step == 0:
            s = away
            q = away * away
        else:
            s += away
            q += away * away
    lane = tl.sum(s, 1).to(tl.float64)
    off = (shift.to(tl.float64) - ref) + lane * (1.0 / N)
    total += N * off
    square += (tl.sum(q, 1).to(tl.float64) - lane * lane * (1.0 / N)) + N * off * off
    return total, square, low, high, zeros, small


@triton.jit
def _counted(counts):
    """A lane's counts; halves are exact as float32, which is quicker to come by than an integer."""
    if counts.dtype != tl.int32:
        counts = counts.to(tl.float32)
    return tl.sum(counts, 1).to(tl.int32)


@triton.jit
def _together(s, q, low, high, zeros, small, s2, q2, low2, high2, zeros2, small2):
    """The sums, limits and counts of two lanes as one's."""
    return (
        s + s2,
        q + q2,
        tl.minimum(low, low2),
        tl.maximum(high, high2),
        zeros + zeros2,
        small + small2,
    )


@triton.jit
def _rest(
    x, left, ref, total, square, low, high, zeros, small, LANES: tl.constexpr, F: tl.constexpr
):
    """Add the `left` elements from `x` on, fewer than a chunk's, to the sums: all in float64."""
    EACH: tl.constexpr = F.each
    cell = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    for at in range(0, left, LANES * EACH):
        there = at + cell < left
        raw = tl.load(x + (at + cell), mask=there, other=0)
        value = _value(raw, F)
        away = tl.where(there, value.to(tl.float64) - ref, 0.0)
        total += tl.sum(away, 1)
        square += tl.sum(away * away, 1)
        real = value.to(low.dtype)
        low = tl.minimum(low, tl.min(tl.where(there, real, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(there, real, float("-inf")), 1))
        zeros += tl.sum((there & (value == 0)).to(tl.int32), 1)
        small += tl.sum((there & _odd(raw, F)).to(tl.int32), 1)
    return total, square, low, high, zeros, small


@triton.jit
def _span(x, start, stop, out, LANES: tl.constexpr, F: tl.constexpr, PACKED: tl.constexpr):
    """Leave the partial of the elements from `start` to `stop`."""
    EACH: tl.constexpr = F.each
    STEPS: tl.constexpr = F.steps
    CHUNK: tl.constexpr = LANES * EACH * STEPS
    REAL: tl.constexpr = tl.float64 if F.wide else tl.float32
    WHOLE: tl.constexpr = tl.int64 if F.bits == 64 else tl.int32
    LIMIT: tl.constexpr = F.half if PACKED else (WHOLE if F.whole else REAL)
    COUNT: tl.constexpr = F.half if PACKED else tl.int32
    x += start
    length = stop - start
    ref = _value(tl.load(x, mask=length > 0, other=0), F).to(tl.float64)
    total = tl.zeros([LANES], tl.float64)
    square = tl.zeros([LANES], tl.float64)
    if F.whole:  # beyond any of them, and so of no account
        lows = tl.full([LANES, EACH], F.highest, LIMIT)
        highs = tl.full([LANES, EACH], F.lowest, LIMIT)
    else:
        lows = tl.full([LANES, EACH], float("inf"), LIMIT)
        highs = tl.full([LANES, EACH], float("-inf"), LIMIT)
    zeros = tl.zeros([LANES], tl.int32)
    small = tl.zeros([LANES], tl.int32)
    chunks = (length // CHUNK).to(tl.int32)
    at = x
    for block in range(0, chunks, _BLOCK):
        nulls = tl.zeros([LANES, EACH], COUNT)
        below = tl.zeros([LANES, EACH], COUNT)
        for _number in range(block, tl.minimum(block + _BLOCK, chunks)):
            total, square, lows, highs, nulls, below = _chunk(
                at, ref, total, square, lows, highs, nulls, below, LANES, F, PACKED
            )
            at += CHUNK
        zeros += _counted(nulls)
        small += _counted(below)
    low = tl.min(lows.to(REAL), 1)
    high = tl.max(highs.to(REAL), 1)
    left = (length - chunks.to(tl.int64) * CHUNK).to(tl.int32)
    total, square, low, high, zeros, small = _rest(
        at, left, ref, total, square, low, high, zeros, small, LANES, F
    )
    s, q, low, high, nothing, lesser = tl.reduce(
        (total, square, low, high, zeros, small), 0, _together
    )
    least, most = low.to(tl.float64), high.to(tl.float64)
    n = length.to(tl.float64)
    nans = tl.full([], 0.0, tl.float64)
    ups, downs, full = nans, nans, nans
    if F.whole:
        full = lesser.to(tl.float64)
        lesser = nothing
    else:
        # Neither is true of NaN. Squares below float32's range are lost; above, they are infinite.
        fine = (tl.abs(s) < float("inf")) & (q < float("inf"))
        fine = fine & ((q >= n * 1e-36) | (least == most))
        if (fine == 0) | (least <= -F.largest) | (most >= F.largest):
            nans, ups, downs, full, least, most = _count_special(x, length, LANES, F)
            n -= nans + ups + downs
            ref = tl.where(n > 0, most, 0.0)
            s, q = _sum_finite(x, length, ref, LANES, F)
    mean = s / tl.maximum(n, 1.0)
    m2 = tl.maximum(q - s * mean, 0.0)
    mean = tl.where(least == most, least, ref + mean)
    m2 = tl.where(least == most, 0.0, m2)
    column = tl.arange(0, _PARTIAL)
    part = _packed(
        column, n, nans, ups, downs, nothing.to(tl.float64), (lesser - nothing).to(tl.float64),
        full, mean, m2, least, most,
    )  # fmt: skip
    tl.store(out + column, part)


@triton.jit
def _packed(column, n, nans, ups, downs, zeros, small, full, mean, m2, least, most):
    """The columns of a partial, side by side."""
    part = tl.where(column == 0, n, 0.0)
    part = tl.where(column == 1, nans, part)
    part = tl.where(column == 2, ups, part)
    part = tl.where(column == 3, downs, part)
    part = tl.where(column == 4, zeros, part)
    part = tl.where(column == 5, small, part)
    part = tl.where(column == 6, full, part)
    part = tl.where(column == 7, mean, part)
    part = tl.where(column == 8, m2, part)
    part = tl.where(column == 9, least, part)
    return tl.where(column == 10, most, part)


@triton.jit
def _count_special(x, length, LANES: tl.constexpr, F: tl.constexpr):
    """NaN, +Inf, -Inf and saturated values of a span, and the limits of the finite ones."""
    EACH: tl.constexpr = F.each
    cell = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    nans = tl.zeros([LANES, EACH], tl.int32)
    ups = tl.zeros([LANES, EACH], tl.int32)
    downs = tl.zeros([LANES, EACH], tl.int32)
    full = tl.zeros([LANES, EACH], tl.int32)
    low = tl.full([LANES, EACH], float("inf"), tl.float32)
    high = tl.full([LANES, EACH], float("-inf"), tl.float32)
    for at in range(0, length, LANES * EACH):
        there = at + cell < length
        raw = tl.load(x + at + cell, mask=there, other=0)
        value, magnitude = _value(raw, F), _bits(raw, F)
        if F.bits == 8:
            positive = raw < 128
        else:
            positive = value > 0
        infinite = (magnitude > F.top) & (magnitude < F.nan)
        finite = (magnitude <= F.top) & there
        nans += (magnitude >= F.nan).to(tl.int32)
        ups += (infinite & positive).to(tl.int32)
        downs += (infinite & (positive == 0)).to(tl.int32)
        full += (magnitude == F.top).to(tl.int32)
        low = tl.minimum(low, tl.where(finite, value, float("inf")))
        high = tl.maximum(high, tl.where(finite, value, float("-inf")))
    return (
        tl.sum(tl.sum(nans, 1)).to(tl.float64),
        tl.sum(tl.sum(ups, 1)).to(tl.float64),
        tl.sum(tl.sum(downs, 1)).to(tl.float64),
        tl.sum(tl.sum(full, 1)).to(tl.float64),
        tl.min(tl.min(low, 1)).to(tl.float64),
        tl.max(tl.max(high, 1)).to(tl.float64),
    )


@triton.jit
def _sum_finite(x, length, ref, LANES: tl.constexpr, F: tl.constexpr):
    """The sums of a span's finite deviations and of their squares, all in float64."""
    EACH: tl.constexpr = F.each
    cell = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    total = tl.zeros([LANES], tl.float64)
    square = tl.zeros([LANES], tl.float64)
    for at in range(0, length, LANES * EACH):
        there = at + cell < length
        raw = tl.load(x + at + cell, mask=there, other=0)
        finite = (_bits(raw, F) <= F.top) & there
        away = tl.where(finite, _value(raw, F).to(tl.float64) - ref, 0.0)
        total += tl.sum(away, 1)
        square += tl.sum(away * away, 1)
    return tl.sum(total), tl.sum(square)


@triton.jit
def _hypot(a, b, c):
    size = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.abs(c))
    unit = tl.where((size > 0) & (size < float("inf")), size, 1.0)
    return unit * tl.sqrt(
        (a / unit) * (a / unit) + (b / unit) * (b / unit) + (c / unit) * (c / unit)
    )


@triton.jit
def _column(parts, there, NUMBER: tl.constexpr, W: tl.constexpr):
    """A column of partials. What other programs wrote is in the second cache, not in the first."""
    place = tl.arange(0, W) * _PARTIAL + NUMBER
    return tl.load(parts + place, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def _all(
    n, nans, ups, downs, zeros, small, full, s, q, least, most,
    n2, nans2, ups2, downs2, zeros2, small2, full2, s2, q2, least2, most2,
):  # fmt: skip
    """Two partials' sums and limits as one's."""
    return (
        n + n2, nans + nans2, ups + ups2, downs + downs2, zeros + zeros2, small + small2,
        full + full2, s + s2, q + q2, tl.minimum(least, least2), tl.maximum(most, most2),
    )  # fmt: skip


@triton.jit
def _reduced(parts, many, W: tl.constexpr):
    """Up to `W` partials as one: Chan's formula around one of the means, so that little cancels."""
    there = tl.arange(0, W) < many
    n = _column(parts, there, 0, W)
    mean = _column(parts, there, 7, W)
    m2 = _column(parts, there, 8, W)
    least = _column(parts, there, 9, W)
    most = _column(parts, there, 10, W)
    nans = _column(parts, there, 1, W)
    ups = _column(parts, there, 2, W)
    downs = _column(parts, there, 3, W)
    zeros = _column(parts, there, 4, W)
    small = _column(parts, there, 5, W)
    full = _column(parts, there, 6, W)
    some = n > 0
    centre = tl.max(tl.where(some, mean, float("-inf")))
    away = tl.where(some, mean - centre, 0.0)
    least = tl.where(some, least, float("inf"))
    most = tl.where(some, most, float("-inf"))
    finite, nans, ups, downs, zeros, small, full, s, q, least, most = tl.reduce(
        (n, nans, ups, downs, zeros, small, full, n * away, m2 + n * away * away, least, most),
        0,
        _all,
    )
    rest = s / tl.maximum(finite, 1.0)
    m2 = tl.maximum(q - s * rest, 0.0)
    mean = tl.where(finite > 0, centre + rest, 0.0)
    return finite, nans, ups, downs, zeros, small, full, mean, m2, least, most


@triton.jit
def _reduce_group(parts, many, out):
    """Leave the partial of a group of programs."""
    finite, nans, ups, downs, zeros, small, full, mean, m2, least, most = _reduced(
        parts, many, _GROUP
    )
    column = tl.arange(0, _PARTIAL)
    part = _packed(column, finite, nans, ups, downs, zeros, small, full, mean, m2, least, most)
    tl.store(out + column, part)


@triton.jit
def _write_moments(parts, many, size, count, row, MERGE: tl.constexpr, W: tl.constexpr):
    """Reduce the last partials of a tensor of `size` elements; merge them into its row, or fill it.

    Merged as Summary.merge does it; a row whose `count` is 0 holds nothing, whatever stands there.
    """
    finite, nans, ups, downs, zeros, small, full, mean, m2, least, most = _reduced(parts, many, W)
    column = tl.arange(0, _PARTIAL)
    std = tl.sqrt(m2 / tl.maximum(finite, 1.0))
    l2 = tl.sqrt(m2 + finite * mean * mean)  # the kernels' formats have no squares beyond float64
    absmax = tl.where(finite > 0, tl.maximum(tl.abs(least), tl.abs(most)), 0.0)
    known = finite > 0
    if MERGE:
        held = count - tl.load(row + 1) - tl.load(row + 2) - tl.load(row + 3)
        mean2 = tl.where(held > 0, tl.load(row + 7), mean)
        std2 = tl.where(held > 0, tl.load(row + 8), 0.0)
        all_n = tl.maximum(finite + held, 1.0)
        share, share2 = finite / all_n, held / all_n
        half = mean / 2 - mean2 / 2
        mean = tl.where(finite > held, mean - 2 * (half * share2), mean2 + 2 * (half * share))
        std = _hypot(
            std * tl.sqrt(share), std2 * tl.sqrt(share2), half * (2 * tl.sqrt(share * share2))
        )
        least = tl.where(held > 0, tl.minimum(least, tl.load(row + 9)), least)
        most = tl.where(held > 0, tl.maximum(most, tl.load(row + 10)), most)
        absmax = tl.where(held > 0, tl.maximum(absmax, tl.load(row + 11)), absmax)
        l2 = _hypot(l2, tl.where(held > 0, tl.load(row + 12), 0.0), 0.0)
        known = finite + held > 0
    nothing = float("nan")
    line = _packed(
        column, size.to(tl.float64), nans, ups, downs, zeros, small, full,
        mean, std, least + 0.0, most + 0.0,
    )  # fmt: skip
    line = tl.where(column == 11, absmax, line)
    line = tl.where(known, line, tl.where(column < 7, line, nothing))
    line = tl.where(column == 12, l2, line)
    if MERGE:
        line += tl.load(row + column, mask=column < 7, other=0.0)
    tl.store(row + column, line, mask=column < _MOMENTS)


@triton.jit
def _write_first(head, size, count, row, F: tl.constexpr):
    """The first elements, behind those of the `count` elements that the row holds already."""
    place = tl.arange(0, 16)
    taken = tl.minimum(count, 1.0 * _FIRST).to(tl.int32)
    fresh = (place >= taken) & (place < _FIRST)
    held_here = place - taken < size
    raw = tl.load(head + (place - taken), mask=fresh & held_here, other=0)
    value = _value(raw, F).to(tl.float64)
    if F.bits == 8 and not F.whole:
        sign = tl.where(raw >= 128, float("-inf"), float("inf"))
        value = tl.where((_bits(raw, F) > F.top) & (_bits(raw, F) < F.nan), sign, value)
    tl.store(row + _MOMENTS + place, tl.where(held_here, value, float("nan")), mask=fresh)


@triton.jit
def _write(parts, many, head, size, row, F: tl.constexpr, MERGE: tl.constexpr, W: tl.constexpr):
    """All of a row."""
    count = tl.full([], 0.0, tl.float64)
    if MERGE:
        count = tl.load(row)
    _write_moments(parts, many, size, count, row, MERGE, W)
    _write_first(head, size, count, row, F)


@triton.jit
def _finish(
    parts, counters, group, programs, groups, head, size, row,
    F: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """What a program does once its partial is written: nothing, unless it is the last.

    `parts` are the partials of the tensor's programs, then those of its groups, `counters` those of
    its groups, then one for all; they are 0 again afterwards, for the next launch on this stream.
    """
    tl.debug_barrier()
    if programs <= _WIDE:
        if tl.atomic_add(counters, 1, sem="acq_rel") == programs - 1:
            tl.store(counters, 0)
            _write(parts, programs, head, size, row, F, MERGE, _WIDE)
    else:
        many = tl.minimum(programs - group * _GROUP, _GROUP)
        if tl.atomic_add(counters + group, 1, sem="acq_rel") == many - 1:
            tl.store(counters + group, 0)
            above = parts + programs * _PARTIAL
            _reduce_group(parts + group * _GROUP * _PARTIAL, many, above + group * _PARTIAL)
            tl.debug_barrier()
            if tl.atomic_add(counters + groups, 1, sem="acq_rel") == groups - 1:
                tl.store(counters + groups, 0)
                _write(above, groups, head, size, row, F, MERGE, _GROUP)


@triton.jit(do_not_specialize=["parts", "counters", "size", "chunks", "head", "row"])
def accumulate_one(
    parts,
    counters,
    size: tl.int64,
    chunks,
    head: tl.int64,
    LANES: tl.constexpr,
    F: tl.constexpr,
    PACKED: tl.constexpr,
    MERGE: tl.constexpr,
    x,
    row,
):
    """One tensor: each program takes `chunks` chunks of it. The first elements are at `head`, or at
    `x` where that is 0; what a launch is told last is what differs from one to the next.
    """
    EACH: tl.constexpr = F.each
    STEPS: tl.constexpr = F.steps
    CHUNK: tl.constexpr = LANES * EACH * STEPS
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    start = program.to(tl.int64) * chunks * CHUNK
    stop = tl.minimum(start + chunks * CHUNK, size)
    _span(x, start, stop, parts + program * _PARTIAL, LANES, F, PACKED)
    where = tl.where(head == 0, x.to(tl.int64), head).to(tl.pointer_type(F.element))
    groups = (programs + _GROUP - 1) // _GROUP
    _finish(parts, counters, program // _GROUP, programs, groups, where, size, row, F, MERGE)


@triton.jit(do_not_specialize=["parts", "counters", "chunks", "rows"])
def accumulate_many(
    parts,
    counters,
    chunks,
    LANES: tl.constexpr,
    F: tl.constexpr,
    PACKED: tl.constexpr,
    MERGE: tl.constexpr,
    table,
    rows,
):
    """Many tensors: `table` says which one a program works on, and where that one lies."""
    EACH: tl.constexpr = F.each
    STEPS: tl.constexpr = F.steps
    CHUNK: tl.constexpr = LANES * EACH * STEPS
    program = tl.program_id(0)
    tensor = tl.load(table + program)
    entry = table + tl.num_programs(0) + tensor * 5
    x = tl.multiple_of(tl.load(entry).to(tl.pointer_type(F.element)), 16)
    size = tl.load(entry + 1)
    first = tl.load(entry + 2)
    programs = tl.load(entry + 3)
    row = rows + tl.load(entry + 4) * _WIDTH
    member = program - first
    groups = (programs + _GROUP - 1) // _GROUP
    # A tensor's groups and what stands above them take as much room as two more programs a tensor
    # and one in `_GROUP`; the same is true of the counters.
    above = first // _GROUP + 2 * tensor
    start = member * chunks * CHUNK
    stop = tl.minimum(start + chunks * CHUNK, size)
    own = parts + (first + above) * _PARTIAL
    _span(x, start, stop, own + member * _PARTIAL, LANES, F, PACKED)
    _finish(own, counters + above, member // _GROUP, programs, groups, x, size, row, F, MERGE)


@triton.jit(do_not_specialize=["size", "chunks", "parts", "row"])
def leave(
    size: tl.int64,
    chunks,
    LANES: tl.constexpr,
    F: tl.constexpr,
    PACKED: tl.constexpr,
    parts,
    x,
    row,
):
    """One tensor: as `accumulate_one` does it, but for reducing the partials.

    The row gets the first elements, and says what is left to do: its count is negative, and then
    come the address of the partials and their number.
    """
    EACH: tl.constexpr = F.each
    STEPS: tl.constexpr = F.steps
    CHUNK: tl.constexpr = LANES * EACH * STEPS
    program = tl.program_id(0)
    start = program.to(tl.int64) * chunks * CHUNK
    stop = tl.minimum(start + chunks * CHUNK, size)
    _span(x, start, stop, parts + program * _PARTIAL, LANES, F, PACKED)
    if program == 0:
        _write_first(x, size, tl.full([], 0.0, tl.float64), row, F)
        tl.store(row, -size.to(tl.float64))
        tl.store((row + 1).to(tl.pointer_type(tl.int64)), parts.to(tl.int64))
        tl.store(row + 2, tl.num_programs(0).to(tl.float64))


@triton.jit(do_not_specialize=["rows"])
def settle(rows):
    """What is left to do of many rows, a program each; those with nothing left stay as they are.

    Behind a tensor's partials there is room for those of its groups.
    """
    row = rows + tl.program_id(0) * _WIDTH
    count = tl.load(row)
    if count < 0:
        parts = tl.load((row + 1).to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.float64))
        programs = tl.load(row + 2).to(tl.int32)
        size = (-count).to(tl.int64)
        nothing = tl.full([], 0.0, tl.float64)
        tl.debug_barrier()
        if programs <= _WIDE:
            _write_moments(parts, programs, size, nothing, row, False, _WIDE)
        else:
            groups = (programs + _GROUP - 1) // _GROUP
            above = parts + programs * _PARTIAL
            for group in range(groups):
                many = tl.minimum(programs - group * _GROUP, _GROUP)
                _reduce_group(parts + group * _GROUP * _PARTIAL, many, above + group * _PARTIAL)
            tl.debug_barrier()
            _write_moments(above, groups, size, nothing, row, False, _GROUP)
