"""What a recording would hold, before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from . import text
from .console import table

if TYPE_CHECKING:
    from rich.table import Table

    from ..targets import PlannedRow, Target

__all__ = ["TargetPlan", "plan_table", "plan_target"]


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

    def sentence(self, keep: str) -> str:
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

    def to_dict(self, keep: str) -> dict[str, Any]:
        one = self.nbytes(keep)
        return {
            "layers": [asdict(row) for row in self.rows],
            "batches": self.batches,
            "nbytes": one,
            "nbytes_all": one * self.batches,
            "notes": list(self.notes),
        }


def plan_target(
    target: Target, layers: Sequence[str], *, inputs: bool, outputs: bool
) -> TargetPlan:
    """Select the layers and find their shapes, without running."""
    from ..selection import select
    from ..targets import shapes_without_running

    selection = select(target.model, list(layers) or "blocks", default_fallback=not layers)
    plan = shapes_without_running(
        target.model, target.batches[0], selection.layers, inputs, outputs, target.run
    )
    return TargetPlan(plan.rows, len(target.batches), (*selection.notes, *plan.notes))


def plan_table(plan: TargetPlan) -> Table:
    """A row a tensor of the first batch."""
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
