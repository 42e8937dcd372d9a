"""Bisection along the blocks: where the error that is left falls below a half.

What is left of the error with the reference's outputs at the first k blocks falls as k grows. A
block that makes half of it is the one where it falls below a half, so about log2 N runs find it, if
there is one; and its share, measured as ever, says whether there is: what is lost between it and
the block before counts as beside them. With the outputs of all blocks before it put in, it makes no
difference whether they hand them on or add them to a stream outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .shares import Shares
from .stage import Put

__all__ = ["Bisection"]


class Bisection:
    """The block at which the error falls below a half, its share, and what comes in around it."""

    def __init__(self, shares: Shares, chain: Sequence[str]) -> None:
        self._shares, self._chain = shares, chain
        self._low, self._high = 0, len(chain) - 1
        self.layer = ""
        self.share = self.before = self.behind = self.beside = math.nan

    @property
    def between(self) -> tuple[str, str]:
        """The layers between which the error falls below a half, as far as is known."""
        return self._chain[self._low], self._chain[self._high]

    def run(self) -> None:
        """Make the runs."""
        shares, chain = self._shares, self._chain
        while self._low < self._high:
            middle = (self._low + self._high) // 2
            if self._left(middle) < shares.total / 2:
                self._high = middle
            else:
                self._low = middle + 1
        low = self._low
        self.layer = chain[low]
        self.share = shares.share(self.layer)
        before, after = self._left(low - 1), self._left(low)
        self.before = 1 - before / shares.total if low == 0 else math.nan
        self.behind = after / shares.total if low == len(chain) - 1 else math.nan
        self.beside = (before - after) / shares.total - self.share

    def _left(self, number: int) -> float:
        """What is left with the reference's outputs at the blocks up to a number."""
        shares, chain = self._shares, self._chain
        if number < 0:
            known = shares.stage.known.has(chain[0], "input")
            return shares.left(Put(chain[0], "input")) if known else shares.total
        following = chain[number + 1] if number + 1 < len(chain) else None
        return shares.left_up_to(chain[: number + 1], following)
