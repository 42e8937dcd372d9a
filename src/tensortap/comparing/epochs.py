"""Two training runs, epoch by epoch: when they part, and how far they go.

For runs of many moments "when" matters more than "where": a row an epoch says how many layers have
diverged in it, which was the first to, and how large the difference is by then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .moments import in_words

if TYPE_CHECKING:
    from .results import Comparison, LayerComparison, Moment, Part

__all__ = [
    "EpochComparison",
    "EpochPart",
    "epochs_of",
    "joined",
    "parted",
    "per_epoch",
    "phase",
    "steps_compared",
]


@dataclass(frozen=True)
class EpochPart:
    """One port and leaf in one epoch. `error` is the largest of its moments, at `worst`.

    It is the relative L2 error where tensors were compared, else the largest relative change of a
    statistic. `first` is the first moment that diverged, `order` its place in the execution.
    """

    epoch: int
    steps: frozenset[int]
    diverged: int = 0
    first: Moment | None = None
    order: int = 0
    error: float = math.nan
    worst: Moment | None = None

    def merge(self, other: EpochPart) -> EpochPart:
        mine, theirs = self.first, other.first
        earlier = other if mine is None or (theirs is not None and theirs < mine) else self
        larger = other if math.isnan(self.error) or other.error > self.error else self
        return EpochPart(
            self.epoch,
            self.steps | other.steps,
            self.diverged + other.diverged,
            earlier.first,
            earlier.order,
            larger.error,
            larger.worst,
        )


@dataclass(frozen=True)
class EpochComparison:
    """One epoch of two training runs.

    `layers` were compared in it, `diverged` of them did; `first_layer` is the first in time that
    did, at `first` (epoch, batch, call). `error` is the largest, at `worst_layer`.
    """

    epoch: int
    steps: int
    layers: int
    diverged: int
    first_layer: str | None
    first: Moment | None
    error: float
    worst_layer: str | None

    def to_dict(self) -> dict[str, Any]:
        from .results import number

        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "layers": self.layers,
            "diverged": self.diverged,
            "first_layer": self.first_layer,
            "first": None if self.first is None else list(self.first),
            "error": number(self.error),
            "worst_layer": self.worst_layer,
        }


def per_epoch(
    moments: Sequence[Moment],
    diverged: Sequence[bool],
    errors: Sequence[float],
    orders: Sequence[int],
) -> tuple[EpochPart, ...]:
    """What was judged moment by moment, by epoch."""
    places: dict[int, list[int]] = {}
    for at, moment in enumerate(moments):
        places.setdefault(moment[0], []).append(at)
    found = []
    for epoch, here in sorted(places.items()):
        bad = [at for at in here if diverged[at]]
        first = min(bad, key=lambda at: moments[at], default=None)
        known = [at for at in here if not math.isnan(errors[at])]
        worst = max(known, key=lambda at: errors[at], default=None)
        found.append(
            EpochPart(
                epoch,
                frozenset(moments[at][1] for at in here),
                len(bad),
                None if first is None else moments[first],
                0 if first is None else orders[first],
                math.nan if worst is None else errors[worst],
                None if worst is None else moments[worst],
            )
        )
    return tuple(found)


def joined(ours: Iterable[EpochPart], theirs: Iterable[EpochPart]) -> tuple[EpochPart, ...]:
    """The epochs of two stretches of one run."""
    found: dict[int, EpochPart] = {}
    for part in (*ours, *theirs):
        known = found.get(part.epoch)
        found[part.epoch] = part if known is None else known.merge(part)
    return tuple(found[epoch] for epoch in sorted(found))


def phase(port: str) -> int:
    """When in a step something happens: forward, backward, the optimizer's step."""
    if port in ("param", "update"):
        return 2
    return int(port.startswith("grad"))


def epochs_of(comparison: Comparison) -> tuple[EpochComparison, ...]:
    """A row an epoch; nothing where no moment was compared."""
    numbers = sorted({e.epoch for row in comparison.layers for p in row.parts for e in p.epochs})
    return tuple(_epoch(comparison.layers, number) for number in numbers)


def _epoch(rows: Sequence[LayerComparison], number: int) -> EpochComparison:
    layers, bad = 0, []
    steps: set[int] = set()
    worst: tuple[float, str | None] = (math.nan, None)
    for row in rows:
        parts = [(p, e) for p in _judging(row) for e in p.epochs if e.epoch == number]
        layers += bool(parts)
        times = []
        for part, here in parts:
            steps |= here.steps
            if here.error > worst[0] or (math.isnan(worst[0]) and not math.isnan(here.error)):
                worst = (here.error, row.layer)
            if here.first is not None:
                times.append((here.first[:2], phase(part.port), here.order, here.first))
        if times:
            bad.append((min(times), row.layer))
    first = min(bad, default=None)
    return EpochComparison(
        epoch=number,
        steps=len(steps),
        layers=layers,
        diverged=len(bad),
        first_layer=None if first is None else first[1],
        first=None if first is None else first[0][3],
        error=worst[0],
        worst_layer=worst[1],
    )


def _judging(row: LayerComparison) -> list[Part]:
    """The parts that a layer's verdict rests on: not what it was given, unless that is all."""
    parts = [part for part in row.parts if part.epochs]
    return [part for part in parts if part.port != "input"] or parts


def steps_compared(comparison: Comparison) -> list[tuple[int, int]]:
    """The (epoch, batch) pairs that both runs have."""
    return sorted(
        {
            (epoch.epoch, batch)
            for row in comparison.layers
            for part in row.parts
            for epoch in part.epochs
            for batch in epoch.steps
        }
    )


def parted(comparison: Comparison) -> str:
    """When two runs of many steps part, in a sentence; nothing where there is one step."""
    first = comparison.first_divergence
    moment = None if first is None else first.first_moment
    steps = steps_compared(comparison)
    if moment is None or len(steps) < 2:
        return ""
    before = sum(step < moment[:2] for step in steps)
    when = in_words(moment[0], moment[1], 0)
    if not before:
        return f" The runs part at the first step that was compared, {when}."
    agree = "the step before it agrees" if before == 1 else f"the {before} steps before it agree"
    return f" The runs part at {when}: {agree}, of {len(steps)} that were compared."
