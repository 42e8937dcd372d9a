"""What a recording would hold, before it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..taps.plan import PlannedRow
from . import text
from .console import table

if TYPE_CHECKING:
    from rich.table import Table

    from ..taps import Ports, Tap
    from ..taps.programs.base import Options
    from ..targets import Target

__all__ = ["CompiledRow", "TargetPlan", "plan_table", "plan_target"]


@dataclass(frozen=True)
class CompiledRow(PlannedRow):
    """A layer of a compiled model: how its name is known, or why it cannot be recorded."""

    provenance: str = "hook"
    lost: str | None = None


@dataclass(frozen=True)
class TargetPlan:
    """The rows of the first batch, and how many batches there are."""

    rows: tuple[PlannedRow, ...]
    batches: int
    notes: tuple[str, ...]

    @property
    def last_layer(self) -> str:
        """The layer behind which nothing is asked for; empty when that is the whole model."""
        known = [row for row in self.rows if row.shape is not None]
        return known[-1].layer if len(known) == len(self.rows) and known else ""

    def nbytes(self, keep: str) -> int:
        """The bytes of one batch, which are at most this: a tensor seen twice is stored once."""
        from ..numerics.sampling import SKETCH
        from ..numerics.summary import WIDTH

        if keep != "tensors":
            each = WIDTH + (SKETCH if keep == "sketch" else 0)
            return len(self.rows) * each * 8
        return sum(row.nbytes or 0 for row in self.rows)

    @property
    def lost(self) -> tuple[str, ...]:
        """The selected layers of a compiled model that are not recorded."""
        lost = [r.layer for r in self.rows if isinstance(r, CompiledRow) and r.lost is not None]
        return tuple(dict.fromkeys(lost))

    def sentence(self, keep: str) -> str:
        if any(isinstance(row, CompiledRow) for row in self.rows):
            return self._compiled_sentence()
        layers = text.plural(len({row.layer for row in self.rows}), "layer")
        records = text.plural(len(self.rows), "record")
        one = self.nbytes(keep)
        unknown = sum(row.nbytes is None for row in self.rows)
        more = f", and {text.plural(unknown, 'record')} of unknown size" if unknown else ""
        if self.batches == 1:
            return f"{layers}, {records}, at most {text.size(one)}{more}"
        whole = text.size(one * self.batches)
        return (
            f"{layers}, {records} a batch, at most {text.size(one)} a batch{more}; "
            f"about {whole} for {self.batches} batches like the first"
        )

    def _compiled_sentence(self) -> str:
        """How many layers: how large they are, a compiled model shows only when it runs."""
        from ..taps.programs.tap import REFUSED

        refused = len({r.layer for r in self.rows if getattr(r, "lost", None) == REFUSED})
        gone = len(self.lost) - refused
        layers = text.plural(len({row.layer for row in self.rows}) - len(self.lost), "layer")
        guesses = f", {refused} more whose name would be a guess"
        without = f", {text.plural(gone, 'layer')} of which nothing is left"
        told = f"{layers}{guesses if refused else ''}{without if gone else ''}"
        return f"{told}; sizes are not known without running"

    def to_dict(self, keep: str) -> dict[str, Any]:
        known = not any(isinstance(row, CompiledRow) for row in self.rows)
        one = self.nbytes(keep) if known else None
        return {
            "layers": [asdict(row) for row in self.rows],
            "batches": self.batches,
            "nbytes": one,
            "nbytes_all": None if one is None else one * self.batches,
            "notes": list(self.notes),
        }


def plan_target(
    target: Target,
    layers: Sequence[str],
    *,
    inputs: bool,
    outputs: bool,
    grads: bool = False,
    options: Options | None = None,
) -> TargetPlan:
    """Select the layers and find their shapes, without running."""
    from ..selection import select
    from ..taps import Ports, choose_tap
    from ..taps.eager import EagerTap
    from ..targets import shapes_without_running

    wanted = list(layers) or "blocks"
    ports = Ports(inputs=inputs, outputs=outputs, grads=grads)
    tap = choose_tap(target.model, wanted, ports, default=not layers, options=options)
    if not isinstance(tap, EagerTap):
        return _compiled(tap, ports, len(target.batches))
    selection = select(target.model, list(layers) or "blocks", default_fallback=not layers)
    plan = shapes_without_running(
        target.model, target.batches[0], selection.layers, inputs, outputs, target.run
    )
    return TargetPlan(plan.rows, len(target.batches), (*selection.notes, *plan.notes))


def _compiled(tap: Tap, ports: Ports, batches: int) -> TargetPlan:
    lost: Mapping[str, str] = getattr(tap, "lost", {})
    rows = tuple(
        CompiledRow(
            slot.name, slot.type, port, provenance=slot.provenance, lost=lost.get(slot.name)
        )
        for slot in tap.slots
        for port in ports.names()
    )
    return TargetPlan(rows, batches, tuple(tap.notes))


def plan_table(plan: TargetPlan) -> Table:
    """A row a tensor of the first batch; of a compiled model, a row a layer and port."""
    if any(isinstance(row, CompiledRow) for row in plan.rows):
        return _compiled_table(plan)
    rows = plan.rows
    leaves = any(row.leaf for row in rows)
    calls = any(row.call for row in rows)
    columns = [("layer", "left"), ("type", "left"), ("port", "left")]
    columns += [("leaf", "left")] * leaves + [("call", "right")] * calls
    result = table(*columns, ("shape", "left"), ("dtype", "left"), ("bytes", "right"))
    for row in rows:
        result.add_row(
            text.layer_name(row.layer),
            row.type,
            row.port,
            *([row.leaf] * leaves),
            *([str(row.call)] * calls),
            text.shape(row.shape) if row.shape is not None else "?",
            row.dtype or "?",
            text.size(row.nbytes) if row.nbytes is not None else "?",
        )
    return result


def _compiled_table(plan: TargetPlan) -> Table:
    rows = [row for row in plan.rows if isinstance(row, CompiledRow)]
    notes = [("recorded", "left")] if plan.lost else []
    columns = [("layer", "left"), ("type", "left"), ("port", "left"), ("name known by", "left")]
    result = table(*columns, *notes)
    for row in rows:
        told = [f"no: {row.lost}" if row.lost else "yes"] if notes else []
        result.add_row(text.layer_name(row.layer), row.type, row.port, row.provenance, *told)
    return result
