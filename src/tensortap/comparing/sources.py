"""Which layers made a tensor, known by its content: what one layer returns is what another reads.

Where the values of two runs have parted, this still tells whether a compiled layer reads what the
module read: both must have it from the same layer.
"""

from __future__ import annotations

from ..recording.reader import Record, Recording
from .names import normalised

__all__ = ["Sources"]

_Key = tuple[int, int, int, str]  # rank, epoch, batch, and the name of the stored tensor


class Sources:
    """The layers of one recording that returned each of its tensors; found when first asked for."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._made: dict[_Key, set[str]] | None = None

    def of(self, record: Record) -> set[str]:
        """The layers that returned what this record holds, in the same step."""
        if self._made is None:
            self._made = {}
            for layer in self._recording.values():
                for output in layer.port("output"):
                    if output.tensor_id is not None:
                        name = normalised(layer.name)
                        self._made.setdefault(_key(output), set()).add(name)
        return self._made.get(_key(record), set())

    def same(self, record: Record, others: Sources, other: Record) -> bool | None:
        """Whether two records come from the same layer; None where that is not known."""
        ours, theirs = self.of(record), others.of(other)
        if not ours or not theirs:
            return None
        return any(_is(one, another) for one in ours for another in theirs)


def _key(record: Record) -> _Key:
    return record.rank, record.epoch, record.batch, record.tensor_id or ""


def _is(one: str, other: str) -> bool:
    """Whether two names are equal but for a prefix of one of them."""
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")
