"""A few values of a tensor, enough to tell whether two of them hold the same thing.

Everything is bounded: however large a tensor is, some thousand values of it are read through its
memory map. Positions follow from the shape alone, so that sketches of two runs meet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import DamagedError
from ..numerics.sampling import COUNT, sample
from ..recording.reader import Record
from .paths import Matrix, equal

__all__ = [
    "EXACT",
    "NONE",
    "Agreement",
    "agreement",
    "compare_values",
    "content_errors",
    "contents",
    "sample",
]

EXACT = 1e-3
_SMALL = 256
_DISTINCT = 3
_MOST_ORDERS = 6  # of axes of one extent
_MOST_AXES = 5
_Key = tuple[object, ...]
_Values = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Agreement:
    """How well two samples agree: |d| over the reference's spread, and their correlation.

    Both are taken about the reference's mean, since values that share a large offset agree under
    any order. `telling` is False when the reference hardly varies: then nothing was proven.
    """

    error: float
    correlation: float
    telling: bool

    @property
    def exact(self) -> bool:
        return self.error < EXACT

    @property
    def clear(self) -> bool:
        """Whether the two are the same values, give or take what precision and a bug may do."""
        return self.exact or (self.error < 0.5 and self.correlation > 0.9)


NONE = Agreement(math.inf, 0.0, False)


def agreement(reference: torch.Tensor, candidate: torch.Tensor, count: int = COUNT) -> Agreement:
    """Compare two tensors of equal shape at the same few positions."""
    if reference.shape != candidate.shape or reference.numel() == 0:
        return NONE
    return compare_values(sample(reference, count), sample(candidate, count))


def compare_values(ours: _Values, theirs: _Values) -> Agreement:
    """The agreement of two samples, over the pairs in which both are finite."""
    both = np.isfinite(ours) & np.isfinite(theirs)
    odd = ~both & ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
    if not both.any() or odd.sum() > 0.1 * ours.size:
        return NONE
    x, y = ours[both], theirs[both]
    scale = float(max(np.abs(x).max(), np.abs(y).max()))
    if scale == 0:
        return Agreement(0.0, 0.0, False)
    x, y = x / scale, y / scale
    x_centred, y_centred = x - x.mean(), y - y.mean()
    spread = float(np.linalg.norm(x_centred))
    distance = float(np.linalg.norm(y - x))
    if spread <= 1e-9 * math.sqrt(x.size):
        return Agreement(0.0 if distance <= 1e-9 * math.sqrt(x.size) else math.inf, 0.0, False)
    other = float(np.linalg.norm(y_centred))
    correlation = float(x_centred @ y_centred) / (spread * other) if other else 0.0
    return Agreement(distance / spread, correlation, len(np.unique(x)) > min(_DISTINCT, x.size - 1))


def content_errors(ours: Sequence[Record | None], theirs: Sequence[Record | None]) -> Matrix:
    """How far the values of every two records are apart; infinite where nothing speaks for them."""
    return contents(ours, theirs)[0]


def contents(
    ours: Sequence[Record | None], theirs: Sequence[Record | None]
) -> tuple[Matrix, Matrix]:
    """How far the values of every two records are apart, and how they correlate, without sign.

    Errors are infinite where nothing speaks for two records, correlations 0. Tensors that are
    stored on both sides are compared at the same few positions: as they lie, with their axes
    sorted by extent (which undoes a permutation), and in their first sample. Otherwise the
    summaries must do: their moments, which know no order, and the first values.
    """
    moments, first = _moment_errors(ours, theirs), _first_errors(ours, theirs)
    shape = equal([r and r.shape for r in ours], [r and r.shape for r in theirs])
    counts = equal(
        [r and math.prod(r.shape) for r in ours], [r and math.prod(r.shape) for r in theirs]
    )
    # Few layers share all moments within 5 %, but norms come near it: first values must agree too.
    loose = np.where(shape & ~np.isnan(first), np.fmax(first, 2 * moments), 10 * moments)
    found = np.where(counts, loose, first)
    values, correlations = _value_errors(ours, theirs)
    # Moments that are equal to many digits are the same values in another order.
    found = np.where(np.isnan(values) | (moments < 1e-4), np.fmin(found, values), values)
    return np.where(np.isnan(found), np.inf, found).astype(np.float32), correlations


def _value_errors(
    ours: Sequence[Record | None], theirs: Sequence[Record | None]
) -> tuple[Matrix, Matrix]:
    """The smallest error over the ways to sample, NaN where none applies, and the correlation."""
    found = np.full((len(ours), len(theirs)), np.nan, dtype=np.float32)
    correlations = np.zeros((len(ours), len(theirs)), dtype=np.float32)
    left = _grouped(ours)
    for order in range(_MOST_ORDERS):
        right = _grouped(theirs, order)
        for key in left.keys() & right.keys():
            (rows, x), (columns, y) = left[key], right[key]
            where = np.ix_(rows, columns)
            error, correlation = _pairwise(x, y)
            found[where] = np.fmin(found[where], error)
            correlations[where] = np.fmax(correlations[where], np.abs(correlation))
        if not right:
            break
    return found, correlations


def _grouped(records: Sequence[Record | None], order: int = 0) -> dict[_Key, tuple[list[int], Any]]:
    """Samples of the records by key; of axes of one extent in the order with that number."""
    groups: dict[_Key, tuple[list[int], list[_Values]]] = {}
    for number, record in enumerate(records):
        if record is None or not record.stored or 0 in record.shape:
            continue
        try:
            tensor = record.tensor()
        except DamagedError:  # a partial recording: what is lost pairs by other means
            continue
        for key, view in _sketched(tensor) if not order else _reordered(tensor, order):
            rows, values = groups.setdefault(key, ([], []))
            rows.append(number)
            values.append(sample(view, _SMALL))
    return {key: (rows, np.stack(values)) for key, (rows, values) in groups.items()}


def _sketched(tensor: torch.Tensor) -> list[tuple[_Key, torch.Tensor]]:
    """Views that are sampled, each with a key that two tensors must share to be compared."""
    complex_too = tensor.is_complex()
    flat = tensor.reshape(-1)
    views: list[tuple[_Key, torch.Tensor]] = [(("flat", complex_too, flat.numel()), flat)]
    slim = tensor.squeeze()
    order = sorted(range(slim.dim()), key=lambda axis: (-slim.shape[axis], axis))
    if slim.dim() > 1:
        ordered = slim.permute(order)
        views.append((("sorted", complex_too, *ordered.shape), ordered))
    if tensor.dim() > 1:
        first = tensor[0].reshape(-1)
        views.append((("first", complex_too, first.numel()), first))
    return views


def _reordered(tensor: torch.Tensor, number: int) -> Iterator[tuple[_Key, torch.Tensor]]:
    """The tensor with its axes sorted by extent, those of one extent in another order."""
    slim = tensor.squeeze()
    if not 1 < slim.dim() <= _MOST_AXES or len(set(slim.shape)) == slim.dim():
        return
    extents = sorted(slim.shape, reverse=True)
    orders = (
        order
        for order in itertools.permutations(range(slim.dim()))
        if [slim.shape[axis] for axis in order] == extents
    )
    for order in itertools.islice(orders, number, number + 1):
        ordered = slim.permute(order)
        yield ("sorted", tensor.is_complex(), *ordered.shape), ordered


def _pairwise(x: Any, y: Any) -> tuple[Matrix, Matrix]:
    """|y - x| over the spread of x, and the correlation, for every two rows.

    The error is NaN for a row of x that tells nothing.
    """
    x, y = np.nan_to_num(x, posinf=0, neginf=0), np.nan_to_num(y, posinf=0, neginf=0)
    scale = max(float(np.abs(x).max()), float(np.abs(y).max())) or 1.0
    x, y = x / scale, y / scale
    squares = x @ y.T
    squares *= -2
    squares += (x**2).sum(1)[:, None]
    squares += (y**2).sum(1)[None, :]
    spread = np.linalg.norm(x - x.mean(1, keepdims=True), axis=1)
    least = 1e-9 * np.abs(x).max(1) * math.sqrt(x.shape[1])
    telling = (spread > least) & ((np.diff(np.sort(x, 1), axis=1) > 0).sum(1) >= _DISTINCT)
    error = np.sqrt(np.maximum(squares, 0, out=squares), out=squares)
    error /= np.where(telling, spread, np.nan)[:, None]
    x, y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    sizes = np.outer(np.where(telling, spread, 0), np.linalg.norm(y, axis=1))
    correlation = np.divide(x @ y.T, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    return error.astype(np.float32), correlation.astype(np.float32)


def _moment_errors(ours: Sequence[Record | None], theirs: Sequence[Record | None]) -> Matrix:
    """How far mean, std, min, max and absmax are apart at most; NaN for constants and scalars."""
    x, y = (np.array([_moments(record) for record in side]) for side in (ours, theirs))
    error = np.zeros((len(ours), len(theirs)), dtype=np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for column, unit in ((0, 1), (1, 1), (2, 4), (3, 4), (4, 4)):
            apart = np.subtract.outer(x[:, column], y[:, column])
            apart /= x[:, unit][:, None]
            np.maximum(error, np.abs(apart, out=apart), out=error, casting="same_kind")
    return error


def _moments(record: Record | None) -> tuple[float, ...]:
    found = None if record is None else record.summary
    if found is None or found.count <= _DISTINCT or not found.std > 1e-9 * found.absmax:
        return (math.nan,) * 5
    return found.mean, found.std, found.min, found.max, found.absmax


def _first_errors(ours: Sequence[Record | None], theirs: Sequence[Record | None]) -> Matrix:
    found = np.full((len(ours), len(theirs)), np.nan, dtype=np.float32)
    left, right = _first_values(ours), _first_values(theirs)
    for length in left.keys() & right.keys():
        (rows, x), (columns, y) = left[length], right[length]
        found[np.ix_(rows, columns)] = _pairwise(x, y)[0]
    return found


def _first_values(records: Sequence[Record | None]) -> dict[int, tuple[list[int], Any]]:
    groups: dict[int, tuple[list[int], list[tuple[float, ...]]]] = {}
    for number, record in enumerate(records):
        first = () if record is None else record.summary.first
        if len(first) > _DISTINCT:
            rows, values = groups.setdefault(len(first), ([], []))
            rows.append(number)
            values.append(first)
    return {length: (rows, np.array(values)) for length, (rows, values) in groups.items()}
