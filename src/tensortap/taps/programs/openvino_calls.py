"""Which call of which module each operation of an OpenVINO graph stands in.

A friendly name tells the module, not the call: of a module that ran three times, all operations lie
in one scope, numbered as they were written. How often it ran is between two bounds. It ran at least
as often as a value left it and came back, and as one of its weights was read; at most as often as
what it did can be dealt out evenly. Where the bounds meet, the number is known. Where they do not,
the most is a guess, and said to be one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from .openvino_graph import Value
from .scopes import ModuleCall

__all__ = ["Calls", "find_calls", "prefixes"]


@dataclass(frozen=True)
class Calls:
    """For each value the calls that it stands in; modules whose calls are a guess, or a riddle."""

    of: Mapping[str, tuple[ModuleCall, ...]]
    guessed: frozenset[str]
    unclear: frozenset[str]


@dataclass
class _Scope:
    own: list[Value] = field(default_factory=list)
    inside: list[Value] = field(default_factory=list)  # with those of the modules in it
    children: list[str] = field(default_factory=list)
    count: int = 1


def prefixes(path: str) -> list[str]:
    """A dotted path and those above it, the outermost first."""
    parts = path.split(".") if path else []
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def find_calls(values: Sequence[Value], fixed: Mapping[str, Value]) -> Calls:
    """The calls of these values, which are activations; `fixed` are weights and constants."""
    scopes = _scopes(values)
    readers = _readers(values)
    guessed, unclear = set(), set()
    for path in sorted(scopes, key=lambda name: -name.count(".")):
        scope = scopes[path]
        most = _at_most(scope, scopes, fixed, readers, path)
        least = 1 if most == 1 else _at_least(scope, values, fixed)
        scope.count = max(most, least)
        if most % least:
            unclear.add(path)
            scope.count = 1
        elif most != least:
            guessed.add(path)
    found: dict[str, tuple[ModuleCall, ...]] = {}
    totals = {path: _totals(scope.own) for path, scope in scopes.items()}
    for value in values:
        found[value.key] = _chain(value, scopes, totals)
    for path, scope in scopes.items():
        if scope.count > 1 and not _in_order(path, scope, found):
            unclear.add(path)
    return Calls(found, frozenset(guessed), frozenset(unclear))


def _scopes(values: Sequence[Value]) -> dict[str, _Scope]:
    scopes: dict[str, _Scope] = {}
    for value in values:
        if value.spot is None or not value.spot.path:
            continue
        above = ""
        for path in prefixes(value.spot.path):
            if path not in scopes:
                scopes[path] = _Scope()
                if above:
                    scopes[above].children.append(path)
            scopes[path].inside.append(value)
            above = path
        scopes[value.spot.path].own.append(value)
    return scopes


def _readers(values: Sequence[Value]) -> dict[str, list[Value]]:
    readers: dict[str, list[Value]] = {}
    for value in values:
        if value.port == 0:
            for key in value.reads:
                readers.setdefault(key, []).append(value)
    return readers


def _totals(own: Sequence[Value]) -> dict[str, int]:
    """How many operations of each kind were written in a scope, dropped ones between included."""
    totals: dict[str, int] = {}
    for value in own:
        if value.spot is not None and value.spot.repeats:
            totals[value.spot.kind] = max(totals.get(value.spot.kind, 0), value.spot.number + 1)
    return totals


def _at_most(
    scope: _Scope,
    scopes: Mapping[str, _Scope],
    fixed: Mapping[str, Value],
    readers: Mapping[str, Sequence[Value]],
    path: str,
) -> int:
    if any(value.spot is not None and not value.spot.repeats for value in scope.inside):
        return 1
    for value in scope.own:
        for key in value.reads:
            weight = fixed[key].weight if key in fixed else None
            mine = weight is not None and weight.rpartition(".")[0] == path
            if mine and len(readers[key]) == 1:  # its own weight is read once
                return 1
    bounds = [*_totals(scope.own).values(), *(scopes[child].count for child in scope.children)]
    return gcd(*bounds)


def _at_least(scope: _Scope, values: Sequence[Value], fixed: Mapping[str, Value]) -> int:
    uses: dict[tuple[str, str], set[int]] = {}
    for value in scope.own:
        for key in value.reads:
            if key in fixed and _is_weight(fixed[key]) and value.spot is not None:
                uses.setdefault((value.spot.kind, key), set()).add(value.spot.number)
    shared = max((len(numbers) for numbers in uses.values()), default=1)
    return max(shared, _visits({value.key for value in scope.inside}, values))


def _is_weight(value: Value) -> bool:
    return value.dtype.startswith(("f", "bf")) and (value.shape is None or prod(value.shape) > 1)


def _visits(inside: set[str], values: Sequence[Value]) -> int:
    """How often a value left these and came back to them, on the way that did so most."""
    seen: dict[str, int] = {}
    most = 1
    for value in values:
        here = value.key in inside
        best = 0
        for key in value.reads:
            visits = seen.get(key, 0)
            if here and visits and key not in inside:
                visits += 1
            best = max(best, visits)
        best = max(best, 1) if here else best
        seen[value.key] = best
        most = max(most, best)
    return most


def _chain(
    value: Value, scopes: Mapping[str, _Scope], totals: Mapping[str, Mapping[str, int]]
) -> tuple[ModuleCall, ...]:
    """The calls that a value stands in, outermost first."""
    spot = value.spot
    if spot is None or not spot.path:
        return ()
    count = scopes[spot.path].count
    share = max(1, totals[spot.path].get(spot.kind, 1) // count)
    number = min(count - 1, spot.number // share) if spot.repeats else 0
    found: list[ModuleCall] = []
    for path in reversed(prefixes(spot.path)):
        above = scopes[path].count
        number = number * above // count
        count = above
        found.append((path, number))
    return tuple(reversed(found))


def _in_order(path: str, scope: _Scope, found: Mapping[str, Sequence[ModuleCall]]) -> bool:
    """Whether no value of a later call is read in an earlier one."""
    number = {v.key: dict(found[v.key])[path] for v in scope.inside}
    return all(
        number.get(key, -1) <= number[value.key] for value in scope.inside for key in value.reads
    )
