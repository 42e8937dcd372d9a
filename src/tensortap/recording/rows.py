"""Summaries as the recording keeps them: one line of float64 numbers, written in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..numerics import native
from ..numerics.backend import pick
from ..numerics.histogram import BUCKETS, Histogram

__all__ = ["fill_row"]


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
