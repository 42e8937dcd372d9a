"""Pairs of layers that names do not give: by what they hold, what they are, and where they stand.

Two sequences are matched in order, between the pairs that are sure already. Values decide first,
and where they decided, the row says `content`. What stands between such pairs and is of one type
and shape is paired too, as `structure`: a layer that diverged holds other values, that is the
point. Nothing is forced: where too little fits, layers stay alone.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..recording.reader import Layer, Record, Recording
from ..recording.schema import Port
from .consensus import by_consensus
from .likeness import shape_likeness, type_likeness
from .names import normalised
from .paths import Matrix, best_path, equal, gaps, table
from .sketch import contents

__all__ = ["by_structure"]

_PORTS: tuple[Port, ...] = ("output", "grad_output", "grad_input", "input")
_MOST_CELLS = 4_200_000
_MOST_TAILS = 20_000
_ALIKE = 0.5  # of the spread: more is another tensor
_CLOSE = 0.1
_NEAR = 0.3
_SAME = 0.02


@dataclass(frozen=True)
class _Side:
    """The layers of one run that are still alone, by their place in the order of execution."""

    places: list[int]
    layers: list[Layer]
    records: list[Record | None]
    inputs: list[Record | None]
    containers: list[bool]

    def part(self, numbers: Sequence[int]) -> _Side:
        return _Side(*([column[i] for i in numbers] for column in vars(self).values()))


@dataclass(frozen=True)
class _Scores:
    """What speaks for every two lone layers; `errors` is infinite where the values say nothing.

    `indices` is 0 where both names say which block they are in and differ in it, `places` where
    they differ in nothing but numbers: those are two layers of one scheme of names. `given` is 1
    where both got the same inputs and 0 where they did not, `forms` 1 where both or neither have
    layers inside, `elsewhere` 1 where what one of the two holds is held by another layer.
    """

    errors: Matrix
    correlations: Matrix
    given: Matrix
    forms: Matrix
    elsewhere: Matrix
    types: Matrix
    shapes: Matrix
    names: Matrix
    indices: Matrix
    places: Matrix

    @classmethod
    def of(cls, ours: _Side, theirs: _Side) -> _Scores:
        types = table(
            [(layer.type, c) for layer, c in zip(ours.layers, ours.containers, strict=True)],
            [(layer.type, c) for layer, c in zip(theirs.layers, theirs.containers, strict=True)],
            _kind_likeness,
        )
        shapes = table(
            [record and record.shape for record in ours.records],
            [record and record.shape for record in theirs.records],
            shape_likeness,
        )
        left, right = ([layer.name for layer in side.layers] for side in (ours, theirs))
        tails = _tail_likeness(left, right)
        blocks, others = [_index(name) for name in left], [_index(name) for name in right]
        names = ((tails + equal(blocks, others)) / 2).astype(np.float32)
        schemes = equal([_scheme(name) for name in left], [_scheme(name) for name in right])
        places = (~schemes | equal(left, right)).astype(np.float32)
        indices = table(blocks, others, _fit)
        errors, correlations = contents(ours.records, theirs.records)
        given = _given(*contents(ours.inputs, theirs.inputs))
        forms = equal(ours.containers, theirs.containers).astype(np.float32)
        elsewhere = _elsewhere(errors)
        return cls(
            errors, correlations, given, forms, elsewhere, types, shapes, names, indices, places
        )

    def part(self, rows: Sequence[int], columns: Sequence[int]) -> _Scores:
        where = np.ix_(rows, columns)
        return _Scores(*(matrix[where] for matrix in vars(self).values()))

    def learnt(self, ours: _Side, theirs: _Side, pairs: Sequence[tuple[int, int]]) -> _Scores:
        """The same with the types that the values have shown to be one, whatever each is called."""
        votes: dict[str, Counter[str]] = {}
        for i, j in pairs:
            if self.forms[i, j] == 1:
                votes.setdefault(ours.layers[i].type, Counter())[theirs.layers[j].type] += 1

        def likeness(left: str, right: str) -> float:
            return votes[left][right] / votes[left].total() if left in votes else 0.0

        kinds = table(
            [one.type for one in ours.layers], [one.type for one in theirs.layers], likeness
        )
        return replace(self, types=np.maximum(self.types, kinds * (self.forms == 1)))

    def by_content(self) -> Matrix:
        """Greater than 0 where two layers hold the same values and no other comes nearer."""
        errors = self.errors
        limit = 1.3 * np.minimum(
            errors.min(axis=1, keepdims=True), errors.min(axis=0, keepdims=True)
        )
        alike = (errors < _ALIKE) & (errors <= limit + 1e-3) & (self.shapes > 0)
        alike &= ((self.types > 0) & (self.indices > 0)) | (errors < _CLOSE)
        alike &= (self.places > 0) | (errors < _SAME)
        score = 10 * (1 - np.where(alike, errors, 0)) + 3 * self.types + self.shapes + self.names
        score += 4 * self.given + 2 * self.forms  # a block holds what its last layer holds
        return np.where(alike, score, 0).astype(np.float32)

    def by_structure(self) -> Matrix:
        """Greater than 0 where two layers are of one type and of shapes that can be compared."""
        fitting = (self.types >= 0.5) & (self.shapes > 0) & (self.places > 0)
        fitting &= self.elsewhere == 0
        nearness = np.maximum(1 - np.minimum(self.errors, 1), self.correlations**2)
        score = 1 + self.types + self.shapes / 2 + self.names + nearness + self.given
        return np.where(fitting, score, 0).astype(np.float32)


def by_structure(
    reference: Recording, candidate: Recording, pairs: Mapping[str, str]
) -> dict[str, tuple[str, Literal["content", "structure"]]]:
    """Pairs among the layers that `pairs` left alone, each with what decided."""
    places = {name: place for place, name in enumerate(reference.layers)}
    others = {name: place for place, name in enumerate(candidate.layers)}
    known = {places[a]: others[b] for a, b in pairs.items() if a}  # every model has a root
    taken = set(pairs.values())
    port = _common_port(reference, candidate)
    ours = _side(reference, [name for name in places if name not in pairs], places, port)
    theirs = _side(candidate, [name for name in others if name not in taken], others, port)
    found: dict[int, tuple[int, Literal["content", "structure"]]] = {}
    for left, right in _windows(ours, theirs):
        found.update(_match(left, right, known, pairs))
    names, partners = reference.layers, candidate.layers
    alike = {names[a]: (partners[b], how) for a, (b, how) in found.items()}
    everything = {**pairs, **{name: partner for name, (partner, _) in alike.items()}}
    ours_types, theirs_types = (
        {name: recording[name].type for name in recording.layers}
        for recording in (reference, candidate)
    )
    for name, partner in by_consensus(ours_types, theirs_types, everything, list(pairs)).items():
        if partner is None:
            del alike[name]
        else:
            alike[name] = (partner, "structure")
    return alike


def _match(
    ours: _Side, theirs: _Side, known: Mapping[int, int], pairs: Mapping[str, str]
) -> dict[int, tuple[int, Literal["content", "structure"]]]:
    if not ours.places or not theirs.places:
        return {}
    scores = _Scores.of(ours, theirs)
    rows = {place: i for i, place in enumerate(ours.places)}
    columns = {place: j for j, place in enumerate(theirs.places)}
    sure = dict(known)
    content: dict[int, int] = {}
    for left, right, _ in gaps(sure, rows, columns):
        here = scores.part([rows[p] for p in left], [columns[p] for p in right])
        content |= {left[i]: right[j] for i, j in best_path(here.by_content())}
    content |= _out_of_order(scores, ours, theirs, content)
    sure |= content
    scores = scores.learnt(ours, theirs, [(rows[a], columns[b]) for a, b in content.items()])
    structure: dict[int, int] = {}
    free = [place for place in ours.places if place not in content]
    taken = set(content.values())
    rest = [place for place in theirs.places if place not in taken]
    for left, right, bounds in gaps(sure, free, rest):
        here = scores.part([rows[p] for p in left], [columns[p] for p in right])
        path = best_path(here.by_structure())
        if _convincing(path, here, bounds):
            structure |= {left[i]: right[j] for i, j in path}
    all_pairs = {**content, **structure}
    parents = dict(pairs) | {
        ours.layers[rows[a]].name: theirs.layers[columns[b]].name for a, b in all_pairs.items()
    }
    structure |= _inside(scores, ours, theirs, all_pairs, parents)
    return {
        **{a: (b, "content") for a, b in content.items()},
        **{a: (b, "structure") for a, b in structure.items()},
    }


def _given(errors: Matrix, correlations: Matrix) -> Matrix:
    """1 for the same inputs, at most half of it for others or where that is not known."""
    known = np.where(errors < _CLOSE, 1, correlations**2 / 2)
    return np.where(np.isinf(errors), 0.5, known).astype(np.float32)


def _elsewhere(errors: Matrix) -> Matrix:
    """1 where two layers hold other values, and one of them the very values of a third layer."""
    if not errors.size:
        return errors
    least = np.minimum(errors.min(axis=1, keepdims=True), errors.min(axis=0, keepdims=True))
    found = (least < _SAME) & (errors > _CLOSE) & (errors > 10 * least)
    return np.asarray(found, dtype=np.float32)


def _convincing(path: Sequence[tuple[int, int]], here: _Scores, bounds: int) -> bool:
    """Whether so many layers fit that they are the same part of the model."""
    less, more = sorted(int(extent) for extent in here.types.shape)
    if bounds == 2:
        return len(path) >= 0.3 * less
    if bounds:
        alike = len(path) >= 3 or any(here.types[i, j] >= 0.8 for i, j in path)
        return alike and len(path) >= 0.6 * less and len(path) >= 0.3 * more
    even = len([1 for i, j in path if here.shapes[i, j] >= 0.9])
    return even >= 3 and even >= 0.8 * less and even >= 0.6 * more


def _out_of_order(
    scores: _Scores, ours: _Side, theirs: _Side, found: Mapping[int, int]
) -> dict[int, int]:
    """Layers that another implementation runs in another order: only where no doubt is left."""
    taken = set(found.values())
    rows = [i for i, place in enumerate(ours.places) if place not in found]
    columns = [j for j, place in enumerate(theirs.places) if place not in taken]
    if not rows or not columns:
        return {}
    here = scores.part(rows, columns)
    close = (here.errors < _NEAR) & (here.types > 0) & (here.shapes > 0)
    close &= (here.places > 0) | (here.errors < _SAME)
    close &= here.errors <= here.errors.min(axis=1, keepdims=True)
    close &= here.errors <= here.errors.min(axis=0, keepdims=True)
    evidence = scores.given + scores.forms
    pairs: dict[int, int] = {}
    for i, j in zip(*np.nonzero(close), strict=True):
        # Paired layers count as rivals too: of twins, neither is the one.
        row, column = rows[i], columns[j]
        near, kind = 3 * here.errors[i, j] + 1e-3, here.types[i, j]
        fit = evidence[row, column]
        rivals = (scores.errors[row] <= near) & (scores.types[row] >= kind) & (evidence[row] >= fit)
        others = (scores.errors[:, column] <= near) & (scores.types[:, column] >= kind)
        others &= evidence[:, column] >= fit
        if rivals.sum() == 1 and others.sum() == 1:
            pairs[ours.places[row]] = theirs.places[column]
    return pairs


def _inside(
    scores: _Scores,
    ours: _Side,
    theirs: _Side,
    found: Mapping[int, int],
    parents: Mapping[str, str],
) -> dict[int, int]:
    """Layers inside two paired ones that are alone of their type and shape on both sides."""
    taken = set(found.values())
    rows = [i for i, place in enumerate(ours.places) if place not in found]
    columns = [j for j, place in enumerate(theirs.places) if place not in taken]
    back = {theirs: ours for ours, theirs in parents.items()}
    within = [_ancestor(ours.layers[i].name, parents) for i in rows]
    inside = [_ancestor(theirs.layers[j].name, back) for j in columns]
    pairs: dict[int, int] = {}
    for ancestor in set(within) - {""}:
        left = [i for i, name in zip(rows, within, strict=True) if name == ancestor]
        right = [j for j, name in zip(columns, inside, strict=True) if name == parents[ancestor]]
        here = scores.part(left, right)
        fits = (here.types >= 0.8) & (here.shapes >= 0.9) & (here.places > 0)
        fits &= here.elsewhere == 0
        for i, j in zip(*np.nonzero(fits), strict=True):
            if fits[i].sum() == 1 and fits[:, j].sum() == 1:
                pairs[ours.places[left[i]]] = theirs.places[right[j]]
    return pairs


def _ancestor(name: str, paired: Mapping[str, str]) -> str:
    """The nearest layer around this one that has a partner; the root, if none has."""
    while name:
        name = name.rpartition(".")[0]
        if name in paired:
            break
    return name


def _windows(ours: _Side, theirs: _Side) -> Iterator[tuple[_Side, _Side]]:
    """Both sides whole, or in as many parts as keep the matrices small."""
    n, m = len(ours.places), len(theirs.places)
    parts = math.ceil(math.sqrt(n * m / _MOST_CELLS)) or 1
    for k in range(parts):
        rows, columns = (range(k * length // parts, (k + 1) * length // parts) for length in (n, m))
        yield ours.part(rows), theirs.part(columns)


def _side(
    recording: Recording, names: Sequence[str], places: Mapping[str, int], port: Port | None
) -> _Side:
    parents = _parents(recording.layers) | set(recording.manifest.structure.blocks)
    layers = [recording[name] for name in names]
    return _Side(
        [places[name] for name in names],
        layers,
        [_first_record(layer, port) for layer in layers],
        [_first_record(layer, "input") for layer in layers],
        [name in parents for name in names],
    )


def _parents(names: Sequence[str]) -> set[str]:
    found = set()
    for name in names:
        while name:
            name = name.rpartition(".")[0]
            found.add(name)
    return found


def _common_port(reference: Recording, candidate: Recording) -> Port | None:
    left, right = (
        {site.port for segment in recording._segments for site in segment.sites}
        for recording in (reference, candidate)
    )
    return next((port for port in _PORTS if port in left and port in right), None)


def _first_record(layer: Layer, port: Port | None) -> Record | None:
    return next((record for record in layer.records if record.port == port), None)


def _kind_likeness(ours: tuple[str, bool], theirs: tuple[str, bool]) -> float:
    """Types and whether a layer has others inside; authors call what they build as they like."""
    likeness = type_likeness(ours[0], theirs[0])
    if ours[1] and theirs[1]:
        return max(likeness, 0.5)
    return likeness if ours[1] == theirs[1] else 0.5 * likeness


def _tail_likeness(ours: Sequence[str], theirs: Sequence[str]) -> Matrix:
    """How alike the last parts of names are, numbers aside."""
    left, right = (
        [re.sub(r"\d+", "", name.rsplit(".", 1)[-1]) for name in side] for side in (ours, theirs)
    )
    if len(set(left)) * len(set(right)) > _MOST_TAILS:
        return equal(left, right).astype(np.float32)
    return table(left, right, _ratio)


def _index(name: str) -> str:
    """The first number among a name's parts: which block it belongs to."""
    return next((part for part in name.split(".") if part.isdigit()), "")


def _fit(ours: str, theirs: str) -> float:
    return float(not ours or not theirs or ours == theirs)


def _scheme(name: str) -> str:
    return re.sub(r"\d+", "#", normalised(name))


@functools.lru_cache(maxsize=65536)
def _ratio(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio() if left and right else 0.0
