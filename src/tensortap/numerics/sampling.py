"""A few values of a tensor, at positions that follow from its shape alone.

Samples of two runs meet, so that two tensors can be told apart though neither is kept whole.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from tensortap.numerics.layout import plain

__all__ = ["COUNT", "SKETCH", "flat_positions", "positions", "sample"]

COUNT = 2048
SKETCH = 1024
"""How many values a recording with `keep="sketch"` has of each tensor."""

_Values = np.ndarray[tuple[int], np.dtype[np.float64]]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        return values.cpu().numpy().astype(np.float64)
    return values.to(torch.float64).cpu().numpy()


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
