"""What the monitor holds of the current epoch, layer by layer, in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import OptionError
from ..numerics.summary import Summary
from .choice import Chosen, uncompiled
from .outputs import Form, put_together, shape_of, tensors_of
from .spill import Maps, RawFile, Spilled, joined

__all__ = ["Entry", "Held", "Moment", "Shelf", "named_shelves"]

Moment = tuple[int, int]
"""(epoch, batch_idx), the key of the document's `data`."""

_MOST_FILES = 32

_STATISTICS = (
    "count", "nan", "posinf", "neginf", "zeros",
    "mean", "std", "min", "max", "absmax", "l2", "rms",
)  # fmt: skip


@dataclass(eq=False)
class Entry:
    """One output that is kept: its form, its tensors, their summaries."""

    form: Form
    tensors: list[torch.Tensor | Spilled]
    summaries: list[Summary]
    saved: bool = False

    @property
    def shape(self) -> Any:
        return shape_of(self.form, [list(tensor.shape) for tensor in self.tensors])

    @property
    def in_memory(self) -> int:
        """How many bytes of memory this takes."""
        return sum(
            t.numel() * t.element_size() for t in self.tensors if isinstance(t, torch.Tensor)
        )

    def output(self, maps: Maps, *, copy: bool = False) -> Any:
        """The output as the layer returned it; a copy is the caller's own."""
        return put_together(self.form, [_values(tensor, maps, copy) for tensor in self.tensors])


@dataclass(eq=False)
class Shelf:
    """One monitored layer with what is held of it."""

    chosen: Chosen
    entries: dict[Moment, Entry] = field(default_factory=dict)
    output_shape: Any = None

    @property
    def key(self) -> str:
        return self.chosen.key

    @property
    def unsaved(self) -> bool:
        return any(not entry.saved for entry in self.entries.values())

    @property
    def in_memory(self) -> int:
        return sum(entry.in_memory for entry in self.entries.values())

    def ordered(self) -> list[tuple[Moment, Entry]]:
        return sorted(self.entries.items(), key=lambda item: item[0])

    def described(self, maps: Maps, *, copy: bool) -> dict[str, Any]:
        """The document's structure of one layer."""
        return {
            "layer": self.chosen.layer,
            "alias": self.chosen.alias,
            "output_shape": _copied(self.output_shape),
            "data": {moment: entry.output(maps, copy=copy) for moment, entry in self.ordered()},
        }

    def clear(self) -> None:
        self.entries, self.output_shape = {}, None

    def spill(self, file: Callable[[int], RawFile]) -> None:
        """Bring what is in memory to disk, in the order of the batches."""
        for _, entry in self.ordered():
            for index, tensor in enumerate(entry.tensors):
                if isinstance(tensor, torch.Tensor):
                    entry.tensors[index] = file(index).append(tensor)

    def whole_epoch(self) -> dict[str, Any]:
        """What is saved of an epoch: its batches in one, or as a list where that cannot be."""
        entries = [entry for _, entry in self.ordered()]
        batches = [batch for (_, batch), _ in self.ordered()]
        output, shape = self._joined(entries)
        return {
            "batch_idx": batches,
            "layer": self.chosen.layer,
            "alias": self.chosen.alias,
            "output_shape": shape,
            "output": output,
            "statistics": _statistics(entries),
        }

    def _joined(self, entries: list[Entry]) -> tuple[Any, Any]:
        form = entries[0].form
        if not _joinable(entries):
            maps = Maps(private=False)
            return [entry.output(maps) for entry in entries], [entry.shape for entry in entries]
        whole = [_join([e.tensors[i] for e in entries]) for i in range(len(entries[0].tensors))]
        return put_together(form, whole), shape_of(form, [list(t.shape) for t in whole])


