"""What the monitor tells a user while a model trains, each thing once."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..taps.session import TapWarning
from .telling import outside

__all__ = ["Words"]

_log = logging.getLogger("tensortap.monitor")


class Words:
    """Warnings, none of them twice."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said: set[str] = set()
        self._waiting: list[str] | None = None

    def once(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            if self._waiting is not None:
                self._waiting.append(text)
            else:
                warnings.warn(text, TapWarning, stacklevel=outside())

    @contextlib.contextmanager
    def at_the_end(self, *, failing: bool) -> Iterator[None]:
        """What is said in here is said when all is done: a warning may be an error (`-W error`).

        Where something failed already, that is what the user must see: then it does not raise.
        """
        waiting = self._waiting = []
        try:
            yield
        finally:
            self._waiting = None
            raised = [error for text in waiting if (error := _warned(text)) is not None]
            if raised and not failing:
                raise raised[0]

    def passed_over(self, reason: str) -> None:
        self.once(
            f"over {reason}",
            f"The model ran {reason}: the monitor passes over such calls. Training runs on.",
        )

    def epoch_unsaid(self) -> None:
        self.once(
            "epoch",
            "The model ran before set_epoch was called: nothing is recorded. Call "
            "monitor.set_epoch(epoch) when an epoch begins, and monitor.set_batch_idx(batch_idx) "
            "before each batch.",
        )

    def batch_unsaid(self) -> None:
        self.once(
            "batch",
            "set_batch_idx was not called in this epoch before the model ran: batches are counted "
            "as the model's forwards, from 0. Call monitor.set_batch_idx(batch_idx) before each "
            "batch.",
        )

    def memory(self, text: str) -> None:
        self.once("memory", text)

    def condition(self, error: Exception) -> None:
        self.once(
            "condition",
            f"The condition raised {type(error).__name__}: {error}. The output is kept, and "
            "so is every other for which it raises.",
        )

    def leaf_is_none(self, layer: str) -> None:
        self.once(
            f"none {layer}",
            f"The leaf that layers_to_monitor picks of '{layer}' is None (attention without "
            "need_weights=True returns no weights): there is nothing to keep.",
        )

    def recording_stopped(self, failure: str) -> None:
        self.once(
            "recording",
            f"tensortap stopped recording to {self._folder}: {failure}. The monitor goes on "
            "without its recording.",
        )

    def not_kept(self, layer: str | None, error: Exception) -> None:
        what = "the model's inputs" if layer is None else f"'{layer}'"
        plain = isinstance(error, LookupError)
        text = str(error) if plain else f"{type(error).__name__}: {error}"
        self.once(
            f"failed {layer}",
            f"The monitor could not keep {what} ({text}) and listens to it no more. Training runs "
            "on.",
        )

    def not_saved(self, key: str, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        self.once(
            f"save {key}",
            f"The outputs of '{key}' could not be saved to {self._folder}: {reason}. Training "
            "runs on.",
        )

    def still_writing(self) -> None:
        self.once(
            "live",
            f"Another monitor was still writing to {self._folder}: its hooks were removed. Call "
            "remove_hooks() when training is over, and give each its own output_dir.",
        )

    def nothing(self, epochs: Sequence[int], batches: Sequence[int] | None, last: int) -> str:
        """Not one layer was heard: the sentence for the manifest and for a warning."""
        in_batches = f" and batches {_some(batches)}" if batches else ""
        return (
            f"Nothing was recorded in {self._folder}: no monitored layer ran in the epochs "
            f"{_some(epochs)}{in_batches}. The last epoch was {last}."
        )

    def silent(self, names: Sequence[str], total: int) -> str:
        shown = ", ".join(f"'{name}'" for name in names[:8]) + (", …" if len(names) > 8 else "")
        return (
            f"Nothing was heard from {len(names)} of {total} layers: {shown}. They did not run in "
            "what is recorded, or were called by .forward() directly, which skips hooks."
        )


def _warned(text: str) -> TapWarning | None:
    """Warn; the warning itself where it was raised, which the log then has."""
    try:
        warnings.warn(text, TapWarning, stacklevel=outside())
    except TapWarning as error:
        _log.warning("%s", text)
        return error
    return None


def _some(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers[:12]))}{', …' if len(numbers) > 12 else ''}]"
