"""Where training is, as far as it was said, and what of that is to be kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .choice import Chosen

__all__ = ["Moments", "When"]

When = tuple[int, int, int]
"""epoch, batch, call"""


class Moments:
    """The epoch, the batch, and how often a layer was called in it."""

    def __init__(self, epochs: Iterable[int], batches: Iterable[int], sample_every: int) -> None:
        self.epoch: int | None = None
        self.recorded = False  # whether the epoch that runs is to be recorded
        self.batch: int | None = None
        self.fresh = False  # whether the batch was said after the model ran last
        self._epochs = frozenset(epochs)
        self._batches = frozenset(batches)
        self._sample_every = sample_every
        self._forwards = 0  # of the whole model, in this epoch
        self._heard: Counter[int] = Counter()  # calls of each layer, in this epoch
        self._calls: Counter[tuple[int, int]] = Counter()  # by layer and batch, in this epoch
        self._called: dict[int, int] = {}  # the most calls of a batch in earlier visits of an epoch

    def begin_epoch(self, epoch: int) -> None:
        """Another epoch: its batch is unsaid, unless it was said just before."""
        if not self.fresh:
            self.batch = None
        if self.epoch is not None:
            most = max(self._calls.values(), default=0)
            self._called[self.epoch] = self._called.get(self.epoch, 0) + most
        self.epoch = epoch
        self.recorded = epoch in self._epochs
        self._forwards = 0
        self._heard.clear()
        self._calls.clear()

    def begin_batch(self, batch: int) -> None:
        self.batch, self.fresh = batch, True

    def begin_forward(self) -> None:
        self._forwards += 1
        self.fresh = False

    def hear(self, index: int) -> None:
        self._heard[index] += 1
        self.fresh = False

    def position(self, index: int | None = None) -> int:
        """The batch that runs: as it was said, or how many forwards came before in this epoch.

        Where the whole model is never called, a layer's own calls are counted.
        """
        if self.batch is not None:
            return self.batch
        if self._forwards:
            return self._forwards - 1
        return 0 if index is None else self._heard[index] - 1

    def keeps(self, one: Chosen, batch: int) -> bool:
        return batch in self._batches if one.single else batch % self._sample_every == 0

    def next_call(self, index: int, batch: int) -> When:
        """Count a call that is kept; an epoch that comes again counts on."""
        assert self.epoch is not None
        call = self._called.get(self.epoch, 0) + self._calls[(index, batch)]
        self._calls[(index, batch)] += 1
        return self.epoch, batch, call
