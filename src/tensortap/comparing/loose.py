"""Values of a compiled model that do not say which item of a layer's return value they are.

A compiler keeps the values and forgets the tuples. What leaves a layer's part of the graph may be
its output, or a key on its way to a cache. Shape and kind of dtype decide where only one value
fits; where several do, the values themselves, or what the values decided at an earlier layer of the
same type. What is left undecided is missing, with the reason: never another tensor. What a layer
reads is believed only where its values, or the layer that made it, speak for it, since compilers
put layers together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..recording.reader import Record
from .sketch import EXACT, agreement, content_errors

__all__ = ["DROPPED", "PASSED_ON", "Choice", "LooseLeaves", "is_loose", "plain_leaf"]

Leaves = Mapping[str, Sequence[Record]]
Fits = Callable[[Sequence[Record], Sequence[Record]], bool]
FromOne = Callable[[Record, Record], bool | None]
_Moment = tuple[int, int, int, int]

DROPPED = (
    "the compiled model kept no value of this leaf: nothing reads it, so the compiler dropped it"
)
PASSED_ON = "it is what the layer was given, and no value of its own in the compiled model"
_UNREAD = "no value that the compiled layer reads is this one"
_CLOSE = 0.1  # of the spread: beyond, the values prove nothing
_ROUGH = 0.5
_CLEAR = 3.0  # times the best: nearer, and two values are too alike to tell


def is_loose(records: Sequence[Record]) -> bool:
    """Whether a leaf's name tells nothing of its place in what the layer returns."""
    first = records[0]
    return first.provenance != "hook" and (not first.leaf or first.leaf.startswith("?"))


def plain_leaf(leaf: str) -> str:
    """What a leaf is called, whether it is an attribute or a key: `.logits` and `['logits']`."""
    return leaf.strip(".[]'\"").replace("']['", ".").replace("'].", ".").replace("['", ".")


@dataclass
class Choice:
    """The records that stand for each leaf whose place is known; of the others, why none does."""

    partners: dict[str, list[Record]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, leaf: str, name: str, records: Sequence[Record]) -> None:
        self.partners.setdefault(leaf, []).extend(records)
        self.names.setdefault(leaf, name)


class LooseLeaves:
    """Chooses layer after layer, and learns from what values decided."""

    def __init__(self) -> None:
        self._learnt: dict[tuple[object, ...], str] = {}

    def choose(
        self, kind: str, port: str, known: Leaves, loose: Leaves, fits: Fits, from_one: FromOne
    ) -> Choice:
        """Which loose leaf stands for which known one, in layers of a type (`kind`).

        `fits` says whether two leaves of other shapes can be set side by side, `from_one` whether
        two tensors were made by the same layer. A layer may be called in several ways: calls that
        leave other values behind are looked at apart.
        """
        found = Choice()
        groups = _ways(loose)
        for moments in groups.values():
            here = _at(known, moments) if len(groups) > 1 else known
            values = _at(loose, moments) if len(groups) > 1 else loose
            if here:
                self._one_way(kind, port, here, values, fits, from_one, found)
        for leaf in known:
            if leaf not in found.partners:
                found.reasons.setdefault(leaf, _dropped(port))
        return found

    def _one_way(
        self,
        kind: str,
        port: str,
        known: Leaves,
        loose: Leaves,
        fits: Fits,
        from_one: FromOne,
        found: Choice,
    ) -> None:
        common = _moments(known) & _moments(loose)
        ours, theirs = _distinct(known, common), _distinct(loose, common)
        free = [same[0] for same in theirs]
        unlike: list[list[str]] = []
        by_form: dict[object, list[list[str]]] = {}
        for same in ours:
            by_form.setdefault(_form(known[same[0]], common), []).append(same)
        for form, leaves in by_form.items():
            fitting = [name for name in free if _form(loose[name], common) == form]
            if not fitting:
                unlike += leaves
                continue
            pairs = self._pairs(kind, port, leaves, fitting, known, loose, len(theirs), from_one)
            left = [name for name in fitting if name not in pairs.values()]
            for same in leaves:
                name = pairs.get(same[0])
                for leaf in same:
                    if name is not None:
                        found.add(leaf, name, loose[name])
                    elif left:
                        found.reasons[leaf] = _undecided(port, len(fitting), len(leaves))
                    else:
                        found.reasons[leaf] = _dropped(port)
            free = [name for name in free if name not in pairs.values()]
        for same in unlike:
            name, reason = _in_another_layout(port, known[same[0]], loose, free, fits)
            for leaf in same:
                if name is None:
                    found.reasons[leaf] = reason
                else:
                    found.add(leaf, name, loose[name])
            free = [other for other in free if other != name]

    def _pairs(
        self,
        kind: str,
        port: str,
        leaves: Sequence[list[str]],
        fitting: Sequence[str],
        known: Leaves,
        loose: Leaves,
        many: int,
        from_one: FromOne,
    ) -> dict[str, str]:
        """Pairs among leaves of one shape and kind."""
        firsts = [same[0] for same in leaves]
        if len(firsts) == len(fitting) == 1:
            if port != "input":
                return {firsts[0]: fitting[0]}
            # A layer that took in the one before it reads that one's input, of the same shape.
            ours, theirs = _meeting(known[firsts[0]], loose[fitting[0]])
            same = True if _alike(ours, theirs) else from_one(ours, theirs)
            if same is False:
                return {}
            pairs = {firsts[0]: fitting[0]} if same else {}
        else:
            pairs = _by_values(firsts, fitting, known, loose)
        for leaf, name in pairs.items():
            self._learnt[kind, port, leaf, many] = name
        for leaf in firsts:
            earlier = self._learnt.get((kind, port, leaf, many))
            if earlier is None or leaf in pairs or earlier in pairs.values():
                continue
            if earlier in fitting:
                pairs[leaf] = earlier
        left = [leaf for leaf in firsts if leaf not in pairs]
        rest = [name for name in fitting if name not in pairs.values()]
        if pairs and len(left) == len(rest) == 1 and len(firsts) == len(fitting):
            pairs[left[0]] = rest[0]
        return pairs


