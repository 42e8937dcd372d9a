"""Differences by plain torch operations in float64: any device and dtype, a piece at a time.

It defines what the other backends must return. Pieces bound the memory; their rows are merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.numerics.difference_row import EMPTY, State, merge_rows, tolerances
from tensortap.numerics.histogram import BUCKETS, Histogram
from tensortap.numerics.layout import paired_pieces, plain
from tensortap.numerics.ordering import Ordering
from tensortap.numerics.percentiles import ranks

__all__ = ["CHUNK", "ReferenceDifference"]

CHUNK = 1 << 20
_FLOAT32_MAX = float(torch.finfo(torch.float32).max)
# Squares of what lies outside leave the range of float64, so such values are scaled.
_TOO_LARGE, _TOO_SMALL = 1e140, 1e-140

Stream = Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]


class ReferenceDifference:
    """What the reference backend knows about pairs."""

    def difference_row(
        self, stream: Stream, *, percentiles: bool, rtol: float | None, atol: float | None
    ) -> tuple[Sequence[float], Sequence[float] | None, Histogram | None]:
        row, ordering = EMPTY, Ordering()
        counts = np.zeros(BUCKETS, dtype=np.int64)
        with torch.no_grad():
            for reference, candidate in stream():
                usual = tolerances(reference.dtype, candidate.dtype)
                limits = (usual[0] if rtol is None else rtol, usual[1] if atol is None else atol)
                if reference.dtype != candidate.dtype:
                    row = row._replace(identical=0.0)
                for piece in _pieces(reference, candidate, CHUNK):
                    finite = _finite(piece)
                    row = merge_rows(row, _measure(piece, finite, *limits))
                    if percentiles:
                        distances = _distances(finite)
                        counts += _histogram(distances)
                        ordering.add(distances.cpu().numpy())
            if not percentiles:
                return row, None, None
            found = ordering.values_at(ranks(int(row.finite)), lambda: _all_distances(stream))
        return row, found, Histogram(counts)

    def profile_rows(
        self, reference: torch.Tensor, candidate: torch.Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        width = reference.shape[-1]
        limit = max(1, CHUNK // width) * width  # whole tokens
        tokens, channels = np.empty((reference.numel() // width, 4)), np.zeros((width, 4))
        start = 0
        with torch.no_grad():
            for piece in _pieces(reference, candidate, limit):
                columns = _profile_columns(piece, width)
                here = columns[0].shape[0]
                tokens[start : start + here] = _reduced(columns, axis=1)
                part = _reduced(columns, axis=0)
                channels[:, 2] = np.maximum(channels[:, 2], part[:, 2])
                channels[:, [0, 1, 3]] += part[:, [0, 1, 3]]
                start += here
        return tokens, channels


class _Piece(NamedTuple):
    """Flat parts of both tensors, in their own dtypes; complex numbers taken apart."""

    reference: torch.Tensor
    candidate: torch.Tensor
    identical: bool
    parts: int


class _Finite(NamedTuple):
    """The finite pairs of a piece in float64; `unit` times d where d itself would overflow."""

    reference: torch.Tensor
    candidate: torch.Tensor
    d: torch.Tensor
    unit: float
    mask: torch.Tensor
    agreeing: torch.Tensor


def _pieces(reference: torch.Tensor, candidate: torch.Tensor, limit: int) -> Iterator[_Piece]:
    # A quantised tensor cannot always be sliced; conjugates and signs are resolved by the piece.
    left, right = (t.dequantize() if t.is_quantized else t for t in (reference, candidate))
    for one, two in paired_pieces(left.detach(), right.detach(), limit):
        one, two = plain(one), plain(two)
        if one.device != two.device or one.device.type == "mps":  # which has no float64
            one, two = one.cpu(), two.cpu()
        same = one.dtype == two.dtype and torch.equal(_bytes(one), _bytes(two))
        parts = 2 if one.is_complex() or two.is_complex() else 1
        if parts == 2:
            one, two = _apart(one), _apart(two)
        yield _Piece(one, two, same, parts)


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    if flat.stride(0) != 1:  # a single element, of which any stride will do
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _apart(flat: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts by turns; a real number has a zero for the second."""
    if flat.is_complex():
        return torch.view_as_real(flat).reshape(-1)
    real = flat.to(torch.float64)
    return torch.stack((real, torch.zeros_like(real)), dim=-1).reshape(-1)


def _finite(piece: _Piece) -> _Finite:
    one, two = piece.reference, piece.candidate
    reference, candidate = one.to(torch.float64), two.to(torch.float64)
    mask = torch.isfinite(reference) & torch.isfinite(candidate)
    agreeing = ~mask & ((reference == candidate) | (reference.isnan() & candidate.isnan()))
    exact = {one.dtype, two.dtype} & {torch.int64, torch.uint64}
    if exact and not (one.is_floating_point() or two.is_floating_point()):
        d = _subtract_integers(two, one)
    else:
        d = candidate - reference
    if not bool(mask.all()):
        reference, candidate, d = reference[mask], candidate[mask], d[mask]
    unit = 1.0
    if bool(d.isinf().any()):
        d, unit = candidate / 4 - reference / 4, 4.0
    return _Finite(reference, candidate, d, unit, mask, agreeing)


