"""One segment: a plain safetensors file with our rows in its metadata.

The header is built by `HeaderBuilder` and read back by `read_segment`, which has it checked by
`header`; the numbers in a table of summaries are checked when the table is first asked for.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import DamagedError
from ..numerics.histogram import BUCKETS, Histogram
from ..numerics.summary import COLUMNS, COUNTS, FIRST, WIDTH
from .header import ROW_FIELDS, RawRow, read_header
from .schema import (
    FORMAT,
    HEADER_KEY,
    HISTOGRAM_BUCKETS,
    HISTOGRAM_COUNTS,
    PADDING,
    SKETCHES,
    SUMMARIES,
    Site,
)
from .store import Store

__all__ = ["ALIGNMENT", "HeaderBuilder", "RawRow", "Segment", "read_segment", "tensor_id"]

ALIGNMENT = 64
_LARGEST_HEADER = 100_000_000  # what safetensors itself accepts
_MOST = 2.0**53  # values that a summary counts
_ROW_TEXT = 80  # bytes that a row takes in a header at most


def tensor_id(rank: int, number: int) -> str:
    """The name of a stored tensor: unique in a recording, so that any segment can refer to it."""
    return f"r{rank:03d}.{number:08d}"


@dataclass
class HeaderBuilder:
    """Collects what a segment's header will say, and knows how long it will be."""

    rank: int
    number: int
    sites: list[Site] = field(default_factory=list)
    rows: list[RawRow] = field(default_factory=list)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    summaries: list[np.ndarray[Any, Any]] = field(default_factory=list)
    histograms: list[tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = field(
        default_factory=list
    )
    sketches: list[tuple[int, np.ndarray[Any, Any]]] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)
    size: int = 0
    estimate: int = 1024
    summarised: int = 0
    _site_index: dict[Site, int] = field(default_factory=dict)

    def site(self, site: Site) -> int:
        index = self._site_index.get(site)
        if index is None:
            index = self._site_index[site] = len(self.sites)
            self.sites.append(site)
            self.estimate += _described(site)[1] + 2
        return index

    def summary(self, rows: np.ndarray[Any, Any]) -> int:
        """Keep a summary row, or a table of them: the number of the first."""
        index = self.summarised
        self.summaries.append(rows)
        self.summarised += 1 if rows.ndim == 1 else len(rows)
        return index

    def place(
        self, name: str, code: str, shape: Sequence[int], nbytes: int, align: int = ALIGNMENT
    ) -> int:
        """Give a tensor its room behind what is there, aligned, and return where it starts."""
        gap = -self.size % align
        if gap and nbytes:
            self._entry(f"{PADDING}{len(self.tensors)}", "U8", [gap], gap)
        start = self.size
        self._entry(name, code, shape, nbytes)
        return start

    def _entry(self, name: str, code: str, shape: Sequence[int], nbytes: int) -> None:
        offsets = [self.size, self.size + nbytes]
        self.tensors[name] = {"dtype": code, "shape": list(shape), "data_offsets": offsets}
        self.size += nbytes
        self.estimate += 130 + 12 * len(shape)

    def row(self, row: RawRow) -> None:
        self.rows.append(row)
        self.estimate += _ROW_TEXT

    def add_rows(self, rows: list[RawRow]) -> None:
        self.rows += rows
        self.estimate += _ROW_TEXT * len(rows)

    def sketch(self, row: int, values: np.ndarray[Any, Any]) -> None:
        """Keep a few values of the tensor whose summary stands in this row."""
        self.sketches.append((row, values))
        self.estimate += 24

    def header(self) -> bytes:
        document = {
            "format": FORMAT,
            "rank": self.rank,
            "number": self.number,
            "merged": self.merged,
            "summary_columns": [*COLUMNS, *(f"first_{i}" for i in range(FIRST))],
            "row_fields": ROW_FIELDS,
            "sites": [_described(site)[0] for site in self.sites],
            "rows": self.rows,
            "histograms": [[row, len(buckets)] for row, buckets, _ in self.histograms],
        }
        if self.sketches:
            document["sketches"] = [[row, len(values)] for row, values in self.sketches]
        text = json.dumps(document, separators=(",", ":"))
        whole = {"__metadata__": {HEADER_KEY: text}, **self.tensors}
        return json.dumps(whole, separators=(",", ":")).encode("utf-8")

    def tail(self) -> list[tuple[int, bytes]]:
        """Place the summaries and histograms behind the tensors: (offset, bytes) to write."""
        parts: list[tuple[int, bytes]] = []
        if self.summaries:
            table = np.ascontiguousarray(np.vstack(self.summaries), dtype=np.float64)
            start = self.place(SUMMARIES, "F64", table.shape, table.nbytes)
            parts.append((start, table.tobytes()))
        if self.histograms:
            buckets = np.concatenate([b for _, b, _ in self.histograms]).astype(np.uint16)
            counts = np.concatenate([c for _, _, c in self.histograms]).astype(np.int64)
            start = self.place(HISTOGRAM_BUCKETS, "U16", buckets.shape, buckets.nbytes)
            parts.append((start, buckets.tobytes()))
            start = self.place(HISTOGRAM_COUNTS, "I64", counts.shape, counts.nbytes)
            parts.append((start, counts.tobytes()))
        if self.sketches:
            values = np.concatenate([v for _, v in self.sketches]).astype(np.float64)
            start = self.place(SKETCHES, "F64", values.shape, values.nbytes)
            parts.append((start, values.tobytes()))
        return parts


