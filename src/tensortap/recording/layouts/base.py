"""What a layout is: a way to keep a recording's tensors as plain files that others read.

A recording knows more than such a tree can hold. So `export` says what it left out, and `read`
gives back trees of entries that are loaded one by one, which keeps memory flat however large the
tree is. Built-in layouts and those of other packages (entry point group "tensortap.layouts") go
through the same registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import LayoutError
from ..schema import Row, Structure

if TYPE_CHECKING:
    import torch

    from ..reader import Record, Recording

__all__ = [
    "Entry",
    "ExportOptions",
    "Exported",
    "Layout",
    "LeftOut",
    "Progress",
    "Skipped",
    "Tree",
    "detect",
    "get",
    "left_out",
    "names",
    "register",
]

GROUP = "tensortap.layouts"

Progress = Callable[[int, int], None]
"""Called with (done, total) while files are read or written."""


def _silent(done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class ExportOptions:
    """What the user asked of an export; `about` goes to the head of the statistics as it is."""

    mode: str | None = None
    layer: str | None = None
    overwrite: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = _silent


@dataclass(frozen=True)
class LeftOut:
    """A kind of record that the layout cannot hold, and how many of them there were."""

    what: str
    records: int
    layers: int

    def __str__(self) -> str:
        return f"{self.what}: {_count(self.records, 'record')} of {_count(self.layers, 'layer')}"

    def to_dict(self) -> dict[str, Any]:
        return {"what": self.what, "records": self.records, "layers": self.layers}


@dataclass(frozen=True)
class Skipped:
    """A tensor that could not be loaded, with the reason."""

    layer: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"layer": self.layer, "reason": self.reason}


@dataclass(frozen=True)
class Exported:
    """What an export wrote, and what it could not."""

    path: str
    layout: str
    files: tuple[str, ...]
    left_out: tuple[LeftOut, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "layout": self.layout,
            "files": list(self.files),
            "left_out": [item.to_dict() for item in self.left_out],
            "skipped": [item.to_dict() for item in self.skipped],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Entry:
    """One tensor of a tree: the row it becomes, and how to load it."""

    row: Row
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Tree:
    """What becomes one recording: the tensors of one mode."""

    entries: tuple[Entry, ...]
    structure: Structure = field(default_factory=Structure)
    mode: str | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Layout(Protocol):
    """One way to keep tensors in files."""

    @property
    def name(self) -> str: ...

    def detect(self, source: Path) -> bool:
        """Whether `source` looks like a tree of this layout; opens no file."""
        ...

    def export(self, recording: Recording, out: Path, options: ExportOptions) -> Exported:
        """Write what the layout can hold of a recording."""
        ...

    def read(self, source: Path) -> list[Tree]:
        """The trees in `source`, one a mode; files are untrusted."""
        ...


_LAYOUTS: dict[str, Layout] = {}


def register(layout: Layout) -> None:
    """Make a layout known under its name."""
    _LAYOUTS[layout.name] = layout


def _all() -> dict[str, Layout]:
    for point in metadata.entry_points(group=GROUP):
        if point.name not in _LAYOUTS:
            _LAYOUTS[point.name] = point.load()()
    return _LAYOUTS


def names() -> list[str]:
    """The layouts that can be named, sorted."""
    return sorted(_all())


def get(name: str) -> Layout:
    """The layout of this name."""
    try:
        return _all()[name]
    except KeyError:
        raise LayoutError(
            f"There is no layout '{name}'. The layouts are: {', '.join(names())}."
        ) from None


def detect(source: Path) -> Layout:
    """The one layout that fits what lies at `source`."""
    fitting = [layout for _, layout in sorted(_all().items()) if layout.detect(source)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        options = " or ".join(f"--layout {layout.name}" for layout in fitting)
        raise LayoutError(f"{source} fits more than one layout. Say which one: {options}.")
    raise LayoutError(
        f"There is nothing to import in {source}: expected <layer>_output.pt files, "
        "mode_<mode>_layer_<i>.npy files, or an .npz file."
    )


def left_out(recording: Recording, taken: Iterable[Record]) -> tuple[LeftOut, ...]:
    """The records that were not taken, by the reason why a layout cannot hold them."""
    held: set[tuple[object, ...]] = set()
    leaves: dict[tuple[str, str], set[str]] = {}
    for record in taken:
        held.add(_key(record))
        leaves.setdefault((record.layer, record.port), set()).add(record.leaf)
    groups: dict[str, list[str]] = {}
    for record in recording.records:
        if _key(record) not in held:
            known = leaves.get((record.layer, record.port))
            groups.setdefault(_reason(record, known), []).append(record.layer)
    return tuple(LeftOut(what, len(layers), len(set(layers))) for what, layers in groups.items())


def _key(record: Record) -> tuple[object, ...]:
    return (record.rank, record.order, record.layer, record.port, record.leaf)


def _reason(record: Record, taken_leaves: set[str] | None) -> str:
    if not record.stored:
        return "summaries without tensors"
    if taken_leaves is None:
        names = {"input": "inputs", "output": "other layers"}
        return names.get(record.port, "gradients")
    if record.rank:
        return "other ranks"
    if record.leaf not in taken_leaves:
        return "other leaves"
    return "later calls" if record.call else "later batches"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
