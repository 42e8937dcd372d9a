# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""Triton's side of triton_difference.py: spans of two tensors to partials (`PARTIAL` columns).

`measure` reads a span once, in float32: a thread's few pairs are added up there, the threads' sums
in float64. The reference is shifted by one of its own values from near its mean, so that offsets do
no harm. It knows where that will not do: values that are not finite, squares that leave the range
of float32, differences that are all alike, a candidate that is next to nothing beside the
reference, a pair on the very limit of the tolerances. Such spans are `repair`ed: read again in
float64. `locate` finds the largest difference, in the spans that may hold it, and `finish` makes
one row of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

__all__ = [
    "KINDS",
    "PARTIAL",
    "Kind",
    "finish",
    "locate",
    "measure",
    "repair",
    "wide_value",
]

PARTIAL: tuple[str, ...] = (
    "finite",
    "agreeing",
    "disagreeing",
    "mismatched",
    "differing",  # whether any bit does
    "r_mean",
    "r_m2",  # the sum of squared deviations
    "d_mean",
    "d_m2",
    "c_mean",
    "c_m2",
    "rd",  # the sum of products of deviations
    "rc",
    "r_dot_c",
    "d_abs",
    "r_abs",
    "relative",
    "max_relative",
    "top",  # the largest |d| as float32; -1 without a finite pair
    "care",  # what `repair` is to do: 0 nothing, 1 count mismatches, 2 everything
)
FOUND = 4  # columns of what `locate` leaves: the largest |d|, its place, both values

_BIG = tl.constexpr(1e37)
_FAINT = tl.constexpr(1e-28)  # a mean square from which float32 loses nothing that shows
_EDGE = tl.constexpr(2.0**-22)  # how far float32 may be from the limit that float64 has
_NOWHERE = tl.constexpr(1 << 62)


@dataclass(frozen=True, eq=False)
class Kind:
    """What the kernels must know of a dtype."""

    name: str
    bits: int
    wide: bool = False  # float32 does not hold all its values
    whole: bool = False  # and it has no others, nor have the differences

    def __repr__(self) -> str:  # Triton makes it part of the names of its functions
        return self.name


KINDS = {
    torch.float32: Kind("f32", 32),
    torch.bfloat16: Kind("bf16", 16),
    torch.float16: Kind("f16", 16),
    torch.float8_e5m2: Kind("e5m2", 8),
    torch.float8_e4m3fn: Kind("e4m3", 8),
    torch.int8: Kind("i8", 8, whole=True),
    torch.uint8: Kind("u8", 8, whole=True),
    torch.bool: Kind("u8", 8, whole=True),
    torch.int16: Kind("i16", 16, whole=True),
    torch.int32: Kind("i32", 32, wide=True),
}


