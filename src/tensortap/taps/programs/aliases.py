"""Modules that a model holds under several names.

An eager model calls such a module by the first of them, wherever it was called through; an exporter
writes down the name that was used. So calls have to be joined under the first name, in the order in
which they ran. Whether two names are of one module is not always to be known: layers may share all
their tensors and still be two (tied embeddings), and those without tensors show nothing at all.

Being kept apart, such names are right all the same as long as no later name was used before an
earlier one: the calls of the earlier name are then the module's first, or all that it had.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .scopes import ModuleCall

__all__ = ["Aliases", "Earlier", "Module", "find_aliases", "join_calls", "likely_order"]


@dataclass(frozen=True)
class Module:
    """What is known of a name: its class, its tensors by relative name, and which object it is.

    `bare`: nothing in it reads a weight. `objects` is empty where the exporter does not tell.
    """

    type: str = ""
    tensors: frozenset[tuple[str, Hashable]] = frozenset()
    objects: frozenset[str] = frozenset()
    bare: bool = False


@dataclass
class Aliases:
    """The first name of every other one, and the names whose calls may be counted wrongly."""

    first: dict[str, str] = field(default_factory=dict)
    doubts: set[str] = field(default_factory=set)


Earlier = Callable[[str, str], bool]
"""Whether a model may hold one name before another."""


def find_aliases(
    modules: Mapping[str, Module],
    calls: Sequence[ModuleCall],
    earlier: Earlier,
    *,
    join: bool = True,
) -> Aliases:
    """What the names of a graph are; `modules` in the model's order, `calls` in order of running.

    The calls may have repetitions: they are what the nodes of the graph stand in, one by one.
    Without `join`, names of the same tensors stay apart: there, equal tensors may be two.
    """
    found = Aliases()
    by_object: dict[str, str] = {}
    by_tensors: dict[frozenset[tuple[str, Hashable]], list[str]] = defaultdict(list)
    for path, module in modules.items():
        if not path:
            continue
        above, _, own = path.rpartition(".")
        first = found.first.get(above)
        if first is None:
            known = [by_object[name] for name in module.objects if name in by_object]
            if join:
                known += [n for n in by_tensors[module.tensors] if _same(modules[n], module)]
            known = [name for name in known if not path.startswith(f"{name}.")]
            first = known[0] if known else None
        else:
            first = f"{first}.{own}"
        if first is not None and first != path:
            found.first[path] = first
        else:
            by_tensors[module.tensors].append(path)
        for name in module.objects:
            by_object.setdefault(name, first or path)
    spans = _spans(calls)
    for group in _groups(modules, found.first, spans):
        if _one_object([modules[path] for path in group]):
            continue
        for path in group:
            others = [name for name in group if not _within(name, path) and earlier(path, name)]
            if modules[path].type.startswith("Dropout"):
                others = [name for name in others if not _above(name, path)]
            if any(spans[other][0] < spans[path][1] for other in others):
                found.doubts.add(found.first.get(path, path))
    return found


def likely_order(owners: Iterable[str]) -> Earlier:
    """An order of names where the model's own is not known, but that of `owners` of weights.

    Between others numbers decide. Where nothing does, a module may well be held by the one that
    hands it down to its parts (`act` before `layers.0.act`), but hardly taken from a part.
    """
    place: dict[str, int] = {}
    for owner in owners:
        parts = owner.split(".")
        for depth in range(1, len(parts) + 1):
            place.setdefault(".".join(parts[:depth]), len(place))

    def earlier(one: str, other: str) -> bool:
        mine, theirs = one.split("."), other.split(".")
        same = 0
        while same < min(len(mine), len(theirs)) and mine[same] == theirs[same]:
            same += 1
        if same == len(mine):
            return True
        if same == len(theirs):
            return False
        known = [place.get(".".join(parts[: same + 1])) for parts in (mine, theirs)]
        if known[0] is not None and known[1] is not None:
            return known[0] < known[1]
        (stem, number), (their_stem, their_number) = _numbered(mine[same]), _numbered(theirs[same])
        if stem == their_stem and number != their_number:
            return number < their_number
        return same == len(mine) - 1

    return earlier


def _within(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _above(one: str, other: str) -> bool:
    """Whether a module belongs to one that stands around the owner of another.

    T5 holds a dropout behind its blocks, runs it before them, and shares it with none of them.
    """
    owner = one.rpartition(".")[0]
    return other.count(".") > one.count(".") and (not owner or other.startswith(f"{owner}."))


def _numbered(part: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.*?)_?(\d+)", part)
    return (match[1], int(match[2])) if match else (part, -1)


def _same(one: Module, other: Module) -> bool:
    """Whether two names of the same tensors are taken for one module: if it has several tensors."""
    if one.objects and other.objects:
        return bool(one.objects & other.objects)
    fits = not one.type or not other.type or one.type == other.type
    return fits and len(one.tensors) > 1


def _one_object(modules: Sequence[Module]) -> bool:
    return bool(modules[0].objects) and all(m.objects & modules[0].objects for m in modules)


def _groups(
    modules: Mapping[str, Module], first: Mapping[str, str], called: Iterable[str]
) -> Iterable[list[str]]:
    """Called names that are, or may be, of one module."""
    groups: dict[Hashable, list[str]] = defaultdict(list)
    joined = set(first.values())
    for path in called:
        module = modules.get(path, Module())
        if path in first or path in joined:
            groups["name", first.get(path, path)].append(path)
        elif module.objects:
            continue
        elif module.tensors:
            groups["tensors", module.type, module.tensors].append(path)
        elif module.bare and module.type:
            groups["type", module.type].append(path)
    return [group for group in groups.values() if len(group) > 1]


def _spans(calls: Sequence[ModuleCall]) -> dict[str, tuple[int, int]]:
    """When each name was first called, and when its last call began."""
    began: dict[ModuleCall, int] = {}
    for index, call in enumerate(calls):
        began.setdefault(call, index)
    spans: dict[str, tuple[int, int]] = {}
    for (path, _), index in began.items():
        first, last = spans.get(path, (index, index))
        spans[path] = (min(first, index), max(last, index))
    return spans


def join_calls(
    calls: Sequence[ModuleCall], first: Mapping[str, str]
) -> dict[ModuleCall, ModuleCall]:
    """Every call by its first name, with its number among all calls of that module."""
    members: dict[str, list[str]] = defaultdict(list)
    for path, _ in dict.fromkeys(calls):
        if path not in members[first.get(path, path)]:
            members[first.get(path, path)].append(path)
    counts: dict[str, int] = defaultdict(int)
    found: dict[ModuleCall, ModuleCall] = {}
    for call in dict.fromkeys(calls):
        name = first.get(call[0], call[0])
        if len(members[name]) == 1:
            found[call] = (name, call[1])
        else:
            found[call] = (name, counts[name])
            counts[name] += 1
    return found
