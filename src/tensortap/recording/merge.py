"""Joins small neighbouring segments when a recording closes.

Sealing every second keeps a crash cheap but leaves many small files, and the room reserved for
their headers mostly blank. The joined file takes the name
of its first part and lists the others as merged before they are removed, so that a crash in between
shows no row twice.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence

from .schema import (
    HISTOGRAM_BUCKETS,
    HISTOGRAM_COUNTS,
    PADDING,
    SKETCHES,
    SUMMARIES,
)
from .segment import HeaderBuilder, Segment, read_segment
from .store import Store

__all__ = ["merge_small"]

_SMALL = 4 << 20
_LARGEST = 16 << 20  # also the most memory that joining takes
_MOST_ROWS = 200_000


def merge_small(store: Store, names: Sequence[str]) -> None:
    """Join runs of small segments among `names`, which are in order."""
    for group in _groups(store, names):
        _merge(store, group)


def _groups(store: Store, names: Sequence[str]) -> Iterator[list[Segment]]:
    group: list[Segment] = []
    size = rows = 0
    for name in names:
        nbytes = store.size(name)
        segment = read_segment(store, name) if nbytes <= _SMALL else None
        fits = segment and size + nbytes <= _LARGEST and rows + len(segment.rows) <= _MOST_ROWS
        if not fits:
            if _is_worth_it(group, size):
                yield group
            group, size, rows = [], 0, 0
        if segment is not None:
            group.append(segment)
            size, rows = size + nbytes, rows + len(segment.rows)
    if _is_worth_it(group, size):
        yield group


def _is_worth_it(group: list[Segment], size: int) -> bool:
    """Several files become one; a single one is rewritten when its header is mostly blank."""
    return len(group) > 1 or (len(group) == 1 and 4 * group[0].padding > size)


def _merge(store: Store, group: list[Segment]) -> None:
    first = group[0]
    builder = HeaderBuilder(first.rank, first.number)
    builder.merged = [name for s in group[1:] for name in (s.name, *s.merged)] + list(first.merged)
    parts: list[tuple[int, Segment, str]] = []
    for segment in group:
        _take(builder, segment, parts)
    tail = builder.tail()
    header = builder.header()
    room = len(header) + -(len(header) + 8) % 64
    scratch = store.scratch(first.name)
    fd = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _pwrite(fd, memoryview(struct.pack("<Q", room) + header.ljust(room)), 0)
        for start, segment, tensor in parts:
            _pwrite(fd, segment.view(tensor), 8 + room + start)
        for start, data in tail:
            _pwrite(fd, memoryview(data), 8 + room + start)
        os.ftruncate(fd, 8 + room + builder.size)
    finally:
        os.close(fd)
    store.commit(scratch, first.name)
    for segment in group[1:]:
        store.remove(segment.name)


def _take(builder: HeaderBuilder, segment: Segment, parts: list[tuple[int, Segment, str]]) -> None:
    """Take over one segment's tensors, rows, summaries and histograms."""
    special = (SUMMARIES, HISTOGRAM_BUCKETS, HISTOGRAM_COUNTS, SKETCHES)
    ours = [n for n in segment.tensors if n not in special and not n.startswith(PADDING)]
    for name in sorted(ours, key=lambda n: segment.tensors[n][2]):
        code, shape, start, stop = segment.tensors[name]
        parts.append((builder.place(name, code, shape, stop - start), segment, name))
    base = builder.summary(segment.summaries())
    if segment.histograms:
        buckets = segment.array(HISTOGRAM_BUCKETS, "<u2")
        counts = segment.array(HISTOGRAM_COUNTS, "<i8")
        at = 0
        for row, length in segment.histograms:
            part = slice(at, at + length)
            builder.histograms.append((base + row, buckets[part], counts[part]))
            at += length
    if segment.sketches:
        values, at = segment.array(SKETCHES, "<f8"), 0
        for row, length in segment.sketches:
            builder.sketch(base + row, values[at : at + length])
            at += length
    for site, *moment, tensor, summary in segment.rows:
        row = base + summary if summary >= 0 else -1
        order, epoch, batch, call = moment
        builder.row((builder.site(segment.sites[site]), order, epoch, batch, call, tensor, row))


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