@triton.jit
def narrow_value(raw, K: tl.constexpr):
    """The value as float32. 8-bit floats come as bytes."""
    if K.name == "bf16":  # the upper half of a float32
        value = (raw.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif K.name == "e5m2":  # the upper half of a float16
        value = (raw.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif K.name == "e4m3":  # moved to where float32 has exponent and mantissa
        wide = raw.to(tl.int32)
        moved = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
        value = moved.to(tl.float32, bitcast=True) * (2.0**120)
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def wide_value(raw, K: tl.constexpr):
    """The value as float64."""
    if K.wide:
        value = raw.to(tl.float64)
    else:
        value = narrow_value(raw, K).to(tl.float64)
    return value


@triton.jit
def _bits(raw, K: tl.constexpr):
    if K.name == "f32":
        bits = raw.to(tl.int32, bitcast=True)
    elif K.name == "bf16" or K.name == "f16":
        bits = raw.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = raw.to(tl.int32)
    return bits


@triton.jit
def _inverse(value, ASM: tl.constexpr):
    if ASM:
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = 1.0 / value
    return result


@triton.jit
def _words(raw):
    """Two bfloat16 of a word, side by side."""
    low = (raw << 16).to(tl.float32, bitcast=True)
    high = (raw & -65536).to(tl.float32, bitcast=True)
    return tl.join(low, high).reshape(raw.shape[0], 2 * raw.shape[1])


@triton.jit
def _terms(r, c, a, rtol, atol, ASM: tl.constexpr):
    """The sums of each lane's terms; `a` is r, shifted."""
    d = c - r
    size, away = tl.abs(r), tl.abs(d)
    relative = away * _inverse(size + 1e-8, ASM)
    limit = rtol * size + atol
    room = limit - away
    over = room.to(tl.int32, bitcast=True) >> 31  # -1 where |d| is above it
    edge = _EDGE * limit - tl.abs(room)
    return (
        tl.sum(a, 1),
        tl.sum(a * a, 1),
        tl.sum(d, 1),
        tl.sum(d * d, 1),
        tl.sum(a * d, 1),
        tl.sum(r * c, 1),
        tl.sum(away, 1),
        tl.sum(size, 1),
        tl.sum(relative, 1),
        tl.max(relative, 1),
        tl.max(away, 1),
        tl.max(edge, 1),
        tl.sum(over, 1),
    )


@triton.jit
def _shift(r, start, stop, LANES: tl.constexpr, R: tl.constexpr):
    """A value of the span near the mean of its first ones: of a constant, the constant."""
    lane = tl.arange(0, LANES)
    first = tl.load(r + start)
    head = narrow_value(tl.load(r + start + lane, mask=start + lane < stop, other=first), R)
    middle = tl.sum(head) / LANES
    away = tl.abs(head - middle)
    return tl.max(tl.where(away == tl.min(away), head, float("-inf")))


@triton.jit(do_not_specialize=["parts", "stride", "size", "tiles", "rtol_bits", "atol_bits"])
def measure(
    r, c, r_words, c_words, parts, stride, size, tiles, rtol_bits, atol_bits,
    LANES: tl.constexpr, EACH: tl.constexpr, UNROLL: tl.constexpr, WORDS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes `tiles` tiles of both; with WORDS, both are bfloat16, two to a word."""
    TILE: tl.constexpr = LANES * EACH
    PAIR: tl.constexpr = 2 if WORDS else 1
    STEP: tl.constexpr = TILE * UNROLL
    program = tl.program_id(0)
    start = program.to(tl.int64) * tiles * STEP
    stop = tl.minimum(start + tiles.to(tl.int64) * STEP, size)
    rtol = rtol_bits.to(tl.int64).to(tl.float64, bitcast=True).to(tl.float32)
    atol = atol_bits.to(tl.int64).to(tl.float64, bitcast=True).to(tl.float32)
    shift = _shift(r, start, stop, LANES, R)
    cell = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    word = tl.arange(0, LANES)[:, None] * (EACH // 2) + tl.arange(0, EACH // 2)[None, :]
    a1 = tl.zeros([LANES], tl.float64)
    a2 = tl.zeros([LANES], tl.float64)
    d1 = tl.zeros([LANES], tl.float64)
    d2 = tl.zeros([LANES], tl.float64)
    ad = tl.zeros([LANES], tl.float64)
    rc = tl.zeros([LANES], tl.float64)
    far = tl.zeros([LANES], tl.float64)
    big = tl.zeros([LANES], tl.float64)
    rel = tl.zeros([LANES], tl.float64)
    peak = tl.zeros([LANES], tl.float32)
    top = tl.zeros([LANES], tl.float32)
    edge = tl.zeros([LANES], tl.float32)
    over = tl.zeros([LANES], tl.int32)
    unlike = tl.zeros([LANES, EACH // PAIR], tl.int32)
    steps = ((stop - start) // STEP).to(tl.int32)
    first = program.to(tl.int64) * tiles * (STEP // PAIR)
    for step in tl.range(0, steps, num_stages=STAGES):
        at = first + step * (STEP // PAIR)
        for turn in tl.static_range(UNROLL):
            if WORDS:
                rw = tl.load(r_words + at + turn * (TILE // 2) + word)
                cw = tl.load(c_words + at + turn * (TILE // 2) + word)
                unlike |= rw ^ cw
                x, y = _words(rw), _words(cw)
            else:
                rw = tl.load(r + at + turn * TILE + cell)
                cw = tl.load(c + at + turn * TILE + cell)
                if R.name == C.name:
                    unlike |= _bits(rw, R) ^ _bits(cw, C)
                x, y = narrow_value(rw, R), narrow_value(cw, C)
            t = _terms(x, y, x - shift, rtol, atol, ASM)
            if turn == 0:
                s0, s1, s2, s3, s4, s5, s6, s7, s8 = (
                    t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]
                )  # fmt: skip
            else:
                s0 += t[0]
                s1 += t[1]
                s2 += t[2]
                s3 += t[3]
                s4 += t[4]
                s5 += t[5]
                s6 += t[6]
                s7 += t[7]
                s8 += t[8]
            peak = tl.maximum(peak, t[9])
            top = tl.maximum(top, t[10])
            edge = tl.maximum(edge, t[11])
            over += t[12]
        a1 += s0.to(tl.float64)
        a2 += s1.to(tl.float64)
        d1 += s2.to(tl.float64)
        d2 += s3.to(tl.float64)
        ad += s4.to(tl.float64)
        rc += s5.to(tl.float64)
        far += s6.to(tl.float64)
        big += s7.to(tl.float64)
        rel += s8.to(tl.float64)
    differing = tl.sum(tl.sum((unlike != 0).to(tl.int32), 1))
    one = tl.arange(0, LANES)[:, None]
    for at in range(start + steps * STEP, stop, LANES):  # what is left is less than a step
        here = at + one < stop
        rw = tl.load(r + at + one, mask=here, other=0)
        cw = tl.load(c + at + one, mask=here, other=0)
        if R.name == C.name:
            differing += tl.sum(tl.sum((_bits(rw, R) != _bits(cw, C)).to(tl.int32), 1))
        x, y = narrow_value(rw, R), narrow_value(cw, C)
        t = _terms(x, y, tl.where(here, x - shift, 0.0), rtol, atol, ASM)
        a1 += t[0].to(tl.float64)
        a2 += t[1].to(tl.float64)
        d1 += t[2].to(tl.float64)
        d2 += t[3].to(tl.float64)
        ad += t[4].to(tl.float64)
        rc += t[5].to(tl.float64)
        far += t[6].to(tl.float64)
        big += t[7].to(tl.float64)
        rel += t[8].to(tl.float64)
        peak = tl.maximum(peak, t[9])
        top = tl.maximum(top, t[10])
        edge = tl.maximum(edge, t[11])
        over += t[12]
    n = (stop - start).to(tl.float64)
    s_a, s_aa, s_d, s_dd = tl.sum(a1), tl.sum(a2), tl.sum(d1), tl.sum(d2)
    s_rc, s_r, most = tl.sum(rc), tl.sum(big), tl.max(top)
    a_mean, d_mean = s_a / n, s_d / n
    r_m2, d_m2 = s_aa - s_a * a_mean, s_dd - s_d * d_mean
    both = tl.sum(ad) - s_a * d_mean
    c_m2 = r_m2 + 2 * both + d_m2
    good = (s_aa < _BIG) & (s_dd < _BIG) & (tl.abs(s_rc) < _BIG)
    good = good & ((s_aa >= n * _FAINT) | (tl.abs(shift) > 1e-6) | (s_r == 0))
    good = good & ((s_dd >= n * _FAINT) | (most == 0))
    good = good & (s_a * a_mean <= 0.5 * s_aa) & (s_d * d_mean <= 0.5 * s_dd)
    good = good & (8 * c_m2 >= r_m2 + d_m2)
    care = tl.where(good, tl.where(tl.max(edge) > 0, 1.0, 0.0), 2.0)
    r_mean = shift.to(tl.float64) + a_mean
    out = parts + program
    tl.store(out, n)
    tl.store(out + 1 * stride, 0.0)
    tl.store(out + 2 * stride, 0.0)
    tl.store(out + 3 * stride, -tl.sum(over).to(tl.float64))
    tl.store(out + 4 * stride, (differing != 0).to(tl.float64))
    tl.store(out + 5 * stride, r_mean)
    tl.store(out + 6 * stride, tl.maximum(r_m2, 0.0))
    tl.store(out + 7 * stride, d_mean)
    tl.store(out + 8 * stride, tl.maximum(d_m2, 0.0))
    tl.store(out + 9 * stride, r_mean + d_mean)
    tl.store(out + 10 * stride, tl.maximum(c_m2, 0.0))
    tl.store(out + 11 * stride, both)
    tl.store(out + 12 * stride, r_m2 + both)
    tl.store(out + 13 * stride, s_rc)
    tl.store(out + 14 * stride, tl.sum(far))
    tl.store(out + 15 * stride, s_r)
    tl.store(out + 16 * stride, tl.sum(rel))
    tl.store(out + 17 * stride, tl.max(peak).to(tl.float64))
    tl.store(out + 18 * stride, most.to(tl.float64))
    tl.store(out + 19 * stride, care)


@triton.jit
def _pair(
    r, c, at, stop, LANES: tl.constexpr, EACH: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Both values in float64, whether they are there, and whether both are finite."""
    cell = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    there = cell < tl.minimum(stop - at, LANES * EACH).to(tl.int32)
    x = wide_value(tl.load(r + at + cell, mask=there, other=0), R)
    y = wide_value(tl.load(c + at + cell, mask=there, other=0), C)
    finite = there & (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf"))
    return x, y, there, finite


@triton.jit(do_not_specialize=["parts", "stride", "size", "span", "rtol_bits", "atol_bits"])
def repair(
    r, c, parts, stride, size, span, rtol_bits, atol_bits,
    LANES: tl.constexpr, EACH: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The spans that `measure` was not sure of, or ALL of them, in float64."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * span
    stop = tl.minimum(start + span, size)
    rtol = rtol_bits.to(tl.int64).to(tl.float64, bitcast=True)
    atol = atol_bits.to(tl.int64).to(tl.float64, bitcast=True)
    out = parts + program
    if ALL:
        care = 2.0
    else:
        care = tl.load(out + 19 * stride)
    if care == 1.0:
        over = tl.zeros([LANES], tl.int32)
        for at in range(start, stop, LANES * EACH):
            x, y, _, finite = _pair(r, c, at, stop, LANES, EACH, R, C)
            limit = atol + rtol * tl.abs(x)
            over += tl.sum((finite & (tl.abs(y - x) > limit)).to(tl.int32), 1)
        tl.store(out + 3 * stride, tl.sum(over).to(tl.float64))
    if care == 2.0:
        _repair(r, c, out, stride, start, stop, rtol, atol, LANES, EACH, R, C)


@triton.jit
def _repair(
    r, c, out, stride, start, stop, rtol, atol,
    LANES: tl.constexpr, EACH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Counts and the largest values first, of which the latter are then the shifts."""
    least = float("-inf")
    good = tl.zeros([LANES], tl.int32)
    alike = tl.zeros([LANES], tl.int32)
    over = tl.zeros([LANES], tl.int32)
    unlike = tl.zeros([LANES], tl.int32)
    x0 = tl.full([LANES], least, tl.float64)
    y0 = tl.full([LANES], least, tl.float64)
    d0 = tl.full([LANES], least, tl.float64)
    top = tl.full([LANES], -1.0, tl.float64)
    cell = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    for at in range(start, stop, LANES * EACH):
        x, y, there, finite = _pair(r, c, at, stop, LANES, EACH, R, C)
        if R.name == C.name:
            rw = tl.load(r + at + cell, mask=there, other=0)
            cw = tl.load(c + at + cell, mask=there, other=0)
            unlike += tl.sum((_bits(rw, R) != _bits(cw, C)).to(tl.int32), 1)
        same = (x == y) | ((x != x) & (y != y))
        x, y = tl.where(finite, x, 0.0), tl.where(finite, y, 0.0)
        d = y - x
        away = tl.abs(d)
        good += tl.sum(finite.to(tl.int32), 1)
        alike += tl.sum((there & (finite == 0) & same).to(tl.int32), 1)
        over += tl.sum((finite & (away > atol + rtol * tl.abs(x))).to(tl.int32), 1)
        x0 = tl.maximum(x0, tl.max(tl.where(finite, x, least), 1))
        y0 = tl.maximum(y0, tl.max(tl.where(finite, y, least), 1))
        d0 = tl.maximum(d0, tl.max(tl.where(finite, d, least), 1))
        top = tl.maximum(top, tl.max(tl.where(finite, away, -1.0), 1))
    finite_count = tl.sum(good)
    agreeing = tl.sum(alike)
    disagreeing = (stop - start).to(tl.int32) - finite_count - agreeing
    some = finite_count > 0
    x_shift = tl.where(some, tl.max(x0), 0.0)
    y_shift = tl.where(some, tl.max(y0), 0.0)
    d_shift = tl.where(some, tl.max(d0), 0.0)
    tl.store(out, finite_count.to(tl.float64))
    tl.store(out + 1 * stride, agreeing.to(tl.float64))
    tl.store(out + 2 * stride, disagreeing.to(tl.float64))
    tl.store(out + 3 * stride, (tl.sum(over) + disagreeing).to(tl.float64))
    tl.store(out + 4 * stride, (tl.sum((unlike != 0).to(tl.int32)) != 0).to(tl.float64))
    tl.store(out + 18 * stride, tl.max(top).to(tl.float32).to(tl.float64))
    a1 = tl.zeros([LANES], tl.float64)
    a2 = tl.zeros([LANES], tl.float64)
    b1 = tl.zeros([LANES], tl.float64)
    b2 = tl.zeros([LANES], tl.float64)
    e1 = tl.zeros([LANES], tl.float64)
    e2 = tl.zeros([LANES], tl.float64)
    ab = tl.zeros([LANES], tl.float64)
    ae = tl.zeros([LANES], tl.float64)
    rc = tl.zeros([LANES], tl.float64)
    far = tl.zeros([LANES], tl.float64)
    big = tl.zeros([LANES], tl.float64)
    rel = tl.zeros([LANES], tl.float64)
    peak = tl.zeros([LANES], tl.float64)
    for at in range(start, stop, LANES * EACH):
        x, y, there, finite = _pair(r, c, at, stop, LANES, EACH, R, C)
        x, y = tl.where(finite, x, 0.0), tl.where(finite, y, 0.0)
        d = y - x
        a = tl.where(finite, x - x_shift, 0.0)
        b = tl.where(finite, y - y_shift, 0.0)
        e = tl.where(finite, d - d_shift, 0.0)
        a1 += tl.sum(a, 1)
        a2 += tl.sum(a * a, 1)
        b1 += tl.sum(b, 1)
        b2 += tl.sum(b * b, 1)
        e1 += tl.sum(e, 1)
        e2 += tl.sum(e * e, 1)
        ab += tl.sum(a * b, 1)
        ae += tl.sum(a * e, 1)
        rc += tl.sum(x * y, 1)
        far += tl.sum(tl.abs(d), 1)
        big += tl.sum(tl.abs(x), 1)
        relative = tl.abs(d) / (tl.abs(x) + 1e-8)
        rel += tl.sum(relative, 1)
        peak = tl.maximum(peak, tl.max(relative, 1))
    n = tl.maximum(finite_count.to(tl.float64), 1.0)
    s_a, s_b, s_e = tl.sum(a1), tl.sum(b1), tl.sum(e1)
    tl.store(out + 5 * stride, x_shift + s_a / n)
    tl.store(out + 6 * stride, tl.maximum(tl.sum(a2) - s_a * (s_a / n), 0.0))
    tl.store(out + 7 * stride, d_shift + s_e / n)
    tl.store(out + 8 * stride, tl.maximum(tl.sum(e2) - s_e * (s_e / n), 0.0))
    tl.store(out + 9 * stride, y_shift + s_b / n)
    tl.store(out + 10 * stride, tl.maximum(tl.sum(b2) - s_b * (s_b / n), 0.0))
    tl.store(out + 11 * stride, tl.sum(ae) - s_a * (s_e / n))
    tl.store(out + 12 * stride, tl.sum(ab) - s_a * (s_b / n))
    tl.store(out + 13 * stride, tl.sum(rc))
    tl.store(out + 14 * stride, tl.sum(far))
    tl.store(out + 15 * stride, tl.sum(big))
    tl.store(out + 16 * stride, tl.sum(rel))
    tl.store(out + 17 * stride, tl.max(peak))
    tl.store(out + 19 * stride, 2.0)


@triton.jit(do_not_specialize=["parts", "stride", "found", "size", "span"])
def locate(
    r, c, parts, stride, found, size, span,
    LANES: tl.constexpr, EACH: tl.constexpr, PROGRAMS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The largest |d| and its first place, from the spans that hold the largest float32 of it.

    These are shared out among the programs, each to as many as there are for one. Where float32
    says all, or there is no difference at all, the first of them is enough.
    """
    program = tl.program_id(0)
    each = tl.arange(0, PROGRAMS)
    cell = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    tops = tl.load(parts + 18 * stride + each, mask=each < stride, other=-1.0)
    most = tl.max(tops)
    held = ((tops == most) & (tops >= 0)).to(tl.int32)
    number = tl.cumsum(held, 0) * held
    spans = tl.sum(held)
    if R.whole and C.whole:
        spans = tl.minimum(spans, 1)
    spans = tl.where(most > 0, spans, tl.minimum(spans, 1))
    sharing = tl.maximum(tl.num_programs(0) // tl.maximum(spans, 1), 1)
    groups = tl.num_programs(0) // sharing
    share = (span + sharing - 1) // sharing
    best = tl.full([], -1.0, tl.float64)
    where = tl.full([], _NOWHERE, tl.int64)
    for turn in range(program // sharing, tl.where(program < groups * sharing, spans, 0), groups):
        one = tl.sum(tl.where(number == turn + 1, each, 0)).to(tl.int64)
        start = one * span + (program % sharing) * share
        stop = tl.minimum(tl.minimum(start + share, (one + 1) * span), size)
        top = tl.full([LANES], -1.0, tl.float64)
        place = tl.full([LANES], _NOWHERE, tl.int64)
        for at in range(start, stop, LANES * EACH):
            x, y, _, finite = _pair(r, c, at, stop, LANES, EACH, R, C)
            away = tl.abs(tl.where(finite, y, 0.0) - tl.where(finite, x, 0.0))
            away = tl.where(finite, away, -1.0)
            here = tl.max(away, 1)
            first = tl.min(tl.where(away == here[:, None], cell.to(tl.int64) + at, _NOWHERE), 1)
            place = tl.where(here > top, first, place)
            top = tl.maximum(top, here)
        largest = tl.max(top)
        first = tl.min(tl.where(top == largest, place, _NOWHERE))
        where = tl.where(largest > best, first, where)
        best = tl.maximum(best, largest)
    out = found + program * 4
    tl.store(out, best)
    if best >= 0:
        tl.store(out + 1, where.to(tl.float64))
        tl.store(out + 2, wide_value(tl.load(r + where), R))
        tl.store(out + 3, wide_value(tl.load(c + where), C))


@triton.jit
def _sums(a, b, c, d):
    """Four sums in one go, since each takes the program's threads to meet."""
    left, right = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), 0))
    first, second = tl.split(left)
    third, fourth = tl.split(right)
    return first, second, third, fourth


@triton.jit
def _column(parts, stride, column, PROGRAMS: tl.constexpr):
    each = tl.arange(0, PROGRAMS)
    return tl.load(parts + column * stride + each, mask=each < stride, other=0.0)


@triton.jit
def _ratio(dot, one, two):
    known = (one > 0) & (two > 0)
    return tl.where(known, dot / tl.where(known, one, 1.0) / tl.where(known, two, 1.0), 0.0)


@triton.jit(do_not_specialize=["parts", "stride", "found", "finders", "row", "size"])
def finish(
    parts, stride, found, finders, row, size,
    SAME: tl.constexpr, PROGRAMS: tl.constexpr, FINDERS: tl.constexpr,
):  # fmt: skip
    """The row (`difference_row.STATE`) of all spans.

    Sums of squares are joined about the mean of one of the spans, from which the others' are off by
    little: nothing large cancels, and a constant keeps no spread.
    """
    each = tl.arange(0, PROGRAMS)
    n = _column(parts, stride, 0, PROGRAMS)
    finite, disagreeing, mismatched, differing = _sums(
        n,
        _column(parts, stride, 2, PROGRAMS),
        _column(parts, stride, 3, PROGRAMS),
        _column(parts, stride, 4, PROGRAMS),
    )
    far, big, rel, dot = _sums(
        _column(parts, stride, 14, PROGRAMS),
        _column(parts, stride, 15, PROGRAMS),
        _column(parts, stride, 16, PROGRAMS),
        _column(parts, stride, 13, PROGRAMS),
    )
    whole = tl.maximum(finite, 1.0)
    first = tl.minimum(tl.min(tl.where(n > 0, each, PROGRAMS)), stride - 1)
    r0 = tl.load(parts + 5 * stride + first)
    d0 = tl.load(parts + 7 * stride + first)
    c0 = tl.load(parts + 9 * stride + first)
    r = tl.where(n > 0, _column(parts, stride, 5, PROGRAMS) - r0, 0.0)
    d = tl.where(n > 0, _column(parts, stride, 7, PROGRAMS) - d0, 0.0)
    c = tl.where(n > 0, _column(parts, stride, 9, PROGRAMS) - c0, 0.0)
    r_sum, d_sum, c_sum, rc = _sums(
        n * r, n * d, n * c, _column(parts, stride, 12, PROGRAMS) + n * r * c
    )
    r_m2, d_m2, c_m2, rd = _sums(
        _column(parts, stride, 6, PROGRAMS) + n * r * r,
        _column(parts, stride, 8, PROGRAMS) + n * d * d,
        _column(parts, stride, 10, PROGRAMS) + n * c * c,
        _column(parts, stride, 11, PROGRAMS) + n * r * d,
    )
    r_rest, d_rest, c_rest = r_sum / whole, d_sum / whole, c_sum / whole
    r_m2 = tl.maximum(r_m2 - finite * r_rest * r_rest, 0.0)
    d_m2 = tl.maximum(d_m2 - finite * d_rest * d_rest, 0.0)
    c_m2 = tl.maximum(c_m2 - finite * c_rest * c_rest, 0.0)
    rd -= finite * r_rest * d_rest
    rc -= finite * r_rest * c_rest
    r_mean, d_mean, c_mean = r0 + r_rest, d0 + d_rest, c0 + c_rest
    r_l2 = tl.sqrt(r_m2 + finite * r_mean * r_mean)
    d_l2 = tl.sqrt(d_m2 + finite * d_mean * d_mean)
    c_l2 = tl.sqrt(c_m2 + finite * c_mean * c_mean)
    finder = tl.arange(0, FINDERS)
    tops = tl.load(found + finder * 4, mask=finder < finders, other=-1.0)
    most = tl.max(tops)
    mine = (tops == most) & (tops >= 0)
    places = tl.load(found + finder * 4 + 1, mask=mine, other=float("inf"))
    at = tl.min(places)
    best = tl.min(tl.where(mine & (places == at), finder, FINDERS - 1))
    best = found + tl.minimum(best, finders - 1) * 4
    relative = tl.max(_column(parts, stride, 17, PROGRAMS))
    known, nothing = finite > 0, float("nan")
    tl.store(row, size.to(tl.float64))
    tl.store(row + 1, finite)
    tl.store(row + 2, size.to(tl.float64) - finite - disagreeing)
    tl.store(row + 3, disagreeing)
    tl.store(row + 4, mismatched)
    if SAME:
        tl.store(row + 5, (differing == 0).to(tl.float64))
    else:
        tl.store(row + 5, 0.0)
    tl.store(row + 6, tl.where(known, d_mean, nothing))
    tl.store(row + 7, tl.where(known, tl.sqrt(d_m2 / whole), nothing))
    tl.store(row + 8, tl.where(known, far / whole, nothing))
    tl.store(row + 9, tl.where(known, d_l2, 0.0))
    tl.store(row + 10, tl.where(known, most, nothing))
    tl.store(row + 11, tl.where(known, at, -1.0))
    tl.store(row + 12, tl.where(known, tl.load(best + 2), nothing))
    tl.store(row + 13, tl.where(known, tl.load(best + 3), nothing))
    tl.store(row + 14, tl.where(known, r_mean, nothing))
    tl.store(row + 15, tl.where(known, tl.sqrt(r_m2 / whole), nothing))
    tl.store(row + 16, tl.where(known, r_l2, 0.0))
    tl.store(row + 17, tl.where(known, big / whole, nothing))
    tl.store(row + 18, tl.where(known, c_mean, nothing))
    tl.store(row + 19, tl.where(known, tl.sqrt(c_m2 / whole), nothing))
    tl.store(row + 20, tl.where(known, c_l2, 0.0))
    tl.store(row + 21, tl.where(known, _ratio(rd + finite * r_mean * d_mean, r_l2, d_l2), 0.0))
    tl.store(row + 22, tl.where(known, _ratio(rd, tl.sqrt(r_m2), tl.sqrt(d_m2)), 0.0))
    tl.store(row + 23, tl.where(known, relative, nothing))
    tl.store(row + 24, tl.where(known, rel / whole, nothing))
    tl.store(row + 25, tl.where(known, _ratio(dot, r_l2, c_l2), 0.0))
    tl.store(row + 26, tl.where(known, _ratio(rc, tl.sqrt(r_m2), tl.sqrt(c_m2)), 0.0))
