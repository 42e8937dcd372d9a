# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""Errors by token and by channel of a pair on a device, in one pass over both.

A program takes some rows of some columns, in float64: it leaves its part of these rows' sums, and
of these columns'. The parts are put together by torch, and come over once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from numpy.typing import NDArray

from tensortap.numerics.triton_difference_kernels import KINDS, wide_value
from tensortap.numerics.triton_pairs import as_read, run

__all__ = ["profile_on"]

Pair = tuple[torch.Tensor, torch.Tensor]
Table = NDArray[np.float64]

_TILE, _WARPS = 1024, 8
_PROGRAMS = 2112
_MOST_PARTS = 1 << 21  # rows of channels' partial sums: 64 MiB


@triton.jit(do_not_specialize=["tokens", "channels", "rows", "width", "span", "blocks"])
def spread(
    r, c, tokens, channels, rows, width, span, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`span` rows of COLUMNS columns; both tables have four numbers a row (`profile.COLUMNS`)."""
    program = tl.program_id(0).to(tl.int64)
    block, part = program % blocks, program // blocks
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    first = part * span
    last = tl.minimum(first + span, rows)
    d2 = tl.zeros([ROWS, COLUMNS], tl.float64)
    r2 = tl.zeros([ROWS, COLUMNS], tl.float64)
    top = tl.zeros([ROWS, COLUMNS], tl.float64)
    odd = tl.zeros([ROWS, COLUMNS], tl.int32)
    for at in range(first, last, ROWS):
        row = at + tl.arange(0, ROWS)
        there = (row < last)[:, None] & (column < width)[None, :]
        place = row[:, None] * width + column[None, :]
        x = wide_value(tl.load(r + place, mask=there, other=0), R)
        y = wide_value(tl.load(c + place, mask=there, other=0), C)
        finite = (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf"))
        alike = finite | (x == y) | ((x != x) & (y != y))
        wrong = tl.where(alike, 0, 1)
        x, y = tl.where(finite, x, 0.0), tl.where(finite, y, 0.0)
        d = y - x
        d2 += d * d
        r2 += x * x
        top = tl.maximum(top, tl.abs(d))
        odd += wrong
        out = tokens + (block * rows + row) * 4
        tl.store(out, tl.sum(d * d, 1), mask=row < last)
        tl.store(out + 1, tl.sum(x * x, 1), mask=row < last)
        tl.store(out + 2, tl.max(tl.abs(d), 1), mask=row < last)
        tl.store(out + 3, tl.sum(wrong, 1).to(tl.float64), mask=row < last)
    out = channels + (part * width + column) * 4
    tl.store(out, tl.sum(d2, 0), mask=column < width)
    tl.store(out + 1, tl.sum(r2, 0), mask=column < width)
    tl.store(out + 2, tl.max(top, 0), mask=column < width)
    tl.store(out + 3, tl.sum(odd, 0).to(tl.float64), mask=column < width)


def profile_on(pieces: Iterable[Pair], width: int) -> tuple[Table, Table]:
    """Tokens and channels of flat pairs in order, each of whole tokens of this width."""
    tokens: list[torch.Tensor] = []
    channels: list[torch.Tensor] = []
    for one, two in pieces:
        by_token, by_channel = _parts(one, two, width)
        tokens.append(_together(by_token))
        channels.append(_together(by_channel))
    every = torch.cat(tokens)
    both = torch.cat((every, _together(torch.stack(channels)))).cpu().numpy()
    return both[: len(every)], both[len(every) :]


def _parts(one: torch.Tensor, two: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = one.get_device()
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return _parts(one, two, width)
    rows = one.numel() // width
    columns = min(_TILE, triton.next_power_of_2(width))
    together = _TILE // columns
    blocks = -(-width // columns)
    most = _PROGRAMS if index >= 0 else 4
    shares = max(1, min(most // blocks, _MOST_PARTS // width, -(-rows // together)))
    span = -(-rows // (shares * together)) * together
    shares = -(-rows // span)
    tokens = torch.empty((blocks, rows, 4), dtype=torch.float64, device=one.device)
    channels = torch.empty((shares, width, 4), dtype=torch.float64, device=one.device)
    args = (as_read(one), as_read(two), tokens, channels, rows, width, span, blocks)
    ways = (together, columns, KINDS[one.dtype], KINDS[two.dtype])
    run(spread, index, blocks * shares, args, ways, _WARPS)
    return tokens, channels


def _together(parts: torch.Tensor) -> torch.Tensor:
    """Parts along the first axis as one: sums, but for the maxima."""
    if len(parts) == 1:
        return parts[0]
    result = parts.sum(dim=0)
    result[:, 2] = parts[:, :, 2].amax(dim=0)
    return result
