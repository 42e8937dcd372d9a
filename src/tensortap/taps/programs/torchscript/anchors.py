"""Which nodes of a graph are layers, told by the weights that they read.

A layer that owns weights is where they are used: a convolution that reads `stem.0.weight` and no
other bias than `stem.0.bias` is `stem.0`. That is sure where the op reads all that the layer owns,
where no other layer's weights are the same, and where it is seen that the layer ends there. The
rest is a guess, or nothing:

- weights of equal content (norms that are all ones) are given out by the blocks in which the layers
  before or behind them stand, where that comes out even;
- a weight that is both looked up and multiplied by is tied, and one of the two has another name;
- a weight that is read by something else (a scale inside a state space) says nothing about what its
  layer returns;
- a weight that is one number throughout may be any layer's, and that of a depthwise convolution
  over time is often read by its parent, which never calls the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base import Provenance
from ..weights import Role
from .copies import holds_tensors
from .graphs import nodes_of
from .neighbours import Found, Neighbours, made_by
from .nodes import NodeTap
from .wholes import has_left, is_whole

__all__ = ["Anchored", "Weight", "anchors"]


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
    readers: dict[str, list[int]]  # where the weights of each layer are read
    reading: set[int]  # the nodes that read any weight


_ROLES = {
    "aten::linear": Role(0, 1, (2,), "Linear"),
    "aten::matmul": Role(0, 1),
    "aten::mm": Role(0, 1),
    "aten::embedding": Role(1, 0, (), "Embedding"),
    "aten::conv1d": Role(0, 1, (2,), "Conv1d"),
    "aten::conv2d": Role(0, 1, (2,), "Conv2d"),
    "aten::conv3d": Role(0, 1, (2,), "Conv3d"),
    "aten::_convolution": Role(0, 1, (2,)),
    "aten::convolution": Role(0, 1, (2,)),
    "aten::layer_norm": Role(0, 2, (3,), "LayerNorm"),
    "aten::group_norm": Role(0, 2, (3,), "GroupNorm"),
    "aten::batch_norm": Role(0, 1, (2, 3, 4)),
    "aten::rms_norm": Role(0, 2),
    "aten::prelu": Role(0, 1, (), "PReLU"),
}
_MAIN = ("weight", "gamma", "scale")
_VIEWS = ("aten::to", "aten::detach", "aten::alias", "aten::contiguous")
_FOLDED = (
    "its weights are not in the compiled model: it was folded into another layer, or changed by "
    "the compiler"
)
_ELSEWHERE = "its weights are read by ops that do not tell what it returns"
_TIED = "other layers have the same weights, so its value cannot be told from theirs"


def anchors(
    graph: Any,
    weights: Mapping[int, Weight],
    modules: Mapping[str, Sequence[str]],
    *,
    blind: bool = True,
) -> Anchored:
    """The layers of a graph.

    `weights` says of values of the graph what they are; `modules` are the layers that own tensors,
    each with the names of those that it needs. `blind`: nothing else is known of the layers, so
    that an op is sure to be one only where it is seen that the layer does nothing behind it.
    """
    nodes = list(nodes_of(graph))
    numbers = {id_: index for index, node in enumerate(nodes) for id_ in made_by(node)}
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
    named = _named(found, why, Neighbours(nodes, found))
    for item, name, alone in named:
        node = nodes[item.start]
        weight = known[item.weight]
        sure = alone and not weight.doubtful and _is_main(weight, name) and not _is_scaled(node)
        if sure and blind:
            others = {nodes[o.start] for o, other, _ in named if not _is_below(other, name)}
            sure = is_whole(node, nodes[item.end]) or has_left(nodes[item.end], others)
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
        type_ = "Linear" if is_product else item.type
        taps.append(NodeTap(name, item.end, item.start, reads, operand, type_, kind))
        if is_product and sure:
            turned = weight.transposed is (item.kind == "aten::linear")
            bias = None if item.bias is None else known[item.bias].names[0]
            linears[name] = (weight.names[0], turned, bias)
    read = {name for weight in known.values() for name in weight.names}
    done = {tap.name for tap in taps}
    for module, owned in modules.items():
        if module not in done and module not in why:
            seen = any(f"{module}.{key}" in read for key in owned)
            why[module] = _ELSEWHERE if seen else _FOLDED
    reading = {
        index
        for index, node in enumerate(nodes)
        if any(value.unique() in known for value in node.inputs())
    }
    return Anchored(taps, linears, why, _readers(nodes, known), reading)


def _is_below(name: str, above: str) -> bool:
    return name == above or name.startswith(f"{above}.")


def _is_main(weight: Weight, module: str) -> bool:
    """Whether a tensor is called what a layer's own weight is called; a table of positions that is
    kept as a buffer, a scale inside a larger layer are not."""
    return any(f"{module}.{key}" in weight.names for key in _MAIN)


def _is_scaled(node: Any) -> bool:
    """Whether what was looked up is multiplied at once: by its layer, or by the one above."""
    users = [use.user.kind() for use in node.output().uses()]
    return node.kind() == "aten::embedding" and users in (["aten::mul"], ["aten::div"])


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
) -> Found | None:
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
    return Found(index, end, tuple(candidates), kind, role.type, role.data, weight, bias)


def _scale(node: Any, known: Mapping[int, Weight]) -> Role | None:
    """A product with a weight, as a norm ends; where a cast follows, which of both it returns is
    not known."""
    sides = [index for index in (0, 1) if node.inputsAt(index).unique() in known]
    readers = [use.user for use in node.output().uses()]
    if len(sides) != 1 or (len(readers) == 1 and readers[0].kind() == "aten::to"):
        return None
    return Role(1 - sides[0], sides[0])


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


def _readers(nodes: Sequence[Any], known: Mapping[int, Weight]) -> dict[str, list[int]]:
    """The nodes that read the weights of a layer, where no other has the same."""
    found: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for value in node.inputs():
            weight = known.get(value.unique())
            if weight is not None and len(weight.names) == 1:
                found.setdefault(weight.names[0].rpartition(".")[0], []).append(index)
    return found


def _named(
    found: Sequence[Found], why: dict[str, str], near: Neighbours
) -> list[tuple[Found, str, bool]]:
    """Each op with the layer whose call it is, and whether that is sure."""
    groups: dict[tuple[str, ...], list[Found]] = {}
    for item in found:
        groups.setdefault(item.candidates, []).append(item)
    named: list[tuple[Found, str, bool]] = []
    for candidates, items in groups.items():
        looked_up = [item.kind == "aten::embedding" for item in items]
        if len(candidates) == 1:
            if len(set(looked_up)) == 1:
                named += [(item, candidates[0], True) for item in items]
            else:  # tied to a layer whose weight the checkpoint does not hold twice
                table = _is_table(candidates[0])
                named += [
                    (item, candidates[0], False)
                    for item, is_table in zip(items, looked_up, strict=True)
                    if is_table is table
                ]
        elif len(items) != len(candidates):
            why.update(dict.fromkeys(candidates, _TIED))
        elif len(set(looked_up)) == 2:
            tables = [name for name in candidates if _is_table(name)]
            if len(candidates) == 2 and len(tables) == 1:
                (head,) = set(candidates) - set(tables)
                named += [
                    (item, tables[0] if item.kind == "aten::embedding" else head, False)
                    for item in items
                ]
            else:
                why.update(dict.fromkeys(candidates, _TIED))
        elif (guesses := near.shared_out(items, candidates)) is not None:
            named += [(item, name, False) for item, name in guesses]
        else:
            why.update(dict.fromkeys(candidates, _TIED))
    return sorted(named, key=lambda entry: entry[0].end)


def _is_table(name: str) -> bool:
    return any(word in name.lower() for word in ("emb", "wte"))
