"""Which nodes of a graph are layers, told by the weights that they read.

A layer that owns weights is where they are used: a convolution that reads `stem.0.weight` and no
other bias than `stem.0.bias` is `stem.0`. That is sure where the op reads all that the layer owns,
and where no other layer's weights are the same. The rest is a guess, or nothing:

- weights of equal content (norms that are all ones) are given out in the order of the names;
- a weight that is both looked up and multiplied by is tied, and one of the two has another name;
- a weight that is read by something else (a scale inside a state space) says nothing about what its
  layer returns;
- a weight that is one number throughout may be any layer's, and that of a depthwise convolution
  over time is often read by its parent, which never calls the layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .base import Provenance
from .postdom import END, nearest_common, post_dominators
from .torchscript_copies import holds_tensors
from .torchscript_nodes import NodeTap
from .torchscript_surgery import nodes_of

__all__ = ["Anchored", "Weight", "anchors", "containers"]


@dataclass(frozen=True)
class Weight:
    """What a value of the graph is: the names of the tensors with its content, all equal."""

    names: tuple[str, ...]
    transposed: bool = False
    doubtful: bool = False  # that it is read does not say that its layer was called


@dataclass(frozen=True)
class Anchored:
    """The layers that were found, and for the others why not."""

    taps: list[NodeTap]
    linears: dict[str, tuple[str, bool, str | None]]  # the weight, whether to transpose it, bias
    why: dict[str, str]


@dataclass(frozen=True)
class _Role:
    """Where an op has its data, its weight, and the rest of its layer's tensors."""

    data: int
    weight: int
    others: tuple[int, ...] = ()
    type: str = ""


_ROLES = {
    "aten::linear": _Role(0, 1, (2,), "Linear"),
    "aten::matmul": _Role(0, 1),
    "aten::mm": _Role(0, 1),
    "aten::embedding": _Role(1, 0, (), "Embedding"),
    "aten::conv1d": _Role(0, 1, (2,), "Conv1d"),
    "aten::conv2d": _Role(0, 1, (2,), "Conv2d"),
    "aten::conv3d": _Role(0, 1, (2,), "Conv3d"),
    "aten::_convolution": _Role(0, 1, (2,)),
    "aten::convolution": _Role(0, 1, (2,)),
    "aten::layer_norm": _Role(0, 2, (3,), "LayerNorm"),
    "aten::group_norm": _Role(0, 2, (3,), "GroupNorm"),
    "aten::batch_norm": _Role(0, 1, (2, 3, 4)),
    "aten::rms_norm": _Role(0, 2),
    "aten::prelu": _Role(0, 1, (), "PReLU"),
}
_MAIN = ("weight", "gamma", "scale")
_VIEWS = ("aten::to", "aten::detach", "aten::alias", "aten::contiguous")
_FOLDED = (
    "its weights are not in the compiled model: it was folded into another layer, or changed by "
    "the compiler"
)
_ELSEWHERE = "its weights are read by ops that do not tell what it returns"
_TIED = "other layers have the same weights, so its value cannot be told from theirs"


@dataclass(frozen=True)
class _Found:
    """One op that may be a call of one of several layers."""

    start: int
    end: int
    candidates: tuple[str, ...]
    kind: str
    role: _Role
    data: int
    weight: int
    bias: int | None


