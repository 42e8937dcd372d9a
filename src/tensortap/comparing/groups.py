"""Layers that get the tokens in groups: the experts of a mixture, of which each gets its own.

After another choice of expert the groups hold other tokens, or as many in other rows. So the rows
of two groups are paired by token: by what the router chose where that was recorded, else by what
the rows hold, since a group is a selection of rows that the mixture was given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ..recording.reader import Record, Recording
from .maker import contains
from .moments import MomentPair
from .routing import Change, Choice

__all__ = [
    "Family",
    "Grouping",
    "Rows",
    "chosen_like",
    "expert_of",
    "family_choice",
    "family_of",
    "family_read",
    "grouped_rows",
    "in_place",
    "listed_rows",
    "paired_rows",
    "with_rows",
]

_NUMBERED = re.compile(r"^(.*)\.(\d+)$")
_LOOKED_AT = 256
_UNSTABLE = 4096
_CLEAR = 0.3  # the error of rows that are in the right order; that of others is above 1
_Token = tuple[int, int]  # token, expert
_Step = tuple[int, int, int]
_Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Grouping:
    """The experts that each token chose in the two runs, at one call of a mixture.

    `chosen` holds, for each side, the experts of each token in order, -1 where it has fewer;
    `held` the tokens of each expert in the order of its rows, where that was read off the rows.
    Where the two runs have other batches, `part` is what one of the candidate's holds of one of the
    reference's: the candidate's step, the first token and the one after the last, and by how many
    places the same token is further on in the reference.
    """

    scope: str
    router: str
    call: int
    order: int
    tokens: int
    chosen: tuple[_Ints, _Ints]
    held: tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]] | None = None
    part: tuple[_Step, int, int, int] | None = None

    @property
    def same(self) -> bool:
        """Whether all tokens chose the same in the two runs, and in the same order."""
        ours, theirs = self.chosen
        if self.part is not None:
            _, start, end, shift = self.part
            ours, theirs = ours[start:end], theirs[start - shift : end - shift]
        return self.held is None and np.array_equal(ours, theirs)

    @property
    def experts(self) -> int:
        return int(max(side.max(initial=-1) for side in self.chosen)) + 1

    def group(self, side: int, expert: int) -> list[_Token]:
        """The tokens of one expert, in order."""
        if self.held is not None:
            return [(token, expert) for token in self.held[side].get(expert, ())]
        here = (self.chosen[side] == expert).any(axis=1)
        return [(self._token(side, int(at)), expert) for at in np.flatnonzero(here)]

    def _token(self, side: int, at: int) -> int:
        """The token of the reference that is in some place; a negative number where it is none."""
        if self.part is None:
            return at
        _, start, end, shift = self.part
        token = at + shift * side
        return token if start <= token < end else -2 * at - 1 - side

    def sorted(self, side: int, *, stable: bool) -> list[_Token]:
        """All tokens of all experts, sorted by expert, as grouped products want them."""
        flat = torch.from_numpy(self.chosen[side].reshape(-1))
        order = torch.sort(flat, stable=stable).indices.tolist()
        slots = self.chosen[side].shape[1]
        return [(self._token(side, at // slots), int(flat[at])) for at in order]

    def flat(self, side: int) -> list[_Token]:
        """The tokens one by one, each as often as it has experts, as batched products want them."""
        slots = self.chosen[side].shape[1]
        experts = self.chosen[side].reshape(-1).tolist()
        return [(self._token(side, at // slots), expert) for at, expert in enumerate(experts)]

    def blocks(self, side: int) -> list[tuple[int, int]]:
        """The rows of each expert, first and one after the last, of all sorted by expert."""
        counts = np.bincount(self.chosen[side].reshape(-1), minlength=self.experts)
        ends = np.cumsum(counts)
        return list(zip((ends - counts).tolist(), ends.tolist(), strict=True))

    def slotted(self, side: int, number: int) -> list[_Token]:
        """The tokens of the expert that is called as the given one, those of the first slot first.

        As a loop over the experts that got any tokens has them.
        """
        experts = np.unique(self.chosen[side])
        if number >= len(experts):
            return []
        expert = int(experts[number])
        places = np.nonzero(expert == self.chosen[side].T)[1]
        return [(self._token(side, int(at)), expert) for at in places]

    def divides(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape has the tokens in groups, as far as a shape can tell."""
        if len(shape) == 2:
            return shape[0] not in (self.tokens, 1)
        return len(shape) == 3 and shape[0] == self.experts and shape[0] * shape[1] != self.tokens


