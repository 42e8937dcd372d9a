"""A segment's header from outside, turned into values that hold what they promise.

Every length, offset, index and name is checked here, against the file's own size and against each
other: a wrong one becomes a sentence, and nothing that comes later meets it.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DamagedError
from ..numerics.summary import WIDTH
from .contents import DOCUMENT
from .dtypes import ITEM_SIZES
from .kinds import Unfit, items, parse, text, whole
from .schema import (
    HEADER_KEY,
    HISTOGRAM_BUCKETS,
    HISTOGRAM_COUNTS,
    SKETCHES,
    SUMMARIES,
    Site,
)

__all__ = ["ROW_FIELDS", "Header", "RawRow", "Tensor", "read_header"]

ROW_FIELDS = ("site", "order", "epoch", "batch", "call", "tensor", "summary")

RawRow = tuple[int, int, int, int, int, int, int]
"""(site, order, epoch, batch, call, tensor number or -1, summary row or -1)"""

Tensor = tuple[str, tuple[int, ...], int, int]
"""(safetensors' dtype, shape, first byte, byte after the last) in the data part"""

_OFFSET = whole(0, 1 << 60)
_NUMBERS = items(_OFFSET)
_NAME = text()


@dataclass(frozen=True)
class Header:
    """What a segment's header says, checked."""

    rank: int
    number: int
    merged: tuple[str, ...]
    sites: tuple[Site, ...]
    rows: tuple[RawRow, ...]
    tensors: dict[str, Tensor]
    histograms: tuple[tuple[int, int], ...]
    sketches: tuple[tuple[int, int], ...]


def read_header(data: bytes, room: int, where: str) -> Header:
    """The header in these bytes, of a file that has `room` bytes of data behind it."""
    try:
        return _checked(data, room, where)
    except Unfit as error:
        raise DamagedError(f"{where} is corrupt: {error}.") from None
    except ValueError as error:
        raise DamagedError(f"{where} is corrupt: its header is not JSON ({error}).") from None


def _checked(data: bytes, room: int, where: str) -> Header:
    whole_header = parse(data)
    if not isinstance(whole_header, dict):
        raise Unfit("its header is no object")
    metadata = whole_header.pop("__metadata__", None)
    inner = metadata.get(HEADER_KEY) if isinstance(metadata, dict) else None
    if not isinstance(inner, str):
        raise Unfit(f"its header has no '{HEADER_KEY}' in its metadata")
    tensors = {
        _NAME(name, "a tensor's name"): _tensor(name, entry, room, where)
        for name, entry in whole_header.items()
    }
    _cover(tensors, room, where)
    document = DOCUMENT(parse(inner), "its document")
    sites = tuple(
        Site(**{name: site.get(name) for name in site if name in _FIELDS})
        for site in document["sites"]
    )
    summaries = _summaries(tensors)
    return Header(
        rank=document["rank"],
        number=document["number"],
        merged=tuple(document.get("merged", ())),
        sites=sites,
        rows=_rows(document["rows"], len(sites), summaries),
        tensors=tensors,
        histograms=_stretches(
            document,
            "histograms",
            tensors,
            {HISTOGRAM_BUCKETS: "U16", HISTOGRAM_COUNTS: "I64"},
            summaries,
        ),
        sketches=_stretches(document, "sketches", tensors, {SKETCHES: "F64"}, summaries),
    )


_FIELDS = frozenset(Site.__dataclass_fields__)


def _tensor(name: str, entry: Any, room: int, where: str) -> Tensor:
    shown = f"tensor {name[:60]!a}"
    if not isinstance(entry, Mapping):
        raise Unfit(f"{shown} is no object")
    code, shape = entry.get("dtype"), _NUMBERS(entry.get("shape"), f"the shape of {shown}")
    offsets = _NUMBERS(entry.get("data_offsets"), f"the place of {shown}")
    if not isinstance(code, str) or len(code) > 40 or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Unfit(f"{shown} has no dtype or no place")
    start, stop = offsets
    if stop > room:
        raise DamagedError(
            f"{where} is truncated: {shown} should end at byte {stop} of the data, "
            f"the file ends at byte {room}."
        )
    needed = math.prod(shape) * ITEM_SIZES.get(code, 0)
    if code in ITEM_SIZES and needed != stop - start:
        raise Unfit(
            f"{shown} of {code} {shape[:8]} needs {needed} bytes, its place has {stop - start}"
        )
    return code, tuple(shape), start, stop


def _cover(tensors: Mapping[str, Tensor], room: int, where: str) -> None:
    """The tensors must fill the file: otherwise their places are not where they were written."""
    end = 0
    for name, (_, _, start, stop) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if start != end:
            raise Unfit(
                f"tensor {name[:60]!a} should start at byte {end} of the data, after the "
                f"one before it, but its place is byte {start}"
            )
        end = stop
    if end != room:
        raise Unfit(f"its tensors take {end} bytes, the file has {room} for them")


def _summaries(tensors: Mapping[str, Tensor]) -> int:
    """How many rows the table of summaries has."""
    if SUMMARIES not in tensors:
        return 0
    code, shape, _, _ = tensors[SUMMARIES]
    if code != "F64" or len(shape) != 2 or shape[1] != WIDTH:
        raise Unfit(
            f"its summaries are {code} of shape {list(shape[:8])}, expected F64 [n, {WIDTH}]"
        )
    return shape[0]


def _stretches(
    document: Mapping[str, Any],
    key: str,
    tensors: Mapping[str, Tensor],
    held_in: Mapping[str, str],
    summaries: int,
) -> tuple[tuple[int, int], ...]:
    """Pairs of a summary's row and how much of a flat tensor is its."""
    pairs: tuple[tuple[int, int], ...] = tuple(document.get(key, ()))
    if any(row >= summaries for row, _ in pairs):
        raise Unfit(f"its '{key}' point to summaries that it has not")
    length = sum(count for _, count in pairs)
    for name, code in held_in.items():
        if not pairs and name not in tensors:
            continue
        found = tensors.get(name)
        if found is None:
            raise Unfit(f"it has '{key}' and no tensor '{name}'")
        if found[0] != code or found[1] != (length,):
            raise Unfit(
                f"its '{name}' is {found[0]} {list(found[1][:8])}, expected {code} [{length}]"
            )
    return pairs


def _rows(rows: list[Any], sites: int, summaries: int) -> tuple[RawRow, ...]:
    """The rows, each of which points to a site and a summary that are there.

    A watched run has hundreds of thousands, so they are looked at all at once.
    """
    width = len(ROW_FIELDS)
    if not all(isinstance(row, list) and len(row) == width for row in rows):
        raise Unfit(f"a row is not a list of {width} whole numbers")
    try:
        flat = array("q", itertools.chain.from_iterable(rows))
    except (TypeError, OverflowError):
        raise Unfit("a row holds something else than whole numbers of 64 bits") from None
    numbers = np.frombuffer(flat, np.int64).reshape(-1, width)
    if len(numbers):
        least, most = numbers.min(axis=0), numbers.max(axis=0)
        if least[0] < 0 or most[0] >= sites:
            raise Unfit("a row points to no site")
        if least[6] < -1 or most[6] >= summaries:
            raise Unfit("a row points to no summary")
        if least[5] < -1 or (least[1:5] < 0).any():
            raise Unfit("a row has a negative order, epoch, batch, call or tensor")
        if ((numbers[:, 5] < 0) & (numbers[:, 6] < 0)).any():
            raise Unfit("a row has neither a tensor nor a summary")
    found: list[RawRow] = list(map(tuple, numbers.tolist()))  # type: ignore[arg-type]
    return tuple(found)
