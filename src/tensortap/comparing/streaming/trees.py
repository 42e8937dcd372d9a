"""Pairs of layers by where they stand in two trees of modules, before anything has run.

Somebody called `blocks` what the other calls `layers`, and all that is inside is named alike. Two
children of paired modules are paired where each is by far the likest of the other; of several that
are as like (four projections of one type and new names), none is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..likeness import type_likeness

__all__ = ["by_tree"]

_LIKE = 0.25  # what is in two modules may go by other names too
_CLEAR = 0.8  # the second must be less like than this part of the first


@dataclass
class _Node:
    """A module and what is in it; `type` is None for one that is not listened to itself."""

    type: str | None = None
    children: dict[str, _Node] = field(default_factory=dict)

    def inside(self, at: str = "") -> dict[str, str | None]:
        """The types of a module and of all that is in it, by their names from here."""
        found = {at: self.type}
        for name, child in self.children.items():
            found |= child.inside(f"{at}.{name}")
        return found


def by_tree(
    ours: Mapping[str, str], theirs: Mapping[str, str], paired: Mapping[str, str]
) -> dict[str, str]:
    """More pairs, ours to theirs; the arguments give each layer's type, and what is paired."""
    found: dict[str, str] = {}
    taken = set(paired.values())

    def meet(left: _Node, right: _Node, name: str, other: str) -> None:
        known = paired.get(name)
        if known is None and other not in taken and left.type and right.type:
            found[name] = other
        for child, partner in _children(left, right).items():
            meet(
                left.children[child],
                right.children[partner],
                f"{name}.{child}".lstrip("."),
                f"{other}.{partner}".lstrip("."),
            )

    meet(_tree(ours), _tree(theirs), "", "")
    return {name: other for name, other in found.items() if name not in paired}


def _tree(types: Mapping[str, str]) -> _Node:
    root = _Node()
    for name, kind in types.items():
        here = root
        for part in name.split(".") if name else ():
            here = here.children.setdefault(part, _Node())
        here.type = kind
    return root


def _children(left: _Node, right: _Node) -> dict[str, str]:
    """Which children of two paired modules belong together: by name, then by what is in them."""
    found = {name: name for name in left.children if name in right.children}
    ours = {n: node.inside() for n, node in left.children.items() if n not in found}
    theirs = {n: node.inside() for n, node in right.children.items() if n not in found}
    scores = {(a, b): _likeness(ours[a], theirs[b]) for a in ours for b in theirs}
    for (a, b), score in scores.items():
        rivals = [s for (x, y), s in scores.items() if (x == a) != (y == b)]
        if score >= _LIKE and max(rivals, default=0.0) < _CLEAR * score:
            found[a] = b
    return found


def _likeness(ours: Mapping[str, str | None], theirs: Mapping[str, str | None]) -> float:
    """How much of the smaller of two modules is in the other, by names and types."""
    if (len(ours) == 1) != (len(theirs) == 1):
        return 0.0  # one of them has something inside
    total = sum(
        type_likeness(ours[name] or "", theirs[name] or "") for name in ours.keys() & theirs.keys()
    )
    return total / min(len(ours), len(theirs))
