"""Which layers are looked at first, and which inside a layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from ...recording.schema import Structure
from ...selection.sites import is_leaf, sites
from ..maker import contains

__all__ = ["ancestors", "children_of", "contains", "first_level", "operations"]


def first_level(structure: Structure, known: Collection[str]) -> tuple[list[str], list[str]]:
    """The blocks, and the outermost layers that stand beside them: embeddings, norms, the head."""
    blocks = [name for name in structure.blocks if name in known]
    if not blocks:
        return [], []
    free = [
        name
        for name in known
        if name and not any(contains(b, name) or contains(name, b) for b in structure.blocks)
    ]
    return blocks, _outermost(free)


def children_of(layer: str, known: Iterable[str]) -> list[str]:
    """The outermost known layers inside one."""
    inner = [name for name in known if name != layer and contains(layer, name)]
    return _outermost(inner)


def ancestors(layers: Sequence[str], known: Iterable[str]) -> list[str]:
    """The known layers that contain all of these, the innermost first; not the root."""
    around = [n for n in known if n and n not in layers and all(contains(n, x) for x in layers)]
    return sorted(around, key=lambda name: -name.count("."))


def operations(model: nn.Module) -> dict[str, int]:
    """About how many operations each layer is made of: its leaves, and what joins them."""
    found: dict[str, int] = {}
    for site in sites(model):
        leaves = sum(is_leaf(module) for module in site.module.modules())
        for name in site.names:
            found[name] = 1 if is_leaf(site.module) else max(4, 2 * leaves)
    return found


def _outermost(names: Sequence[str]) -> list[str]:
    there = set(names)
    return [n for n in names if not any(o != n and contains(o, n) for o in there)]