@dataclass(frozen=True)
class Rows:
    """Rows of the two sides that belong together, and the tokens in them, where that is known.

    `flat` says that the rows of a token stand together, and are not sorted by expert.
    """

    reference: tuple[int, ...]
    candidate: tuple[int, ...]
    tokens: tuple[int, ...] | None = None
    flat: bool = False


def paired_rows(ours: Sequence[_Token], theirs: Sequence[_Token]) -> Rows:
    """The rows that hold a token of both sides, in the reference's order."""
    places = {token: at for at, token in enumerate(theirs)}
    both = [(at, places[token], token[0]) for at, token in enumerate(ours) if token in places]
    return Rows(*(tuple(column) for column in zip(*both, strict=True)) if both else ((), (), ()))


def expert_of(layer: str, scope: str) -> tuple[str, int] | None:
    """The expert, by name and number, that a layer is or is inside of, if it is inside of a scope.

    Experts stand in a list: `mixture.experts.3.up` is in expert 3.
    """
    if not contains(scope, layer):
        return None
    inside = (layer, *(name for name in _around(layer) if contains(scope, name)))
    for name in reversed([name for name in inside if name != scope]):
        found = _NUMBERED.match(name)
        if found is not None:
            return name, int(found[2])
    return None


def grouped_rows(pair: MomentPair, grouping: Grouping) -> Rows | None:
    """The rows of a pair of records by token; None where they hold no groups of that mixture."""
    sizes = tuple(_rows(record) for record in (pair.reference, pair.candidate))
    found = expert_of(pair.reference.layer, grouping.scope)
    if found is None and sizes == tuple(len(side) for side in grouping.chosen):
        return None
    if found is not None:
        options = [[grouping.group(side, found[1]) for side in (0, 1)]]
    else:
        number = pair.reference.call
        options = [
            *([grouping.sorted(side, stable=how) for side in (0, 1)] for how in (False, True)),
            [grouping.slotted(side, number) for side in (0, 1)],
        ]
    fitting = [paired_rows(*o) for o in options if tuple(len(side) for side in o) == sizes]
    flat = [grouping.flat(side) for side in (0, 1)]
    if found is None and tuple(len(side) for side in flat) == sizes:
        fitting.append(replace(paired_rows(*flat), flat=True))
    if len(fitting) < 2:  # one option, or none
        return fitting[0] if fitting else None
    best = min(fitting, key=lambda rows: _wrong(pair, rows))
    if _error(pair, best) < _CLEAR:
        return best
    nearest = _nearest(pair, grouping)
    enough = 2 * len(nearest.reference) > len(best.reference)
    return nearest if enough and _error(pair, nearest) < _CLEAR else best


def listed_rows(pair: MomentPair, grouping: Grouping, *, flat: bool) -> Rows | None:
    """The tokens of rows that are in the same order on both sides; None where that is unknown.

    `flat` says that the model does not sort its rows by expert. A small sort on a device may leave
    equal numbers in any order.
    """
    order = grouping.flat(0) if flat else grouping.sorted(0, stable=False)
    if len(order) != _rows(pair.reference):
        order = grouping.slotted(0, pair.reference.call)
    elif not flat and not pair.reference.device.startswith("cpu") and len(order) <= _UNSTABLE:
        return None
    if len(order) != _rows(pair.reference):
        return None
    every = tuple(range(len(order)))
    return Rows(every, every, tuple(token for token, _ in order))


def with_rows(pair: MomentPair, rows: Rows, grouping: Grouping) -> MomentPair:
    """A pair of records of which those rows are compared."""
    return replace(
        pair,
        reference_rows=rows.reference,
        candidate_rows=rows.candidate,
        tokens=None if rows.tokens is None else (grouping.tokens, rows.tokens),
    )


def in_place(pair: MomentPair) -> bool:
    """Whether the rows of two records agree as they stand."""
    same = tuple(range(_rows(pair.reference)))
    return pair.shapes[0] == pair.shapes[1] and _error(pair, Rows(same, same)) < _CLEAR


