"""Records by a few of their values: tensors that were sampled, sketches, or the first ten.

A record of a thousand values is a record as any other, so the one judge can look at it; positions
follow from the shape alone, so that two runs are sampled at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...numerics.sampling import SKETCH, sample
from ...numerics.summary import Summary
from ...recording.dtypes import torch_dtype
from ...recording.reader import Layer, Record
from ..align import LayerPair

__all__ = ["SketchRecord", "by_samples", "by_summaries", "has_samples"]

_Key = tuple[str, str, int, int, int, int]


@dataclass(frozen=True)
class SketchRecord(Record):
    """A record of which some values are known, as if they were all of it."""

    whole: Record | None = None
    sampled: bool = False
    first: bool = False  # whether the summary's first values are all there is

    @property
    def stored(self) -> bool:
        return self.sampled

    @property
    def summary(self) -> Summary:
        assert self.whole is not None
        return self.whole.summary

    @property
    def tensor_id(self) -> str | None:
        return None  # what is sampled alike need not be alike

    def tensor(self) -> torch.Tensor:
        assert self.whole is not None
        values = _values(self.whole, self.first)
        found = torch.from_numpy(np.ascontiguousarray(values))
        dtype = torch_dtype(self.whole.dtype, self.layer)
        return found if dtype.is_complex else found.to(dtype)


def by_samples(pair: LayerPair) -> LayerPair:
    """Two layers whose records are their samples, where both sides have some of the same shape."""
    assert pair.reference is not None
    assert pair.candidate is not None
    left, right = _keyed(pair.reference), _keyed(pair.candidate)
    ours: dict[_Key, Record] = {}
    theirs: dict[_Key, Record] = {}
    for key in left.keys() & right.keys():
        one, other = left[key], right[key]
        first = not (has_samples(one) and has_samples(other))
        if one.shape == other.shape and one.shape:
            ours[key], theirs[key] = _sketch(one, first), _sketch(other, first)
    return LayerPair(
        _with(pair.reference, [ours.get(key, _slim(left[key])) for key in left]),
        _with(pair.candidate, [theirs.get(key, _slim(right[key])) for key in right]),
        pair.matched_by,
    )


def by_summaries(pair: LayerPair) -> LayerPair:
    """Two layers whose records are their summaries alone."""
    assert pair.reference is not None
    assert pair.candidate is not None
    return LayerPair(
        _with(pair.reference, [_slim(record) for record in pair.reference.records]),
        _with(pair.candidate, [_slim(record) for record in pair.candidate.records]),
        pair.matched_by,
    )


def _with(layer: Layer, records: Sequence[Record]) -> Layer:
    outputs = tuple(record for record in records if record.port == "output")
    return replace(layer, records=outputs)


def _keyed(layer: Layer) -> dict[_Key, Record]:
    return {(r.port, r.leaf, r.rank, r.epoch, r.batch, r.call): r for r in layer.records}


def has_samples(record: Record) -> bool:
    """Whether more is known of a record than its statistics and first values."""
    return record.stored or record.sketch is not None


def _sketch(record: Record, first: bool) -> SketchRecord:
    count = len(_values(record, first))
    return _copied(record, shape=(count,), sampled=True, first=first)


def _slim(record: Record) -> SketchRecord:
    return _copied(record)


def _copied(record: Record, **changes: Any) -> SketchRecord:
    fields = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    return SketchRecord(**{**fields, "whole": record, **changes})


def _values(record: Record, first: bool) -> np.ndarray[Any, Any]:
    if first:
        return np.array(record.summary.first)
    kept = record.sketch
    return sample(record.tensor(), SKETCH) if kept is None else kept
