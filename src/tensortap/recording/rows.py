"""Summaries as the recording keeps them: one line of float64 numbers, written in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..numerics import native
from ..numerics.backend import pick
from ..numerics.histogram import BUCKETS, Histogram

__all__ = ["Sparse", "fill_row", "sparse"]

Sparse = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""The filled buckets of a histogram and their counts: a few hundred of 8192."""


def sparse(histogram: Histogram | None) -> Sparse | None:
    """A histogram as it is kept until it is written: whole ones would outgrow the budget."""
    return None if histogram is None else histogram.sparse()


def fill_row(
    row: np.ndarray[Any, Any], tensor: torch.Tensor, histogram: bool, threads: int = 0
) -> Histogram | None:
    """Write a tensor's raw summary into `row`; the histogram, when asked, comes back.

    The writer's thread asks for one thread, so that it does not take the model's cores.
    """
    backend = pick(tensor)
    if backend.name == "native":
        counts = np.zeros(BUCKETS, dtype=np.int64) if histogram else None
        where = 0 if counts is None else counts.ctypes.data
        if native.summarize_into(tensor, row.ctypes.data, where, threads):
            return None if counts is None else Histogram(counts)
    values, found = backend.summarize_row(tensor, histogram)
    row[:] = values
    return found
