"""What follows from another choice of expert: which tokens it has touched at a later tensor.

A token that chose another expert has another answer from there on, and so may tokens that attend to
it: those after it in its sample, or all of its sample in a model that looks both ways. They are set
apart, and the others alone say what a layer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..recording.reader import Record, Recording
from .maker import contains
from .routing import Choice

__all__ = ["Apart", "Touched", "joined"]

_Step = tuple[int, int, int]
_Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Apart:
    """The tokens of a tensor in two heaps; `axes` are those of the tensor that count tokens.

    `clean` are the places of tokens that no other choice has touched, `following` those of tokens
    that came in touched, `fresh` those whose other choice was made just before, so that nothing is
    known of what it brings along. Without axes nothing tells the tokens of the tensor apart; then
    `share` says how many of all are touched.
    """

    axes: tuple[int, ...]
    clean: NDArray[np.int64]
    following: NDArray[np.int64]
    fresh: NDArray[np.int64]
    share: float = 0.0

    @property
    def count(self) -> int:
        """How many are set apart."""
        return len(self.following) + len(self.fresh)

    @property
    def total(self) -> int:
        return self.count + len(self.clean)

    @property
    def touched(self) -> NDArray[np.int64]:
        """All that are set apart, in order."""
        return np.sort(np.concatenate([self.following, self.fresh]))


@dataclass(frozen=True, eq=False)
class _Event:
    """Tokens that chose other experts at one call of a router."""

    router: str
    scope: str  # the module around the router: the mixture
    home: str  # the block around that
    order: int
    call: int
    slots: int
    tokens: NDArray[np.int64]
    reordered: NDArray[np.int64]


def joined(ours: Apart | None, noise: Apart | None) -> Apart | None:
    """The tokens that are apart in the candidate, and those that are so in the floor run alone.

    Of the latter a floor run does not tell how well they may be.
    """
    if ours is None or noise is None or ours.axes != noise.axes or ours.total != noise.total:
        return ours or noise
    clean = np.intersect1d(ours.clean, noise.clean)
    following = np.setdiff1d(np.arange(ours.total), np.union1d(clean, ours.fresh))
    return Apart(ours.axes, clean, following, ours.fresh)


class Touched:
    """The tokens that other choices have touched, step by step."""

    def __init__(self, reference: Recording) -> None:
        self._reference = reference
        self._blocks = reference.manifest.structure.blocks
        config = reference.manifest.target.get("config")
        self._both_ways = isinstance(config, dict) and config.get("is_encoder_decoder") is True
        self._events: dict[_Step, dict[int, list[_Event]]] = {}  # by how many tokens there are
        self._grids: dict[tuple[_Step, int], tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(
        self,
        record: Record,
        choice: Choice,
        explained: Sequence[int] | None = None,
        start: int = 0,
        tokens: int | None = None,
    ) -> None:
        """Tokens chose others at the call that a record of the reference belongs to.

        `explained` are those of them that count; by default all. Of a choice of some of the tokens
        `start` says which is the first, and `tokens` how many there are.
        """
        every = [change.token for change in choice.changes] if explained is None else explained
        changed = [start + token for token in every]
        reordered = [start + token for token in choice.reordered]
        tokens = choice.tokens if tokens is None else tokens
        slots = 0 if choice.reference is None else choice.reference.shape[1]
        if not changed and not reordered:
            return
        scope = next((name for name in _around(record.layer) if name in self._reference), "")
        around = [name for name in self._blocks if contains(name, record.layer)]
        home = around[0] if around else scope.rpartition(".")[0] or scope
        self._events.setdefault(_step(record), {}).setdefault(tokens, []).append(
            _Event(
                record.layer,
                scope,
                home,
                record.order,
                record.call,
                slots,
                np.array(changed, dtype=np.int64),
                np.array(reordered, dtype=np.int64),
            )
        )

    def before(self, record: Record, tokens: int) -> _Mask:
        """Which of so many tokens were touched when a layer was called."""
        following, fresh = self._masks(record, record.shape, tokens)
        return following | fresh

    def apart(
        self,
        record: Record,
        shape: Sequence[int],
        rows: tuple[int, Sequence[int]] | None = None,
        samples: tuple[int, int] | None = None,
    ) -> Apart | None:
        """How the tokens of a tensor are divided; None where no choice has touched any.

        `shape` is that of the tensors that are compared. `rows` says how many tokens there are,
        and which of them the first axis holds, where it holds some of them; `samples` which part of
        the first axis of the record is meant.
        """
        if rows is not None:
            count, held = rows
            following, fresh = (mask[list(held)] for mask in self._masks(record, shape, count))
            return _divided((0,), following, fresh)
        for count in self._events.get(_step(record), {}):
            following, fresh = self._masks(record, shape, count)
            if not following.any() and not fresh.any():
                continue
            grid = self._grid(record, count)
            whole = tuple(shape) if samples is None else record.shape
            axes, masks = _laid_out(grid, whole, (following, fresh))
            if samples is not None and axes[:1] == (0,):
                sizes = [whole[axis] for axis in axes]
                first, second = (mask.reshape(sizes)[slice(*samples)] for mask in masks)
                masks = (first.reshape(-1), second.reshape(-1))
            found = _divided(axes, *masks)
            share = float((following | fresh).mean())
            return found if found is None or axes else replace(found, share=share)
        return None

    def _masks(self, record: Record, shape: Sequence[int], count: int) -> tuple[_Mask, _Mask]:
        following, fresh = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        for event in self._events.get(_step(record), {}).get(count, ()):
            if not _after(record, event):
                continue
            inside = _inside(record, event)
            if inside or not event.scope:  # of what the model itself does little is known
                fresh[event.tokens] = True
            if inside and event.slots and event.slots == tuple(shape)[-1]:
                fresh[event.reordered] = True
            if not inside and len(event.tokens):
                samples, length = self._grid(record, count)
                reached = following.reshape(samples, length)
                sample, place = np.divmod(event.tokens, length)
                for number in np.unique(sample):
                    start = 0 if self._both_ways else int(place[sample == number].min())
                    reached[number, start:] = True
        following &= ~fresh
        return following, fresh

    def _grid(self, record: Record, count: int) -> tuple[int, int]:
        """Samples and tokens of each, as the tensors of the step have them."""
        key = _step(record), count
        if key not in self._grids:
            self._grids[key] = self._grid_of(*key)
        return self._grids[key]

    def _grid_of(self, step: _Step, count: int) -> tuple[int, int]:
        names = {e.router: None for e in self._events.get(step, {}).get(count, ())}
        around = [outer for name in names for outer in _around(name)]
        for name in (*around, *list(self._reference.layers)[:_LOOKED_AT]):
            if name not in self._reference:
                continue
            for record in self._reference[name].records:
                if _step(record) != step or record.port not in ("input", "output"):
                    continue
                if len(record.shape) >= 3 and record.shape[0] * record.shape[1] == count:
                    return record.shape[0], record.shape[1]
        return 1, count


_LOOKED_AT = 64


def _around(name: str) -> list[str]:
    """The modules around a layer, the innermost first."""
    found = []
    while name:
        name = name.rpartition(".")[0]
        found.append(name)
    return found


def _after(record: Record, event: _Event) -> bool:
    """Whether what a record holds was made after a choice."""
    if record.port == "input":  # its row was written when the call had ended
        inner = contains(record.layer, event.router) and record.call == event.call
        return event.order < record.order and not inner
    return event.order < record.order or (
        record.layer == event.router and record.call == event.call
    )


def _inside(record: Record, event: _Event) -> bool:
    """Whether nothing but the experts stands between a choice and a record."""
    if event.scope and contains(event.scope, record.layer):
        return True
    return contains(event.home, record.layer) and contains(record.layer, event.router)


def _divided(axes: tuple[int, ...], following: _Mask, fresh: _Mask) -> Apart | None:
    if not following.any() and not fresh.any():
        return None
    fresh_at, following_at = np.flatnonzero(fresh), np.flatnonzero(following & ~fresh)
    return Apart(axes, np.flatnonzero(~following & ~fresh), following_at, fresh_at)


def _laid_out(
    grid: tuple[int, int], shape: tuple[int, ...], masks: tuple[_Mask, _Mask]
) -> tuple[tuple[int, ...], tuple[_Mask, _Mask]]:
    """The axes of a tensor that count tokens, and the masks along them.

    Where no axis does, the samples are told apart, or nothing is: then all of it is touched.
    """
    samples, length = grid
    squares = tuple(mask.reshape(samples, length) for mask in masks)
    first, second = squares

    def along(
        axes: tuple[int, ...], ours: _Mask, theirs: _Mask
    ) -> tuple[tuple[int, ...], tuple[_Mask, _Mask]]:
        return axes, (ours.reshape(-1), theirs.reshape(-1))

    if len(shape) > 1 and shape[0] == samples and length in shape[1:]:
        return along((0, 1 + shape[1:].index(length)), first, second)
    if shape and shape[0] == samples * length:
        return along((0,), first, second)
    if len(shape) > 1 and shape[:2] == (length, samples):
        return along((0, 1), first.T, second.T)
    if length in shape and (samples == 1 or shape[0] == 1 or shape[0] == length):
        return along((shape.index(length),), _any(first, 0), _any(second, 0))
    if shape and shape[0] == samples:
        return along((0,), _any(first, 1), _any(second, 1))
    whole = (np.array([first.any()]), np.array([second.any()]))
    return (), whole


def _any(mask: _Mask, axis: int) -> _Mask:
    found: _Mask = np.asarray(mask.any(axis=axis))
    return found


def _step(record: Record) -> _Step:
    return record.rank, record.epoch, record.batch
