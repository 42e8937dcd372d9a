"""Raw summary rows as tensors or arrays: empty ones, and many of them made one.

A row is `summary.COLUMNS`, then the first values. Whatever else stands in it, a row whose count is
0 is empty. Nothing here reads a value of a device: what is merged there stays there.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.numerics.summary import COLUMNS, FIRST, WIDTH

__all__ = [
    "MOMENTS",
    "empty_rows",
    "joined_first",
    "merge_into",
    "merge_rows",
    "merged",
    "reset",
]

_COUNTS, MOMENTS = 7, len(COLUMNS)


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
        rows[..., :_COUNTS].zero_()
        rows[..., MOMENTS - 1].zero_()  # l2; an assignment to one number would wait


def merge_rows(rows: torch.Tensor, others: torch.Tensor) -> None:
    """Merge rows into rows of the same device, in place, without waiting for it."""
    with torch.no_grad():
        both = torch.stack([rows[..., :MOMENTS], others[..., :MOMENTS]], dim=-2)
        first = joined_first(rows[..., :1], rows[..., MOMENTS:], others[..., MOMENTS:])
        rows[..., MOMENTS:] = first
        rows[..., :MOMENTS] = merged(both)


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
    first = (a[MOMENTS : MOMENTS + known] + b[MOMENTS:])[:FIRST]
    l2 = math.hypot(a[-1 - FIRST], b[-1 - FIRST])
    counts = [x + y for x, y in zip(a[:_COUNTS], b[:_COUNTS], strict=True)]
    many, few = a[0] - a[1] - a[2] - a[3], b[0] - b[1] - b[2] - b[3]
    if many < few:
        many, few, a, b = few, many, b, a
    if not few:
        return [*counts, *a[_COUNTS : MOMENTS - 1], l2, *first]
    mean, std, low, high, absmax = a[_COUNTS : MOMENTS - 1]
    mean2, std2, low2, high2, absmax2 = b[_COUNTS : MOMENTS - 1]
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


def merged(parts: torch.Tensor) -> torch.Tensor:
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
            range(_COUNTS, MOMENTS), (0.0, 0.0, math.inf, -math.inf, 0.0, 0.0), strict=True
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


def joined_first(count: torch.Tensor, held: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """The first values of a row of which `count` numbers are known, followed by others."""
    padding = held.new_full((*held.shape[:-1], FIRST - more.shape[-1]), math.nan)
    place = torch.arange(FIRST, device=held.device)
    known = count.clamp(max=FIRST).to(torch.int64)
    index = torch.where(place < known, place, FIRST + place - known)
    return torch.cat([held, more, padding], -1).gather(-1, index.expand(held.shape))
