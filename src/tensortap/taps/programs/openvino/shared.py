"""What looks like a layer's value, and is none: results that several layers share, and lists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..scopes import ModuleCall, Step
from .graph import Value

__all__ = ["find_lists", "without_shared"]

_DIGITS = re.compile(r"(?<![^.])\d+(?![^.])")


def without_shared(
    steps: Sequence[Step],
    out: Mapping[ModuleCall, Sequence[str]],
    values: Sequence[Value],
    fixed: Mapping[str, Value],
) -> dict[ModuleCall, tuple[str, ...]]:
    """What leaves each call, less what all blocks compute alike and OpenVINO computes once.

    Every block of a decoder widens the same cosines; only the first one still does, and the others
    read its result. Such a value is never a call's main one, depends on no trained matrix, and is
    read outside by the same module of other blocks alone.
    """
    trained: set[str] = set()
    for value in values:
        if any(key in trained or _is_matrix(fixed.get(key)) for key in value.reads):
            trained.add(value.key)
    calls = {step.name: step.calls for step in steps}
    readers: dict[str, list[Step]] = {}
    for step in steps:
        for key in step.inputs:
            readers.setdefault(key, []).append(step)

    def shared(key: str, call: ModuleCall) -> bool:
        where = _DIGITS.sub("*", calls[key][-1][0])
        outside = [step for step in readers.get(key, []) if call not in step.calls]
        return (
            key not in trained
            and bool(outside)
            and all(s.calls and _DIGITS.sub("*", s.calls[-1][0]) == where for s in outside)
        )

    return {
        call: tuple(key for index, key in enumerate(keys) if index == 0 or not shared(key, call))
        for call, keys in out.items()
    }


def _is_matrix(value: Value | None) -> bool:
    if value is None or value.shape is None or not value.dtype.startswith(("f", "bf")):
        return False
    return sum(size > 1 for size in value.shape) > 1


def find_lists(
    steps: Sequence[Step],
    out: Mapping[ModuleCall, Sequence[str]],
    into: Mapping[ModuleCall, Sequence[str]],
) -> set[str]:
    """Paths that are lists of modules, which are never called, or may be ones.

    A list is no more than a name before numbers. A Sequential looks the same, but hands each of its
    modules what the one before returned, and nothing else. Where modules that hold others are so
    chained it may be either, and is taken for a list.
    """
    busy = {step.calls[-1][0] for step in steps if step.calls}
    children: dict[ModuleCall, dict[ModuleCall, list[str]]] = {}
    for step in steps:
        for above, below in zip(step.calls, step.calls[1:], strict=False):
            tail = step.calls[-1][0][len(below[0]) :]
            children.setdefault(above, {}).setdefault(below, []).append(tail)
    lists: set[str] = set()
    for call, inner in children.items():
        ends = [path.rpartition(".")[2] for path, _ in inner]
        if call[0] in busy or not all(end.isdecimal() for end in ends):
            continue
        chain = sorted(inner, key=lambda item: int(item[0].rpartition(".")[2]))
        straight = all(
            set(into.get(later, ())) <= set(out.get(earlier, ()))
            for earlier, later in pairwise(chain)
        )
        blocks = any(tail for tails in inner.values() for tail in tails)
        if blocks or not straight:
            lists.add(call[0])
    return lists
