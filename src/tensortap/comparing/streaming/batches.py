"""Which samples of the reference a running batch holds, where the two runs cut them differently.

The reference lies on disk, so its samples are known as one row; a running batch stands in that row
where the last one ended. The values must have agreed once, at a layer that is still good, before
another first axis is taken for other batches and not for another shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...numerics import summarize
from ...numerics.summary import Summary
from ...recording.reader import Record, Recording
from ..moments import in_words
from ..sketch import agreement
from .live import LiveRecord

__all__ = ["Batches", "Cut"]

_Key = tuple[str, str, str, int, int]  # layer, port, leaf, rank, call
_Moment = tuple[int, int, int, int]  # rank, epoch, batch, call


@dataclass(frozen=True)
class _Rows(Record):
    """Some samples of a recorded tensor."""

    whole: Record | None = None
    rows: tuple[int, int] = (0, 0)

    @property
    def stored(self) -> bool:
        return True

    @property
    def tensor_id(self) -> str | None:
        assert self.whole is not None
        return f"{self.whole.tensor_id}[{self.rows[0]}:{self.rows[1]}]"

    @property
    def summary(self) -> Summary:
        return summarize(self.tensor())

    def tensor(self) -> torch.Tensor:
        assert self.whole is not None
        return self.whole.tensor()[self.rows[0] : self.rows[1]]


@dataclass
class Cut:
    """The records of one call on both sides, cut where either side is cut."""

    ours: list[Record] = field(default_factory=list)
    theirs: list[LiveRecord] = field(default_factory=list)
    covered: dict[tuple[str, str, _Moment], int] = field(default_factory=dict)
    alone: dict[tuple[str, str], str] = field(default_factory=dict)


@dataclass
class _Row:
    """All records of a leaf and call, with the place of their first sample."""

    records: list[tuple[int, Record]] = field(default_factory=list)
    starts: dict[tuple[int, int], int] = field(default_factory=dict)
    length: int = 0

    def __bool__(self) -> bool:
        return bool(self.records)

    def add(self, record: Record) -> None:
        self.starts.setdefault((record.epoch, record.batch), self.length)
        self.records.append((self.length, record))
        self.length += record.shape[0] if record.shape else 0

    def alike(self, rest: tuple[int, ...]) -> bool:
        """Whether all are stored and differ in nothing but how many samples they hold."""
        return all(r.stored and r.shape and r.shape[1:] == rest for _, r in self.records)


_NO_ROW = _Row()


class Batches:
    """The reference's samples in a row, and how far a run has come along it."""

    def __init__(self, reference: Recording) -> None:
        self._reference = reference
        self._known: dict[str, dict[_Key, _Row]] = {}
        self._at: dict[_Key, int] = {}
        self._step: tuple[tuple[int, ...], dict[int, int]] = ((), {})
        self.differ = False  # once a layer has confirmed it

    def cut(
        self, layer: str, moment: _Moment, here: Sequence[Record], live: Sequence[LiveRecord]
    ) -> Cut | None:
        """What a call is compared with; None where the reference's own records will do."""
        own = {(record.port, record.leaf): record for record in here}
        found, other = Cut(), False
        for record in live:
            key = (layer, record.port, record.leaf, moment[0], moment[3])
            pieces = self._pieces(key, moment, own.get((record.port, record.leaf)), record)
            if pieces is None:
                found.ours += [r for r in here if (r.port, r.leaf) == (record.port, record.leaf)]
                found.theirs.append(record)
                continue
            other = True
            self._add(found, record, pieces)
        if not other:
            return None
        names = {(record.port, record.leaf) for record in live}
        found.ours += [record for name, record in own.items() if name not in names]
        return found

    def _pieces(
        self, key: _Key, moment: _Moment, own: Record | None, live: LiveRecord
    ) -> list[tuple[Record, tuple[int, int], tuple[int, int]]] | None:
        """The reference's records and rows that a live tensor holds, with the rows of its own."""
        row = self._row(key)
        if not live.shape or not live.stored or not row:
            return None
        size = live.shape[0]
        at = self._place(key, moment, row.starts.get(moment[1:3]), size)
        if at is None:
            return None
        self._at[key] = at + size
        if not self.differ and own is not None and own.shape == live.shape:
            return None
        if not row.alike(live.shape[1:]):
            return None
        pieces = list(_overlaps(row.records, at, size))
        if not self.differ and not _confirmed(pieces, live):
            return None
        self.differ = True
        return pieces

    def _place(self, key: _Key, moment: _Moment, start: int | None, size: int) -> int | None:
        """Where in its row a live tensor begins: where the last ended, or as others of its size."""
        if self._step[0] != moment[:3]:
            self._step = (moment[:3], {})
        others = self._step[1]
        at = self._at.get(key, others.get(size)) if self.differ else start
        if at is not None:
            others.setdefault(size, at)
        return at

    def _add(
        self,
        found: Cut,
        live: LiveRecord,
        pieces: Sequence[tuple[Record, tuple[int, int], tuple[int, int]]],
    ) -> None:
        end = 0
        for record, rows, others in pieces:
            shape = (rows[1] - rows[0], *record.shape[1:])
            found.ours.append(_Rows(**{**_fields(record), "shape": shape}, whole=record, rows=rows))
            tensor = live.tensor()[others[0] : others[1]]
            found.theirs.append(
                replace(
                    live,
                    epoch=record.epoch,
                    batch=record.batch,
                    shape=tuple(tensor.shape),
                    content=f"{live.content}[{others[0]}:{others[1]}]",
                    known=summarize(tensor),
                    values=[tensor],
                )
            )
            moment = (record.rank, record.epoch, record.batch, record.call)
            found.covered[record.port, record.leaf, moment] = rows[1] - rows[0]
            end = others[1]
        if end < live.shape[0]:
            where = in_words(live.epoch, live.batch, live.call)
            rest = f"samples {end}..{live.shape[0] - 1} of {where} only in the candidate"
            found.alone[live.port, live.leaf] = rest

    def _row(self, key: _Key) -> _Row:
        layer = key[0]
        if layer not in self._known:
            found: dict[_Key, _Row] = {}
            for record in sorted(self._reference[layer].records, key=lambda r: (r.epoch, r.batch)):
                place = (layer, record.port, record.leaf, record.rank, record.call)
                found.setdefault(place, _Row()).add(record)
            self._known[layer] = found
        return self._known[layer].get(key, _NO_ROW)


def _overlaps(
    row: Sequence[tuple[int, Record]], at: int, size: int
) -> Iterator[tuple[Record, tuple[int, int], tuple[int, int]]]:
    for start, record in row:
        low, high = max(at, start), min(at + size, start + record.shape[0])
        if low < high:
            yield record, (low - start, high - start), (low - at, high - at)


def _confirmed(
    pieces: Sequence[tuple[Record, tuple[int, int], tuple[int, int]]], live: LiveRecord
) -> bool:
    """Whether the values say that these are the same samples."""
    found = [
        agreement(record.tensor()[rows[0] : rows[1]], live.tensor()[others[0] : others[1]])
        for record, rows, others in pieces
    ]
    return bool(found) and all(one.clear for one in found) and any(one.telling for one in found)


def _fields(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in Record.__dataclass_fields__}