def _error(pair: MomentPair, rows: Rows) -> float:
    """The error of the usual row, relative to its own size; of some of the rows."""
    errors = _errors(pair, rows, max(1, len(rows.reference) // _LOOKED_AT))
    return float(errors.median()) if len(errors) else 0.0


def _wrong(pair: MomentPair, rows: Rows) -> float:
    """How much of all rows is wrong, from 0 to 1: two orders may differ in a few of them."""
    errors = _errors(pair, rows, 1).clamp(max=1.0)
    return float(errors.mean()) if len(errors) else 0.0


def _errors(pair: MomentPair, rows: Rows, every: int) -> torch.Tensor:
    """The errors of rows, relative to each one's own size; of one row in so many."""
    if not rows.reference:
        return torch.zeros(0)
    ours, theirs = (
        record.tensor()[list(some[::every])].to(torch.float64)
        for record, some in ((pair.reference, rows.reference), (pair.candidate, rows.candidate))
    )
    sizes = ours.flatten(1).norm(dim=1)
    errors = (theirs - ours).flatten(1).norm(dim=1)
    found: torch.Tensor = errors[sizes > 0] / sizes[sizes > 0]
    return found


def _nearest(pair: MomentPair, grouping: Grouping) -> Rows:
    """The rows of each expert that are nearest to each other, from both sides."""
    ours, theirs = (
        record.tensor().to("cpu", torch.float32).flatten(1)
        for record in (pair.reference, pair.candidate)
    )
    first: list[int] = []
    second: list[int] = []
    for (a, b), (c, d) in zip(grouping.blocks(0), grouping.blocks(1), strict=True):
        if a == b or c == d:
            continue
        apart = torch.cdist(ours[a:b], theirs[c:d])
        there, back = apart.argmin(1).tolist(), apart.argmin(0).tolist()
        for at, other in enumerate(there):
            if back[other] == at:
                first.append(a + at)
                second.append(c + other)
    return Rows(tuple(first), tuple(second))


def _rows(record: Record) -> int:
    return record.shape[0] if record.shape else 0


@dataclass(frozen=True, eq=False)
class Family:
    """What each of a list of experts was given in one run: the tokens in the order of its rows.

    `first` is the first tensor that one of them was given, `begin` the place of the first that any
    layer inside of them has.
    """

    outer: str
    tokens: int
    experts: int
    held: Mapping[int, Sequence[int]]
    first: Record
    begin: int

    @property
    def sets(self) -> list[set[int]]:
        """The experts of each token."""
        found: list[set[int]] = [set() for _ in range(self.tokens)]
        for expert, rows in self.held.items():
            for token in rows:
                found[token].add(expert)
        return found


def family_read(recording: Recording, names: Sequence[str], step: _Step) -> Family | None:
    """The tokens of a list of experts; None where nothing is known that they were selected of."""
    given = _given(recording, names, step)
    if given is None:
        return None
    outer = names[0].rpartition(".")[0]
    numbers = [int(name.rpartition(".")[2]) for name in names]
    found = _held(recording, given, outer, numbers)
    if found is None:
        return None
    first = min((r for r in given if r is not None), key=lambda record: record.order)
    inside = [name for name in recording.layers if contains(outer, name)]
    records = [r for name in inside for r in recording[name].records if _step_of(r) == step]
    begin = min(record.order for record in records)
    return Family(outer, found[0], 1 + max(numbers), found[1], first, begin)


def chosen_like(sets: Sequence[set[int]], scores: NDArray[np.float64]) -> list[set[int]]:
    """As many experts for each token as it has, those with the largest scores.

    Of equal scores those that it has go first.
    """
    own = np.zeros(scores.shape, dtype=bool)
    for token, experts in enumerate(sets):
        own[token, list(experts)] = True
    order = np.lexsort((~own, -scores), axis=1)
    return [set(row[: len(have)].tolist()) for have, row in zip(sets, order, strict=True)]


def family_choice(
    ours: Family, theirs: Family | Sequence[set[int]], scope: str
) -> tuple[Choice, Grouping]:
    """The choice that shows in the groups of the two sides, or in the candidate's scores."""
    other = theirs.sets if isinstance(theirs, Family) else list(theirs)
    own = ours.sets
    changes = tuple(
        Change(token, tuple(sorted(left - new)), tuple(sorted(new - left)))
        for token, (left, new) in enumerate(zip(own, other, strict=True))
        if left != new
    )
    sets = tuple(tuple(sorted(experts)) for experts in own)
    held = (ours.held, theirs.held if isinstance(theirs, Family) else _lists(other))
    order = ours.begin - 1
    chosen = (_padded(own), _padded(other))
    return (
        Choice(ours.tokens, ours.experts, changes, sets=sets),
        Grouping(scope, ours.outer, ours.first.call, order, ours.tokens, chosen, held),
    )


def _lists(sets: Sequence[set[int]]) -> dict[int, Sequence[int]]:
    found: dict[int, list[int]] = {}
    for token, experts in enumerate(sets):
        for expert in experts:
            found.setdefault(expert, []).append(token)
    return dict(found)


def family_of(recording: Recording, layer: str, step: _Step) -> list[str]:
    """The experts that stand in a list, of which one is a layer or stands around it.

    They are of one type, and are given groups of several sizes.
    """
    for name in (layer, *_around(layer)):
        found = _NUMBERED.match(name)
        if found is None or name not in recording:
            continue
        pattern = re.compile(re.escape(found[1]) + r"\.\d+$")
        names = [other for other in recording.layers if pattern.match(other)]
        if len(names) < 2 or len({recording[other].type for other in names}) > 1:
            continue
        given = [r for r in _given(recording, names, step) or () if r is not None]
        if all(len(r.shape) == 2 for r in given) and len({r.shape[0] for r in given}) > 1:
            return names
    return []


def _given(recording: Recording, names: Sequence[str], step: _Step) -> list[Record | None] | None:
    """What each expert was given; None where one is called several times."""
    found: list[Record | None] = []
    for name in names:
        records = [] if name not in recording else recording[name].port("input")
        here = [r for r in records if _step_of(r) == step and r.leaf == records[0].leaf]
        if len(here) > 1 or any(not r.stored for r in here):
            return None
        found.append(here[0] if here else None)
    return found if any(r is not None for r in found) else None


def _held(
    recording: Recording, records: Sequence[Record | None], outer: str, numbers: Sequence[int]
) -> tuple[int, dict[int, Sequence[int]]] | None:
    """How many tokens a mixture has, and which of them each expert got."""
    there = [record for record in records if record is not None]
    for source in _sources(recording, there[0], outer):
        tensor = source.tensor()
        held: dict[int, Sequence[int]] = {}
        known = _places(tensor)
        for number, record in zip(numbers, records, strict=True):
            rows = [] if record is None else _by_content(known, record.tensor())
            if rows is None:
                break
            held[number] = rows
        else:
            return tensor.numel() // tensor.shape[-1], held
    return None


def _padded(sets: Sequence[set[int]]) -> _Ints:
    width = max(1, *(len(experts) for experts in sets))
    return np.array([[*sorted(e), *[-1] * (width - len(e))] for e in sets], dtype=np.int64)


def _places(source: torch.Tensor) -> dict[bytes, list[int]]:
    known: dict[bytes, list[int]] = {}
    for at, row in enumerate(_bytes(source)):
        known.setdefault(row, []).append(at)
    return known


def _by_content(known: Mapping[bytes, Sequence[int]], group: torch.Tensor) -> list[int] | None:
    """Which rows of a source each row of a group is; None where some are none of them."""
    found = []
    used: dict[bytes, int] = {}
    for row in _bytes(group):
        places, at = known.get(row, ()), used.get(row, 0)
        if at >= len(places):
            return None
        used[row] = at + 1
        found.append(places[at])
    return found


def _bytes(tensor: torch.Tensor) -> Iterator[bytes]:
    rows = tensor.detach().reshape(-1, tensor.shape[-1]).to("cpu").contiguous()
    for row in rows.view(torch.uint8).numpy():
        yield row.tobytes()


def _sources(recording: Recording, record: Record, outer: str) -> Iterator[Record]:
    """What a group may be a selection of: what the modules around it were given, nearest first.

    Then what was made before it inside of them.
    """
    for name in (n for n in _around(outer) if n in recording or not n):
        here = recording[name].port("input") if name in recording else []
        yield from (found for found in here if _may_hold(found, record))
        for other in recording.layers:
            if other != name and contains(name, other) and not contains(outer, other):
                for found in recording[other].records:
                    if found.order < record.order and _may_hold(found, record):
                        yield found


def _may_hold(source: Record, record: Record) -> bool:
    alike = source.dtype == record.dtype and source.stored and len(source.shape) > 1
    same = _step_of(source) == _step_of(record) and source.port in ("input", "output")
    return alike and same and source.shape[-1] == record.shape[-1]


def _around(name: str) -> list[str]:
    """The modules around a layer, the innermost first."""
    found = []
    while name:
        name = name.rpartition(".")[0]
        found.append(name)
    return found


def _step_of(record: Record) -> _Step:
    return record.rank, record.epoch, record.batch
