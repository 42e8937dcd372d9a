"""Layers with the same weights, told apart by the layers before and behind them: guesses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .copies import holds_tensors

__all__ = ["Found", "Neighbours", "made_by"]


@dataclass(frozen=True)
class Found:
    """One op that may be a call of one of several layers."""

    start: int
    end: int
    candidates: tuple[str, ...]
    kind: str
    type: str
    data: int
    weight: int
    bias: int | None


def made_by(node: Any) -> list[int]:
    """The values that a node makes."""
    return [value.unique() for value in node.outputs()]


class Neighbours:
    """Which sure layers stand before and behind an op: names of one block stand together."""

    def __init__(self, nodes: Sequence[Any], found: Sequence[Found]) -> None:
        sure = [item for item in found if len(item.candidates) == 1]
        self._ends = {item.end: item.candidates[0] for item in sure}
        self._starts = {item.start: item.candidates[0] for item in sure}
        made = {id_: index for index, node in enumerate(nodes) for id_ in made_by(node)}
        self._before: dict[int, list[int]] = {}
        self._behind: dict[int, list[int]] = {}
        for index, node in enumerate(nodes):
            for value in node.inputs():
                source = made.get(value.unique())
                if source is not None and holds_tensors(value.type()):
                    self._before.setdefault(index, []).append(source)
                    self._behind.setdefault(source, []).append(index)

    def shared_out(
        self, items: Sequence[Found], candidates: Sequence[str]
    ) -> list[tuple[Found, str]] | None:
        """Ops given to names by the block that their neighbours stand in.

        Where norms stand in front of what they serve, what reads them is of their block; where
        behind, what they read. All have to fit one of both, but for one that is left over.
        """
        room: dict[str, list[str]] = {}
        for name in candidates:
            room.setdefault(name.rpartition(".")[0], []).append(name)
        ahead = [self._nearest(item.end, self._behind, self._starts, min) for item in items]
        back = [self._nearest(item.start, self._before, self._ends, max) for item in items]
        if any(len({_turn(name) for name in names}) < len(names) for names in room.values()):
            return None  # which of a block's norms comes first cannot be told
        for neighbours in (ahead, back):
            parents = _fitting([_block(name, room) for name in neighbours], room)
            if parents is not None:
                return [
                    (items[index], name)
                    for parent, names in room.items()
                    for index, name in zip(
                        [index for index, chosen in enumerate(parents) if chosen == parent],
                        sorted(names, key=_turn),
                        strict=True,
                    )
                ]
        return None

    def _nearest(
        self,
        start: int,
        edges: Mapping[int, Sequence[int]],
        known: Mapping[int, str],
        choose: Callable[[Iterable[int]], int],
    ) -> str | None:
        """The nearest sure layer along the graph, others not passed through."""
        seen: set[int] = set()
        reached: set[int] = set()
        waiting = [start]
        while waiting:
            for index in edges.get(waiting.pop(), ()):
                if index in known:
                    reached.add(index)
                elif index not in seen:
                    seen.add(index)
                    waiting.append(index)
        return known[choose(reached)] if reached else None


def _block(name: str | None, parents: Collection[str]) -> str | None:
    """The innermost of these modules that holds a layer."""
    while name:
        name = name.rpartition(".")[0]
        if name in parents:
            return name
    return None


def _fitting(parents: Sequence[str | None], room: Mapping[str, Sequence[str]]) -> list[str] | None:
    """The same with the one that is left over put where room is left; None if it does not fit."""
    left = Counter({parent: len(names) for parent, names in room.items()})
    left.subtract(parent for parent in parents if parent is not None)
    missing = sum(parent is None for parent in parents)
    if missing > 1 or any(count < 0 for count in left.values()):
        return None
    rest = next((parent for parent, count in left.items() if count), "")
    return [rest if parent is None else parent for parent in parents]


def _turn(name: str) -> tuple[int, str]:
    """What the name of a norm says of its place in its block: a word, or a number."""
    last = name.rpartition(".")[2].lower()
    early = any(word in last for word in ("input", "before", "pre"))
    late = any(word in last for word in ("post", "after", "final", "output"))
    digits = "".join(letter for letter in last if letter.isdigit())
    return (0 if early else 2 if late else 1), digits.zfill(6)
