"""The Hadamard transform in front of an int8 linear layer: it spreads outliers over all channels.

A row of activations and each row of the weight are turned by the same orthogonal matrix, so their
product stays what it was, in exact arithmetic; what changes is how well each fits an int8 grid.
The width is cut into blocks of its largest power of two (1536 is 3 blocks of 512).
"""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["block_size", "rotate"]


def block_size(width: int) -> int:
    """The largest power of two that divides the width."""
    return width & -width


def rotate(x: Tensor) -> Tensor:
    """Each block of the last axis times the normalised Hadamard matrix, which is its own inverse.

    Butterflies in place of a matrix: log2(block) passes of sums and differences.
    """
    width = x.shape[-1]
    block = block_size(width)
    y = x.reshape(-1, block)
    half = 1
    while half < block:
        pairs = y.reshape(y.shape[0], block // (2 * half), 2, half)
        left, right = pairs.unbind(2)
        y = _joined(left + right, left - right).reshape(-1, block)
        half *= 2
    return (y / math.sqrt(block)).reshape(x.shape)


def _joined(left: Tensor, right: Tensor) -> Tensor:
    joined = left.new_empty(left.shape[0], left.shape[1], 2, left.shape[2])
    joined[:, :, 0], joined[:, :, 1] = left, right
    return joined
