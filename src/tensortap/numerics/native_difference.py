"""Differences by the compiled core, for pairs in CPU memory.

A pair that lies in order is handed over as it is, however large: the core reads it in chunks. Views
go piece by piece through `layout.paired_pieces`. The stream is read once for its length, once for a
sample, once for everything, and again only where a percentile escaped the cells that the sample
laid for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.numerics.difference_row import EMPTY, STATE, State, merge_rows, tolerances
from tensortap.numerics.histogram import BUCKETS, Histogram
from tensortap.numerics.layout import paired_pieces, plain
from tensortap.numerics.native import CODES, core, suits

if TYPE_CHECKING:
    from tensortap._core import Percentiles

__all__ = ["NativeDifference", "suits_pair"]

Pair = tuple[torch.Tensor, torch.Tensor]

_COPY_LIMIT = 1 << 22


def suits_pair(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Whether the core can read both."""
    if core is None or not hasattr(core, "difference"):  # a core older than this file
        return False
    return suits(reference) and suits(candidate)


class _Memory(NamedTuple):
    """What the core wants to know of a pair that lies in order."""

    reference: int
    reference_dtype: int
    candidate: int
    candidate_dtype: int
    n: int


class NativeDifference:
    """What the native backend knows about pairs."""

    # Which instruction set, and how many threads at most: all there is, unless a test says so.
    isa = -1
    threads = 0

    def difference_row(
        self,
        stream: Callable[[], Iterator[Pair]],
        *,
        percentiles: bool,
        rtol: float | None,
        atol: float | None,
    ) -> tuple[Sequence[float], Sequence[float] | None, Histogram | None]:
        with torch.no_grad():
            wanted = self._planned(stream) if percentiles else None
            row = self._row(stream, wanted, rtol, atol)
            if wanted is None:
                return row, None, None
            while not wanted.settle(int(row.finite)):
                for pair in stream():
                    for memory in _memories(*pair):
                        wanted.scan(*memory, self.threads, self.isa)
        counts = np.zeros(BUCKETS, dtype=np.int64)
        wanted.histogram(counts.ctypes.data)
        return row, wanted.values(), Histogram(counts)

    def _planned(self, stream: Callable[[], Iterator[Pair]]) -> Percentiles:
        assert core is not None
        total = sum(r.numel() * _parts(r, c) for r, c in stream())
        wanted: Percentiles = core.Percentiles(total)
        for reference, candidate in stream():
            memory = _whole(reference, candidate)
            if memory is not None:
                wanted.sample(*memory, self.threads, self.isa)
            else:
                _sample_views(wanted, reference, candidate, self.isa)
        wanted.plan()
        return wanted

    def _row(
        self,
        stream: Callable[[], Iterator[Pair]],
        wanted: Percentiles | None,
        rtol: float | None,
        atol: float | None,
    ) -> State:
        assert core is not None
        row = EMPTY
        part = array("d", bytes(8 * len(STATE)))
        out, _ = part.buffer_info()
        for reference, candidate in stream():
            usual = tolerances(reference.dtype, candidate.dtype)
            limits = (usual[0] if rtol is None else rtol, usual[1] if atol is None else atol)
            if reference.dtype != candidate.dtype:
                row = row._replace(identical=0.0)
            for memory in _memories(reference, candidate):
                core.difference(*memory, *limits, out, wanted, self.threads, self.isa)
                row = merge_rows(row, part)
        return row

    def profile_rows(
        self, reference: torch.Tensor, candidate: torch.Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        assert core is not None
        parts = _parts(reference, candidate)
        width = reference.shape[-1]
        limit = max(1, _COPY_LIMIT // width) * width  # whole tokens
        tokens = np.zeros((reference.numel() // width, 4))
        channels = np.zeros((width * parts, 4))
        row = 0
        with torch.no_grad():
            for memory in _memories(reference, candidate, limit):
                rows = memory.n // (width * parts)
                here = tokens.ctypes.data + row * tokens.strides[0]
                there = channels.ctypes.data
                core.profile(*memory[:4], rows, width * parts, here, there, self.threads, self.isa)
                row += rows
        if parts == 1:
            return tokens, channels
        sides = channels.reshape(width, parts, 4)
        joined = sides.sum(axis=1)
        joined[:, 2] = sides[:, :, 2].max(axis=1)
        return tokens, joined


def _parts(reference: torch.Tensor, candidate: torch.Tensor) -> int:
    """How many numbers an element of this pair is: two, when either is complex."""
    return max(CODES[reference.dtype][1], CODES[candidate.dtype][1])


def _whole(reference: torch.Tensor, candidate: torch.Tensor) -> _Memory | None:
    """The pair where it lies, when both do so in the order of their elements."""
    for tensor in (reference, candidate):
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return None
    (code, parts), (other, others) = CODES[reference.dtype], CODES[candidate.dtype]
    if parts != others:
        return None
    count = reference.numel() * parts
    return _Memory(reference.data_ptr(), code, candidate.data_ptr(), other, count)


def _memories(
    reference: torch.Tensor, candidate: torch.Tensor, limit: int = _COPY_LIMIT
) -> Iterator[_Memory]:
    """All of the pair, in order; what is yielded holds until the next is asked for."""
    memory = _whole(reference, candidate)
    if memory is not None:
        yield memory
        return
    for left, right in paired_pieces(reference.detach(), candidate.detach(), limit):
        left, right = plain(left), plain(right)
        if left.is_complex() != right.is_complex():
            left, right = _apart(left), _apart(right)
        piece = _whole(left, right)
        assert piece is not None
        yield piece


def _apart(flat: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts by turns; a real number has a zero for the second."""
    if flat.is_complex():
        return torch.view_as_real(flat).reshape(-1)
    real = flat.to(torch.float64)
    return torch.stack((real, torch.zeros_like(real)), dim=-1).reshape(-1)


def _sample_views(
    wanted: Percentiles, reference: torch.Tensor, candidate: torch.Tensor, isa: int
) -> None:
    """Sample a pair of which one is a view, touching no more of it than the sample."""
    parts = _parts(reference, candidate)
    n = reference.numel() * parts
    if parts == 2 or not reference.dim():
        for memory in _memories(reference, candidate):
            wanted.sample(*memory, isa=isa)
        return
    assert core is not None
    starts = torch.tensor(wanted.places(n), dtype=torch.int64)
    flat = (starts[:, None] + torch.arange(core.RUN)).clamp_(max=max(0, n - 1)).reshape(-1)
    index = torch.unravel_index(flat, reference.shape)
    left, right = (_gathered(tensor.detach(), index) for tensor in (reference, candidate))
    gathered = _whole(left, right)
    assert gathered is not None
    wanted.sample_runs(*gathered[:4], n, isa=isa)


def _gathered(tensor: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if tensor.element_size() == 1:  # 8-bit floats cannot be indexed
        return tensor.view(torch.uint8)[index].view(tensor.dtype).contiguous()
    return plain(tensor[index]).contiguous()
