"""Experts that tokens choose: whether rounding explains that some of them choose others.

A router takes the experts with the largest scores. Where two scores are nearly equal, the rounding
of either run decides between them, and that is no error of anybody. So a token may choose another
expert where the reference's own margin, the score of the expert left out less that of the expert
taken instead, is no more than two scores may be off together. Where the scores were not recorded,
the values of the experts that were chosen tell a part of it, and the number of tokens the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from .flips import Flips
from .judge import AGAINST_ESTIMATE, Judgement
from .results import Verdict

__all__ = ["Change", "Choice", "Known", "choice_of", "chooses", "judge_choice", "rows_of"]

_MOST_SLOTS = 64
_DENSITY = 0.45  # of normal scores: P(another choice) is at most this x experts x relative error
_CHANCE = 3.0  # standard deviations of a number of tokens

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
Basis = Literal["scores", "values", "count"]


@dataclass(frozen=True)
class Change:
    """A token that chose other experts: those that it left out, and those that it took instead."""

    token: int
    left: tuple[int, ...]
    new: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Choice:
    """The experts that each token chose in the two runs.

    `reference` and `candidate` hold the experts of each token in order, where they were recorded;
    else `sets` holds those of the reference. `reordered` are the tokens that have the same experts
    in another order.
    """

    tokens: int
    experts: int
    changes: tuple[Change, ...]
    reordered: tuple[int, ...] = ()
    reference: _Ints | None = None
    candidate: _Ints | None = None
    sets: tuple[tuple[int, ...], ...] = ()

    @property
    def chosen(self) -> Sequence[Sequence[int]] | _Ints:
        """The experts of each token in the reference."""
        return self.sets if self.reference is None else self.reference


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of the scores that a choice was made of.

    `scores` of all experts or `values` of those that were chosen, in the reference and in the
    candidate; `expected` is the relative error to be expected of them.
    """

    expected: float
    scores: tuple[_Floats, _Floats] | None = None
    values: tuple[_Floats, _Floats] | None = None


def rows_of(tensor: torch.Tensor) -> _Floats:
    """A tensor as rows of its last axis."""
    rows: _Floats = tensor.detach().reshape(-1, tensor.shape[-1]).to("cpu", torch.float64).numpy()
    return rows


def choice_of(reference: torch.Tensor, candidate: torch.Tensor) -> Choice | None:
    """The choice that two tensors of whole numbers hold: experts of each token, in its last axis.

    None where the numbers are no such choice: an expert is chosen once by a token.
    """
    if not reference.dim() or reference.shape != candidate.shape or not reference.numel():
        return None
    if reference.dim() == 1:
        return None
    ours, theirs = (
        side.detach().reshape(-1, side.shape[-1]).to("cpu", torch.int64).numpy()
        for side in (reference, candidate)
    )
    hot = [_one_hot(side) for side in (ours, theirs)]
    experts = ours.shape[1]
    if hot[0] is not None and hot[1] is not None and hot[0].shape == hot[1].shape:
        ours, theirs = hot[0], hot[1]
    else:
        experts = int(max(ours.max(), theirs.max())) + 1
    if ours.shape[1] > _MOST_SLOTS or min(ours.min(), theirs.min()) < 0:
        return None
    sets = [np.sort(side, axis=1) for side in (ours, theirs)]
    if any((side[:, 1:] == side[:, :-1]).any() for side in sets):
        return None
    other = np.flatnonzero((sets[0] != sets[1]).any(axis=1))
    moved = np.flatnonzero((ours != theirs).any(axis=1) & (sets[0] == sets[1]).all(axis=1))
    changes = tuple(_change(int(token), ours[token], theirs[token]) for token in other)
    return Choice(len(ours), experts, changes, tuple(moved.tolist()), ours, theirs)


def _one_hot(rows: _Ints) -> _Ints | None:
    """The places of the ones, where rows hold zeros and as many ones each."""
    if rows.shape[1] < 3 or rows.min() < 0 or rows.max() > 1:
        return None
    ones = rows.sum(axis=1)
    if not ones[0] or ones[0] == rows.shape[1] or (ones != ones[0]).any():
        return None
    return np.nonzero(rows)[1].reshape(len(rows), int(ones[0]))


