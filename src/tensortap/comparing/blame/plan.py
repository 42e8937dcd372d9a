"""What blame is going to do, and how long that takes: said before it begins.

To look at every layer of a long model takes a run or two for each. Where that would take longer
than a person waits, the layers are bisected, unless the user insists.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LONG", "Plan"]

LONG = 600.0  # seconds: what takes longer is bisected
_WORTH_SAYING = 60.0


@dataclass(frozen=True)
class Plan:
    """How many runs it takes to look at every layer, or to bisect them, and what is chosen.

    `seconds` is the time of one run; `asked` says whether the user chose.
    """

    layers: int
    runs: int
    bisected: int
    seconds: float
    bisect: bool
    asked: bool

    @property
    def long(self) -> bool:
        """Whether to look at every layer takes longer than a person waits."""
        return self.runs * self.seconds > LONG

    @property
    def worth_saying(self) -> bool:
        """Whether what is going to be done takes long enough to be said."""
        runs = self.bisected if self.bisect else self.runs
        return runs * self.seconds > min(LONG, _WORTH_SAYING) or (self.bisect and not self.asked)

    def __str__(self) -> str:
        every = f"{self._cost(self.runs)} to look at all {self.layers:,} layers"
        few = f"{self._cost(self.bisected)} to bisect them"
        one = f"one run takes {_time(self.seconds)}"
        if self.bisect and not self.asked:
            return (
                f"Blame needs {every}, and {few} ({one}). As the first is more than "
                f"{_time(LONG)}, it bisects; --no-bisect (bisect=False) looks at every layer."
            )
        if self.bisect:
            return f"Blame needs {few} ({one})."
        text = f"Blame needs {every} ({one})."
        if self.long:
            text += f" --bisect (bisect=True) needs {self._cost(self.bisected)}."
        return text

    def _cost(self, runs: int) -> str:
        return f"about {runs:,} runs ({_time(runs * self.seconds)})"


def _time(seconds: float) -> str:
    """A time in words that a person reads at a glance."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
