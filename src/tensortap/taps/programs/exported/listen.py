"""An exported graph with taps on some layers, and what each of its runs lets us hear."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...leaves import flatten
from ..base import HeardCall, Leaves, loose_leaves
from .branches import BranchPlan
from .plan import CallPlan, Pick
from .surgery import Branch, Heard, with_taps

__all__ = ["Listening", "leaves_of"]


@dataclass(frozen=True)
class _Part:
    """What is listened to in one graph: its calls, their picks, and its branches by cond."""

    calls: Sequence[CallPlan]
    picks: Sequence[Pick]
    index: Mapping[Pick, int]
    conds: Mapping[str, tuple[_Part, _Part]]
    modules: Mapping[str, tuple[Branch, Branch]]
    ends: Mapping[str, int]


class Listening:
    """A copy of a graph module that also returns what some of its layers made."""

    def __init__(
        self,
        module: fx.GraphModule,
        calls: Sequence[CallPlan],
        branches: Mapping[str, tuple[BranchPlan, BranchPlan]],
        *,
        layers: Collection[str],
        inputs: bool,
        linears: Collection[str],
    ) -> None:
        self._layers, self._inputs, self._linears = layers, inputs, linears
        self._part = self._prepare(calls, branches)
        self.module = with_taps(module, self._part.picks, self._part.modules)

    def heard(self, taps: Sequence[Any]) -> list[HeardCall]:
        """The calls of one run, from what its taps held."""
        return self._heard(self._part, taps)

    def _prepare(
        self,
        calls: Sequence[CallPlan],
        branches: Mapping[str, tuple[BranchPlan, BranchPlan]],
    ) -> _Part:
        chosen = [c for c in calls if c.layer in self._layers or c.layer in self._linears]
        picks: dict[Pick, int] = {}
        for call in chosen:
            for pick in self._picks(call):
                picks.setdefault(pick, len(picks))
        conds, modules, ends = {}, {}, {}
        for name, pair in branches.items():
            parts = (self._branch(pair[0]), self._branch(pair[1]))
            if any(part.calls or part.conds for part in parts):
                conds[name] = parts
                ends[name] = pair[0].end
                modules[name] = (
                    Branch(pair[0].module, parts[0].picks, parts[0].modules),
                    Branch(pair[1].module, parts[1].picks, parts[1].modules),
                )
        return _Part(chosen, list(picks), picks, conds, modules, ends)

    def _branch(self, plan: BranchPlan) -> _Part:
        return self._prepare(plan.calls, plan.conds)

    def _picks(self, call: CallPlan) -> list[Pick]:
        found = [pick for pick in call.outputs if pick is not None]
        if self._inputs and call.layer in self._layers:
            found += call.inputs
        if call.operand is not None and call.layer in self._linears:
            found.append(call.operand)
        return found

    def _heard(self, part: _Part, taps: Sequence[Any]) -> list[HeardCall]:
        found = [(call.end, -call.depth, [self._call(call, part, taps)]) for call in part.calls]
        for index, name in enumerate(part.conds):
            heard = taps[len(part.picks) + index]
            assert isinstance(heard, Heard)
            inner = self._heard(part.conds[name][heard.which], heard.taps)
            found.append((part.ends[name], -1 << 20, inner))
        found.sort(key=lambda item: item[:2])
        return [call for _, _, calls in found for call in calls]

    def _call(self, call: CallPlan, part: _Part, taps: Sequence[Any]) -> HeardCall:
        def at(pick: Pick | None) -> torch.Tensor | None:
            return None if pick is None else taps[part.index[pick]].detach()

        outputs = leaves_of(call, [at(pick) for pick in call.outputs])
        inputs: Leaves = ()
        if self._inputs and call.layer in self._layers:
            inputs = loose_leaves([at(pick) for pick in call.inputs])
        operand = at(call.operand) if call.layer in self._linears else None
        return HeardCall(call.layer, outputs, inputs, operand)


def leaves_of(call: CallPlan, values: Sequence[Any]) -> list[tuple[str, Any]]:
    """What a call returned with its leaves: exact ones where the export kept its signature."""
    if call.spec is None:
        return list(loose_leaves(values))
    return flatten(pytree.tree_unflatten(list(values), call.spec))
