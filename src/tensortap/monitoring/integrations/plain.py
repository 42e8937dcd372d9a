"""A plain loop: epochs and batches, with the watch and the monitor told where training is.

`tap.watch` hears steps from the optimizer and needs no help; what a loop by hand forgets is to say
the epoch, and document 004's monitor wants epoch and batch before every forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from ...errors import OptionError
from ..telling import failure_of
from ..watch import Watcher

if TYPE_CHECKING:
    from ..monitor import Monitor

__all__ = ["Loop", "loop"]

Batch = TypeVar("Batch")


def loop(
    loader: Iterable[Batch],
    *,
    epochs: int | Iterable[int] = 1,
    watch: Watcher | None = None,
    monitor: Monitor | None = None,
) -> Loop[Batch]:
    """Iterate over (epoch, batch_idx, batch), telling a watch and a monitor where training is.

        with loop(loader, epochs=3, watch=watch, monitor=monitor) as batches:
            for epoch, batch_idx, batch in batches:
                ...

    `epochs` is how many, from 0, or which: `range(1, 4)` counts from 1 as the document does. The
    monitor's outputs are saved as each epoch ends. `with` closes both when training ends, by
    exception too; without it they are yours to close.
    """
    if isinstance(epochs, int):
        if isinstance(epochs, bool) or epochs < 0:
            raise OptionError(f"epochs is a number of epochs or their numbers, got {epochs!r}.")
        epochs = range(epochs)
    return Loop(loader, epochs, watch, monitor)


class Loop(Generic[Batch]):
    """Epochs and batches of one training; see `loop`."""

    def __init__(
        self,
        loader: Iterable[Batch],
        epochs: Iterable[int],
        watch: Watcher | None,
        monitor: Monitor | None,
    ) -> None:
        self.loader = loader
        self.epochs = epochs
        self.watch = watch
        self.monitor = monitor

    def __iter__(self) -> Iterator[tuple[int, int, Batch]]:
        for epoch in self.epochs:
            if self.watch is not None:
                self.watch.epoch(epoch)
            if self.monitor is not None:
                self.monitor.set_epoch(epoch)
            for index, batch in enumerate(self.loader):
                if self.monitor is not None:
                    self.monitor.set_batch_idx(index)
                yield epoch, index, batch
            if self.monitor is not None:
                self.monitor.save_single_outputs()
                self.monitor.save_epoch_outputs()

    def __enter__(self) -> Loop[Batch]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        failure = failure_of(error)
        if self.monitor is not None:
            self.monitor.close(failure)  # saves what nobody saved
        if self.watch is not None:
            self.watch.close(failure)
