"""Down from a block to the leaf that makes its error.

Inside a block the same question is asked again, with the block in the place of the model: it runs
alone on the reference's inputs, which costs a fraction of a forward pass, and a child's share of
its error is scaled by its share of the final one. The innermost layer's share is then measured in
runs of the whole model, as the definition has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...errors import TapError
from ...taps.patching import leaves_of
from ..causes import Cause
from ..causes.cause import say_little
from .explaining import Wrong, explained
from .inside import FirstWrong
from .levels import children_of
from .one_layer import OneLayer
from .results import BlamedLayer
from .shares import Baggage, Shares
from .stage import Final, Put, Stage
from .trace import first_float
from .verdict import LEAST, MOST, stands_out

__all__ = ["Descent", "Found"]

_SAME = 1e-3  # of the error that is looked for: a layer run alone must do what it does in the model
_PART = 0.05  # of the culprit's own error: what is wrong inside of it is not much smaller


@dataclass
class Found:
    """What the descent came to."""

    culprit: BlamedLayer | None
    rows: list[BlamedLayer] = field(default_factory=list)
    causes: tuple[Cause, ...] = ()
    notes: list[str] = field(default_factory=list)


class Descent:
    """Goes down inside one layer of the first level."""

    def __init__(
        self,
        shares: Shares,
        stage: Stage,
        types: Mapping[str, str],
        operations: Mapping[str, int],
        precisions: tuple[str | None, ...],
        judged: Callable[[list[BlamedLayer]], list[BlamedLayer]],
        may_run: Callable[[int], bool],
    ) -> None:
        self.shares = shares
        self.stage = stage
        self.types = types
        self.operations = operations
        self.precisions = precisions
        self.judged = judged
        self.may_run = may_run

    def into(self, top: BlamedLayer, kept: Sequence[str]) -> Found:
        """The culprit inside a layer that makes most of the error, or the layer itself."""
        found = Found(top if top.clear else None)
        inner = [name for name in kept if name in self.shares.trace.outputs]
        children = children_of(top.layer, inner)
        inside = self.shares
        if not children:
            if self.types_inside(top.layer):
                found.notes.append(
                    f"What is inside {top.layer} is not in the reference. Record it with --layers "
                    "all --inputs to go on to the leaf."
                )
        else:
            inside = self._stage(top, self.shares.baggage(top.layer), found)
            self._descend(top, children, inner, inside, found)
        if found.culprit is not None:
            self._explain(found, found.culprit, inside)
        return found

    def types_inside(self, layer: str) -> bool:
        """Whether a layer has layers inside."""
        return any(name.startswith(f"{layer}.") for name in self.types)

    # Inside.

    def _stage(self, top: BlamedLayer, baggage: Baggage, found: Found) -> Shares:
        """The layer alone, if that does what it does in the model; else the whole model."""
        leaf = _main_leaf(baggage)
        problem = baggage.problem
        if not problem and leaf is not None:
            alone = OneLayer(
                self.stage.known,
                self.stage.modules,
                Final(top.layer, leaf),
                layer=top.layer,
                captured=baggage.calls,
                feeding=self.stage.feeding,
                touched=self.stage.touched,
                routers=self.stage.routers,
                scale=_size(baggage, leaf),
            )
            total = 0.0
            try:
                for _ in range(2):  # what state does shows in the second run at the latest
                    again = _Outputs()
                    total = alone.run((), {top.layer: again})
                    problem = problem or again.unlike(baggage)
            except Exception as error:  # whatever the layer raises when it is taken out
                lines = str(error).strip().splitlines() or ["no message"]
                problem = f"{type(error).__name__}: {lines[0]}"
            else:
                if not problem and total > 0:
                    return Shares(
                        alone,
                        self.shares.trace,
                        total,
                        precisions=self.precisions,
                        infer=False,
                        scale=top.share,
                        parent=top.layer,
                    )
        found.notes.append(
            f"{top.layer} cannot be run alone ({problem or 'it returns no float'}): what is inside "
            "was looked at in runs of the whole model."
        )
        return Shares(
            self.stage,
            self.shares.trace,
            self.shares.total,
            precisions=self.precisions,
            parent=top.layer,
        )

    def _descend(
        self,
        top: BlamedLayer,
        children: Sequence[str],
        inner: Sequence[str],
        inside: Shares,
        found: Found,
    ) -> None:
        at, path = top, [top]
        while children:
            rows = [
                replace(inside.row(name, self.types[name], self.operations[name]), parent=at.layer)
                for name in children
            ]
            rows = self.judged(rows)
            found.rows += rows
            best = max(rows, key=lambda row: row.share)
            if not stands_out(best, rows):
                break
            at = best
            path.append(at)
            children = children_of(at.layer, inner)
        self._verify(path, inside, found)

    def _verify(self, path: list[BlamedLayer], inside: Shares, found: Found) -> None:
        """The innermost layer clear of rounding whose share holds in the whole model."""
        while len(path) > 1:
            row = path.pop()
            if not row.clear:
                continue
            if inside.stage is self.stage or not self.may_run(self.shares.cost(row.layer)):
                found.culprit = row
                return
            share = self.shares.share(row.layer)
            exact = replace(row, share=share, how="patched")
            found.rows = [exact if r.layer == row.layer else r for r in found.rows]
            if LEAST <= share <= MOST:
                found.culprit = exact
                return
        found.culprit = path[0] if path[0].clear else None

    def _explain(self, found: Found, culprit: BlamedLayer, inside: Shares) -> None:
        """What the culprit does to good inputs, in the words of simple hypotheses.

        Where it holds others, the first tensor inside that is wrong is nearer to what happened.
        """
        ran = inside if inside.has_run(culprit.layer) else self.shares
        outer = self._of_output(culprit, ran)
        first = self._first_inside(culprit, ran)
        inner = () if first is None else self._of_tensor(culprit, first)
        sides = (inner, outer) if not say_little(inner) else (outer, inner)
        found.causes = next((side for side in sides if side and side[0].kind != "noise"), outer)

    def _of_output(self, culprit: BlamedLayer, ran: Shares) -> tuple[Cause, ...]:
        floor = 0.0 if math.isnan(culprit.floor) else culprit.floor
        for batch, call, leaves in ran.baggage(culprit.layer).outputs:
            records = self.stage.known.at(culprit.layer, "output", batch, call)
            for leaf, tensor in leaves.items():
                reference = records[leaf].tensor()
                reshaped = reference.shape != tensor.shape
                if not tensor.is_floating_point():
                    continue
                if reshaped or not torch.equal(reference.to(tensor), tensor):
                    wrong = Wrong(culprit.layer, batch, call, records[leaf], tensor)
                    return explained(self.stage.known, wrong, floor)
        return ()

    def _first_inside(self, culprit: BlamedLayer, ran: Shares) -> Wrong | None:
        """The first tensor at a layer inside the culprit that is not the reference's."""
        inner = [
            name
            for name in self.shares.trace.outputs
            if name.startswith(f"{culprit.layer}.") and name in ran.stage.modules
        ]
        if not culprit.layer or not inner or not self.may_run(1):
            return None
        made = 0.0 if math.isnan(culprit.made_here) else culprit.made_here
        floor = 0.0 if math.isnan(culprit.floor) else culprit.floor
        watcher = FirstWrong(max(4 * floor, _PART * min(1.0, made)))
        try:
            ran.stage.run([Put(culprit.layer, "input")], dict.fromkeys(inner, watcher))
        except TapError:
            return None
        return watcher.found

    def _of_tensor(self, culprit: BlamedLayer, first: Wrong) -> tuple[Cause, ...]:
        floor = 0.0 if math.isnan(culprit.floor) else culprit.floor
        causes = explained(self.stage.known, first, floor)
        where = f"of the {first.record.port} of {first.layer}"
        return tuple(
            replace(
                cause,
                text=f"{where}: {cause.text}",
                details={**cause.details, "layer": first.layer, "port": first.record.port},
            )
            for cause in causes
        )


