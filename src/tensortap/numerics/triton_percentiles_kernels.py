# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""Triton's side of triton_percentiles.py: distances, and what lies in brackets of them.

A bracket is four float32 that ascend: a number, the next one, another number and its next one. What
lies between the second and the third is to be looked at; what is on one of the numbers themselves,
which may be many, is only counted. The comparisons are subtractions of which the sign is counted.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from tensortap.numerics.triton_difference_kernels import narrow_value, wide_value

__all__ = ["bracket", "distance", "rounded", "sift"]


@triton.jit
def _away(x, y, R: tl.constexpr, C: tl.constexpr):
    """|d| as float32: of finite pairs a finite number, else NaN or infinity."""
    if R.wide or C.wide:
        away = tl.abs(wide_value(y, C) - wide_value(x, R)).to(tl.float32)
    else:
        away = tl.abs(narrow_value(y, C) - narrow_value(x, R))
    return away


@triton.jit
def _exact(x, y, R: tl.constexpr, C: tl.constexpr):
    """|d| as float64, infinite where the pair is not finite."""
    x, y = wide_value(x, R), wide_value(y, C)
    finite = (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf"))
    return tl.where(
        finite, tl.abs(tl.where(finite, y, 0.0) - tl.where(finite, x, 0.0)), float("inf")
    )


@triton.jit(do_not_specialize=["out", "size"])
def distance(r, c, out, size, TILE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """All distances in float64; infinite where a pair is not finite."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(r + at, mask=at < size, other=0)
    y = tl.load(c + at, mask=at < size, other=0)
    tl.store(out + at, _exact(x, y, R, C), mask=at < size)


@triton.jit
def _below(away, bound):
    """How many of each lane's are less than the bound: those between which the sign is negative."""
    return tl.sum((away - bound).to(tl.int32, bitcast=True) >> 31, 1)


@triton.jit(do_not_specialize=["bounds", "counts", "flags", "size", "tiles"])
def bracket(
    r, c, bounds, counts, flags, size, tiles,
    LANES: tl.constexpr, EACH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """How many distances lie below each of sixteen bounds, four to a bracket, by program; and
    which groups of EACH hold one between a bracket's ends.
    """
    TILE: tl.constexpr = LANES * EACH
    program = tl.program_id(0)
    start = program.to(tl.int64) * tiles * TILE
    stop = tl.minimum(start + tiles.to(tl.int64) * TILE, size)
    lane = tl.arange(0, LANES)
    cell = lane[:, None] * EACH + tl.arange(0, EACH)[None, :]
    b0 = tl.load(bounds + 0)
    b1 = tl.load(bounds + 1)
    b2 = tl.load(bounds + 2)
    b3 = tl.load(bounds + 3)
    b4 = tl.load(bounds + 4)
    b5 = tl.load(bounds + 5)
    b6 = tl.load(bounds + 6)
    b7 = tl.load(bounds + 7)
    b8 = tl.load(bounds + 8)
    b9 = tl.load(bounds + 9)
    b10 = tl.load(bounds + 10)
    b11 = tl.load(bounds + 11)
    b12 = tl.load(bounds + 12)
    b13 = tl.load(bounds + 13)
    b14 = tl.load(bounds + 14)
    b15 = tl.load(bounds + 15)
    n0 = tl.zeros([LANES], tl.int32)
    n1 = tl.zeros([LANES], tl.int32)
    n2 = tl.zeros([LANES], tl.int32)
    n3 = tl.zeros([LANES], tl.int32)
    n4 = tl.zeros([LANES], tl.int32)
    n5 = tl.zeros([LANES], tl.int32)
    n6 = tl.zeros([LANES], tl.int32)
    n7 = tl.zeros([LANES], tl.int32)
    n8 = tl.zeros([LANES], tl.int32)
    n9 = tl.zeros([LANES], tl.int32)
    n10 = tl.zeros([LANES], tl.int32)
    n11 = tl.zeros([LANES], tl.int32)
    n12 = tl.zeros([LANES], tl.int32)
    n13 = tl.zeros([LANES], tl.int32)
    n14 = tl.zeros([LANES], tl.int32)
    n15 = tl.zeros([LANES], tl.int32)
    for at in range(start, stop, TILE):
        left = tl.minimum(stop - at, TILE).to(tl.int32)
        if left == TILE:
            away = _away(tl.load(r + at + cell), tl.load(c + at + cell), R, C)
        else:
            x = tl.load(r + at + cell, mask=cell < left, other=0)
            y = tl.load(c + at + cell, mask=cell < left, other=0)
            away = tl.where(cell < left, _away(x, y, R, C), float("inf"))
        s0 = _below(away, b0)
        s1 = _below(away, b1)
        s2 = _below(away, b2)
        s3 = _below(away, b3)
        s4 = _below(away, b4)
        s5 = _below(away, b5)
        s6 = _below(away, b6)
        s7 = _below(away, b7)
        s8 = _below(away, b8)
        s9 = _below(away, b9)
        s10 = _below(away, b10)
        s11 = _below(away, b11)
        s12 = _below(away, b12)
        s13 = _below(away, b13)
        s14 = _below(away, b14)
        s15 = _below(away, b15)
        n0 += s0
        n1 += s1
        n2 += s2
        n3 += s3
        n4 += s4
        n5 += s5
        n6 += s6
        n7 += s7
        n8 += s8
        n9 += s9
        n10 += s10
        n11 += s11
        n12 += s12
        n13 += s13
        n14 += s14
        n15 += s15
        inside = (s1 - s2) + (s5 - s6) + (s9 - s10) + (s13 - s14)
        group = at // EACH + lane
        tl.store(flags + group, (inside > 0).to(tl.uint8), mask=lane * EACH < left)
    out = counts + program * 16
    tl.store(out + 0, -tl.sum(n0))
    tl.store(out + 1, -tl.sum(n1))
    tl.store(out + 2, -tl.sum(n2))
    tl.store(out + 3, -tl.sum(n3))
    tl.store(out + 4, -tl.sum(n4))
    tl.store(out + 5, -tl.sum(n5))
    tl.store(out + 6, -tl.sum(n6))
    tl.store(out + 7, -tl.sum(n7))
    tl.store(out + 8, -tl.sum(n8))
    tl.store(out + 9, -tl.sum(n9))
    tl.store(out + 10, -tl.sum(n10))
    tl.store(out + 11, -tl.sum(n11))
    tl.store(out + 12, -tl.sum(n12))
    tl.store(out + 13, -tl.sum(n13))
    tl.store(out + 14, -tl.sum(n14))
    tl.store(out + 15, -tl.sum(n15))


@triton.jit(do_not_specialize=["bounds", "groups", "many", "kept", "room", "held", "size", "tiles"])
def sift(
    r, c, bounds, groups, many, kept, room, held, size, tiles,
    LANES: tl.constexpr, EACH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Keep what lies in a bracket, in float64 and in any order, from these groups of EACH."""
    first = tl.program_id(0) * tiles * LANES
    for at in range(first, tl.minimum(first + tiles * LANES, many), LANES):
        lane = at + tl.arange(0, LANES)
        group = tl.load(groups + lane, mask=lane < many, other=0)
        cell = group[:, None] * EACH + tl.arange(0, EACH)[None, :]
        there = (lane < many)[:, None] & (cell < size)
        x = tl.load(r + cell, mask=there, other=0)
        y = tl.load(c + cell, mask=there, other=0)
        away = tl.where(there, _away(x, y, R, C), float("inf"))
        inside = (away >= tl.load(bounds + 1)) & (away < tl.load(bounds + 2))
        inside = inside | ((away >= tl.load(bounds + 5)) & (away < tl.load(bounds + 6)))
        inside = inside | ((away >= tl.load(bounds + 9)) & (away < tl.load(bounds + 10)))
        inside = inside | ((away >= tl.load(bounds + 13)) & (away < tl.load(bounds + 14)))
        some = tl.sum(inside.to(tl.int32), 1)
        base = tl.atomic_add(held, tl.sum(some).to(tl.int64))
        before = (tl.cumsum(some, 0) - some)[:, None] + tl.cumsum(inside.to(tl.int32), 1) - 1
        place = base + before
        tl.store(kept + place, _exact(x, y, R, C), mask=inside & (place < room))


@triton.jit(do_not_specialize=["bounds", "counts", "size", "tiles"])
def rounded(
    r, c, bounds, counts, size, tiles,
    TILE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """How many distances are one of the brackets' numbers in float32, but not in float64."""
    start = tl.program_id(0).to(tl.int64) * tiles * TILE
    stop = tl.minimum(start + tiles.to(tl.int64) * TILE, size)
    count = tl.zeros([TILE], tl.int32)
    for at in range(start, stop, TILE):
        lane = at + tl.arange(0, TILE)
        x = tl.load(r + lane, mask=lane < stop, other=0)
        y = tl.load(c + lane, mask=lane < stop, other=0)
        away, exact = _away(x, y, R, C), _exact(x, y, R, C)
        on = (away == tl.load(bounds)) | (away == tl.load(bounds + 2))
        on = on | (away == tl.load(bounds + 4)) | (away == tl.load(bounds + 6))
        on = on | (away == tl.load(bounds + 8)) | (away == tl.load(bounds + 10))
        on = on | (away == tl.load(bounds + 12)) | (away == tl.load(bounds + 14))
        count += (on & (exact != away.to(tl.float64)) & (lane < stop)).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(count))
