"""Where in a tensor the error sits: by token (all axes but the last) and by channel (the last).

One bad token of a thousand moves a whole-tensor metric by next to nothing; here it stands out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.numerics.pairs import check_pair

__all__ = ["COLUMNS", "Profile", "profile"]

COLUMNS: tuple[str, ...] = ("d_squares", "reference_squares", "max_abs", "disagreeing")


@dataclass(frozen=True, eq=False)
class Profile:
    """Sums of d² and of reference² over finite pairs, max |d|, and disagreeing pairs (`COLUMNS`).

    `shape` is that of the tokens: all axes but the last, flattened in `tokens`.
    """

    shape: tuple[int, ...]
    tokens: NDArray[np.float64] = field(repr=False)
    channels: NDArray[np.float64] = field(repr=False)


def profile(reference: torch.Tensor, candidate: torch.Tensor) -> Profile | None:
    """The profile of two tensors of one shape; None where there are no axes, or no elements.

    A tensor of one axis is one token. Both parts of a complex number count for its place.
    """
    from tensortap.numerics.backend import pick_pair

    check_pair(reference, candidate)
    if not reference.dim() or not reference.numel():
        return None
    tokens, channels = pick_pair(reference, candidate).profile_rows(reference, candidate)
    return Profile(tuple(reference.shape[:-1]), tokens, channels)