def _change(token: int, ours: _Ints, theirs: _Ints) -> Change:
    mine, other = set(ours.tolist()), set(theirs.tolist())
    return Change(token, tuple(sorted(mine - other)), tuple(sorted(other - mine)))


def chooses(scores: _Floats, chosen: Sequence[Sequence[int]] | _Ints) -> bool:
    """Whether the experts chosen by each token are those with its largest scores."""
    if isinstance(chosen, np.ndarray):
        taken = np.zeros(scores.shape, dtype=bool)
        np.put_along_axis(taken, chosen, True, axis=1)
        least = np.where(taken, scores, np.inf).min(axis=1)
        return bool((least >= np.where(taken, -np.inf, scores).max(axis=1)).all())
    for row, experts in zip(scores, chosen, strict=True):
        here = np.zeros(len(row), dtype=bool)
        here[list(experts)] = True
        if here.any() and not here.all() and row[here].min() < row[~here].max():
            return False
    return True


def judge_choice(
    choice: Choice, known: Known, touched: NDArray[np.bool_], given: bool
) -> tuple[Judgement, tuple[int, ...]]:
    """The verdict on a choice, and the tokens whose other experts are explained.

    `touched` are the tokens that came in with another error than rounding, since they or tokens
    before them chose other experts at an earlier layer. `given` says that what the router was
    given agrees: where no scores were recorded, that has to be known.
    """
    if known.scores is not None:
        basis: Basis = "scores"
        margins, rooms = _by_scores(choice, known, touched)
    else:
        basis = "values" if known.values is not None else "count"
        margins, rooms = _by_values(choice, known, touched)
    good = margins <= rooms
    tokens = [change.token for change in choice.changes]
    changed = np.array([*tokens, *choice.reordered], dtype=np.int64)
    fresh = ~touched[changed] if len(changed) else np.zeros(0, dtype=bool)
    if basis != "scores" and _too_many(choice, known, touched, given):
        good[fresh] = False
    known_margins = margins[fresh & good & np.isfinite(margins)]
    flips = Flips(
        tokens=choice.tokens,
        changed=len(choice.changes),
        beyond=int((~good[: len(tokens)]).sum()),
        followed=int(touched[tokens].sum()) if tokens else 0,
        reordered=len(choice.reordered),
        margin=float(known_margins.max(initial=0.0)) if basis != "count" else math.nan,
        room=float(rooms[fresh].max(initial=0.0)) if basis != "count" else math.nan,
        basis=basis,
    )
    verdict: Verdict = "within" if good.all() else "diverged"
    hints: tuple[str, ...] = ()
    if not good.all():
        hints = (f"chose another expert: {_named(changed[~good])}",)
        worst = margins[~good]
        if basis != "count" and len(worst) and np.isfinite(worst).all():
            hints += (f"the largest margin beyond rounding is {worst.max():.3g}",)
    explained = tuple(t for t, fine in zip(tokens, good[: len(tokens)], strict=True) if fine)
    return Judgement(verdict, flips.words, hints=hints, flips=flips), explained


def _named(tokens: _Ints) -> str:
    shown = ", ".join(str(token) for token in tokens[:4])
    more = f" and {len(tokens) - 4} more" if len(tokens) > 4 else ""
    return f"{'token' if len(tokens) == 1 else 'tokens'} {shown}{more}"


def _rms(rows: _Floats) -> Any:
    """The size of each row, and at least that of all."""
    finite = np.where(np.isfinite(rows), rows, 0.0)
    return np.sqrt(np.maximum(np.square(finite).mean(axis=1), np.square(finite).mean()))


def _room(known: Known, rows: _Floats) -> _Floats:
    """What the difference of two scores of a token may be off by, for each token."""
    room: _Floats = AGAINST_ESTIMATE * math.sqrt(2) * known.expected * _rms(rows)
    return room


