"""What blame says, as data: who made the final error, layer by layer."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..causes.cause import Cause
from ..maker import Maker
from ..results import BitDifference, Verdict, json_text, number, write_text

if TYPE_CHECKING:
    from .beside_floor import AgainstFloor

__all__ = ["Blame", "BlameInterrupted", "BlamedLayer"]


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

    `final` is the layer whose output counts as the model's ("" is the model itself), `final_error`
    its relative L2 error in the candidate's own run, `final_floor` what rounding explains of it.
    `final_verdict` is what compare says of it, and `final_why` why; `first_divergence` the first
    layer that diverges before it, `first_bit_difference` the first whose bits differ after others
    that have the same bits. `culprit` is the innermost layer that makes at least half of the
    squared final error and stands clear of rounding and of the others, or None; `share` is the
    culprit's share, or the largest one. `before` and `behind` are the shares of what runs before
    the first and behind the last of the blocks, which `ends` names; `beside` of what comes in by
    other ways than through them, as masks and rotary tables do. `causes` explain what the culprit
    does; `made_in` says where in its own forward, if the layers that it calls do nothing wrong.
    `against_floor` is set where the culprit was found beside a floor run: what it makes alone, and
    what the floor's does. `weights` are the layers whose weights are not the reference's, where its
    recording tells.
    `forwards` is how often the whole model ran over its `batches`, `limit` how often it may.
    `interrupted` says that it was stopped on its way, so that the answer is partial; `halved` then
    names the layers between which a bisection had come.
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
    final_verdict: Verdict = "diverged"
    final_why: str = ""
    first_divergence: str | None = None
    first_bit_difference: BitDifference | None = None
    before: float = math.nan
    behind: float = math.nan
    beside: float = math.nan
    causes: tuple[Cause, ...] = ()
    made_in: Maker | None = None
    against_floor: AgainstFloor | None = None
    bisect: bool = False
    interrupted: bool = False
    halved: tuple[str, str] | None = None
    forwards: int = 0
    limit: int = 0
    batches: int = 1
    ends: tuple[str, str] | None = None
    weights: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """No culprit, and a final output that is identical or within, as compare has it."""
        return self.culprit is None and self.final_verdict in ("identical", "within")

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
        bits = self.first_bit_difference
        return {
            "format": 1,
            "same": self.same,
            "sentence": self.sentence,
            "reference": self.reference,
            "candidate": self.candidate,
            "culprit": self.culprit,
            "made_in": None if self.made_in is None else self.made_in.to_dict(),
            "against_floor": None if self.against_floor is None else self.against_floor.to_dict(),
            **{name: number(getattr(self, name)) for name in numbers.split()},
            "final": self.final,
            "final_leaf": self.final_leaf,
            "final_verdict": self.final_verdict,
            "final_why": self.final_why,
            "first_divergence": self.first_divergence,
            "first_bit_difference": None if bits is None else bits.to_dict(),
            "causes": [cause.to_dict() for cause in self.causes],
            "bisect": self.bisect,
            "interrupted": self.interrupted,
            "halved": None if self.halved is None else list(self.halved),
            "forwards": self.forwards,
            "limit": self.limit,
            "batches": self.batches,
            "ends": None if self.ends is None else list(self.ends),
            "weights": list(self.weights),
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


class BlameInterrupted(KeyboardInterrupt):
    """Somebody pressed Ctrl-C: `blame` holds what was known until then, and says so."""

    def __init__(self, blame: Blame) -> None:
        super().__init__("interrupted")
        self.blame = blame
