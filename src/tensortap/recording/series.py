"""The summaries of one place over time, as columns: what a run of many steps is looked at by.

A watched run has a summary of every place at every step: hundreds of thousands, which are too many
to look at one by one in Python. Here they are rows of one table a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..numerics.summary import COLUMNS, FIRST, WIDTH, Summary

if TYPE_CHECKING:
    from .reader import Record, Recording
    from .segment import Segment

__all__ = ["Series", "is_watched", "merge_rows", "series_of", "summary_table"]

Table = NDArray[np.float64]
Whole = NDArray[np.int64]

_AT = {name: number for number, name in enumerate(COLUMNS)}
_WATCHED = ("param", "grad_param", "update", "scalar")


def is_watched(recording: Recording) -> bool:
    """Whether a recording is of a training run that was watched: summaries of steps."""
    if "watch" in recording.manifest.selection:
        return True
    ports = {site.port for segment in recording._segments for site in segment.sites}
    return not ports.isdisjoint(_WATCHED)


@dataclass(frozen=True, eq=False)
class Series:
    """One place of a recording over its moments, in order."""

    records: tuple[Record, ...] = field(repr=False)
    table: Table = field(repr=False)

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def layer(self) -> str:
        return self.first.layer

    @property
    def port(self) -> str:
        return self.first.port

    @property
    def leaf(self) -> str:
        return self.first.leaf

    def column(self, name: str) -> Table:
        """One statistic (`numerics.summary.COLUMNS`, or `rms`) at every moment."""
        if name == "rms":
            return rms_of(self.table)
        return self.table[:, _AT[name]]

    @property
    def bad(self) -> Table:
        """How many values are NaN or infinite, at every moment."""
        found: Table = self.table[:, _AT["nan"] : _AT["neginf"] + 1].sum(axis=1)
        return found

    @property
    def steps(self) -> Whole:
        """(epoch, batch) of every moment."""
        return np.array([(r.epoch, r.batch) for r in self.records], dtype=np.int64)

    def summary(self) -> Summary:
        return merge_rows(self.table)

    def by_step(self) -> Series:
        """The same with one row a step: calls of one step are merged, its first record stands."""
        steps = self.steps
        new = np.ones(len(steps), dtype=bool)
        new[1:] = (steps[1:] != steps[:-1]).any(axis=1)
        if new.all():
            return self
        starts = np.flatnonzero(new)
        ends = [*starts[1:].tolist(), len(steps)]
        rows = [
            self.table[a] if b == a + 1 else np.asarray(merge_rows(self.table[a:b]).to_row())
            for a, b in zip(starts.tolist(), ends, strict=True)
        ]
        return Series(tuple(self.records[at] for at in starts.tolist()), np.stack(rows))


def series_of(records: Sequence[Record]) -> list[Series]:
    """Records by place (layer, port, leaf, rank), places in order of execution, moments in time.

    With an alarm a watched run writes the steps before it later than they were.
    """
    groups: dict[tuple[str, str, str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record.layer, record.port, record.leaf, record.rank), []).append(record)
    for group in groups.values():
        group.sort(key=lambda record: (record.epoch, record.batch))
    return [Series(tuple(group), summary_table(group)) for group in groups.values()]


def summary_table(records: Sequence[Record]) -> Table:
    """The raw summary rows of some records; one that was not kept is computed."""
    table = np.empty((len(records), WIDTH))
    places: dict[str, tuple[Segment, list[int], list[int]]] = {}
    for number, record in enumerate(records):
        if record._summary_row < 0:
            table[number] = record.summary.to_row()
            continue
        name = record._segment.name
        if name not in places:
            places[name] = (record._segment, [], [])
        places[name][1].append(number)
        places[name][2].append(record._summary_row)
    for segment, at, rows in places.values():
        table[at] = segment.summaries()[rows]
    return table


def rms_of(table: Table) -> Table:
    """The root mean square of each row; NaN where nothing is finite."""
    finite = finite_of(table)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(finite > 0, table[:, _AT["l2"]] / np.sqrt(finite), np.nan)


def finite_of(table: Table) -> Table:
    """How many values of each row are neither NaN nor infinite."""
    bad = table[:, _AT["nan"] : _AT["neginf"] + 1].sum(axis=1)
    found: Table = table[:, _AT["count"]] - bad
    return found


def merge_rows(table: Table) -> Summary:
    """The summary of all rows together: `Summary.merge`, for many at once."""
    if len(table) == 1:
        return Summary.from_row(table[0].tolist())
    merged = np.full(WIDTH, np.nan)
    merged[:7] = table[:, :7].sum(axis=0)
    merged[_AT["l2"]] = _norm(table[:, _AT["l2"]])
    finite = finite_of(table)
    there = finite > 0
    if there.any():
        rows, weights = table[there], finite[there] / finite.sum()
        means = rows[:, _AT["mean"]]
        # around one of them, in halves, since the sum and the difference itself may overflow
        half = means / 2 - means[0] / 2
        mean = means[0] + 2 * float((half * weights).sum())
        apart = 2 * (means / 2 - mean / 2)
        spread = np.concatenate([rows[:, _AT["std"]], apart]) * np.sqrt(np.tile(weights, 2))
        merged[_AT["mean"]], merged[_AT["std"]] = mean, _norm(spread)
        merged[_AT["min"]] = rows[:, _AT["min"]].min()
        merged[_AT["max"]] = rows[:, _AT["max"]].max()
        merged[_AT["absmax"]] = rows[:, _AT["absmax"]].max()
    width = np.minimum(table[:, _AT["count"]], FIRST).astype(int)
    first: list[float] = []
    for row, length in zip(table, width.tolist(), strict=True):
        first += row[len(COLUMNS) : len(COLUMNS) + length].tolist()
        if len(first) >= FIRST:
            break
    merged[len(COLUMNS) : len(COLUMNS) + min(FIRST, len(first))] = first[:FIRST]
    return Summary.from_row(merged.tolist())


def _norm(values: Table) -> float:
    """The Euclidean norm, scaled so that no square overflows."""
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0 or not np.isfinite(largest):
        return largest
    return largest * float(np.sqrt(np.square(values / largest).sum()))
