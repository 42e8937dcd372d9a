"""Timing by interleaved medians, for a machine that others use too.

Every variant runs once a round, in an order shuffled anew, so that what slows the machine
slows them all. A ratio is the median of the ratios within rounds. No round is dropped: the spread
(quartiles) is reported beside the median instead.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Timings", "interleave"]


@dataclass(frozen=True)
class Timings:
    """Seconds by variant, one a round; position k of every list is the same round."""

    seconds: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratios(self, name: str, base: str) -> list[float]:
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return [own / other for own, other in pairs]

    def ratio(self, name: str, base: str) -> float:
        """The median over rounds of `name` / `base`."""
        return statistics.median(self.ratios(name, base))

    def spread(self, name: str, base: str) -> tuple[float, float]:
        """The quartiles of the same ratios."""
        ratios = self.ratios(name, base)
        if len(ratios) < 2:
            return ratios[0], ratios[0]
        low, _, high = statistics.quantiles(ratios, n=4)
        return low, high


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    warmup: int = 2,
    rest: float = 0.0,
    repeat: Mapping[str, int] | int = 1,
    seed: int = 0,
    after: Mapping[str, Callable[[], object]] | None = None,
) -> Timings:
    """Time every variant once a round in shuffled order.

    `repeat` is how often a variant is called within one timing, in all or by name: use it where one
    call is too short for the clock. `rest` seconds pass before each timing, so that one variant's
    heat, writes or spinning threads do not fall on the next; `after` is called behind a variant's
    timing and not timed, to wait for what it left to other threads.
    """
    shuffler = random.Random(seed)
    names = list(variants)
    settle = after or {}
    times = {name: repeat if isinstance(repeat, int) else repeat.get(name, 1) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        for _ in range(warmup):
            variants[name]()
            settle.get(name, _nothing)()
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            gc.collect()
            for name in shuffler.sample(names, len(names)):
                call, count = variants[name], times[name]
                if rest:
                    time.sleep(rest)
                start = time.perf_counter()
                for _ in range(count):
                    call()
                seconds[name].append((time.perf_counter() - start) / count)
                settle.get(name, _nothing)()
    finally:
        if enabled:
            gc.enable()
    return Timings({name: tuple(values) for name, values in seconds.items()})


def _nothing() -> None: ...
