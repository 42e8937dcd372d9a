"""Which moments of two runs belong together, also where they divided their samples differently."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..recording.reader import Record, undisturbed
from .place import HERE, Place

if TYPE_CHECKING:
    from .transforms import Transform

__all__ = ["Arrangement", "MomentPair", "by_moment", "by_samples", "in_words"]

_Key = tuple[int, int, int, int, int]  # rank, epoch, batch, call, and which of several
_Rows = tuple[int, int]
_MOST_OFFSETS = 64


@dataclass(frozen=True)
class MomentPair:
    """The records of one moment on both sides; epoch, batch and call are the reference's.

    `*_samples` (start, stop) are the rows of the first axis that are meant, where the two runs
    divided their samples into other batches. `*_rows` are those that hold the same tokens, where
    tokens were grouped otherwise; `tokens` says of how many, and which.
    """

    epoch: int
    batch: int
    call: int
    reference: Record
    candidate: Record
    reference_samples: _Rows | None = None
    candidate_samples: _Rows | None = None
    reference_rows: tuple[int, ...] | None = None
    candidate_rows: tuple[int, ...] | None = None
    tokens: tuple[int, tuple[int, ...]] | None = None

    @property
    def whole(self) -> bool:
        """Whether all that the two records hold is meant."""
        parts = (self.reference_samples, self.candidate_samples, self.reference_rows)
        return all(part is None for part in (*parts, self.candidate_rows))

    def tensors(
        self, transform: Transform | None = None, place: Place = HERE
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tensors as views of equal shape, at some place."""
        reference = _rows(place.tensor(self.reference), self.reference_samples)
        candidate = _rows(place.tensor(self.candidate), self.candidate_samples)
        if self.reference_rows is not None and self.candidate_rows is not None:
            reference = reference[list(self.reference_rows)]
            candidate = candidate[list(self.candidate_rows)]
        return (
            (reference, candidate) if transform is None else transform.views(reference, candidate)
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The two shapes before any transform."""
        if self.reference_rows is not None and self.candidate_rows is not None:
            return (
                (len(self.reference_rows), *self.reference.shape[1:]),
                (len(self.candidate_rows), *self.candidate.shape[1:]),
            )
        return (
            _shape(self.reference.shape, self.reference_samples),
            _shape(self.candidate.shape, self.candidate_samples),
        )


@dataclass(frozen=True)
class Arrangement:
    """One way to bring the moments of two runs together.

    `kind` names the way, so that one which was confirmed at a layer is known at the next; `name`
    is for the report, empty where moments are simply the same. `unpaired` is in words.
    """

    kind: str
    name: str
    pairs: tuple[MomentPair, ...]
    unpaired: tuple[str, ...]

    @property
    def elements(self) -> int:
        """How much of the two runs is compared this way."""
        return sum(min(math.prod(shape) for shape in pair.shapes) for pair in self.pairs)


def by_moment(ours: Sequence[Record], theirs: Sequence[Record]) -> Arrangement:
    """Records of the same epoch, batch and call."""
    with undisturbed():
        left, right = _keyed(ours), _keyed(theirs)
        both = sorted(key for key in left if key in right)
        pairs = tuple(_pair(left[key], right[key]) for key in both)
    unpaired = [_only(key, "reference") for key in left if key not in right]
    unpaired += [_only(key, "candidate") for key in right if key not in left]
    return Arrangement("moments", "", pairs, tuple(unpaired))


def by_samples(ours: Sequence[Record], theirs: Sequence[Record]) -> Iterator[Arrangement]:
    """Ways in which the first axis may hold the same samples in other batches.

    As one row of samples that each run cut up in its own way, call by call or over all calls; as
    batches of which one side took the first few; as a part out of the middle of a single batch.
    """
    if not all(record.shape for record in (*ours, *theirs)):
        return
    calls = {record.call for record in (*ours, *theirs)}
    yield _in_a_row("samples in a row", ours, theirs, lambda r: (r.rank, r.call))
    if len(calls) > 1:
        yield _in_a_row("samples in a row of calls", ours, theirs, lambda r: (r.rank, 0))
    if len(ours) > 1 and len(theirs) > 1:
        yield _first_of_each(ours, theirs)
    if len(ours) == len(theirs) == 1:
        yield from _offsets(ours[0], theirs[0])


def _in_a_row(
    kind: str,
    ours: Sequence[Record],
    theirs: Sequence[Record],
    group: Callable[[Record], tuple[int, int]],
) -> Arrangement:
    pairs: list[MomentPair] = []
    unpaired: list[str] = []
    left, right = _grouped(ours, group), _grouped(theirs, group)
    for key in dict.fromkeys([*left, *right]):
        found, alone = _overlaps(left.get(key, []), right.get(key, []))
        pairs += found
        unpaired += alone
    one = len(ours) == len(theirs) == 1
    name = _span(pairs[0]) if one and pairs else f"samples: {_sizes(ours)} against {_sizes(theirs)}"
    return Arrangement(kind, name, tuple(pairs), tuple(unpaired))


def _overlaps(
    ours: Sequence[Record], theirs: Sequence[Record]
) -> tuple[list[MomentPair], list[str]]:
    """Cut two rows of samples where either of them is cut."""
    pairs: list[MomentPair] = []
    i = j = used = other = 0
    while i < len(ours) and j < len(theirs):
        size = min(ours[i].shape[0] - used, theirs[j].shape[0] - other)
        if size > 0:
            pairs.append(_pair(ours[i], theirs[j], (used, used + size), (other, other + size)))
        used, other = used + size, other + size
        if used == ours[i].shape[0]:
            i, used = i + 1, 0
        if j < len(theirs) and other == theirs[j].shape[0]:
            j, other = j + 1, 0
    alone = [*_left_over(ours[i:], used, "reference"), *_left_over(theirs[j:], other, "candidate")]
    return pairs, alone


def _left_over(records: Sequence[Record], used: int, side: str) -> Iterator[str]:
    for record in records:
        yield (
            f"{_range(used, record.shape[0])} of {_words(_key(record))} only in the {side}"
            if used
            else _only(_key(record), side)
        )
        used = 0


def _first_of_each(ours: Sequence[Record], theirs: Sequence[Record]) -> Arrangement:
    plain = by_moment(ours, theirs)
    pairs = []
    for pair in plain.pairs:
        size = min(pair.reference.shape[0], pair.candidate.shape[0])
        pairs.append(_pair(pair.reference, pair.candidate, (0, size), (0, size)))
    name = f"{_span(pairs[0])} in each batch" if pairs else ""
    return Arrangement("first samples of each batch", name, tuple(pairs), plain.unpaired)


def _offsets(ours: Record, theirs: Record) -> Iterator[Arrangement]:
    size, other = ours.shape[0], theirs.shape[0]
    short = min(size, other)
    for start in range(1, min(max(size, other) - short, _MOST_OFFSETS) + 1):
        rows = (start, start + short)
        pair = _pair(ours, theirs, rows, (0, short))
        if size < other:
            pair = _pair(ours, theirs, (0, short), rows)
        longer, side = (ours, "reference") if size > other else (theirs, "candidate")
        rest = f"the other samples of {_words(_key(longer))} only in the {side}"
        yield Arrangement(f"samples from {start}", _span(pair), (pair,), (rest,))


def _span(pair: MomentPair) -> str:
    """The rows that are meant, of the side that has more of them."""
    rows, size = pair.reference_samples, pair.reference.shape[0]
    if pair.candidate.shape[0] > size:
        rows, size = pair.candidate_samples, pair.candidate.shape[0]
    rows = rows or (0, size)
    return f"{_range(*rows)} of {size}"


def _range(start: int, stop: int) -> str:
    return f"samples {start}..{stop - 1}" if stop > start + 1 else f"sample {start}"


def _sizes(records: Sequence[Record]) -> str:
    sizes = [record.shape[0] for record in records]
    what = "batch" if len(sizes) == 1 else "batches"
    each = str(sizes[0]) if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
    return f"{len(sizes)} {what} of {each}"


def _pair(
    ours: Record, theirs: Record, rows: _Rows | None = None, others: _Rows | None = None
) -> MomentPair:
    rows = None if rows == (0, ours.shape[0] if ours.shape else 0) else rows
    others = None if others == (0, theirs.shape[0] if theirs.shape else 0) else others
    return MomentPair(ours.epoch, ours.batch, ours.call, ours, theirs, rows, others)


def _grouped(
    records: Sequence[Record], group: Callable[[Record], tuple[int, int]]
) -> dict[tuple[int, int], list[Record]]:
    found: dict[tuple[int, int], list[Record]] = {}
    for record in sorted(records, key=_key):
        found.setdefault(group(record), []).append(record)
    return found


def _keyed(records: Sequence[Record]) -> dict[_Key, Record]:
    found: dict[_Key, Record] = {}
    for record in records:
        key = _key(record)
        while key in found:
            key = (*key[:4], key[4] + 1)
        found[key] = record
    return found


def _key(record: Record) -> _Key:
    return record.rank, record.epoch, record.batch, record.call, 0


def _only(key: _Key, side: str) -> str:
    return f"{_words(key)} only in the {side}"


def _words(key: _Key) -> str:
    rank, epoch, batch, call, _ = key
    where = in_words(epoch, batch, call)
    return f"rank {rank}, {where}" if rank else where


def in_words(epoch: int, batch: int, call: int) -> str:
    """A moment as one says it: the first epoch and the first call go without saying."""
    words = [f"epoch {epoch}"] if epoch else []
    words.append(f"batch {batch}")
    if call:
        words.append(f"call {call}")
    return ", ".join(words)


def _rows(tensor: torch.Tensor, rows: _Rows | None) -> torch.Tensor:
    return tensor if rows is None else tensor[rows[0] : rows[1]]


def _shape(shape: tuple[int, ...], rows: _Rows | None) -> tuple[int, ...]:
    return shape if rows is None else (rows[1] - rows[0], *shape[1:])