def anchors(
    graph: Any, weights: Mapping[int, Weight], modules: Mapping[str, Sequence[str]]
) -> Anchored:
    """The layers of a graph.

    `weights` says of values of the graph what they are; `modules` are the layers that own tensors,
    each with the names of those that it needs.
    """
    nodes = list(nodes_of(graph))
    numbers = {id_: index for index, node in enumerate(nodes) for id_ in _made(node)}
    known = dict(weights)
    _spread(nodes, known)
    found = [
        item
        for index, node in enumerate(nodes)
        if (item := _look(index, node, nodes, numbers, known, modules)) is not None
    ]
    taps: list[NodeTap] = []
    linears: dict[str, tuple[str, bool, str | None]] = {}
    why: dict[str, str] = {}
    for item, name, alone in _named(found, why):
        sure = alone and not known[item.weight].doubtful and _is_main(known[item.weight], name)
        node = nodes[item.start]
        reads = tuple(
            index
            for index, value in enumerate(node.inputs())
            if holds_tensors(value.type())
            and value.unique() not in known
            and value.node().kind() != "prim::Constant"
        )
        kind: Provenance = "weight" if sure else "inferred"
        is_product = item.kind in ("aten::linear", "aten::matmul", "aten::mm")
        operand = item.data if is_product else None
        type_ = "Linear" if is_product else item.role.type
        taps.append(NodeTap(name, item.end, item.start, reads, operand, type_, kind))
        if is_product and sure:
            weight = known[item.weight]
            turned = weight.transposed is (item.kind == "aten::linear")
            bias = None if item.bias is None else known[item.bias].names[0]
            linears[name] = (weight.names[0], turned, bias)
    read = {name for weight in known.values() for name in weight.names}
    named = {tap.name for tap in taps}
    for module, owned in modules.items():
        if module not in named and module not in why:
            seen = any(f"{module}.{key}" in read for key in owned)
            why[module] = _ELSEWHERE if seen else _FOLDED
    return Anchored(taps, linears, why)


def _is_main(weight: Weight, module: str) -> bool:
    """Whether a tensor is called what a layer's own weight is called; a table of positions that is
    kept as a buffer, a scale inside a larger layer are not."""
    return any(f"{module}.{key}" in weight.names for key in _MAIN)


def _made(node: Any) -> list[int]:
    return [value.unique() for value in node.outputs()]


def _spread(nodes: Sequence[Any], known: dict[int, Weight]) -> None:
    """What is a weight, cast or transposed, is that weight."""
    for node in nodes:
        kind = node.kind()
        if kind not in (*_VIEWS, "aten::t", "aten::transpose", "aten::numpy_T"):
            continue
        weight = known.get(node.inputsAt(0).unique())
        if weight is not None:
            turned = weight.transposed ^ (kind not in _VIEWS)
            known[node.output().unique()] = Weight(weight.names, turned, weight.doubtful)


def _look(
    index: int,
    node: Any,
    nodes: Sequence[Any],
    numbers: Mapping[int, int],
    known: Mapping[int, Weight],
    modules: Mapping[str, Sequence[str]],
) -> _Found | None:
    kind = node.kind()
    role = _ROLES.get(kind) or (_scale(node, known) if kind == "aten::mul" else None)
    if role is None or (main := known.get(node.inputsAt(role.weight).unique())) is None:
        return None
    if node.inputsAt(role.data).unique() in known:
        return None
    others = [node.inputsAt(place) for place in role.others]
    others = [value for value in others if value.type().kind() != "NoneType"]
    if any(value.unique() not in known for value in others):
        return None  # a bias that is no layer's: something was folded into it
    candidates: list[str] = []
    ends: dict[str, tuple[int, int | None]] = {}
    for name in main.names:
        module, _, first = name.rpartition(".")
        left = [key for key in modules.get(module, ()) if key != first]
        fits = True
        for value in others:
            match = next((k for k in left if f"{module}.{k}" in known[value.unique()].names), None)
            fits = fits and match is not None
            left = [key for key in left if key != match]
        end, bias = index, others[0].unique() if others and fits else None
        if fits and len(left) == 1 and not others:
            added = _adds(node, f"{module}.{left[0]}", numbers, known, nodes)
            if added is not None:
                (end, bias), left = added, []
        if fits and not left and module not in candidates and module in modules:
            candidates.append(module)
            ends[module] = (end, bias)
    if not candidates or len(set(ends.values())) != 1:
        return None
    end, bias = ends[candidates[0]]
    weight = node.inputsAt(role.weight).unique()
    return _Found(index, end, tuple(candidates), kind, role, role.data, weight, bias)