class Held:
    """All shelves, and the limit on what they may keep in memory."""

    def __init__(self, chosen: Iterable[Chosen], folder: Path, limit: int) -> None:
        self.shelves = [Shelf(one) for one in chosen]
        self.limit = limit
        self.bytes = 0
        self.spilling = False
        self._folder = folder
        self._files: dict[tuple[str, int], RawFile] = {}  # by key and number of the tensor

    @property
    def unsaved(self) -> bool:
        """Whether anything is held that is in no file, or nothing was heard yet."""
        entries = [entry for shelf in self.shelves for entry in shelf.entries.values()]
        return not entries or any(not entry.saved for entry in entries)

    def put(self, shelf: Shelf, moment: Moment, entry: Entry, warn: Callable[[str], None]) -> None:
        """Keep an output; the last call of a batch replaces an earlier one."""
        old = shelf.entries.get(moment)
        self.bytes += entry.in_memory - (old.in_memory if old is not None else 0)
        shelf.entries[moment] = entry
        if shelf.output_shape is None:
            shelf.output_shape = entry.shape
        if self.bytes > self.limit and not self.spilling:
            self.spilling = True
            text = self._too_much()
            for each in self.shelves:
                self.spill(each)
            warn(text)
        elif self.spilling:
            self.spill(shelf)

    def spill(self, shelf: Shelf) -> None:
        """Hold this layer on disk from here on."""
        held = shelf.in_memory
        if held:
            shelf.spill(lambda index: self._file(shelf.key, index))
            self.bytes -= held

    def _file(self, key: str, index: int) -> RawFile:
        """The file of one leaf. Files are few: a process may not have many open."""
        file = self._files.get((key, index))
        if file is None:
            files = list(dict.fromkeys(self._files.values()))
            file = RawFile(self._folder) if len(files) < _MOST_FILES else min(files, key=_size_of)
            self._files[(key, index)] = file
        return file

    def clear(self, shelves: Iterable[Shelf]) -> None:
        for shelf in shelves:
            self.bytes -= shelf.in_memory
            shelf.clear()
            for place in [place for place in self._files if place[0] == shelf.key]:
                del self._files[place]
        if not any(shelf.entries for shelf in self.shelves):
            self.spilling = False

    def room_to_join(self, shelf: Shelf) -> None:
        """Joining an epoch in memory takes it a second time: where that is too much, from disk."""
        if self.bytes + shelf.in_memory > self.limit:
            self.spill(shelf)

    def _too_much(self) -> str:
        largest = sorted(self.shelves, key=lambda shelf: -shelf.in_memory)[:3]
        named = ", ".join(f"'{s.key}' ({_size(s.in_memory)})" for s in largest if s.in_memory)
        return (
            f"The monitor holds {_size(self.bytes)}, more than its memory_limit of "
            f"{_size(self.limit)}; most of it of {named}. It goes on from disk, which is slower. "
            "To hold less: fewer layers or batches, sample_every, a leaf of a tuple, or "
            "save_…_outputs() and clear_current_epoch_data() more often; or raise memory_limit."
        )


def named_shelves(shelves: list[Shelf], layers: str | Iterable[str]) -> list[Shelf]:
    """The shelves that aliases or names of layers mean."""
    if isinstance(layers, str):
        layers = [layers]
    wanted = list(layers) if isinstance(layers, Iterable) else [layers]
    named = {name: s for s in shelves for name in (s.chosen.layer, s.key)}
    named |= {s.key: s for s in shelves}  # an alias beats another layer's name
    unknown = [
        name
        for name in wanted
        if not isinstance(name, str) or (name not in named and uncompiled(name) not in named)
    ]
    if unknown:
        raise OptionError(
            f"Not monitored: {unknown}. Monitored are {[shelf.key for shelf in shelves]}."
        )
    chosen = {id(named.get(name) or named[uncompiled(name)]) for name in wanted}
    return [shelf for shelf in shelves if id(shelf) in chosen]


def _size(nbytes: int) -> str:
    number = float(nbytes)
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def _size_of(file: RawFile) -> int:
    return file.size


def _values(tensor: torch.Tensor | Spilled, maps: Maps, copy: bool) -> torch.Tensor:
    if isinstance(tensor, Spilled):
        return maps.tensor(tensor)
    return tensor.clone() if copy else tensor


def _copied(shape: Any) -> Any:
    if isinstance(shape, list):
        return [_copied(item) for item in shape]
    if isinstance(shape, dict):
        return {key: _copied(item) for key, item in shape.items()}
    return shape


def _joinable(entries: list[Entry]) -> bool:
    first = entries[0]
    if not first.tensors or any(entry.form != first.form for entry in entries):
        return False
    return all(
        len(tensor.shape) > 0
        and tensor.dtype == wanted.dtype
        and tuple(tensor.shape[1:]) == tuple(wanted.shape[1:])
        for entry in entries
        for tensor, wanted in zip(entry.tensors, first.tensors, strict=True)
    )


def _join(parts: list[torch.Tensor | Spilled]) -> torch.Tensor:
    spilled = [part for part in parts if isinstance(part, Spilled)]
    if len(spilled) == len(parts):
        return joined(spilled)
    maps = Maps(private=False)
    return torch.cat([_values(part, maps, False) for part in parts], dim=0)


def _statistics(entries: list[Entry]) -> Any:
    """Exact over all batches: summaries merge. In the form of the output, or by leaf."""
    merged: dict[str, Summary] = {}
    for entry in entries:
        for (_, leaf), summary in zip(tensors_of(entry.form), entry.summaries, strict=True):
            merged[leaf] = merged[leaf].merge(summary) if leaf in merged else summary
    numbers = {leaf: _numbers(summary) for leaf, summary in merged.items()}
    form = entries[0].form
    if any(entry.form != form for entry in entries):
        return numbers
    return put_together(form, [numbers[leaf] for _, leaf in tensors_of(form)], values=False)


def _numbers(summary: Summary) -> dict[str, float]:
    return {name: getattr(summary, name) for name in _STATISTICS}
