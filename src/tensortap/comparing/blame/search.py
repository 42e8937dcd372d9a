"""Bisection along a chain of layers: where the error that is left falls below a half."""

from __future__ import annotations

from collections.abc import Sequence

from .shares import Shares
from .stage import Put

__all__ = ["bisect_chain"]


def bisect_chain(shares: Shares, chain: Sequence[str]) -> tuple[set[str], float, float]:
    """The layers that were looked at, and the shares before and behind the chain where known.

    What is left of the error with the reference's output at a layer falls along the chain. A layer
    that makes half of it is the one where it falls below a half, so about log2 N runs find it, if
    there is one; and its share says whether there is.
    """
    low, high = 0, len(chain) - 1
    while low < high:
        middle = (low + high) // 2
        if shares.left(Put(chain[middle], "output")) < shares.total / 2:
            high = middle
        else:
            low = middle + 1
    found = chain[low]
    shares.share(found)
    before = behind = float("nan")
    if low == 0 and shares.stage.known.has(found, "input"):
        before = 1 - shares.left(Put(found, "input")) / shares.total
    if low == len(chain) - 1:
        behind = shares.left(Put(found, "output")) / shares.total
    return {found}, before, behind