class _Outputs:
    """Keeps what a layer returns."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def enter(self, stage: Stage, layer: str, call: int, args: object, kwargs: object) -> None:
        pass

    def leave(self, stage: Stage, layer: str, call: int, output: object) -> None:
        self.seen.append({leaf: t.detach().to("cpu") for leaf, t in leaves_of(output).items()})

    def unlike(self, baggage: Baggage) -> str:
        """Why these are not the outputs that were seen in the model; empty when they are."""
        if len(self.seen) != len(baggage.outputs):
            return f"it ran {len(self.seen)} times instead of {len(baggage.outputs)}"
        for mine, (_, _, theirs) in zip(self.seen, baggage.outputs, strict=True):
            for leaf, tensor in theirs.items():
                own = mine.get(leaf)
                if own is None or own.shape != tensor.shape:
                    return "it returns something else"
                if tensor.is_floating_point():
                    apart = (own.double() - tensor.double()).nan_to_num().norm()
                    if float(apart) > _SAME * float(tensor.double().nan_to_num().norm()):
                        return "it keeps state: alone it returns something else"
        return ""


def _size(baggage: Baggage, leaf: str) -> float:
    """How large a layer's output is, so that squares of it are numbers."""
    sizes = [float(leaves[leaf].abs().max()) for _, _, leaves in baggage.outputs if leaf in leaves]
    return max((s for s in sizes if math.isfinite(s)), default=0.0) or 1.0


def _main_leaf(baggage: Baggage) -> str | None:
    for _, _, leaves in baggage.outputs:
        main = first_float(leaves)
        for leaf, tensor in leaves.items():
            if tensor is main:
                return leaf
    return None
