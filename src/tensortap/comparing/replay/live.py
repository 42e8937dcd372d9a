"""What a layer returned just now, beside what was recorded: judged as any two recordings are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from ...numerics import summarize
from ...numerics.difference import difference
from ...numerics.summary import Summary
from ...recording.dtypes import dtype_name
from ...recording.reader import Record
from ...selection.sites import is_called, is_leaf
from ..judge import Expectation, judge
from ..measure import MomentMeasurement, measure
from ..moments import MomentPair
from ..parts import compared_part, incomparable_part, missing_part
from ..precision import estimated_floor, offset_of
from ..results import Part
from ..sites import SitePair
from .running import Played

__all__ = ["LiveRecord", "judged_parts"]


@dataclass(frozen=True)
class LiveRecord(Record):
    """A record whose tensor is in memory and in no file."""

    _value: torch.Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)

    @classmethod
    def beside(cls, record: Record, value: torch.Tensor) -> LiveRecord:
        """The live tensor at the place and moment of a recorded one."""
        known: dict[str, Any] = {f.name: getattr(record, f.name) for f in fields(Record)}
        known |= {"shape": tuple(value.shape), "dtype": dtype_name(value.dtype), "_number": -1}
        return cls(**known, _value=value)

    @property
    def stored(self) -> bool:
        return True

    @property
    def tensor_id(self) -> str | None:
        return None

    @property
    def summary(self) -> Summary:
        return summarize(self._value)

    def tensor(self) -> torch.Tensor:
        return self._value


@dataclass(frozen=True)
class _Given:
    """What the inputs of a call bring along: the rounding of a cast, and an offset."""

    error: float
    offset: float

    @classmethod
    def of(cls, played: Played) -> _Given:
        error, offset = 0.0, 1.0
        for leaf, tensor in played.inputs.items():
            if tensor.is_floating_point():
                recorded = played.recorded.inputs[leaf].tensor()
                found = difference(recorded, tensor.to("cpu"), percentiles=False)
                offset = max(offset, offset_of(found))
                error = max(error, found.error) if found.error > 0 else error
        return cls(error, offset)


def judged_parts(
    module: nn.Module, played: Sequence[Played], precisions: tuple[str | None, str | None]
) -> tuple[Part, ...]:
    """A part an output leaf, over all calls that were run again."""
    leaves = list(dict.fromkeys(leaf for one in played for leaf in one.recorded.outputs))
    given = {one.recorded.moment: _Given.of(one) for one in played}
    return tuple(_part(module, leaf, played, given, precisions) for leaf in leaves)


def _part(
    module: nn.Module,
    leaf: str,
    played: Sequence[Played],
    given: dict[Any, _Given],
    precisions: tuple[str | None, str | None],
) -> Part:
    site = _site(leaf, played)
    if site.missing:
        return missing_part(site)
    if site.problem:
        return incomparable_part(site)
    measured = measure(site)
    depth = max(1, sum(is_leaf(m) and is_called(m) for m in module.modules()))

    def expected(moment: MomentMeasurement) -> Expectation:
        here = given[moment.moment]
        estimate = estimated_floor(moment.dtypes, precisions, depth, here.offset)
        named = [name for name in (*moment.dtypes, *precisions) if name is not None]
        basis = f"{' and '.join(dict.fromkeys(named))} and what the layer does"
        return Expectation(max(estimate, here.error) if estimate else estimate, basis)

    judged = [judge(moment, expected(moment)) for moment in measured.moments]
    return compared_part(measured, judged, None)


def _site(leaf: str, played: Sequence[Played]) -> SitePair:
    pairs = []
    for one in played:
        record, value = one.recorded.outputs.get(leaf), one.outputs.get(leaf)
        if record is not None and value is not None:
            live = LiveRecord.beside(record, value)
            pairs.append(MomentPair(*one.recorded.moment, record, live))
    site = SitePair("output", leaf, leaf, tuple(pairs))
    if not pairs:
        return SitePair("output", leaf, leaf, (), missing="candidate")
    for pair in pairs:
        ours, theirs = pair.shapes
        if ours != theirs:
            problem = f"The recorded output has the shape {list(ours)}, the live one {list(theirs)}"
            return SitePair("output", leaf, leaf, site.moments, problem=f"{problem}.")
    return site
