"""Exact percentiles of |d| on a device, in bounded memory.

Up to two million distances are kept as they are. Of more, an even sample lays a bracket around each
percentile; a pass over everything counts what lies below the brackets and keeps what lies in them,
about one value in a hundred, to be sorted. A bracket's ends are counted on their own, so that a
value that half of the pairs share needs no room. Should a bracket miss, all is ordered by its bits.

A value's place is decided by its float32: rounding keeps the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.numerics import triton_difference_kernels as kernels
from tensortap.numerics.histogram import BUCKETS, Histogram
from tensortap.numerics.ordering import Ordering
from tensortap.numerics.percentiles import PERCENTS, ranks
from tensortap.numerics.triton_difference_kernels import KINDS
from tensortap.numerics.triton_pairs import as_read, run

__all__ = ["Distances"]

Pair = tuple[torch.Tensor, torch.Tensor]

ALL = 1 << 21  # elements of a pair of which all are taken
STRIDE = 512  # at most: one of so many is sampled
_SAMPLES = 1 << 23  # that are held; beyond, every other is dropped
_SIGMAS = 5.0
_CHUNK = 1 << 22
_LANES, _WARPS, _SPANS = 256, 8, 2048
_FLOAT32_MAX = float(torch.finfo(torch.float32).max)
_TOP = 0x7F7FFFFF  # its bits


class Distances:
    """What is known of |d|: first a sample, then on demand the values at the ranks."""

    def __init__(self) -> None:
        self._samples: list[torch.Tensor] = []
        self._weights: list[int] = []
        self._sorted: tuple[torch.Tensor, torch.Tensor] | None = None

    def sample(self, one: torch.Tensor, two: torch.Tensor) -> None:
        """Take some or all of a pair, flat and contiguous; what is not finite is taken as Inf."""
        size = one.numel()
        stride = 1 if size <= ALL else min(STRIDE, size // (ALL // 2))
        if stride > 1:
            # One of each stretch, but not always the same: the data may have a period.
            which = torch.arange(size // stride, device=one.device)
            mixed = (which * 2654435761) ^ (which >> 5)
            which = which * stride + ((mixed >> 9) % stride)
            one, two = _taken(one, which), _taken(two, which)
        self._samples.append(_distances(one, two))
        self._weights.append(stride)
        while sum(s.numel() for s in self._samples) > _SAMPLES:
            self._samples = [s[::2].clone() for s in self._samples]
            self._weights = [2 * w for w in self._weights]

    def values(self, finite: int, again: Callable[[], Iterable[Pair]]) -> list[float]:
        """The values at `ranks(finite)`; `again` starts another pass over the pairs."""
        wanted = ranks(finite)
        if not wanted:
            return []
        values, weights = self._in_order()
        if all(w == 1 for w in self._weights):
            found: list[float] = values[torch.tensor(wanted, device=values.device)].tolist()
            return found
        margins = self._margins()
        bounds = _bounds(values, weights, margins)
        room = 3 * int(sum(2 * margin for margin in margins)) + (1 << 16)
        kept = torch.empty(room, dtype=torch.float64, device=values.device)
        counts = torch.zeros(18, dtype=torch.int64, device=values.device)
        for pair in again():
            one, two = (side.to(kept.device) for side in pair)  # a stream may have several
            _gather(one, two, bounds, counts, kept)
        values_at = _resolved(wanted, finite, bounds, counts, kept)
        return _by_bits(wanted, again) if values_at is None else values_at

    def histogram(self) -> Histogram:
        """That of the sample, with the weight of what it stands for."""
        values, weights = self._in_order()
        counts = np.zeros(BUCKETS, dtype=np.int64)
        keys = values.clamp(max=_FLOAT32_MAX).to(torch.float32).view(torch.int32) >> 19
        finite = (values < math.inf).sum()
        edges = torch.arange(BUCKETS // 2 + 1, dtype=torch.int32, device=values.device)
        places = torch.minimum(torch.searchsorted(keys, edges), finite)
        cumulative = torch.cat((weights.new_zeros(1), weights.cumsum(0)))[places]
        counts[: BUCKETS // 2] = cumulative.diff().cpu().numpy()
        return Histogram(counts)

    def _in_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sorted is None:
            device = self._samples[0].device if self._samples else None
            samples = [s.to(device) for s in self._samples]
            samples = samples or [torch.empty(0, dtype=torch.float64)]
            each = [
                torch.full_like(s, w, dtype=torch.int64)
                for s, w in zip(samples, self._weights, strict=False)
            ] or [torch.empty(0, dtype=torch.int64)]
            values, order = torch.cat(samples).sort()
            self._sorted = values, torch.cat(each)[order]
            self._samples = [values]
        return self._sorted

    def _margins(self) -> list[float]:
        """By percentile, how far the sample may be off, in elements."""
        assert self._sorted is not None
        squares = float(self._sorted[1].square().sum())
        rest = 8.0 * max(self._weights)
        shares = [percent / 100 for percent in PERCENTS]
        return [_SIGMAS * math.sqrt(p * (1 - p) * squares) + rest for p in shares]


def _taken(flat: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    if flat.element_size() == 1 and flat.dtype.is_floating_point:  # which cannot be indexed
        return flat.view(torch.uint8)[which].view(flat.dtype)
    return flat[which]


def _distances(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    r, c = one.to(torch.float64), two.to(torch.float64)
    finite = torch.isfinite(r) & torch.isfinite(c)
    return torch.where(finite, (c - r).abs(), math.inf)


def _bounds(values: torch.Tensor, weights: torch.Tensor, margins: Sequence[float]) -> torch.Tensor:
    """Sixteen float32 that ascend: each bracket's lower end, the next number, its upper end, the
    next number. All on the device: nobody waits.
    """
    device = values.device
    finite = values < math.inf
    cumulative = torch.where(finite, weights, 0).cumsum(0).to(torch.float64)
    share = torch.tensor(PERCENTS, dtype=torch.float64, device=device) / 100
    margin = torch.tensor(margins, dtype=torch.float64, device=device)
    middle = cumulative[-1] * share
    last = finite.sum() - 1
    low = torch.searchsorted(cumulative, middle - margin) - 1
    high = torch.searchsorted(cumulative, middle + margin) + 1
    keys = values.clamp(max=_FLOAT32_MAX).to(torch.float32).view(torch.int32)
    lower = torch.where(low < 0, 0, keys[low.clamp(min=0)])
    upper = torch.where(high > last, _TOP, keys[torch.minimum(high, last).clamp(min=0)])
    bounds = torch.stack((lower, lower + 1, upper, upper + 1), dim=1).view(-1)
    # Ends that meet are moved apart; then nothing lies between them.
    steps = torch.tensor([0, 1, 1, 2] * len(margins), device=device, dtype=bounds.dtype)
    steps = steps + 3 * torch.arange(len(margins), device=device).repeat_interleave(4)
    bounds = ((bounds - steps).cummax(0).values + steps).clamp(max=_TOP + 1)
    return bounds.to(torch.int32).view(torch.float32)


def _gather(
    one: torch.Tensor,
    two: torch.Tensor,
    bounds: torch.Tensor,
    counts: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    index = one.get_device()
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return _gather(one, two, bounds, counts, kept)
    left, right = KINDS[one.dtype], KINDS[two.dtype]
    each = min(8, 128 // max(left.bits, right.bits))
    lanes = _LANES if index >= 0 else 32
    tiles = -(-one.numel() // (lanes * each * (_SPANS if index >= 0 else 4)))
    grid = (-(-one.numel() // (lanes * each * tiles)), 1, 1)
    args = (as_read(one), as_read(two), bounds, counts, kept, kept.numel(), one.numel(), tiles)
    run(kernels.gather, index, grid, args, (lanes, each, left, right), _WARPS)


def _resolved(
    wanted: Sequence[int],
    finite: int,
    bounds: torch.Tensor,
    counts: torch.Tensor,
    kept: torch.Tensor,
) -> list[float] | None:
    """The values at the ranks, or None where a bracket missed or ran over."""
    ends = bounds.cpu().numpy().astype(np.float64)
    found: NDArray[np.int64] = counts.cpu().numpy()
    below, held, rounded = finite - found[:16], int(found[16]), int(found[17])
    if held > kept.numel():
        return None
    # How many of the kept lie in lower brackets, by bracket.
    inside = below[2::4] - below[1::4]
    earlier = np.cumsum(inside) - inside
    known: dict[int, float] = {}
    places: dict[int, int] = {}
    for rank in wanted:
        region = int(np.searchsorted(below, rank, side="right")) - 1
        kind = region % 4
        if region < 0 or kind == 3 or (kind != 1 and rounded):
            return None
        if kind == 1:
            places[rank] = int(earlier[region // 4] + rank - below[region])
        else:
            known[rank] = float(ends[region])
    if places:
        order = kept[:held].sort().values
        values = order[torch.tensor(list(places.values()), device=kept.device)].tolist()
        known |= dict(zip(places, values, strict=True))
    return [known[rank] for rank in wanted]


def _by_bits(wanted: Sequence[int], again: Callable[[], Iterable[Pair]]) -> list[float]:
    """Slowly, whatever the values are."""
    ordering = Ordering()
    for part in _parts(again()):
        ordering.add(part)
    return ordering.values_at(wanted, lambda: _parts(again()))


def _parts(pairs: Iterable[Pair]) -> Iterator[NDArray[np.float64]]:
    for one, two in pairs:
        for start in range(0, one.numel(), _CHUNK):
            left, right = (side[start : start + _CHUNK] for side in (one, two))
            distances = _distances(left, right)
            yield distances[distances < math.inf].cpu().numpy()
