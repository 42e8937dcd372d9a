"""Which layer of the candidate stands for which layer of the reference.

Passes from the surest to the boldest; each takes what the earlier ones left, and none forces a
pair: a layer without a partner stays alone and is said to be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..recording.reader import Layer, Record, Recording
from ..recording.schema import Port
from .absent import runtime_of
from .likeness import shape_likeness, type_likeness
from .names import by_map, by_name, by_normalised_name
from .sketch import content_errors
from .structure import by_structure

__all__ = ["LayerPair", "align"]

_ALIKE = 0.5  # of the spread: more is another tensor
_CLOSE = 0.1
_SAME = 0.02
_MOST_NAMED = 2000
_OTHERWISE = "paired by what it holds; the candidate's layer of this name holds something else"


@dataclass(frozen=True)
class LayerPair:
    """Two layers that are compared, or one that the other side lacks.

    `matched_by` is `map`, `name`, `normalised`, `structure` or `content`; empty for a lone layer.
    `note` says where the names would have it otherwise.
    """

    reference: Layer | None
    candidate: Layer | None
    matched_by: str
    note: str = ""


def align(
    reference: Recording,
    candidate: Recording,
    *,
    maps: Sequence[str] = (),
    names: Sequence[str] | None = None,
) -> list[LayerPair]:
    """Every layer beside its partner, in the reference's order of execution.

    A layer of the candidate alone stands behind the layer that it follows in the candidate. With
    `names` only those layers of the reference are listed, and no lone layers of the candidate.
    """
    wanted = None if names is None else {reference.resolve(name) for name in names}
    found = _pairs(reference, candidate, maps, wanted)
    pairs = list(_in_order(reference, candidate, found))
    if wanted is None:
        return pairs
    return [p for p in pairs if p.reference is not None and p.reference.name in wanted]


def _pairs(
    reference: Recording, candidate: Recording, maps: Sequence[str], wanted: set[str] | None
) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}

    def take(pairs: Mapping[str, str], how: str) -> None:
        found.update((ours, (theirs, how)) for ours, theirs in pairs.items())

    def free() -> list[str]:
        return [name for name in reference.layers if name not in found]

    def others() -> list[str]:
        taken = {theirs for theirs, _ in found.values()}
        return [name for name in candidate.layers if name not in taken]

    def types(recording: Recording, names: Sequence[str]) -> dict[str, str]:
        return {name: recording[name].type for name in names}

    take(by_map(maps, reference, candidate), "map")
    numbers = _Numbers(reference, candidate)
    take(numbers.pairs(free(), others()), "name")
    named = by_name(reference, candidate, free(), others())
    content = _Content(reference, candidate)
    refuted = content.refuted(named)
    doubtful = {name for name in named if _says_little(name, named[name], reference, candidate)}
    doubtful |= refuted
    take({ours: theirs for ours, theirs in named.items() if ours not in doubtful}, "name")
    left, right = free(), others()
    if left and right:
        agree = _Agree(reference, candidate)
        normal = by_normalised_name(types(reference, left), types(candidate, right), agree)
        take(
            {
                ours: theirs
                for ours, theirs in normal.items()
                if numbers.fit(ours, theirs) and not content.against(ours, theirs)
            },
            "normalised",
        )
    if "" in free() and "" in others() and _root_fits(reference, candidate):
        take({"": ""}, "name")
    left, right = free(), others()
    if left and right and (wanted is None or wanted & set(left)):
        sure = {ours: theirs for ours, (theirs, _) in found.items()}
        alike = by_structure(reference, candidate, sure)
        found.update((ours, pair) for ours, pair in alike.items() if numbers.fit(ours, pair[0]))
    left, right = free(), others()
    rest = {name: name for name in doubtful - refuted if name and name in left and name in right}
    take({ours: rest[ours] for ours in rest if not content.against(ours, rest[ours])}, "name")
    return found


def _says_little(ours: str, theirs: str, reference: Recording, candidate: Recording) -> bool:
    """Whether an equal name is no reason to pair two layers of different types.

    Every model has a root: a bare model's is what a model with a head calls `model`. A number is a
    position, which moves when a layer is put in before it.
    """
    left, right = reference[ours].type, candidate[theirs].type
    if not ours and not theirs:
        return left != right and not _same_outputs(reference, candidate)
    number = ours == theirs and ours.rsplit(".", 1)[-1].isdigit()
    return number and type_likeness(left, right) == 0


def _same_outputs(reference: Recording, candidate: Recording) -> bool:
    """Whether the roots of one model in two runtimes are before us, whatever each calls its class.

    A program that is opaque has nothing but its outputs, so they are all that can tell.
    """
    if runtime_of(reference) == runtime_of(candidate):
        return False
    left, right = (
        {r.shape for r in recording[""].records if r.port == "output"}
        for recording in (reference, candidate)
    )
    return bool(left & right)


def _root_fits(reference: Recording, candidate: Recording) -> bool:
    left, right = (
        {r.shape for r in recording[""].records if r.port in ("output", "grad_output")}
        for recording in (reference, candidate)
    )
    return any(shape_likeness(ours, theirs) > 0 for ours in left for theirs in right)


class _Numbers:
    """The numbers that both sides' files gave to their blocks, where both are imported trees.

    `mode_a_layer_5.npy` is layer 5, whatever it is called inside and whatever else is like it.
    """

    def __init__(self, reference: Recording, candidate: Recording) -> None:
        both = (reference, candidate)
        known = all("imported" in recording.manifest.target for recording in both)
        self._ours, self._theirs = (
            {name: i for i, name in enumerate(recording.manifest.structure.blocks) if known}
            for recording in both
        )

    def pairs(self, left: Sequence[str], right: Sequence[str]) -> dict[str, str]:
        there = {self._theirs[name]: name for name in right if name in self._theirs}
        numbered = ((name, self._ours[name]) for name in left if name in self._ours)
        return {name: there[number] for name, number in numbered if number in there}

    def fit(self, ours: str, theirs: str) -> bool:
        """Whether no number is against a pair."""
        left, right = self._ours.get(ours), self._theirs.get(theirs)
        return left is None or right is None or left == right


class _Content:
    """What the values say against a pair that names gave."""

    def __init__(self, reference: Recording, candidate: Recording) -> None:
        self._recordings = (reference, candidate)
        roots = (run[""].type if "" in run else "" for run in self._recordings)
        self._foreign = type_likeness(*roots) < 1
        self._outputs: list[list[Record | None]] | None = None

    def against(self, ours: str, theirs: str) -> bool:
        """Whether two layers of unlike types hold other values, and a third one those of either.

        Or nothing of a shape that could be compared. A bug makes values that no layer has.
        """
        left, right = (run[n] for run, n in zip(self._recordings, (ours, theirs), strict=True))
        if not ours or not theirs or type_likeness(left.type, right.type) > 0:
            return False
        mine, other = _first(left, "output"), _first(right, "output")
        if mine is None or other is None:
            return False
        if ours == theirs and self._given_the_same(left, right):
            return False  # another layer was put in its place
        shapes = [{r.shape for r in layer.port("output")} for layer in (left, right)]
        if not any(shape_likeness(a, b) for a in shapes[0] for b in shapes[1]):
            return True
        error = float(content_errors([mine], [other])[0, 0])
        if error < _CLOSE:
            return False
        if self._outputs is None:
            self._outputs = [
                [_first(run[n], "output") for n in run.layers] for run in self._recordings
            ]
        row = content_errors([mine], self._outputs[1])
        column = content_errors(self._outputs[0], [other])
        return min(float(row.min()), float(column.min())) < min(_SAME, error / 10)

    def _given_the_same(self, left: Layer, right: Layer) -> bool:
        """Whether two layers stand at one place of one model: they were given the same values."""
        given = _first(left, "input"), _first(right, "input")
        if (
            self._foreign
            or given[0] is None
            or given[1] is None
            or given[0].shape != given[1].shape
        ):
            return False
        return float(content_errors([given[0]], [given[1]])[0, 0]) < _SAME

    def refuted(self, named: Mapping[str, str]) -> set[str]:
        """Layers whose name another implementation gave to a layer that does something else.

        They are given other values than the layer of their name and make others, and a layer of
        another name is given theirs and makes theirs. A layer with a bug is given the same.
        """
        found = {ours for ours, theirs in named.items() if self.against(ours, theirs)}
        left = [name for name in named if name and name not in found]
        if not self._foreign or not 1 < len(left) <= _MOST_NAMED:
            return found
        sides = [
            [[_first(run[name], port) for name in names] for port in ("output", "input")]
            for run, names in zip(
                self._recordings, (left, [named[name] for name in left]), strict=True
            )
        ]
        made, given = (content_errors(ours, theirs) for ours, theirs in zip(*sides, strict=True))
        known = np.isfinite(given.diagonal())
        other = (made.diagonal() > _ALIKE) & (given.diagonal() > _CLOSE) & known
        same = (made < _SAME) & (given < _SAME) & other[:, None] & other[None, :]
        return found | {left[i] for i in np.flatnonzero(same.any(axis=1) | same.any(axis=0))}


def _first(layer: Layer, port: Port) -> Record | None:
    return next((record for record in layer.records if record.port == port), None)


class _Agree:
    """Whether two layers hold alike values, as far as their summaries can tell."""

    def __init__(self, reference: Recording, candidate: Recording) -> None:
        self._recordings = (reference, candidate)

    def __call__(self, ours: str, theirs: str) -> bool:
        left, right = (
            next((r for r in recording[name].records if r.port == "output"), None)
            for recording, name in zip(self._recordings, (ours, theirs), strict=True)
        )
        return bool(content_errors([left], [right])[0, 0] < 0.1)


def _in_order(
    reference: Recording, candidate: Recording, found: Mapping[str, tuple[str, str]]
) -> Iterator[LayerPair]:
    taken = {name for name, _ in found.values()}
    followers: dict[str | None, list[str]] = {}
    last: str | None = None
    for name in candidate.layers:
        if name in taken:
            last = name
        else:
            followers.setdefault(last, []).append(name)
    for name in followers.get(None, ()):
        yield LayerPair(None, candidate[name], "")
    for name in reference.layers:
        if name not in found:
            yield LayerPair(reference[name], None, "")
            continue
        partner, how = found[name]
        note = _OTHERWISE if how == "content" and partner != name and name in candidate else ""
        yield LayerPair(reference[name], candidate[partner], how, note)
        for other in followers.get(partner, ()):
            yield LayerPair(None, candidate[other], "")
