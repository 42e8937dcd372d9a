"""One segment: a plain safetensors file with our rows in its metadata.

The header is built by `HeaderBuilder` and read back, with every number checked, by `read_segment`:
files come from outside, and a wrong offset must become a sentence, not a crash.
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
from ..numerics.summary import COLUMNS, FIRST, WIDTH
from .dtypes import ITEM_SIZES
from .schema import (
    FORMAT,
    HEADER_KEY,
    HISTOGRAM_BUCKETS,
    HISTOGRAM_COUNTS,
    PADDING,
    PORTS,
    PROVENANCES,
    SKETCHES,
    SUMMARIES,
    Provenance,
    Site,
)
from .store import Store

__all__ = ["ALIGNMENT", "HeaderBuilder", "RawRow", "Segment", "read_segment", "tensor_id"]

ALIGNMENT = 64
_LARGEST_HEADER = 100_000_000  # what safetensors itself accepts
_ROW_TEXT = 80  # bytes that a row takes in a header at most
_ROW_FIELDS = ("site", "order", "epoch", "batch", "call", "tensor", "summary")

RawRow = tuple[int, int, int, int, int, int, int]
"""(site, order, epoch, batch, call, tensor number or -1, summary row or -1)"""


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
            "row_fields": _ROW_FIELDS,
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

    def view(self, tensor: str) -> memoryview:
        _, _, start, stop = self.tensors[tensor]
        return self.store.view(self.name, self.data_start + start, self.data_start + stop)

    def array(self, tensor: str, dtype: str) -> np.ndarray[Any, Any]:
        shape = self.tensors[tensor][1]
        return np.frombuffer(self.view(tensor), dtype=dtype).reshape(shape)

    def summaries(self) -> np.ndarray[Any, Any]:
        if SUMMARIES not in self.tensors:
            return np.empty((0, WIDTH))
        return self.array(SUMMARIES, "<f8")


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
    try:
        text = bytes(store.view(name, 8, 8 + length))
        whole = json.loads(text)
        document = json.loads(whole["__metadata__"][HEADER_KEY])
        entries = {key: value for key, value in whole.items() if key != "__metadata__"}
        tensors = {
            key: _check_entry(key, value, size - 8 - length, where)
            for key, value in entries.items()
        }
        padding = len(text) - len(text.rstrip(b" "))
        return _build(store, name, document, tensors, (8 + length, padding), where)
    except DamagedError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"{where} is corrupt: its header cannot be read ({type(error).__name__}: {error})."
        ) from None


def _check_entry(
    key: str, value: Any, room: int, where: str
) -> tuple[str, tuple[int, ...], int, int]:
    code, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
    numbers = [start, stop, *shape]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise DamagedError(f"{where} is corrupt: tensor {key} has a size that is no whole number.")
    if stop > room:
        raise DamagedError(
            f"{where} is truncated: tensor {key} should end at byte {stop} of the data, "
            f"the file ends at byte {room}."
        )
    count = 1
    for extent in shape:
        count *= extent
    if code in ITEM_SIZES and count * ITEM_SIZES[code] != stop - start:
        raise DamagedError(
            f"{where} is corrupt: tensor {key} of {code} {list(shape)} needs "
            f"{count * ITEM_SIZES[code]} bytes, its place has {stop - start}."
        )
    return str(code), tuple(shape), start, stop


def _build(
    store: Store,
    name: str,
    document: Any,
    tensors: dict[str, tuple[str, tuple[int, ...], int, int]],
    header: tuple[int, int],
    where: str,
) -> Segment:
    sites = tuple(_site(item, where) for item in document["sites"])
    summaries = tensors[SUMMARIES][1] if SUMMARIES in tensors else (0, WIDTH)
    if len(summaries) != 2 or summaries[1] != WIDTH:
        raise DamagedError(f"{where} is corrupt: its summaries have shape {list(summaries)}.")
    rows = _checked_rows(document["rows"], len(sites), summaries[0], where)
    sketches = tuple((int(r), int(n)) for r, n in document.get("sketches", ()))
    kept = tensors[SKETCHES][1] if SKETCHES in tensors else (0,)
    if sketches and kept != (sum(count for _, count in sketches),):
        raise DamagedError(f"{where} is corrupt: its sketches have shape {list(kept)}.")
    return Segment(
        store=store,
        name=name,
        rank=int(document["rank"]),
        number=int(document["number"]),
        merged=tuple(str(n) for n in document.get("merged", ())),
        sites=sites,
        rows=rows,
        tensors=tensors,
        histograms=tuple((int(r), int(n)) for r, n in document.get("histograms", ())),
        data_start=header[0],
        padding=header[1],
        sketches=sketches,
    )


def _checked_rows(rows: Any, sites: int, summaries: int, where: str) -> tuple[RawRow, ...]:
    """The rows, each of which points to a site and a summary that are there.

    A watched run has hundreds of thousands, so they are looked at all at once, and one by one only
    to name the one that is wrong.
    """
    try:
        numbers = np.array(rows)
    except ValueError:
        numbers = np.empty(0)
    if numbers.dtype == np.int64 and numbers.shape[1:] == (len(_ROW_FIELDS),):
        at = numbers[:, 0]
        if ((at >= 0) & (at < sites) & (numbers[:, 6] < summaries)).all():
            return tuple(map(tuple, rows))
    checked = tuple(tuple(int(n) for n in row) for row in rows)
    for row in checked:
        if len(row) != len(_ROW_FIELDS) or not 0 <= row[0] < sites:
            raise DamagedError(f"{where} is corrupt: the row {row} points to no site.")
        if row[6] >= summaries:
            raise DamagedError(f"{where} is corrupt: the row {row} points to no summary.")
    return checked  # type: ignore[return-value]


def _site(item: Any, where: str) -> Site:
    shape = tuple(int(n) for n in item["shape"])
    if item["port"] not in PORTS or any(n < 0 for n in shape):
        raise DamagedError(f"{where} is corrupt: no such site as {item!r}.")
    alias = item.get("alias")
    return Site(
        layer=str(item["layer"]),
        port=item["port"],
        leaf=str(item["leaf"]),
        alias=None if alias is None else str(alias),
        type=str(item["type"]),
        shape=shape,
        dtype=str(item["dtype"]),
        device=str(item["device"]),
        provenance=_provenance(item.get("provenance", "hook"), where),
    )


def _provenance(value: Any, where: str) -> Provenance:
    if value not in PROVENANCES:
        raise DamagedError(f"{where} is corrupt: no name is known by {value!r}.")
    return value  # type: ignore[no-any-return]


def sorted_rows(segments: Iterable[Segment]) -> list[tuple[Segment, RawRow]]:
    """Every row of these segments in order of execution, rank by rank."""
    pairs = [(segment, row) for segment in segments for row in segment.rows]
    pairs.sort(key=lambda pair: (pair[0].rank, pair[1][1]))
    return pairs
