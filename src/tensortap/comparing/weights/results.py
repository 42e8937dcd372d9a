"""What a comparison of two checkpoints says, as data."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..causes.cause import Cause
from ..results import BAD, EnvironmentDifference, Verdict, json_text, number

__all__ = ["WeightComparison", "WeightRow"]

_MOST_NAMED = 4


@dataclass(frozen=True)
class WeightRow:
    """One weight of the reference beside what the candidate has for it.

    `how` is a word for what happened to it: `renamed`, `moved`, `tied`, `rounded`, `transposed`,
    `shape`, `missing`, `new`, `changed`, or the kind of the best cause (`factor`, `permutation`);
    empty for the same bits under the same name. `text` says it in words.
    """

    name: str
    candidate_name: str | None
    verdict: Verdict
    how: str = ""
    text: str = ""
    shape: tuple[int, ...] = ()
    candidate_shape: tuple[int, ...] = ()
    dtype: str = ""
    candidate_dtype: str = ""
    error: float = math.nan
    causes: tuple[Cause, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "candidate_name": self.candidate_name,
            "verdict": self.verdict,
            "how": self.how,
            "text": self.text,
            "shape": list(self.shape),
            "candidate_shape": list(self.candidate_shape),
            "dtype": self.dtype,
            "candidate_dtype": self.candidate_dtype,
            "error": number(self.error),
            "causes": [cause.to_dict() for cause in self.causes],
        }


@dataclass(frozen=True)
class WeightComparison:
    """Two checkpoints, weight by weight; true when no weight and no entry of the config differs.

    Weights that were rounded to another dtype, renamed or tied are not different ones.
    """

    reference: str
    candidate: str
    weights: tuple[WeightRow, ...] = field(repr=False)
    config: tuple[EnvironmentDifference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return not self.differing and not self.config

    def __bool__(self) -> bool:
        return self.same

    @property
    def differing(self) -> tuple[WeightRow, ...]:
        """The weights that are others, have another shape, or are on one side alone."""
        return tuple(row for row in self.weights if row.verdict in (*BAD, "missing"))

    @property
    def counts(self) -> dict[str, int]:
        """How many weights got each verdict."""
        return dict(Counter(row.verdict for row in self.weights))

    @property
    def sentence(self) -> str:
        """The answer in a sentence."""
        total = len(self.weights)
        if self.same:
            names = Counter(row.how for row in self.weights if row.how)
            said = _counted(names)
            return f"The weights are the same: {total} of {total}{said and f' ({said})'}."
        parts = []
        if self.differing:
            said = _counted(Counter(row.how for row in self.differing))
            parts.append(
                f"{len(self.differing)} of {total} weights differ ({said}): "
                f"{_named(row.name for row in self.differing)}"
            )
        if self.config:
            many = "entry differs" if len(self.config) == 1 else "entries differ"
            parts.append(f"{len(self.config)} config {many}: {_named(i.name for i in self.config)}")
        return "; ".join(parts) + "."

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": 1,
            "same": self.same,
            "sentence": self.sentence,
            "reference": self.reference,
            "candidate": self.candidate,
            "counts": self.counts,
            "config": [item.to_dict() for item in self.config],
            "notes": list(self.notes),
            "weights": [row.to_dict() for row in self.weights],
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Strict JSON; also written to `path`."""
        return json_text(self.to_dict(), path)

    def print(self, *, only_bad: bool = False) -> None:
        """The weights that are not identical, the config, and the answer."""
        from ...reporting.weights import print_weights

        print_weights(self, only_bad=only_bad)


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in names.items())


def _named(names: Iterable[str]) -> str:
    every = list(names)
    more = len(every) - _MOST_NAMED
    return ", ".join(every[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
