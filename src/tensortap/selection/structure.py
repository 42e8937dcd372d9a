"""The parts of a model that have a role, found by how it is built rather than by its names.

Repeated blocks are what a container repeats: outermost wins, so that a mixture's experts, which
are repeated too, stay inside their layer. A container of *stages* (a ResNet's, a Swin's) is
looked through, because a stage is itself a list of blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..recording.schema import Structure
from .sites import children, is_called, is_internal, is_leaf, type_name, unwrap

__all__ = ["structure"]

_LAZY = (UninitializedBuffer, UninitializedParameter)  # no shape before the first call
# A group with less than this share of the largest group's weights is no backbone.
_SHARE = 1 / 64
_NUMBERED = re.compile(r"(.*?)_?\d+")
_BEFORE_BLOCKS = re.compile(r"emb|pre|input", re.IGNORECASE)
_BEHIND_BLOCKS = re.compile(r"final|post|last|out|_f$|^norm$", re.IGNORECASE)
_NO_TOKENS = re.compile(r"pos|type|segment|rotary|relative", re.IGNORECASE)


@dataclass(eq=False)
class _Node:
    name: str
    module: nn.Module
    parent: _Node | None
    children: list[_Node] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.name.rpartition(".")[2]

    def walk(self) -> Iterator[_Node]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class _Group:
    """Modules that one parent repeats. Weak: only one, or no two of a type."""

    parent: _Node
    members: tuple[_Node, ...]
    weak: bool = False

    @property
    def weight(self) -> int:
        return sum(_weight(member.module) for member in self.members)

    @property
    def types(self) -> set[type]:
        return {type(member.module) for member in self.members}


def structure(model: nn.Module) -> Structure:
    """Find the repeated blocks, the token (or patch) embedding and the norm behind the blocks."""
    root = _tree(model)
    blocks = _blocks(root)
    embedding = _embedding(root, blocks)
    norm = _final_norm(blocks[-1]) if blocks else None
    return Structure(
        blocks=tuple(block.name for block in blocks),
        embedding=None if embedding is None else embedding.name,
        final_norm=None if norm is None else norm.name,
    )


def _tree(model: nn.Module) -> _Node:
    seen: set[int] = set()

    def grow(name: str, module: nn.Module, parent: _Node | None) -> _Node:
        seen.add(id(module))
        node = _Node(name, module, parent)
        for key, child in children(module):
            if id(child) not in seen and not is_internal(key):
                node.children.append(grow(f"{name}.{key}" if name else key, child, node))
        return node

    return grow("", unwrap(model), None)


def _numel(tensor: Tensor) -> int:
    return 0 if isinstance(tensor, _LAZY) else tensor.numel()


def _weight(module: nn.Module) -> int:
    """How much a module holds; quantised modules keep their weights in buffers."""
    return sum(map(_numel, module.parameters())) + sum(map(_numel, module.buffers()))


def _has_weights(module: nn.Module) -> bool:
    own = next(module.parameters(), None), next(module.buffers(), None)
    return any(tensor is not None for tensor in own) or any(
        "_packed_params" in part._modules for part in module.modules()
    )


def _is_blocklike(node: _Node) -> bool:
    return not is_leaf(node.module) and _has_weights(node.module)


def _blocks(root: _Node) -> list[_Node]:
    groups = _groups(root)
    strong = [group for group in groups if not group.weak]
    weak = [group for group in groups if group.weak]
    # One block a stage, as in the smallest ResNets: no list repeats, but the model does.
    pooled = Counter(kind for group in weak for kind in group.types)
    known = {kind for group in strong for kind in group.types}
    known |= {kind for kind, count in pooled.items() if count > 1 and kind is not nn.Sequential}
    chosen = strong + [group for group in weak if group.types & known]
    if not chosen:
        chosen = [group for group in weak if isinstance(group.parent.module, nn.ModuleList)]
        top = min((group.parent.name.count(".") for group in chosen), default=0)
        chosen = [group for group in chosen if group.parent.name.count(".") == top]
    if not chosen:
        return []
    largest = max(chosen, key=lambda group: group.weight)
    kept = {
        member.name
        for group in chosen
        if group.weight >= largest.weight * _SHARE or group.types & largest.types
        for member in group.members
    }
    return [node for node in root.walk() if node.name in kept]


def _groups(node: _Node, staged: bool = False) -> list[_Group]:
    """The outermost groups at or below a node; `staged`: the node may be a stage already."""
    found: list[_Group] = []
    taken: set[int] = set()
    for group in _candidates(node):
        taken |= {id(member) for member in group.members}
        inner = [_groups(member, staged=True) for member in group.members]
        flat = [part for parts in inner for part in parts]
        if any(not is_called(member.module) for member in group.members):
            found += [replace(part, weak=group.weak) for part in flat]  # a bare list is no layer
        elif isinstance(node.module, nn.Sequential) and group.weak:
            found += flat or [group]
        elif not staged and _are_stages(group, inner):
            found += flat
        else:
            found.append(group)
    for child in node.children:
        if id(child) not in taken:
            found += _groups(child, staged)
    return found


def _candidates(node: _Node) -> list[_Group]:
    heavy = [child for child in node.children if _is_blocklike(child)]
    if not heavy:
        return []
    module = node.module
    if isinstance(module, nn.ModuleList):
        # Hybrids mix layer types in one list (Mamba and attention): all of them are blocks.
        repeats = len({type(child.module) for child in heavy}) < len(heavy)
        return [_Group(node, tuple(heavy), weak=not repeats)]
    if isinstance(module, nn.Sequential):
        kind, count = Counter(type(child.module) for child in heavy).most_common(1)[0]
        members = tuple(child for child in heavy if type(child.module) is kind)
        return [_Group(node, members, weak=count == 1)]
    return _numbered(node, heavy)


def _numbered(node: _Node, heavy: Sequence[_Node]) -> list[_Group]:
    """`block1`, `block2`, … as plain attributes or as keys of a ModuleDict."""
    stems: dict[tuple[str, type], list[_Node]] = {}
    for child in heavy:
        if match := _NUMBERED.fullmatch(child.key):
            stems.setdefault((match.group(1), type(child.module)), []).append(child)
    return [_Group(node, tuple(members)) for members in stems.values() if len(members) > 1]


def _are_stages(group: _Group, inner: Sequence[Sequence[_Group]]) -> bool:
    """Whether a group's members only bundle the real blocks.

    Blocks have the same weights one after the other. Stages grow wider, and nearly all that they
    hold is one list of blocks; an expert list deeper inside a block is not of that kind.
    """
    strong = [parts for parts in inner if any(not part.weak for part in parts)]
    members = group.members
    if all(isinstance(member.module, nn.Sequential) for member in members):
        return 2 * len(strong) >= len(members)
    direct = [
        part
        for member, parts in zip(members, inner, strict=True)
        for part in parts
        if part.parent is member or part.parent.parent is member
    ]
    share = sum(part.weight for part in direct) / max(1, group.weight)
    if group.weak or not isinstance(group.parent.module, nn.ModuleList | nn.Sequential):
        return bool(strong) and share > 0.9
    return share > 0.5 and _shapes_differ(members)


def _shapes_differ(members: Sequence[_Node]) -> bool:
    shapes: dict[str, object] = {}
    for member in members:
        for name, parameter in member.module.named_parameters():
            if isinstance(parameter, _LAZY):
                continue
            if shapes.setdefault(name, parameter.shape) != parameter.shape:
                return True
    return False


def _is_norm(node: _Node) -> bool:
    module = node.module
    if "norm" in type_name(module).lower():
        return True
    own = dict(module.named_parameters(recurse=False))
    vectors = all(not isinstance(p, _LAZY) and p.dim() == 1 and p.numel() > 1 for p in own.values())
    names = {"weight", "bias", "scale", "shift", "gamma", "beta", "g", "b"}
    relu = "relu" in type_name(module).lower()
    return is_leaf(module) and bool(own) and vectors and names >= set(own) and not relu


def _final_norm(last: _Node) -> _Node | None:
    """The norm that a block's nearest ancestor applies behind it, wherever it was defined."""
    below, above = last, last.parent
    while above is not None:
        place = above.children.index(below)
        before, behind = above.children[:place], above.children[place + 1 :]
        for node in behind:
            if _is_norm(node) and not _BEFORE_BLOCKS.search(node.key):
                return node
        for node in before:  # OPT and BART-likes define it ahead of their layers
            if _is_norm(node) and _BEHIND_BLOCKS.search(node.key):
                return node
        for node in behind:  # a head that starts with it: Sequential(LayerNorm, Linear)
            head = node.children[:1] if isinstance(node.module, nn.Sequential) else []
            if head and _is_norm(head[0]):
                return head[0]
        below, above = above, above.parent
    return None


def _embedding(root: _Node, blocks: Sequence[_Node]) -> _Node | None:
    """The first lookup table outside the blocks that is not for positions; else the patches'."""
    inside = {id(node) for block in blocks for node in block.walk()}
    outside = [node for node in root.walk() if id(node) not in inside and _has_weights(node.module)]
    for node in outside:
        table = isinstance(node.module, nn.Embedding | nn.EmbeddingBag) or (
            "embedding" in type_name(node.module).lower() and _is_table(node.module)
        )
        if table and not _NO_TOKENS.search(node.key):
            return node
    named = [
        node
        for node in outside
        if is_called(node.module)
        and "embed" in (type_name(node.module) + node.key).lower()
        and not _NO_TOKENS.search(node.key)
        and not any(block.name.startswith(f"{node.name}.") for block in blocks)
        and node.name
    ]
    patches = [n for n in named if "patch" in (type_name(n.module) + n.key).lower()]
    return next(iter(patches or named), None)


def _is_table(module: nn.Module) -> bool:
    weight = dict(module.named_parameters(recurse=False)).get("weight")  # TorchScript has no dict
    return is_leaf(module) and weight is not None and weight.dim() == 2
