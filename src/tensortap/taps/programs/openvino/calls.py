"""Which call of which module each operation of an OpenVINO graph stands in.

A friendly name tells the module, not the call: of a module that ran three times, all operations lie
in one scope, numbered as they were written. It ran once if it did anything once. It ran at least as
often as a value left it and came back, or as one of its weights was read. If it falls into as many
pieces, each is a call. Else it ran at most as often as what it did can be dealt out evenly; where
that is as often as at least, the numbers tell the calls. Where it is not, the most is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from ..scopes import ModuleCall
from .graph import Value

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
    totals: dict[str, int] = field(default_factory=dict)  # operations of each kind as written
    count: int = 1
    pieces: dict[str, int] | None = None  # the call of each value, where pieces tell it


def prefixes(path: str) -> list[str]:
    """A dotted path and those above it, the outermost first."""
    parts = path.split(".") if path else []
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def find_calls(values: Sequence[Value], fixed: Mapping[str, Value]) -> Calls:
    """The calls of these values, which are activations; `fixed` are weights and constants."""
    scopes = _scopes(values)
    _count_kinds((*values, *fixed.values()), scopes)
    readers = _readers(values)
    place = {value.key: index for index, value in enumerate(values)}
    guessed: set[str] = set()
    unclear: set[str] = set()
    for path in sorted(scopes, key=lambda name: -name.count(".")):
        scope = scopes[path]
        children = [scopes[child].count for child in scope.children if child not in guessed]
        bounds = [*scope.totals.values(), *children]
        if not bounds or 1 in bounds or _reads_own_weight_once(path, scope, fixed, readers):
            continue
        first, last = place[scope.inside[0].key], place[scope.inside[-1].key]
        levels = _visits({value.key for value in scope.inside}, values[first : last + 1])
        least = max(_uses(scope, fixed), 1, *levels.values())
        pieces = _pieces(scope.inside, levels)
        most = gcd(*bounds)
        if least > 1 and len(set(pieces.values())) == least:
            scope.count, scope.pieces = least, pieces
        elif most % least:
            unclear.add(path)
        else:
            scope.count = most
            if most != least or most == 1:
                guessed.add(path)
    uses = {path: often for path, scope in scopes.items() if (often := _uses(scope, fixed))}
    for path, scope in scopes.items():
        inner = [uses[other] for other in uses if f"{other}.".startswith(f"{path}.")]
        if scope.count == 1 and inner and min(inner) > 1:
            guessed.add(path)  # all weights in it are read again: what it did once may be shared
    found = {value.key: _chain(value, scopes) for value in values}
    for path, scope in scopes.items():
        if scope.count > 1 and not _in_order(path, scope, found):
            unclear.add(path)
    return Calls(found, frozenset(guessed - unclear), frozenset(unclear))


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


def _count_kinds(values: Sequence[Value], scopes: Mapping[str, _Scope]) -> None:
    """How many operations of each kind were written in a scope, dropped ones between included."""
    for value in values:
        spot = value.spot
        if spot is not None and spot.path in scopes:
            totals = scopes[spot.path].totals
            number = spot.number if spot.repeats else 0
            totals[spot.kind] = max(totals.get(spot.kind, 0), number + 1)


def _reads_own_weight_once(
    path: str,
    scope: _Scope,
    fixed: Mapping[str, Value],
    readers: Mapping[str, Sequence[Value]],
) -> bool:
    for value in scope.own:
        for key in value.reads:
            weight = fixed[key].weight if key in fixed else None
            mine = weight is not None and weight.rpartition(".")[0] == path
            if mine and len(readers[key]) == 1:
                return True
    return False


def _uses(scope: _Scope, fixed: Mapping[str, Value]) -> int:
    """How often the same operation reads the same weight; 0 where none is read."""
    uses: dict[tuple[str, str], set[int]] = {}
    for value in scope.own:
        for key in value.reads:
            if key in fixed and _is_weight(fixed[key]) and value.spot is not None:
                uses.setdefault((value.spot.kind, key), set()).add(value.spot.number)
    return max((len(numbers) for numbers in uses.values()), default=0)


def _is_weight(value: Value) -> bool:
    return value.dtype.startswith(("f", "bf")) and (value.shape is None or prod(value.shape) > 1)


def _visits(inside: set[str], values: Sequence[Value]) -> dict[str, int]:
    """For each of these, how often on its way it left them and came back, at the most."""
    seen: dict[str, int] = {}
    for value in values:
        here = value.key in inside
        best = 0
        for key in value.reads:
            visits = seen.get(key, 0)
            if here and visits and key not in inside:
                visits += 1
            best = max(best, visits)
        seen[value.key] = max(best, 1) if here else best
    return {key: seen[key] for key in inside}


def _pieces(inside: Sequence[Value], levels: Mapping[str, int]) -> dict[str, int]:
    """Values that hang together, each with the number of its piece, in order."""
    home = {value.key: value.key for value in inside}

    def find(key: str) -> str:
        while home[key] != key:
            home[key] = home[home[key]]
            key = home[key]
        return key

    for value in inside:
        for key in value.reads:
            if key in home:
                home[find(value.key)] = find(key)
    level: dict[str, int] = {}
    number: dict[str, int] = {}
    for value in inside:
        root = find(value.key)
        level[root] = max(level.get(root, 0), levels[value.key])
        if value.spot is not None:
            number[root] = min(number.get(root, value.spot.number), value.spot.number)
    order = sorted(level, key=lambda root: (level[root], number.get(root, 0)))
    rank = {root: index for index, root in enumerate(order)}
    return {value.key: rank[find(value.key)] for value in inside}


def _chain(value: Value, scopes: Mapping[str, _Scope]) -> tuple[ModuleCall, ...]:
    """The calls that a value stands in, outermost first."""
    spot = value.spot
    if spot is None or not spot.path:
        return ()
    scope = scopes[spot.path]
    count = scope.count
    share = max(1, scope.totals.get(spot.kind, 1) // count)
    number = min(count - 1, spot.number // share) if spot.repeats else 0
    found: list[ModuleCall] = []
    for path in reversed(prefixes(spot.path)):
        scope = scopes[path]
        number = number * scope.count // count
        count = scope.count
        if scope.pieces is not None:
            number = scope.pieces[value.key]
        found.append((path, number))
    return tuple(reversed(found))


def _in_order(path: str, scope: _Scope, found: Mapping[str, Sequence[ModuleCall]]) -> bool:
    """Whether no value of a later call is read in an earlier one."""
    number = {v.key: dict(found[v.key])[path] for v in scope.inside}
    return all(
        number.get(key, -1) <= number[value.key] for value in scope.inside for key in value.reads
    )
