"""The tree of document 003: one array a block and mode, all samples along axis 0.

mode_fp32_layer_0.npy  mode_fp32_layer_23.npy  mode_fp32_stats.json  mode_0_layer_0.npy …
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import LayoutError
from ..schema import Row, Structure
from .arrays import Array
from .base import Entry, Exported, ExportOptions, Skipped, Tree, left_out
from .batches import (
    Part,
    describe,
    gather,
    join,
    parts_of,
    read_json,
    split,
    unloadable,
    write_json,
)
from .files import folder, inside, listing, safe_name, writing
from .naming import fill_blocks, json_safe, mode_of, plain, told_about

if TYPE_CHECKING:
    from ..reader import Recording

__all__ = ["NpyLayout"]

_FILE = re.compile(r"mode_(.+)_layer_(\d{1,9})\.npy")


class NpyLayout:
    """Seed 003's tree."""

    name = "npy"

    def detect(self, source: Path) -> bool:
        return any(_FILE.fullmatch(name) for name in listing(source))

    def export(self, recording: Recording, out: Path, options: ExportOptions) -> Exported:
        mode = mode_of(recording, options.mode)
        stem = f"mode_{safe_name(mode, 'mode')}"
        wanted, notes = _numbered(recording)
        groups = {i: gather(recording, name, "output") for i, name in wanted.items()}
        groups = {i: records for i, records in groups.items() if records}
        if not groups:
            raise LayoutError(
                f"{recording.path} holds no output tensors of blocks, so there is nothing to "
                "export. Record with --layers blocks, or export with --layout pt."
            )
        _make_room(out, stem, overwrite=options.overwrite)
        skipped, layers, files = [], {}, []
        for step, (index, records) in enumerate(groups.items()):
            options.progress(step, len(groups))
            reason = unloadable(records)
            if reason is not None:
                skipped.append(Skipped(records[0].layer, reason))
                continue
            name = f"{stem}_layer_{index}.npy"
            with writing(out / name) as scratch:
                shape = join(records, scratch).shape
            layers[str(index)] = describe(records, shape)
            files.append(name)
        if not files:
            raise LayoutError(f"Nothing could be exported. {skipped[0].reason}")
        given = json_safe(options.about)
        stats = {"mode": mode, **given, **told_about(recording), **given, "layers": layers}
        write_json(out / f"{stem}_stats.json", stats)
        options.progress(len(groups), len(groups))
        return Exported(
            path=str(out),
            layout=self.name,
            files=(*files, f"{stem}_stats.json"),
            left_out=left_out(recording, [r for records in groups.values() for r in records]),
            skipped=tuple(skipped),
            notes=notes,
        )

    def read(self, source: Path) -> list[Tree]:
        return [_tree(source, mode, files) for mode, files in self.files(source).items()]

    def read_each(self, source: Path) -> dict[str, Tree | LayoutError]:
        """The tree of each mode as files name it, or why it cannot be read.

        A bad file is no other mode's.
        """
        return {
            mode: _tree_or_why(source, mode, files) for mode, files in self.files(source).items()
        }

    def files(self, source: Path) -> dict[str, dict[int, str]]:
        """The names of the files, by mode and number."""
        modes: dict[str, dict[int, str]] = {}
        for name in listing(source):
            if match := _FILE.fullmatch(name):
                modes.setdefault(match[1], {})[int(match[2])] = name
        if not modes:
            raise LayoutError(
                f"There is nothing to import in {source}: no file mode_<mode>_layer_<i>.npy."
            )
        return modes


def _numbered(recording: Recording) -> tuple[dict[int, str], tuple[str, ...]]:
    """Blocks by their index; a model without blocks is numbered in order of execution."""
    blocks = recording.manifest.structure.blocks
    found = {i: name for i, name in enumerate(blocks) if name in recording.layers}
    if blocks or not recording.layers:
        return found, ()  # a number is a block's: what is none has no file here
    note = "The recording has no repeated blocks: its layers are numbered in order of execution."
    return dict(enumerate(recording.layers)), (note,)