def _by_scores(choice: Choice, known: Known, touched: NDArray[np.bool_]) -> tuple[_Floats, _Floats]:
    """The margin of each token that chose otherwise, and the room that it has."""
    assert known.scores is not None
    ours, theirs = known.scores
    rooms = _room(known, ours)
    margins, allowed = [], []
    for change in choice.changes:
        row, other = ours[change.token], theirs[change.token]
        if not change.left or not change.new:  # another number of experts
            margins.append(math.inf)
            allowed.append(rooms[change.token])
            continue
        left, new = list(change.left), list(change.new)
        margins.append(float(row[left].max() - row[new].min()))
        room = rooms[change.token]
        if touched[change.token]:  # its scores may be others: whether the choice follows from them
            moved = np.abs(other[left] - row[left]).max() + np.abs(other[new] - row[new]).max()
            room = max(room, float(moved))
        allowed.append(room)
    for token in choice.reordered:
        assert choice.reference is not None and choice.candidate is not None
        row, other = ours[token], theirs[token]
        margin = _disorder(row[choice.reference[token]], row[choice.candidate[token]])
        room = rooms[token]
        if touched[token]:
            room = max(room, 2 * float(np.abs(other - row).max()))
        margins.append(margin)
        allowed.append(room)
    return np.array(margins, dtype=np.float64), np.array(allowed, dtype=np.float64)


def _disorder(ours: _Floats, theirs: _Floats) -> float:
    """How far scores in another order are from falling; 0 where the reference sorts none."""
    if (np.diff(ours) > 0).any():
        return 0.0
    lowest = np.minimum.accumulate(theirs)
    return float((theirs - lowest).max(initial=0.0))


def _by_values(choice: Choice, known: Known, touched: NDArray[np.bool_]) -> tuple[_Floats, _Floats]:
    """The same where the values of the chosen experts alone are known.

    What was taken instead has its value in the candidate alone. It must be that of the expert left
    out, and both the smallest of their token's.
    """
    count = len(choice.changes) + len(choice.reordered)
    if known.values is None or choice.reference is None or choice.candidate is None:
        return np.zeros(count), np.full(count, np.inf)
    ours, theirs = known.values
    known = Known(max(known.expected, _unchanged_error(choice, ours, theirs)))
    rooms = _room(known, ours)
    margins, allowed = [], []
    for change in choice.changes:
        row, other = ours[change.token], theirs[change.token]
        mine = choice.reference[change.token].tolist()
        others = choice.candidate[change.token].tolist()
        left = row[[mine.index(expert) for expert in change.left]]
        new = other[[others.index(expert) for expert in change.new]]
        found = [0.0]
        if len(left) and len(new):
            found.append(float(np.abs(np.sort(left) - np.sort(new)).max()))
        for values, whole in ((left, row), (new, other)):
            if 0 < len(values) < len(whole):
                found.append(float(values.max() - whole.min()))
        margins.append(max(found) if len(left) == len(new) else math.inf)
        allowed.append(math.inf if touched[change.token] else rooms[change.token])
    for token in choice.reordered:
        margins.append(float(np.abs(np.sort(ours[token]) - np.sort(theirs[token])).max()))
        allowed.append(math.inf if touched[token] else rooms[token])
    return np.array(margins, dtype=np.float64), np.array(allowed, dtype=np.float64)


def _unchanged_error(choice: Choice, ours: _Floats, theirs: _Floats) -> float:
    """The relative error of the values of the tokens that chose the same."""
    same = np.ones(len(ours), dtype=bool)
    same[[change.token for change in choice.changes]] = False
    same[list(choice.reordered)] = False
    size = float(np.square(ours[same]).sum())
    return math.sqrt(float(np.square(theirs[same] - ours[same]).sum()) / size) if size else 0.0


def _too_many(choice: Choice, known: Known, touched: NDArray[np.bool_], given: bool) -> bool:
    """Whether more tokens chose others than near ties among normal scores let expect.

    The scores beside the last that is chosen lie apart by the spread over the number of experts.
    """
    tokens = [change.token for change in choice.changes]
    count = int((~touched[tokens]).sum()) if tokens else 0
    if not given:
        return count > 0
    error = AGAINST_ESTIMATE * known.expected
    expected = int((~touched).sum()) * min(1.0, _DENSITY * choice.experts * error)
    return count > math.floor(expected + _CHANCE * math.sqrt(expected))
