"""A few values of a tensor, at positions that follow from its shape alone.

Samples of two runs meet, so that two tensors can be told apart though neither is kept whole.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from tensortap.numerics.layout import plain

__all__ = ["COUNT", "SKETCH", "flat_positions", "positions", "sample", "sample_on"]

COUNT = 2048
SKETCH = 1024
"""How many values a recording with `keep="sketch"` has of each tensor."""

_Values = np.ndarray[tuple[int], np.dtype[np.float64]]
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample(tensor: torch.Tensor, count: int = COUNT) -> _Values:
    """The values at pseudo-random positions, all of them when there are few, as float64."""
    picked = _picked(tensor, count)
    if picked.dtype in _UNSIGNED:
        return picked.cpu().numpy().astype(np.float64)
    return picked.to(torch.float64).cpu().numpy()


def sample_on(tensor: torch.Tensor, count: int = COUNT) -> torch.Tensor | None:
    """The same, left on the tensor's device without waiting for it; None for a dtype that only the
    CPU can convert."""
    if tensor.dtype in _UNSIGNED:
        return None
    return _picked(tensor, count).to(torch.float64)


def _picked(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The chosen values, flat, in the tensor's dtype; of complex ones, the parts by turns."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = plain(tensor)
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.float64)
    word = _WORDS.get(tensor.dtype.itemsize)
    if not shape:
        picked = tensor.reshape(1)
    elif word is None or tensor.is_complex() or tensor.is_conj() or tensor.is_neg():
        picked = tensor[_index(shape, count, *_where(tensor))]
    else:  # as plain words: not every dtype can be indexed on a CPU
        picked = tensor.view(word)[_index(shape, count, *_where(tensor))].view(tensor.dtype)
    return torch.view_as_real(plain(picked)).reshape(-1) if picked.is_complex() else picked


def _where(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """The device, and the stream in whose order copies and uses of an index stand."""
    if not tensor.is_cuda:
        return tensor.device, 0
    return tensor.device, torch.cuda.current_stream(tensor.device).cuda_stream


@functools.lru_cache(maxsize=512)
def _index(
    shape: tuple[int, ...], count: int, device: torch.device, stream: int
) -> tuple[torch.Tensor, ...]:
    """`positions` as tensors on a device, which are copied there once a stream."""
    with torch.inference_mode(False):
        axes = (torch.from_numpy(axis) for axis in positions(shape, count))
        if device.type != "cuda":
            return tuple(axis.to(device) for axis in axes)
        return tuple(axis.pin_memory().to(device, non_blocking=True) for axis in axes)


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
