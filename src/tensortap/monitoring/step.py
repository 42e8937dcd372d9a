"""What was watched in one step: raw summary rows in order of execution, with their places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..numerics.summary import COLUMNS, Summary
from ..recording.schema import Port, Site

__all__ = ["Key", "Step"]

Key = tuple[str, Port, str]
"""(layer, port, leaf): a place, whatever the shape of what stands there."""

_COLUMN = {name: index for index, name in enumerate(COLUMNS)}


@dataclass(frozen=True, eq=False)
class Step:
    """One step of training. Row i of `table` (numerics.summary.WIDTH columns) stands at `sites[i]`.

    A place has several rows where its layer ran more than once in the step (micro-batches of
    gradient accumulation, shared layers): `calls` tells them apart, `merged` makes them one.
    """

    epoch: int
    batch: int  # the step's number, from 0
    sites: tuple[Site, ...]
    calls: tuple[int, ...]
    table: NDArray[np.float64]
    scalars: Mapping[str, float] = field(default_factory=dict)  # what the user logged: the loss

    def __len__(self) -> int:
        return len(self.sites)

    def column(self, name: str) -> NDArray[np.float64]:
        """One statistic (`numerics.summary.COLUMNS`) of every row."""
        return self.table[:, _COLUMN[name]]

    @property
    def bad(self) -> NDArray[np.float64]:
        """How many values of each row are NaN or infinite."""
        return self.column("nan") + self.column("posinf") + self.column("neginf")

    def summary(self, row: int) -> Summary:
        return Summary.from_row(self.table[row].tolist())

    @cached_property
    def merged(self) -> Mapping[Key, Summary]:
        """The summary of each place over all of its calls, in order of execution."""
        found: dict[Key, Summary] = {}
        for row, site in enumerate(self.sites):
            key = (site.layer, site.port, site.leaf)
            summary = self.summary(row)
            found[key] = found[key].merge(summary) if key in found else summary
        return found