def _subtract_integers(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """The exact difference of 64-bit integers, rounded once: each half of the bits on its own."""
    (high, low), (their_high, their_low) = _halves(one), _halves(two)
    return (high - their_high).to(torch.float64) * 2.0**32 + (low - their_low).to(torch.float64)


def _halves(integers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = integers.view(torch.int64) if integers.dtype == torch.uint64 else integers.long()
    high = whole >> 32
    if integers.dtype == torch.uint64:
        high = high & 0xFFFFFFFF
    return high, whole & 0xFFFFFFFF


def _measure(piece: _Piece, finite: _Finite, rtol: float, atol: float) -> State:
    count, good = finite.mask.numel(), finite.d.numel()
    agreeing = int(finite.agreeing.sum())
    disagreeing = count - good - agreeing
    row = State(
        count=count,
        finite=good,
        agreeing=agreeing,
        disagreeing=disagreeing,
        mismatched=disagreeing,
        identical=float(piece.identical),
    )
    if not good:
        return row
    distances, sizes = _distances(finite), finite.reference.abs()
    mismatched = int((distances > atol + rtol * sizes).sum())
    r, c, d = _side(finite.reference), _side(finite.candidate), _side(finite.d)
    relative = _side(distances / (sizes + 1e-8))
    at = int(distances.argmax())
    return row._replace(
        mismatched=disagreeing + mismatched,
        d_mean=d.mean * finite.unit,
        d_std=d.std * finite.unit,
        d_mae=d.mae * finite.unit,
        d_l2=d.l2 * finite.unit,
        max_abs=float(distances[at]),
        max_abs_at=float(finite.mask.nonzero()[at]) if good < count else float(at),
        max_abs_reference=float(finite.reference[at]),
        max_abs_candidate=float(finite.candidate[at]),
        ref_mean=r.mean,
        ref_std=r.std,
        ref_l2=r.l2,
        ref_mae=r.mae,
        cand_mean=c.mean,
        cand_std=c.std,
        cand_l2=c.l2,
        cos_rd=_angle(r.values, d.values),
        corr_rd=_angle(r.deviations, d.deviations),
        max_relative=relative.largest,
        mean_relative=relative.mean,
        cos_rc=_angle(r.values, c.values),
        corr_rc=_angle(r.deviations, c.deviations),
    )


class _Side(NamedTuple):
    """Moments of some values; `values` and `deviations` are scaled to where squares are safe."""

    mean: float
    std: float
    l2: float
    mae: float
    largest: float
    values: torch.Tensor
    deviations: torch.Tensor


def _side(values: torch.Tensor) -> _Side:
    n = values.numel()
    low, high = float(values.min()), float(values.max())
    largest = max(abs(low), abs(high))
    scale = 1.0
    if largest > _TOO_LARGE or 0 < largest < _TOO_SMALL:
        scale = math.ldexp(1.0, max(-1000, min(1000, -math.frexp(largest)[1])))
        values = values * scale
    if low == high:  # whose spread is nothing at all, not what rounding leaves
        mean, deviations = low * scale, torch.zeros_like(values)
    else:
        mean = float(values.sum()) / n
        deviations = values - mean
        rest = float(deviations.sum()) / n  # what rounding the mean left over
        mean, deviations = mean + rest, deviations.sub_(rest)
    std, l2 = _norm(deviations) / math.sqrt(n), _norm(values)
    mae = float(values.abs().sum()) / n
    return _Side(mean / scale, std / scale, l2 / scale, mae / scale, largest, values, deviations)


def _norm(values: torch.Tensor) -> float:
    return math.sqrt(float(torch.dot(values, values)))


def _angle(one: torch.Tensor, two: torch.Tensor) -> float:
    norms = _norm(one), _norm(two)
    return float(torch.dot(one, two)) / norms[0] / norms[1] if all(norms) else 0.0


def _distances(finite: _Finite) -> torch.Tensor:
    return finite.d.abs() * finite.unit


def _all_distances(stream: Stream) -> Iterator[NDArray[np.float64]]:
    for reference, candidate in stream():
        for piece in _pieces(reference, candidate, CHUNK):
            yield _distances(_finite(piece)).cpu().numpy()


def _histogram(distances: torch.Tensor) -> NDArray[np.int64]:
    keys = distances.clamp(max=_FLOAT32_MAX).to(torch.float32).view(torch.int32) >> 19
    counts: NDArray[np.int64] = torch.bincount(keys, minlength=BUCKETS).cpu().numpy()
    return counts


def _profile_columns(piece: _Piece, width: int) -> list[torch.Tensor]:
    """By place: d², reference², |d| and whether it disagrees, over (tokens, channels)."""
    finite = _finite(piece)
    columns = []
    for values in (finite.d**2, finite.reference**2, _distances(finite)):
        placed = torch.zeros(finite.mask.shape, dtype=torch.float64, device=values.device)
        placed[finite.mask] = values
        columns.append(placed)
    columns[0] *= finite.unit**2
    columns.append((~finite.mask & ~finite.agreeing).to(torch.float64))
    tables = [column.view(-1, width, piece.parts) for column in columns]
    return [t.amax(dim=-1) if k == 2 else t.sum(dim=-1) for k, t in enumerate(tables)]


def _reduced(columns: Sequence[torch.Tensor], axis: int) -> NDArray[np.float64]:
    found = [c.amax(dim=axis) if k == 2 else c.sum(dim=axis) for k, c in enumerate(columns)]
    table: NDArray[np.float64] = torch.stack(found, dim=-1).cpu().numpy()
    return table
