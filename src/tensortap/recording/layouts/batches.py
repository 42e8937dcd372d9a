"""Several batches of one layer in one array, and apart again.

The documents put all samples into one array along axis 0. How they were cut into batches, and of
what dtype they were, is said in the statistics beside it, so that an import cuts them again.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import DamagedError, LayoutError, RecordingError
from ...regular_files import read_regular
from ..dtypes import torch_dtype
from ..kinds import parse, plain
from .arrays import Array, from_numpy, numpy_twin, to_numpy
from .files import writing

_LARGEST_TEXT = 256 << 20  # bytes of the statistics beside a tree

if TYPE_CHECKING:
    from ..reader import Record, Recording
    from ..schema import Port

__all__ = [
    "Part",
    "describe",
    "gather",
    "join",
    "parts_of",
    "read_json",
    "split",
    "unloadable",
    "write_json",
]


@dataclass(frozen=True)
class Part:
    """One batch inside an array of several."""

    epoch: int
    batch: int
    shape: tuple[int, ...]

    def extent(self, dtype: torch.dtype) -> int:
        """How much of axis 0 the batch takes."""
        if _raw(dtype):
            return math.prod(self.shape) * dtype.itemsize
        return self.shape[0] if self.shape else 1


def _raw(dtype: torch.dtype) -> bool:
    """Whether values are kept as bytes, so that the array is flat."""
    return numpy_twin(dtype) == "uint8" and dtype != torch.uint8


def gather(recording: Recording, layer: str, port: Port) -> tuple[Record, ...]:
    """The records that go into one array: of each batch the first call's first leaf.

    A batch of another shape than the first, axis 0 aside, cannot stand in the same array.
    """
    chosen: dict[tuple[int, int], Record] = {}
    first: Record | None = None
    for record in recording[layer].port(port):
        if record.rank or not record.stored:
            continue
        first = first or record
        same = record.leaf == first.leaf and record.dtype == first.dtype
        fits = len(record.shape) == len(first.shape) and record.shape[1:] == first.shape[1:]
        if same and fits:
            chosen.setdefault((record.epoch, record.batch), record)
    return tuple(chosen.values())


def join(records: Sequence[Record], path: Path | None = None) -> Array:
    """The records' values along axis 0; with a path, written there as .npy batch by batch."""
    first = records[0]
    dtype = torch_dtype(first.dtype, first.layer)
    parts = [Part(r.epoch, r.batch, r.shape) for r in records]
    length = sum(part.extent(dtype) for part in parts)
    shape = (length,) if _raw(dtype) or not first.shape else (length, *first.shape[1:])
    kind = np.dtype(numpy_twin(dtype))
    if path is None or math.prod(shape) == 0:
        whole: Array = np.empty(shape, kind)
    else:
        whole = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
    at = 0
    for record, part in zip(records, parts, strict=True):
        extent = part.extent(dtype)
        whole[at : at + extent] = to_numpy(record.tensor()).reshape(extent, *shape[1:])
        at += extent
    if path is not None:
        if isinstance(whole, np.memmap):
            whole.flush()
        else:
            with path.open("wb") as file:
                np.lib.format.write_array(file, whole, allow_pickle=False)
    return whole


def describe(records: Sequence[Record], shape: Sequence[int]) -> dict[str, Any]:
    """The documents' statistics of one array, and what an import needs besides."""
    first = records[0]
    summary = functools.reduce(lambda a, b: a.merge(b), (r.summary for r in records)).to_dict()
    return {
        "shape": list(shape),
        "first_10": summary["first"],
        **{key: summary[key] for key in ("mean", "std", "min", "max", "nan", "posinf", "neginf")},
        "layer": first.layer,
        "leaf": first.leaf,
        "alias": first.alias,
        "type": first.type,
        "dtype": first.dtype,
        "stored_as": numpy_twin(torch_dtype(first.dtype, first.layer)),
        "batches": [{"epoch": r.epoch, "batch": r.batch, "shape": list(r.shape)} for r in records],
    }


def parts_of(
    stats: Mapping[str, Any], array_shape: tuple[int, ...], where: str
) -> tuple[torch.dtype | None, tuple[Part, ...]]:
    """The dtype and batches that statistics tell of; without any, the whole array is one batch."""
    name = stats.get("dtype")
    try:
        dtype = torch_dtype(name, where) if isinstance(name, str) else None
    except DamagedError as error:
        raise LayoutError(str(error)) from None
    batches = stats.get("batches")
    if dtype is None or not isinstance(batches, list) or not batches:
        return None, (Part(0, 0, array_shape),)
    try:
        parts = tuple(
            Part(_whole(b["epoch"]), _whole(b["batch"]), tuple(_whole(n) for n in b["shape"]))
            for b in batches
        )
    except (KeyError, TypeError, ValueError):
        raise LayoutError(
            f"The statistics of {where} are damaged: 'batches' should be a list of "
            '{"epoch", "batch", "shape"}.'
        ) from None
    length = array_shape[0] if array_shape else 1
    if sum(part.extent(dtype) for part in parts) != length:
        raise LayoutError(
            f"{where} has {length} rows along axis 0, its statistics tell of "
            f"{sum(part.extent(dtype) for part in parts)}."
        )
    return dtype, parts


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError
    return value


def split(
    array: Array, dtype: torch.dtype | None, parts: Sequence[Part], index: int, where: str
) -> torch.Tensor:
    """One batch out of an array."""
    part = parts[index]
    if dtype is None:
        return from_numpy(array, None, part.shape, where)
    start = sum(p.extent(dtype) for p in parts[:index])
    rows = np.atleast_1d(array)[start : start + part.extent(dtype)]
    return from_numpy(rows, dtype, part.shape, where)


def read_json(path: Path) -> dict[str, Any]:
    """A statistics file as a dictionary; anything else is refused by name."""
    try:
        data = plain(parse(read_regular(path, _LARGEST_TEXT)), "it")
    except ValueError as error:
        raise LayoutError(f"{path} is corrupt: no usable JSON ({error}).") from None
    except OSError as error:
        raise LayoutError(f"Cannot read {path}: {error.strerror or error}.") from None
    if not isinstance(data, dict):
        raise LayoutError(f"{path} is corrupt: expected a JSON object, got {type(data).__name__}.")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    with writing(path) as scratch:
        text = json.dumps(data, indent=4, ensure_ascii=False, allow_nan=False)
        scratch.write_text(text + "\n", encoding="utf-8")


def unloadable(records: Sequence[Record]) -> str | None:
    """Why these records cannot be loaded, or None when they can."""
    try:
        for record in records:
            record.tensor()
    except (RecordingError, RuntimeError) as error:
        return str(error)
    return None