def _scale(node: Any, known: Mapping[int, Weight]) -> _Role | None:
    """A product with a weight, as a norm ends; where a cast follows, which of both it returns is
    not known."""
    sides = [index for index in (0, 1) if node.inputsAt(index).unique() in known]
    readers = [use.user for use in node.output().uses()]
    if len(sides) != 1 or (len(readers) == 1 and readers[0].kind() == "aten::to"):
        return None
    return _Role(1 - sides[0], sides[0])


def _adds(
    node: Any,
    bias: str,
    numbers: Mapping[int, int],
    known: Mapping[int, Weight],
    nodes: Sequence[Any],
) -> tuple[int, int] | None:
    """The op that adds a layer's bias to what another op made of its weight."""
    uses = list(node.output().uses())
    if len(uses) != 1 or uses[0].user.kind() not in ("aten::add", "aten::add_"):
        return None
    user = uses[0].user
    for place in (0, 1):
        value = user.inputsAt(place)
        weight = known.get(value.unique())
        if weight is not None and bias in weight.names:
            return numbers[user.output().unique()], value.unique()
    return None


def _named(found: Sequence[_Found], why: dict[str, str]) -> list[tuple[_Found, str, bool]]:
    """Each op with the layer whose call it is, and whether that is sure."""
    groups: dict[tuple[str, ...], list[_Found]] = {}
    for item in found:
        groups.setdefault(item.candidates, []).append(item)
    named: list[tuple[_Found, str, bool]] = []
    for candidates, items in groups.items():
        looked_up = [item.kind == "aten::embedding" for item in items]
        if len(candidates) == 1:
            if len(set(looked_up)) == 1:
                named += [(item, candidates[0], True) for item in items]
            else:  # tied to a layer whose weight the checkpoint does not hold twice
                table = "emb" in candidates[0].lower()
                named += [
                    (item, candidates[0], False)
                    for item, is_table in zip(items, looked_up, strict=True)
                    if is_table is table
                ]
        elif len(items) == len(candidates):
            ordered = sorted(candidates, key=_natural)
            if len(set(looked_up)) == 2:
                ordered.sort(key=lambda name: "emb" not in name.lower())
                items = sorted(items, key=lambda item: item.kind != "aten::embedding")
            named += [(i, name, False) for i, name in zip(items, ordered, strict=True)]
        else:
            why.update(dict.fromkeys(candidates, _TIED))
    return sorted(named, key=lambda entry: entry[0].end)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts layers.2 before layers.10."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"[.]", name)]


def containers(graph: Any, taps: Sequence[NodeTap]) -> list[NodeTap]:
    """Guesses of what the modules above the layers return: where all that they made meets."""
    nodes = list(nodes_of(graph))
    outer = {id_ for node in graph.nodes() for id_ in _made(node)}
    numbers = {id_: index for index, node in enumerate(nodes) for id_ in _made(node)}
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        for value in node.outputs():
            if holds_tensors(value.type()):
                for use in value.uses():
                    ids = _made(use.user)
                    after = numbers[ids[0]] if ids and ids[0] in numbers else END
                    readers.setdefault(index, []).append(after)
    nearest = post_dominators(readers, len(nodes))
    below: dict[str, list[NodeTap]] = {}
    for tap in taps:
        name = tap.name
        while "." in name:
            name = name.rpartition(".")[0]
            below.setdefault(name, []).append(tap)
    found = []
    for name, members in below.items():
        if all(tap.name[len(name) + 1 :].split(".")[0].isdigit() for tap in members):
            continue  # a list of modules, most likely, which is no layer
        twice = len({tap.name for tap in members}) != len(members)
        inner = any(not set(_made(nodes[tap.end])) & outer for tap in members)
        meet = END if twice or inner else nearest_common([tap.end for tap in members], nearest)
        if meet == END or not _is_tensor(nodes[meet]):
            continue
        found.append(NodeTap(name, meet, meet, (), None, "", "inferred"))
    return found


def _is_tensor(node: Any) -> bool:
    outputs = list(node.outputs())
    return len(outputs) == 1 and isinstance(outputs[0].type(), torch._C.TensorType)
