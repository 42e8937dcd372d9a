"""Exact percentiles of |d| on a device, in bounded memory. The kernels:
triton_percentiles_kernels.py.

Up to two million distances are kept as they are. Of more, an even sample lays a bracket around each
percentile; a pass over everything counts what lies below the brackets, and finds what lies in them,
about one value in a hundred, to be sorted. A bracket's ends are counted on their own, so that a
value that half of the pairs share needs no room. Should a bracket miss, all is ordered by its bits.

A value's place is decided by its float32: rounding keeps the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.numerics import triton_percentiles_kernels as kernels
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
_FLOAT32_MAX = float(torch.finfo(torch.float32).max)
_TOP = 0x7F7FFFFF  # its bits
_BOUNDS = 4 * len(PERCENTS)


class Shape(NamedTuple):
    """How the kernels are cut."""

    lanes: int = 256
    tile: int = 2048
    spans: int = 2112


SHAPE = Shape()
INTERPRETED = Shape(lanes=32, tile=256, spans=3)


class Distances:
    """What is known of |d|: first a sample, then on demand the values at the ranks."""

    def __init__(self) -> None:
        self._samples: list[torch.Tensor] = []
        self._weights: list[int] = []
        self._sorted: torch.Tensor | None = None
        self._below: torch.Tensor | None = None  # what all before each in order stand for
        self._squares = 0.0  # of the weights

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
        values = self._in_order()
        if self._exact:
            found: list[float] = torch.stack([values[rank] for rank in wanted]).tolist()
            return found
        assert self._below is not None
        margins = self._margins()
        bounds = _bounds(values, self._below, margins)
        room = 3 * int(sum(2 * margin for margin in margins)) + (1 << 16)
        inside = _Inside(bounds, room)
        for one, two in again():
            inside.add(one, two)
        values_at = inside.values_at(wanted, again)
        return _by_bits(wanted, again) if values_at is None else values_at

    def histogram(self, finite: int) -> Histogram:
        """That of the sample, with the weight of what it stands for."""
        values = self._in_order()
        counts = np.zeros(BUCKETS, dtype=np.int64)
        keys = values.clamp(max=_FLOAT32_MAX).to(torch.float32).view(torch.int32) >> 19
        edges = torch.arange(BUCKETS // 2 + 1, dtype=torch.int32, device=values.device)
        places = torch.searchsorted(keys, edges)
        if self._below is not None:
            places = self._below[places]
        found: NDArray[np.int64] = places.cpu().numpy()
        counts[: BUCKETS // 2] = np.diff(
            found if self._below is not None else found.clip(max=finite)
        )
        return Histogram(counts)

    @property
    def _exact(self) -> bool:
        return all(weight == 1 for weight in self._weights)

    def _in_order(self) -> torch.Tensor:
        """The sample, sorted."""
        if self._sorted is None:
            home = self._samples[0].device if self._samples else None
            samples = [s.to(home) for s in self._samples] or [torch.empty(0, dtype=torch.float64)]
            every = samples[0] if len(samples) == 1 else torch.cat(samples)
            self._sorted, order = every.sort()
            if not self._exact:
                each = torch.cat(
                    [
                        torch.full_like(s, weight, dtype=torch.int64)
                        for s, weight in zip(samples, self._weights, strict=True)
                    ]
                )
                each = torch.where(self._sorted < math.inf, each[order], 0)
                self._below = torch.cat((each.new_zeros(1), each.cumsum(0)))
                squares = [w * w * s.numel() for s, w in zip(samples, self._weights, strict=True)]
                self._squares = float(sum(squares))
            self._samples.clear()
        return self._sorted

    def _margins(self) -> list[float]:
        """By percentile, how far the sample may be off, in elements."""
        rest = 8.0 * max(self._weights)
        shares = [percent / 100 for percent in PERCENTS]
        return [_SIGMAS * math.sqrt(p * (1 - p) * self._squares) + rest for p in shares]


def _taken(flat: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    if flat.element_size() == 1 and flat.dtype.is_floating_point:  # which cannot be indexed
        return flat.view(torch.uint8)[which].view(flat.dtype)
    return flat[which]


def _distances(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """All, in float64; infinite where a pair is not finite."""
    index = _entered(one)
    if index is None:
        with torch.cuda.device(one.device):
            return _distances(one, two)
    tile = _shape(index).tile
    out = torch.empty(one.numel(), dtype=torch.float64, device=one.device)
    if one.numel():
        ways = (tile, KINDS[one.dtype], KINDS[two.dtype])
        args = (as_read(one), as_read(two), out, one.numel())
        run(kernels.distance, index, -(-one.numel() // tile), args, ways)
    return out


def _entered(tensor: torch.Tensor) -> int | None:
    """The number of the current device, -1 for the interpreter; None if it is not the tensor's."""
    index = tensor.get_device()
    return index if index < 0 or index == torch.cuda.current_device() else None


