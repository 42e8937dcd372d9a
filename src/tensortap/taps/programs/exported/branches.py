"""The branches of a `torch.cond`: which layers run in them, as far as anything still says so.

Exported in strict mode, their nodes bear names like all others. Otherwise they bear none, but are
given the weights by name: a layer is then known by the weight that its node reads, and a layer
without weights, or with others inside it, is not known at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from .graph import Reading, read
from .plan import CallPlan, plan_calls, plan_weights

__all__ = ["BranchPlan", "branch_plans"]


@dataclass(frozen=True)
class BranchPlan:
    """One branch: its graph, the calls in it, and the branches inside it by their cond."""

    module: fx.GraphModule
    calls: Sequence[CallPlan]
    types: Mapping[str, str]
    conds: Mapping[str, tuple[BranchPlan, BranchPlan]]
    end: int  # when its cond runs, among the nodes around it

    def all_calls(self) -> list[CallPlan]:
        """Its calls and those of the branches inside it."""
        inner = [branch for pair in self.conds.values() for branch in pair]
        return [*self.calls, *(call for branch in inner for call in branch.all_calls())]

    def all_types(self) -> dict[str, str]:
        """The classes of all its layers."""
        found = dict(self.types)
        for pair in self.conds.values():
            for branch in pair:
                found.update(branch.all_types())
        return found


def branch_plans(
    module: fx.GraphModule, reading: Reading
) -> dict[str, tuple[BranchPlan, BranchPlan]]:
    """The two branches of every cond of a graph, by the name of its node."""
    found = {}
    for name in reading.conds:
        node, spot = reading.nodes[name], reading.spots[name]
        holder = module
        for attribute in spot.graph:
            holder = holder.get_submodule(attribute)  # type: ignore[assignment]
        pair = [_branch(holder, node, index, reading, spot.graph) for index in (1, 2)]
        if pair[0] is not None and pair[1] is not None:
            found[name] = (pair[0], pair[1])
    return found


def _branch(
    holder: fx.GraphModule, node: fx.Node, index: int, reading: Reading, path: tuple[str, ...]
) -> BranchPlan | None:
    source = node.args[index]
    operands = node.args[3]
    if not isinstance(source, fx.Node) or not isinstance(operands, tuple | list):
        return None
    module = holder.get_submodule(str(source.target))
    if not isinstance(module, fx.GraphModule):
        return None
    constants = {}
    holders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for place, value in zip(holders, operands, strict=False):
        if isinstance(value, fx.Node):
            outer = reading.resolve("/".join((*path, value.name)))
            if outer in reading.weights:
                constants[place.name] = reading.weights[outer]
    inside = read(module, constants)
    around = {
        call[0] for step in reading.steps if step.name == _of(path, node) for call in step.calls
    }
    calls = [
        replace(plan, operand=None)
        for plan in plan_calls(inside, {})[0]
        if plan.layer not in around
    ]
    named = {plan.layer for plan in calls}
    calls += [plan for plan in plan_weights(inside) if plan.layer not in named]
    calls.sort(key=lambda plan: (plan.end, -plan.depth))
    return BranchPlan(
        module,
        calls,
        dict(inside.types),
        branch_plans(module, inside),
        reading.order[_of(path, node)],
    )


def _of(path: tuple[str, ...], node: fx.Node) -> str:
    return "/".join((*path, node.name))
