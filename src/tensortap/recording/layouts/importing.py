"""Turns trees of tensor files into recordings."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...errors import LayoutError, OptionError, RecordingError
from ..contents import INPUTS, TARGET
from ..kinds import Kind, plain, why_unfit
from ..schema import MANIFEST, Manifest
from ..writer import Writer, now, prepare
from .base import Progress, Tree, _silent, detect, get
from .files import safe_name

__all__ = ["Imported", "import_read", "import_tree"]


@dataclass(frozen=True)
class Imported:
    """One recording that an import wrote."""

    path: str
    layout: str
    mode: str | None
    layers: int
    records: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "layout": self.layout,
            "mode": self.mode,
            "layers": self.layers,
            "records": self.records,
        }


def import_tree(
    source: str | os.PathLike[str],
    out: str,
    *,
    layout: str = "auto",
    mode: str | None = None,
    only: str | None = None,
    overwrite: bool = False,
    progress: Progress = _silent,
) -> list[Imported]:
    """Write a tree as a recording; several modes in one tree become one recording each below.

    `only` is a glob over the names that the tree's files have, as `layer_*`: the rest is not read.
    """
    path = Path(source)
    if not path.exists():
        raise LayoutError(f"There is nothing to import: {path} does not exist.")
    if (path / MANIFEST).exists():
        raise LayoutError(f"{path} is already a recording. Look at it: tensortap show {path}")
    chosen = detect(path) if layout == "auto" else get(layout)
    trees = _choose(chosen.read(path), mode, path)
    if only is not None:
        trees = [_part(tree, only, path) for tree in trees]
    places = [out]
    if len(trees) > 1:
        places = [f"{out}/{safe_name(tree.mode or 'recording', 'mode')}" for tree in trees]
    total = sum(len(tree.entries) for tree in trees)
    done = 0
    results = []
    for tree, place in zip(trees, places, strict=True):
        told = _shifted(progress, done, total)
        results.append(import_read(tree, place, chosen.name, str(source), mode, overwrite, told))
        done += len(tree.entries)
    return results


def import_read(
    tree: Tree,
    out: str,
    layout: str,
    source: str,
    mode: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Imported:
    """Write a tree that was read already as one recording."""
    manifest = _manifest(tree, layout, source, mode)
    _write(tree, manifest, out, overwrite, progress)
    layers = len({entry.row.layer for entry in tree.entries})
    return Imported(out, layout, manifest.mode, layers, len(tree.entries))


def _shifted(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(before + done, total)


def _choose(trees: Sequence[Tree], mode: str | None, path: Path) -> list[Tree]:
    """The tree of the mode that was asked for; a tree without modes takes any name."""
    if mode is None or (len(trees) == 1 and trees[0].mode is None):
        return list(trees)
    fitting = [tree for tree in trees if tree.mode == mode]
    if not fitting:
        known = ", ".join(str(tree.mode) for tree in trees)
        raise OptionError(f"There is no mode '{mode}' in {path}. Its modes are: {known}.")
    return fitting


def _part(tree: Tree, only: str, path: Path) -> Tree:
    names = [entry.row.alias or entry.row.layer or "root" for entry in tree.entries]
    kept = tuple(e for e, name in zip(tree.entries, names, strict=True) if fnmatchcase(name, only))
    if not kept:
        raise LayoutError(
            f"Nothing in {path} is called '{only}'. It holds {', '.join(names[:4])}"
            f"{f', … ({len(names)} in all)' if len(names) > 4 else ''}."
        )
    return replace(tree, entries=kept)


def _fitting(
    found: Mapping[str, Any], kinds: Mapping[str, Kind], notes: list[str]
) -> dict[str, Any]:
    """What a tree says of its run, as far as a recording may hold it; the rest is a note."""
    kept = {}
    for key, value in found.items():
        problem = why_unfit(kinds.get(key, plain), value, f"'{key}'")
        if problem is None:
            kept[key] = value
        else:
            notes.append(f"Not imported, as it cannot be so: {problem}.")
    return kept


def _manifest(tree: Tree, layout: str, source: str, mode: str | None) -> Manifest:
    notes = list(tree.notes)
    target, inputs = _fitting(tree.target, TARGET, notes), _fitting(tree.inputs, INPUTS, notes)
    return Manifest(
        tool=f"tensortap {__version__}",
        torch=torch.__version__,
        python=platform.python_version(),
        created=now(),
        mode=tree.mode if tree.mode is not None else mode,
        target={**target, "imported": {"layout": layout, "source": source}},
        selection={
            "layers": list(dict.fromkeys(entry.row.layer for entry in tree.entries)),
            "ports": sorted({entry.row.port for entry in tree.entries}),
            "keep": "tensors",
        },
        structure=tree.structure,
        inputs=inputs,
        notes=notes,
    )


def _write(
    tree: Tree, manifest: Manifest, place: str, overwrite: bool, progress: Callable[[int], None]
) -> None:
    """Write one tree; a tree that turns out to be bad leaves nothing behind."""
    writer = Writer(place, manifest, overwrite=overwrite)
    whole = False
    try:
        for number, entry in enumerate(tree.entries):
            progress(number)
            writer.add(entry.row, entry.load())
        whole = True
    finally:
        writer.close("complete" if whole else "failed")
        if not whole or writer.failure is not None:
            prepare(writer.store, overwrite=True)
            with contextlib.suppress(OSError):
                Path(place).rmdir()
    progress(len(tree.entries))
    if writer.failure is not None:
        raise RecordingError(f"Cannot write the recording {place}: {writer.failure}.")