@lru_cache(maxsize=1 << 16)  # every segment names the same sites
def _described(site: Site) -> tuple[dict[str, Any], int]:
    """A site as it stands in a header, and how much room it takes there at most."""
    described = asdict(site)
    return described, len(json.dumps(json.dumps(described)))


@dataclass(frozen=True)
class Segment:
    """A finished segment as it was read: the rows now, the bytes when they are asked for."""

    store: Store
    name: str
    rank: int
    number: int
    merged: tuple[str, ...]
    sites: tuple[Site, ...]
    rows: tuple[RawRow, ...]
    tensors: dict[str, tuple[str, tuple[int, ...], int, int]]
    histograms: tuple[tuple[int, int], ...]
    data_start: int
    padding: int
    sketches: tuple[tuple[int, int], ...] = ()
    _checked: list[bool] = field(default_factory=list, repr=False, compare=False)

    def view(self, tensor: str) -> memoryview:
        _, _, start, stop = self.tensors[tensor]
        return self.store.view(self.name, self.data_start + start, self.data_start + stop)

    def array(self, tensor: str, dtype: str) -> np.ndarray[Any, Any]:
        shape = self.tensors[tensor][1]
        return np.frombuffer(self.view(tensor), dtype=dtype).reshape(shape)

    def summaries(self) -> np.ndarray[Any, Any]:
        """The table of summaries, a row each; what is not possible in it is damage."""
        if SUMMARIES not in self.tensors:
            return np.empty((0, WIDTH))
        table = self.array(SUMMARIES, "<f8")
        if not self._checked:
            self._check(table)
            self._checked.append(True)
        return table

    def histogram(self, place: slice) -> Histogram:
        """One histogram, of the stretch that is its."""
        buckets = self.array(HISTOGRAM_BUCKETS, "<u2")[place]
        counts = self.array(HISTOGRAM_COUNTS, "<i8")[place]
        if len(buckets) and (int(buckets.max()) >= BUCKETS or int(counts.min()) < 0):
            raise self._corrupt("a histogram has buckets or counts that there cannot be")
        return Histogram.from_sparse(buckets, counts)

    def _check(self, table: np.ndarray[Any, Any]) -> None:
        """That counts are counts, that parts are no more than the whole, that a norm has no sign.

        A statistic may be anything that values may be, also NaN: only counts cannot.
        """
        counts = table[:, :COUNTS]
        with np.errstate(invalid="ignore"):
            fits = (counts >= 0) & (counts <= _MOST) & (counts == np.floor(counts))
            whole = fits.all() and (counts[:, 1:4].sum(axis=1) <= counts[:, 0]).all()
            lengths = table[:, [COLUMNS.index("l2"), COLUMNS.index("std")]]
            if not whole or (counts.max(axis=1, initial=0) > counts[:, 0]).any():
                raise self._corrupt("its summaries have counts that there cannot be")
            if (lengths < 0).any():
                raise self._corrupt("its summaries have a negative norm or deviation")

    def _corrupt(self, what: str) -> DamagedError:
        return DamagedError(f"{self.store.url}/{self.name} is corrupt: {what}.")


def read_segment(store: Store, name: str) -> Segment:
    """Read a segment's header and check that everything it promises is there."""
    where = f"{store.url}/{name}"
    size = store.size(name)
    if size < 8:
        raise DamagedError(f"{where} is truncated: it has {size} bytes, a header needs 8.")
    (length,) = struct.unpack("<Q", store.view(name, 0, 8))
    if length > min(size - 8, _LARGEST_HEADER):
        raise DamagedError(
            f"{where} is truncated or corrupt: its header should take {length} bytes, "
            f"the file has {size - 8} behind the length."
        )
    text = bytes(store.view(name, 8, 8 + length))
    header = read_header(text, size - 8 - length, where)
    return Segment(
        store=store,
        name=name,
        rank=header.rank,
        number=header.number,
        merged=header.merged,
        sites=header.sites,
        rows=header.rows,
        tensors=header.tensors,
        histograms=header.histograms,
        data_start=8 + length,
        padding=len(text) - len(text.rstrip(b" ")),
        sketches=header.sketches,
    )


def sorted_rows(segments: Iterable[Segment]) -> list[tuple[Segment, RawRow]]:
    """Every row of these segments in order of execution, rank by rank."""
    pairs = [(segment, row) for segment in segments for row in segment.rows]
    pairs.sort(key=lambda pair: (pair[0].rank, pair[1][1]))
    return pairs