def _make_room(out: Path, stem: str, *, overwrite: bool) -> None:
    folder(out)
    ours = re.compile(re.escape(stem) + r"(_layer_\d+\.npy|_stats\.json)")
    old = [name for name in listing(out) if ours.fullmatch(name)]
    if old and not overwrite:
        raise LayoutError(
            f"{out} already holds {old[0]}. Choose another folder or --mode, or replace it with "
            "--overwrite."
        )
    for name in old:
        (out / name).unlink()


def _tree_or_why(source: Path, mode: str, files: Mapping[int, str]) -> Tree | LayoutError:
    try:
        return _tree(source, mode, files)
    except LayoutError as error:
        return error


def _tree(source: Path, mode: str, files: Mapping[int, str]) -> Tree:
    stats_name = f"mode_{mode}_stats.json"
    stats = read_json(inside(source, stats_name)) if stats_name in listing(source) else {}
    told = stats.get("layers")
    about: dict[int, Mapping[str, Any]] = {
        i: told[str(i)] if isinstance(told, Mapping) and isinstance(told.get(str(i)), dict) else {}
        for i in files
    }
    names: dict[int, str] = {}
    entries: list[Entry] = []
    for place, index in enumerate(sorted(files)):
        path = inside(source, files[index])
        layer = about[index].get("layer")
        taken = not isinstance(layer, str) or layer in names.values()
        names[index] = f"layer_{index}" if taken else str(layer)
        array = open_npy(path)
        dtype, parts = parts_of(about[index], array.shape, str(path))
        entries += [
            Entry(
                row(names[index], about[index], part, place + number * len(files)),
                NpyPart(path, dtype, parts, number),
            )
            for number, part in enumerate(parts)
        ]
    structure = stats.get("structure")
    return Tree(
        entries=tuple(entries),
        structure=Structure.from_dict(structure)
        if isinstance(structure, Mapping)
        else Structure(fill_blocks(names)),
        mode=str(stats.get("mode") or mode),
        inputs=plain(stats.get("inputs")) if isinstance(stats.get("inputs"), dict) else {},
        target=plain(stats.get("target")) if isinstance(stats.get("target"), dict) else {},
    )


def row(layer: str, about: Mapping[str, Any], part: Part, order: int) -> Row:
    """The row of one batch of an array, from what its statistics tell."""
    alias = about.get("alias")
    return Row(
        layer=layer,
        port="output",
        leaf=str(about.get("leaf") or ""),
        alias=alias if isinstance(alias, str) else None,
        type=str(about.get("type") or ""),
        epoch=part.epoch,
        batch=part.batch,
        order=order,
    )


def open_npy(path: Path) -> Array:
    """An array on disk, mapped; nothing in it is unpickled."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise LayoutError(f"Cannot read {path}: {error.strerror or error}.") from None
    except Exception as error:  # a header made to break numpy's parser can raise anything
        raise LayoutError(unreadable(str(path), error)) from None
    if not isinstance(array, np.ndarray):
        raise LayoutError(f"{path} holds no single array.")
    return array


def unreadable(where: str, error: Exception) -> str:
    """The sentence for what numpy could not read."""
    text = str(error).strip()
    if "bject arrays" in text or "Python objects" in text or "pickle" in text.lower():
        return f"{where} holds Python objects, or is no array; tensortap never unpickles."
    line = text.splitlines()[0][:200] if text else type(error).__name__
    return f"{where} is corrupt or no array: {line}"


class NpyPart:
    """Loads one batch of an array when it is asked for."""

    def __init__(
        self, path: Path, dtype: torch.dtype | None, parts: tuple[Part, ...], index: int
    ) -> None:
        self.path = path
        self.dtype = dtype
        self.parts = parts
        self.index = index

    def __call__(self) -> torch.Tensor:
        return split(open_npy(self.path), self.dtype, self.parts, self.index, str(self.path))
