"""Puts taps into a copy of an exported graph: copies of values become further outputs.

The user's graph stays as it is; weights are shared with it. What a branch of a `torch.cond` made
cannot be an output of the graph: there, a module takes the place of the operator, runs the branch
that is taken and hands out what was heard in it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .nodes import region
from .plan import Pick

__all__ = ["Branch", "Heard", "copied", "with_taps"]

_PyTreeCodeGen: Any = fx.graph._PyTreeCodeGen


@dataclass(frozen=True)
class Heard:
    """What was heard in the branch that was taken; `which` counts true as 0 and false as 1."""

    which: int
    taps: tuple[Any, ...]


@dataclass(frozen=True)
class Branch:
    """One branch of a cond: its graph, and what is to be copied in it."""

    module: fx.GraphModule
    picks: Sequence[Pick]
    conds: Mapping[str, tuple[Branch, Branch]] = field(default_factory=dict)


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A module with a graph of its own, that shares the weights and checks of the other one."""
    own = fx.GraphModule(module, _same(module.graph))
    for name in ("range_constraints", "validate_inputs", "meta"):
        if hasattr(module, name):
            setattr(own, name, getattr(module, name))
    for hook_id, hook in module._forward_pre_hooks.items():
        own._forward_pre_hooks[hook_id] = hook
        if hook_id in module._forward_pre_hooks_with_kwargs:
            own._forward_pre_hooks_with_kwargs[hook_id] = True
    return own


def _same(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph; what it holds besides nodes is never changed, and so is shared."""
    own = fx.Graph()
    made: Any = own.graph_copy(graph, {}, return_output_node=True)
    value, old = made
    output = own.output(value)
    output.meta = copy.copy(old.meta)
    own._codegen = copy.copy(graph._codegen)
    return own


def with_taps(
    module: fx.GraphModule,
    picks: Sequence[Pick],
    conds: Mapping[str, tuple[Branch, Branch]] | None = None,
) -> fx.GraphModule:
    """A copy of a module that returns (output, taps): the picks in order, then `Heard` a cond."""
    tapped, keys = _Surgeon(picks, conds or {}).operate(module, ())
    place = {key: index for index, key in enumerate(keys)}
    order = [place[key] for key in (*picks, *(conds or {}))]
    output = _output(tapped)
    count = len(keys)
    made = output.args[0]
    assert isinstance(made, tuple)
    own, taps = made[: len(made) - count], made[len(made) - count :]
    ordered = tuple(taps[index] for index in order)
    codegen: Any = tapped.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        output.args = ((*own, *ordered),)
        info = codegen.pytree_info
        spec = pytree.TreeSpec(
            tuple, None, [info.out_spec, pytree.tree_structure((0,) * len(ordered))]
        )
        codegen.pytree_info = info._replace(out_spec=spec)
    else:
        original = _output(module).args[0]
        single = not isinstance(original, tuple)
        output.args = ((own[0] if single else own, ordered),)
    tapped.recompile()
    return tapped


class _Surgeon:
    """Works on one graph and on the regions inside it."""

    def __init__(self, picks: Sequence[Pick], conds: Mapping[str, tuple[Branch, Branch]]) -> None:
        self._picks: dict[tuple[str, ...], list[Pick]] = {}
        for pick in dict.fromkeys(picks):
            self._picks.setdefault(pick.graph, []).append(pick)
        self._conds: dict[tuple[str, ...], list[str]] = {}
        self._branches = conds
        for name in conds:
            self._conds.setdefault(tuple(name.split("/")[:-1]), []).append(name)

    def operate(
        self, module: fx.GraphModule, path: tuple[str, ...]
    ) -> tuple[fx.GraphModule, list[object]]:
        """A copy whose flat outputs are followed by those asked for; and which those are."""
        tapped = copied(module)
        graph = tapped.graph
        nodes = {old.name: new for old, new in zip(module.graph.nodes, graph.nodes, strict=True)}
        keys: list[object] = []
        extra: list[fx.Node] = []
        for pick in self._picks.get(path, ()):
            keys.append(pick)
            extra.append(_clone(graph, nodes, pick))
        for name in self._conds.get(path, ()):
            node = nodes[name.split("/")[-1]]
            keys.append(name)
            extra.append(_taken(tapped, node, self._branches[name]))
        for old, node in zip(list(module.graph.nodes), list(nodes.values()), strict=True):
            inner = region(module, old) if old.op == "call_function" else None
            if inner is None or not self._reaches((*path, inner.attribute)):
                continue
            below, found = self.operate(inner.graph, (*path, inner.attribute))
            made = _output(below).args[0]
            assert isinstance(made, tuple)
            below.recompile()
            holder, _, attribute = inner.attribute.rpartition(".")
            setattr(tapped.get_submodule(holder), attribute, below)
            with graph.inserting_after(node):
                for offset, key in enumerate(found):
                    index = len(made) - len(found) + offset
                    keys.append(key)
                    extra.append(graph.call_function(operator.getitem, (node, index)))
        output = _output(tapped)
        made = output.args[0]
        own = tuple(made) if isinstance(made, tuple | list) else (made,)
        output.args = ((*own, *extra),)
        return tapped, keys

    def _reaches(self, path: tuple[str, ...]) -> bool:
        return any(other[: len(path)] == path for other in (*self._picks, *self._conds))


def _clone(graph: fx.Graph, nodes: Mapping[str, fx.Node], pick: Pick) -> fx.Node:
    anchor = nodes[pick.anchor]
    if anchor.op == "placeholder" and not pick.before:
        anchor = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
        place = graph.inserting_before(anchor)
    else:
        place = graph.inserting_before(anchor) if pick.before else graph.inserting_after(anchor)
    with place:
        return graph.call_function(torch.ops.aten.clone.default, (nodes[pick.node],))


def _taken(module: fx.GraphModule, node: fx.Node, branches: tuple[Branch, Branch]) -> fx.Node:
    """Let a module of ours take a cond's place; the node of what it hears."""
    name = f"_taken_{node.name}"
    runner = _Taken([with_taps(b.module, b.picks, b.conds) for b in branches])
    module.add_submodule(name, runner)
    predicate, _, _, operands = node.args
    node.op, node.target, node.args = "call_module", name, (predicate, operands)
    with module.graph.inserting_after(node):
        return module.graph.call_function(operator.getitem, (node, -1))


class _Taken(nn.Module):
    """Runs the branch that a predicate chooses, as `torch.cond` does."""

    def __init__(self, branches: Sequence[fx.GraphModule]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, predicate: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
        which = 0 if bool(predicate) else 1
        output, taps = self.branches[which](*operands)
        own = output if isinstance(output, tuple) else (output,)
        return (*own, Heard(which, taps))


def _output(module: fx.GraphModule) -> fx.Node:
    node: fx.Node = module.graph.output_node()
    return node
