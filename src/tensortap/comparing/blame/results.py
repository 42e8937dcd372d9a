"""What blame says, as data: who made the final error, layer by layer."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

from ..causes.cause import Cause
from ..results import json_text, number, write_text

__all__ = ["Blame", "BlamedLayer"]


@dataclass(frozen=True)
class BlamedLayer:
    """One layer: the error that it makes, the error that it hands on, its share of the final one.

    All errors are relative L2 errors of the layer's outputs (`handed`: of its inputs), NaN where
    unknown. `share` is the part of the squared final error that goes when the layer alone is made
    right: with the reference's input put at the layer, less with its output put there.

    `parent` is the layer that was descended into to reach this one, None on the first level. `how`
    says what the share rests on: `patched` (in runs of the whole model), `within` (in runs of
    its block alone, scaled by the block's share), `inferred` (the runs could be told without
    running them), `` where there is none. `floor` is what rounding explains of `made_here`.
    """

    layer: str
    type: str = ""
    made_here: float = math.nan
    accumulated: float = math.nan
    handed: float = math.nan
    amplification: float = math.nan
    share: float = math.nan
    floor: float = math.nan
    parent: str | None = None
    how: str = ""
    note: str = ""

    @property
    def clear(self) -> bool:
        """Whether what the layer makes is more than rounding explains."""
        return not self.made_here <= self.floor

    def to_dict(self) -> dict[str, Any]:
        numbers = "made_here accumulated handed amplification share floor"
        return {
            "layer": self.layer,
            "type": self.type,
            **{name: number(getattr(self, name)) for name in numbers.split()},
            "parent": self.parent,
            "how": self.how,
            "note": self.note,
        }


@dataclass(frozen=True)
class Blame:
    """Who made the error at a model's output; true when there is none to speak of.

    `final` is the layer whose output counts as the model's ("" is the model itself),
    `final_error` its relative L2 error in the candidate's own run, `final_floor` what rounding
    explains of it. `culprit` is the innermost layer that makes at least half of the squared final
    error and stands clear of rounding and of the others, or None; `share` is the culprit's share,
    or the largest one. `before` and `behind` are the shares of what runs before the first and
    behind the last of the blocks, which `ends` names; `beside` of what comes in by other ways than
    through them, as masks and rotary tables do. `causes` explain what the culprit does.
    `forwards` is how often the whole model ran over its `batches`, `limit` how often it may.
    """

    reference: str
    candidate: str
    layers: tuple[BlamedLayer, ...] = field(repr=False)
    culprit: str | None
    share: float
    final: str = ""
    final_leaf: str = ""
    final_error: float = math.nan
    final_floor: float = math.nan
    before: float = math.nan
    behind: float = math.nan
    beside: float = math.nan
    causes: tuple[Cause, ...] = ()
    bisect: bool = False
    forwards: int = 0
    limit: int = 0
    batches: int = 1
    ends: tuple[str, str] | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """No culprit, and a final error that is nil or explained by rounding."""
        return self.culprit is None and self.final_error <= self.final_floor

    def __bool__(self) -> bool:
        return self.same

    @property
    def first_level(self) -> tuple[BlamedLayer, ...]:
        """The layers that were looked at before descending, in order of execution."""
        return tuple(row for row in self.layers if row.parent is None)

    def inside(self, layer: str) -> tuple[BlamedLayer, ...]:
        """The layers that were looked at when descending into this one."""
        return tuple(row for row in self.layers if row.parent == layer)

    def __getitem__(self, layer: str) -> BlamedLayer:
        for row in self.layers:
            if row.layer == layer:
                return row
        raise KeyError(layer)

    @property
    def sentence(self) -> str:
        """The answer in a sentence."""
        from .sentences import answer

        return answer(self)

    def to_dict(self) -> dict[str, Any]:
        numbers = "share final_error final_floor before behind beside"
        return {
            "format": 1,
            "same": self.same,
            "sentence": self.sentence,
            "reference": self.reference,
            "candidate": self.candidate,
            "culprit": self.culprit,
            **{name: number(getattr(self, name)) for name in numbers.split()},
            "final": self.final,
            "final_leaf": self.final_leaf,
            "causes": [cause.to_dict() for cause in self.causes],
            "bisect": self.bisect,
            "forwards": self.forwards,
            "limit": self.limit,
            "batches": self.batches,
            "ends": None if self.ends is None else list(self.ends),
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "layers": [row.to_dict() for row in self.layers],
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Strict JSON, as docs/blame.schema.json describes it; also written to `path`."""
        return json_text(self.to_dict(), path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """A single page with a chart of the shares, which opens without a network."""
        from ...reporting.blame_page import render_blame_page

        text = render_blame_page(self)
        if path is not None:
            write_text(path, text)
        return text

    def __rich__(self) -> Any:
        from ...reporting.blame import blame_table

        return blame_table(self)

    def __str__(self) -> str:
        from ...reporting.blame import blame_text

        return blame_text(self)

    def _repr_html_(self) -> str:
        from ...reporting.blame_page import blame_notebook

        return blame_notebook(self)
