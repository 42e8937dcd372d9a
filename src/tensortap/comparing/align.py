"""Which layer of the candidate stands for which layer of the reference.

Passes from the surest to the boldest; each takes what the earlier ones left, and none forces a
pair: a layer without a partner stays alone and is said to be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..recording.reader import Layer, Recording
from .absent import runtime_of
from .likeness import shape_likeness, type_likeness
from .names import by_map, by_name, by_normalised_name
from .sketch import content_errors
from .structure import by_structure

__all__ = ["LayerPair", "align"]


@dataclass(frozen=True)
class LayerPair:
    """Two layers that are compared, or one that the other side lacks.

    `matched_by` is `map`, `name`, `normalised`, `structure` or `content`; empty for a lone layer.
    """

    reference: Layer | None
    candidate: Layer | None
    matched_by: str


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
    doubtful = {name for name in named if _says_little(name, named[name], reference, candidate)}
    take({ours: theirs for ours, theirs in named.items() if ours not in doubtful}, "name")
    left, right = free(), others()
    if left and right:
        agree = _Agree(reference, candidate)
        normal = by_normalised_name(types(reference, left), types(candidate, right), agree)
        take(
            {ours: normal[ours] for ours in normal if numbers.fit(ours, normal[ours])}, "normalised"
        )
    if "" in free() and "" in others() and _root_fits(reference, candidate):
        take({"": ""}, "name")
    left, right = free(), others()
    if left and right and (wanted is None or wanted & set(left)):
        sure = {ours: theirs for ours, (theirs, _) in found.items()}
        alike = by_structure(reference, candidate, sure)
        found.update((ours, pair) for ours, pair in alike.items() if numbers.fit(ours, pair[0]))
    left, right = free(), others()
    take({name: name for name in doubtful if name and name in left and name in right}, "name")
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
        yield LayerPair(reference[name], candidate[partner], how)
        for other in followers.get(partner, ()):
            yield LayerPair(None, candidate[other], "")
