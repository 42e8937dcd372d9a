"""The last steps that were not written, for when something goes wrong."""

from __future__ import annotations

from collections import deque

from ..errors import OptionError
from .step import Step

__all__ = ["Ring"]


class Ring:
    """Holds the last `size` steps: bounded, whatever happens. A size of 0 holds none."""

    def __init__(self, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise OptionError(f"ring must be a number of steps, from 0; got {size!r}.")
        self.size = size
        self._steps: deque[Step] = deque(maxlen=size)

    def push(self, step: Step) -> None:
        """Keep a step, and let go of the oldest when there is no more room."""
        self._steps.append(step)

    def take(self) -> list[Step]:
        """The steps in order, oldest first; the ring is empty afterwards."""
        taken = list(self._steps)
        self._steps.clear()
        return taken

    def __len__(self) -> int:
        return len(self._steps)
