"""A few values of a tensor, enough to tell whether two of them hold the same thing.

Everything is bounded: however large a tensor is, some thousand values of it are read through its
memory map. Positions follow from the shape alone, so that sketches of two runs meet.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from ..numerics.layout import plain

__all__ = ["EXACT", "NONE", "Agreement", "agreement", "compare_values", "sample"]

COUNT = 2048
EXACT = 1e-3
_Values = np.ndarray[tuple[int], np.dtype[np.float64]]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    return Agreement(distance / spread, correlation, len(np.unique(x)) > min(3, x.size - 1))


def sample(tensor: torch.Tensor, count: int = COUNT) -> _Values:
    """The values at pseudo-random positions, all of them when there are few, as float64."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = plain(tensor)
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        return np.empty(0)
    if not shape:
        return _floats(tensor.reshape(1))
    index = tuple(torch.from_numpy(axis) for axis in positions(shape, count))
    word = _WORDS.get(tensor.dtype.itemsize)
    if word is None or tensor.is_complex() or tensor.is_conj() or tensor.is_neg():
        return _floats(tensor[index])
    # As plain words: not every dtype can be indexed on a CPU.
    return _floats(tensor.view(word)[index].view(tensor.dtype))


def _floats(values: torch.Tensor) -> _Values:
    if values.is_complex():
        values = torch.view_as_real(plain(values)).reshape(-1)
    if values.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return values.numpy().astype(np.float64)
    return values.to(torch.float64).numpy()


@functools.lru_cache(maxsize=512)
def positions(
    shape: tuple[int, ...], count: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
    """Where to look in a tensor of this shape: indices by axis."""
    total = math.prod(shape)
    flat = flat_positions(total, count)
    return tuple(np.unravel_index(flat, shape))


@functools.lru_cache(maxsize=512)
def flat_positions(total: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where to look among so many elements: evenly spread, jittered, the same in every run."""
    if total <= count:
        return np.arange(total)
    jitter = np.random.default_rng(total).random(count)
    return ((np.arange(count) + jitter) * (total / count)).astype(np.int64).clip(0, total - 1)