def _by_values(
    leaves: Sequence[str], names: Sequence[str], known: Leaves, loose: Leaves
) -> dict[str, str]:
    """Leaves that one value holds and no other comes near to."""
    at = next(iter(_moments(known) & _moments(loose)), None)
    errors = content_errors(
        [_record(known[leaf], at) for leaf in leaves], [_record(loose[name], at) for name in names]
    )
    found: dict[str, str] = {}
    for row, leaf in enumerate(leaves):
        column = int(errors[row].argmin())
        best = float(errors[row, column])
        if not best < _CLOSE:
            continue
        beyond = best if best < EXACT else _CLEAR * best
        others = [float(errors[row, c]) for c in range(len(names)) if c != column]
        rivals = [float(errors[r, column]) for r in range(len(leaves)) if r != row]
        if all(error > beyond for error in rivals) and all(error >= beyond for error in others):
            found[leaf] = names[column]
    return found


def _meeting(known: Sequence[Record], loose: Sequence[Record]) -> tuple[Record, Record]:
    """A record of each side, of one moment where they have one in common."""
    moments = {_moment(record) for record in known}
    at = next((_moment(record) for record in loose if _moment(record) in moments), None)
    return _record(known, at), _record(loose, at)


def _alike(ours: Record, theirs: Record) -> bool:
    """Whether nothing in two tensors of one shape speaks against their being the same value."""
    if not ours.stored or not theirs.stored:
        error = float(content_errors([ours], [theirs])[0, 0])
        return error < _ROUGH or math.isinf(error)
    return agreement(ours.tensor(), theirs.tensor()).clear


def _in_another_layout(
    port: str, records: Sequence[Record], loose: Leaves, free: Sequence[str], fits: Fits
) -> tuple[str | None, str]:
    """The value that the leaf is in other axes; or why none is."""
    options = [name for name in free if _kind(loose[name][0]) == _kind(records[0])]
    fitting = [name for name in options if fits(records, loose[name])]
    if len(fitting) > 1:
        close = _by_values([""], fitting, {"": records}, loose)
        fitting = list(close.values()) or fitting
    if len(fitting) == 1:
        return fitting[0], ""
    if fitting:
        return None, _undecided(port, len(fitting), 1)
    if len(loose) == len(free) == 1:
        other = next(iter(loose.values()))[0]
        what = f"{other.dtype} {list(other.shape)}, not {records[0].dtype} {list(records[0].shape)}"
        return None, f"the only value that {_way(port)} the compiled layer is {what}: it is another"
    return None, _dropped(port)


def _undecided(port: str, values: int, leaves: int) -> str:
    if values == leaves == 1:
        return (
            "the one value of this shape that enters the compiled layer holds something else: it "
            "has diverged, or layers were put together"
        )
    if values == 1:
        return (
            f"one value of this shape {_way(port)} the layer, and the compiled model does not say "
            f"which of {leaves} leaves it is"
        )
    verb = _way(port).rstrip("s")
    what = "which of them it is" if port == "input" else "which is its output"
    return (
        f"{values} values of this shape {verb} the layer, and the compiled model does not say "
        f"{what}"
    )


def _way(port: str) -> str:
    return "enters" if port == "input" else "leaves"


def _dropped(port: str) -> str:
    return _UNREAD if port == "input" else DROPPED


def _ways(loose: Leaves) -> dict[tuple[str, ...], set[_Moment]]:
    """The moments at which the same loose leaves are there."""
    there: dict[_Moment, list[str]] = {}
    for leaf, records in loose.items():
        for record in records:
            there.setdefault(_moment(record), []).append(leaf)
    found: dict[tuple[str, ...], set[_Moment]] = {}
    for moment, leaves in there.items():
        found.setdefault(tuple(dict.fromkeys(leaves)), set()).add(moment)
    return found


def _at(leaves: Leaves, moments: Collection[_Moment]) -> dict[str, list[Record]]:
    found = {
        leaf: [record for record in records if _moment(record) in moments]
        for leaf, records in leaves.items()
    }
    return {leaf: records for leaf, records in found.items() if records}


def _moment(record: Record) -> _Moment:
    return record.rank, record.epoch, record.batch, record.call


def _moments(leaves: Leaves) -> set[_Moment]:
    return {_moment(record) for records in leaves.values() for record in records}


def _record(records: Sequence[Record], at: _Moment | None) -> Record:
    return next((record for record in records if _moment(record) == at), records[0])


def _distinct(leaves: Leaves, moments: Collection[_Moment]) -> list[list[str]]:
    """Leaves that hold the same tensors at all moments are one value under several names."""
    found: dict[object, list[str]] = {}
    for leaf, records in leaves.items():
        ids = [r.tensor_id for r in records if not moments or _moment(r) in moments]
        key = leaf if None in ids or not ids else tuple(ids)
        found.setdefault(key, []).append(leaf)
    return list(found.values())


def _form(records: Sequence[Record], moments: Collection[_Moment]) -> tuple[object, ...]:
    """Kind of dtype, and the shapes at the moments that both sides have."""
    shapes = {_moment(r): r.shape for r in records if not moments or _moment(r) in moments}
    return _kind(records[0]), tuple(shapes[moment] for moment in sorted(shapes))


def _kind(record: Record) -> str:
    for kind in ("bool", "complex", "float"):
        if kind in record.dtype:
            return kind
    return "int"
