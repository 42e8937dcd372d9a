"""The layers of a blame as rows of a table: children under the layer that was descended into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import text

if TYPE_CHECKING:
    from ..comparing.blame.results import Blame, BlamedLayer

__all__ = [
    "Row",
    "amplification",
    "cost",
    "final_words",
    "most_telling",
    "outside",
    "percent",
    "rows_of",
]

_HOW = {"within": "within its block", "inferred": "inferred"}
_LEAST = 0.0005  # of the final error: less is said as that
_NEAR = 12  # rows around the largest share that a long table keeps whatever theirs is
_WORTH = 0.005  # of it, for what is outside the chain to be said


@dataclass(frozen=True)
class Row:
    """One line: a layer at its depth, `parent` the number of the row above it."""

    name: str
    layer: BlamedLayer
    depth: int = 0
    culprit: bool = False
    parent: int | None = None
    other_weights: bool = False  # than the reference's, here or inside

    def value(self, name: str) -> float:
        """A number of the layer by its name."""
        return float(getattr(self.layer, name))

    @property
    def share(self) -> float:
        return self.layer.share

    @property
    def type(self) -> str:
        return text.clean(self.layer.type)

    @property
    def note(self) -> str:
        """What is to be said beside the numbers, where they are not plain."""
        parts = [_HOW.get(self.layer.how, ""), text.clean(self.layer.note).rstrip(".")]
        if not self.layer.clear and self.layer.made_here > 0:
            parts.insert(0, "other weights" if self.other_weights else "rounding")
        return "; ".join(part for part in parts if part)


def rows_of(blame: Blame, *, full_names: bool = False) -> list[Row]:
    """Every layer in order of execution, children below their parent.

    A child's name stands without its parent's, as `.down`, unless `full_names`.
    """
    rows: list[Row] = []
    children: dict[str | None, list[BlamedLayer]] = {}
    known = {layer.layer for layer in blame.layers}
    for layer in blame.layers:
        parent = layer.parent if layer.parent in known - {layer.layer} else None
        children.setdefault(parent, []).append(layer)
    seen: set[int] = set()

    def add(layers: Sequence[BlamedLayer], depth: int, parent: int | None) -> None:
        for layer in layers:
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            above = layer.parent if depth else None
            name = text.layer_name(layer.layer if full_names else _below(layer.layer, above))
            is_culprit = blame.culprit is not None and layer.layer == blame.culprit
            inside = f"{layer.layer}." if layer.layer else ""
            other = any(n == layer.layer or n.startswith(inside) for n in blame.weights)
            rows.append(Row(name, layer, depth, is_culprit, parent, other))
            add(children.get(layer.layer, ()), depth + 1, len(rows) - 1)

    add(children.get(None, ()), 0, None)
    add([layer for layer in blame.layers if id(layer) not in seen], 0, None)
    return rows


def _below(layer: str, parent: str | None) -> str:
    """A child's name as its parent calls it."""
    return layer[len(parent) :] if parent and layer.startswith(f"{parent}.") else layer


def most_telling(rows: Sequence[Row], most: int) -> list[Row]:
    """All where there are few, else no more than about `most`.

    Those with the largest shares, with what they stand below; of those with none, the neighbours
    of the largest.
    """
    if len(rows) <= most:
        return list(rows)
    shares = [abs(row.share) if math.isfinite(row.share) else 0.0 for row in rows]
    middle = max(range(len(rows)), key=lambda at: (rows[at].culprit, shares[at]))
    ranked = sorted(
        (at for at in range(len(rows)) if shares[at] >= _LEAST or abs(at - middle) <= _NEAR),
        key=lambda at: (not rows[at].culprit, -shares[at], abs(at - middle)),
    )
    kept: set[int] = set()
    for at in ranked:
        if len(kept) >= most:
            break
        above: int | None = at
        while above is not None:
            kept.add(above)
            above = rows[above].parent
    return [row for at, row in enumerate(rows) if at in kept]


def percent(share: float) -> str:
    """A share in few letters."""
    if math.isnan(share):
        return "-"
    if math.isinf(share) or abs(share) >= 10:
        return ">1000 %" if share > 0 else "<-1000 %"
    if share and abs(share) < _LEAST:
        return f"{'-' if share < 0 else ''}<0.1 %"
    return f"{100 * share:.1f} %" if share else "0 %"


def amplification(value: float) -> str:
    return "-" if math.isnan(value) else f"{text.number(value, 3)} ×"


def cost(blame: Blame) -> str:
    """How often the whole model ran, and how often it may."""
    most = f" (at most {text.count(blame.limit)})" if blame.limit else ""
    over = f" over {blame.batches} batches" if blame.batches > 1 else ""
    return f"ran the model {text.plural(blame.forwards, 'time')}{over}{most}"


def final_words(blame: Blame) -> str:
    """The error that is to be shared out, and where it stands."""
    layer = text.layer_name(blame.final) if blame.final else "the model"
    error = f"final error {text.number(blame.final_error, 3)}"
    if not math.isnan(blame.final_floor):
        error += f" (rounding explains {text.number(blame.final_floor, 3)})"
    return text.clean(f"{error} at the output{blame.final_leaf} of {layer}")


def outside(blame: Blame) -> str:
    """What comes in outside the chain of layers; empty where nothing to speak of does."""
    places = (
        (blame.before, "before its first layer"),
        (blame.behind, "behind its last one"),
        (blame.beside, "beside it, by other ways than from layer to layer"),
    )
    told = [f"{percent(share)} {where}" for share, where in places if abs(share) >= _WORTH]
    return f"Outside the chain of layers: {', '.join(told)}." if told else ""