def _shape(index: int) -> Shape:
    return SHAPE if index >= 0 else INTERPRETED


def _bounds(values: torch.Tensor, below: torch.Tensor, margins: Sequence[float]) -> torch.Tensor:
    """Sixteen float32 that ascend: each bracket's lower end, the next number, its upper end, the
    next number. All on the device: nobody waits.
    """
    device = values.device
    finite = values < math.inf
    cumulative = below[1:].to(torch.float64)
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
    bounds = ((bounds - steps).cummax(0).values + steps).clamp(max=_TOP)
    return bounds.to(torch.int32).view(torch.float32)


class _Inside:
    """A pass over everything: what lies below the bounds, and what between a bracket's ends."""

    def __init__(self, bounds: torch.Tensor, room: int) -> None:
        self.bounds = bounds
        self.kept = torch.empty(room, dtype=torch.float64, device=bounds.device)
        self.held = torch.zeros(1, dtype=torch.int64, device=bounds.device)
        self.below = torch.zeros(_BOUNDS, dtype=torch.int64, device=bounds.device)

    def add(self, one: torch.Tensor, two: torch.Tensor) -> None:
        one, two = one.to(self.kept.device), two.to(self.kept.device)  # a stream may have several
        index = _entered(one)
        if index is None:
            with torch.cuda.device(one.device):
                return self.add(one, two)
        r, c, size, shape = as_read(one), as_read(two), one.numel(), _shape(index)
        left, right = KINDS[one.dtype], KINDS[two.dtype]
        group = 4 if max(left.bits, right.bits) == 32 else 8  # that are looked at again together
        ways = (shape.lanes, group, left, right)
        tiles = -(-size // (shape.lanes * group * shape.spans))
        programs = -(-size // (shape.lanes * group * tiles))
        flags = torch.empty(-(-size // group), dtype=torch.uint8, device=r.device)
        counts = torch.empty((programs, _BOUNDS), dtype=torch.int32, device=r.device)
        args = (r, c, self.bounds, counts, flags, size, tiles)
        run(kernels.bracket, index, programs, args, ways)
        self.below += counts.sum(dim=0)
        groups = flags.nonzero().view(-1)
        many = groups.numel()
        if not many:
            return None
        tiles = -(-many // (shape.lanes * shape.spans))
        # Not `run`, which may do it twice: this one counts on.
        kernels.sift[(-(-many // (shape.lanes * tiles)),)](
            r, c, self.bounds, groups, many, self.kept, self.kept.numel(), self.held, size, tiles,
            *ways, num_warps=8,
        )  # fmt: skip
        return None

    def values_at(
        self, wanted: Sequence[int], again: Callable[[], Iterable[Pair]]
    ) -> list[float] | None:
        """The values at the ranks, or None where a bracket missed or ran over."""
        ends = self.bounds.cpu().numpy().astype(np.float64)
        below: NDArray[np.int64] = self.below.cpu().numpy()
        held = int(self.held)
        if held > self.kept.numel():
            return None
        # How many of the kept lie in lower brackets, by bracket.
        inside = below[2::4] - below[1::4]
        earlier = np.cumsum(inside) - inside
        known: dict[int, float] = {}
        places: dict[int, int] = {}
        for rank in wanted:
            region = int(np.searchsorted(below, rank, side="right")) - 1
            if region < 0 or region % 4 == 3:
                return None
            if region % 4 == 1:
                places[rank] = int(earlier[region // 4] + rank - below[region])
            else:
                known[rank] = float(ends[region])
        if any(known.values()) and any(self._rounded(*pair) for pair in again()):
            return None
        if places:
            order = self.kept[:held].sort().values
            values = torch.stack([order[place] for place in places.values()]).tolist()
            known |= dict(zip(places, values, strict=True))
        return [known[rank] for rank in wanted]

    def _rounded(self, one: torch.Tensor, two: torch.Tensor) -> bool:
        """Whether float32 takes any other distance for one of the brackets' ends."""
        left, right = KINDS[one.dtype], KINDS[two.dtype]
        if left.whole and right.whole:
            return False
        one, two = one.to(self.kept.device), two.to(self.kept.device)
        index = _entered(one)
        if index is None:
            with torch.cuda.device(one.device):
                return self._rounded(one, two)
        size, shape = one.numel(), _shape(index)
        tiles = -(-size // (shape.tile * shape.spans))
        programs = -(-size // (shape.tile * tiles))
        counts = torch.empty(programs, dtype=torch.int32, device=one.device)
        args = (as_read(one), as_read(two), self.bounds, counts, size, tiles)
        run(kernels.rounded, index, programs, args, (shape.tile, left, right))
        return bool(counts.any())


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
