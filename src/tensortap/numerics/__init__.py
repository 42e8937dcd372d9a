"""Arithmetic: summaries and differences of tensors, behind one interface for every backend.

This package stands below recording, comparing and reporting and knows none of them. `summarize`,
`difference` and `profile.profile` are the doors; `backend.pick` says who does the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.numerics.difference import Difference, difference
from tensortap.numerics.histogram import Histogram
from tensortap.numerics.summary import Summary

if TYPE_CHECKING:
    import torch

__all__ = ["Difference", "Histogram", "Summary", "difference", "summarize"]


def summarize(tensor: torch.Tensor, histogram: bool = False) -> Summary:
    """Summarise a tensor of any dtype, shape and device.

    NaN and infinities are counted and left out of the moments. A complex tensor is taken as its
    real and imaginary parts, interleaved, so that `count` is twice its number of elements.
    64-bit integers are rounded to float64. The tensor, its version and the random state stay as
    they are, and nothing enters an autograd graph.
    """
    from tensortap.numerics.backend import pick

    row, counts = pick(tensor).summarize_row(tensor, histogram)
    return Summary.from_row(row, counts)
