"""The file of document 002: input and output of one layer, every mode in one .npz.

    first_layer_io_all_modes.npz          keys mode_<mode>_input, mode_<mode>_output
    first_layer_io_all_modes_stats.json   the document's statistics of them

A mode that is exported into an existing file joins those that are there.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import LayoutError
from ..schema import Port, Row, Structure
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
from .naming import json_safe, mode_of, plain, told_about
from .npy import unreadable

if TYPE_CHECKING:
    from ..reader import Record, Recording

__all__ = ["NpzLayout"]

_DEFAULT = "first_layer_io_all_modes.npz"
_KEY = re.compile(r"mode_(.+)_(input|output)\.npy")
_PORTS: tuple[Port, Port] = ("input", "output")


class NpzLayout:
    """Seed 002's file."""

    name = "npz"

    def detect(self, source: Path) -> bool:
        if source.is_dir():
            return any(name.endswith(".npz") for name in listing(source))
        return source.suffix == ".npz"

    def export(self, recording: Recording, out: Path, options: ExportOptions) -> Exported:
        mode = mode_of(recording, options.mode)
        safe_name(mode, "mode")
        layer = _layer(recording, options.layer)
        groups: dict[Port, tuple[Record, ...]] = {p: gather(recording, layer, p) for p in _PORTS}
        path = out if out.suffix == ".npz" else out / _DEFAULT
        folder(path.parent)
        stats = _old_stats(path)
        keys = [f"mode_{mode}_{port}.npy" for port in _PORTS]
        old = _members(path) if path.exists() else []
        if set(keys) & set(old) and not options.overwrite:
            raise LayoutError(
                f"{path} already holds the mode '{mode}'. Choose another file or --mode, or "
                "replace it with --overwrite."
            )
        skipped = [
            Skipped(layer, f"{port}: {reason}")
            for port, records in groups.items()
            if (reason := unloadable(records))
        ]
        for item in skipped:
            groups[_PORTS[0] if item.reason.startswith("input") else _PORTS[1]] = ()
        if not any(groups.values()):
            why = skipped[0].reason if skipped else "It has neither an input nor an output tensor."
            raise LayoutError(f"Nothing of '{layer}' could be exported. {why}")
        told: dict[str, Any] = {"layer": layer}
        options.progress(0, 1)
        with writing(path) as scratch, zipfile.ZipFile(scratch, "w", allowZip64=True) as target:
            _copy(path, target, [name for name in old if name not in keys])
            for port, records in groups.items():
                if records:
                    array = join(records)
                    _write(target, f"mode_{mode}_{port}.npy", array)
                    told[port] = describe(records, array.shape)
        options.progress(1, 1)
        write_json(_stats_path(path), _stats(recording, stats, mode, told, options.about))
        notes = [
            f"The {port} of '{layer}' is not in the recording, so the key mode_{mode}_{port} is "
            f"not in the file.{' Record with --inputs.' if port == 'input' else ''}"
            for port in _PORTS
            if not recording[layer].port(port)
        ]
        return Exported(
            path=str(path),
            layout=self.name,
            files=(path.name, _stats_path(path).name),
            left_out=left_out(recording, [r for records in groups.values() for r in records]),
            skipped=tuple(skipped),
            notes=tuple(notes),
        )

    def read(self, source: Path) -> list[Tree]:
        path = _file(source)
        stats = _old_stats(path)
        told = stats.get("modes")
        modes: dict[str, dict[str, str]] = {}
        for name in _members(path):
            if match := _KEY.fullmatch(name):
                modes.setdefault(match[1], {})[match[2]] = name
        if not modes:
            raise LayoutError(
                f"There is nothing to import in {path}: no key mode_<mode>_input or "
                "mode_<mode>_output."
            )
        return [
            _tree(path, mode, keys, stats, told.get(mode) if isinstance(told, Mapping) else None)
            for mode, keys in modes.items()
        ]


def _layer(recording: Recording, wanted: str | None) -> str:
    if wanted is not None:
        return recording.resolve(wanted)
    blocks = [name for name in recording.manifest.structure.blocks if name in recording.layers]
    if blocks or recording.layers:
        return (blocks or recording.layers)[0]
    raise LayoutError(f"{recording.path} holds no layers, so there is nothing to export.")


def _stats_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}_stats.json")


def _old_stats(path: Path) -> dict[str, Any]:
    stats = _stats_path(path)
    return read_json(inside(stats.parent, stats.name)) if stats.exists() else {}


def _stats(
    recording: Recording,
    old: Mapping[str, Any],
    mode: str,
    told: Mapping[str, Any],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The document's statistics, with what an import needs beside them."""
    shape = next(told[port]["shape"] for port in _PORTS if port in told)
    about = told_about(recording)
    spec = str(recording.manifest.target.get("spec") or "")
    modes = old.get("modes")
    return {
        "timestamp": datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
        "model": about["model"],
        "pretrained_dir": spec.removeprefix("hf:") if spec.startswith("hf:") else None,
        "seq_len": shape[1] if len(shape) > 1 else None,
        **json_safe(given),
        "modes": {
            **(modes if isinstance(modes, dict) else {}),
            mode: {**told, **{key: about[key] for key in ("structure", "inputs", "target")}},
        },
    }


def _members(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, ValueError, EOFError):
        raise LayoutError(f"{path} is corrupt or no .npz file.") from None
    except OSError as error:
        raise LayoutError(f"Cannot read {path}: {error.strerror or error}.") from None


def _copy(path: Path, target: zipfile.ZipFile, names: list[str]) -> None:
    if not names:
        return
    with zipfile.ZipFile(path) as archive:
        for name in names:
            with archive.open(name) as old, target.open(name, "w", force_zip64=True) as new:
                shutil.copyfileobj(old, new, 1 << 20)


def _write(target: zipfile.ZipFile, name: str, array: Array) -> None:
    with target.open(name, "w", force_zip64=True) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)


def _file(source: Path) -> Path:
    if not source.is_dir():
        return inside(source.parent, source.name)
    found = [name for name in listing(source) if name.endswith(".npz")]
    if len(found) == 1:
        return inside(source, found[0])
    if not found:
        raise LayoutError(f"There is nothing to import in {source}: no .npz file.")
    raise LayoutError(f"{source} holds {len(found)} .npz files. Name one: {', '.join(found[:5])}.")


def _tree(
    path: Path, mode: str, keys: Mapping[str, str], stats: Mapping[str, Any], told: object
) -> Tree:
    about: Mapping[str, Any] = told if isinstance(told, Mapping) else {}
    layer = about.get("layer")
    layer = layer if isinstance(layer, str) else "layer_0"
    ports = [port for port in _PORTS if port in keys]
    entries: list[Entry] = []
    for place, port in enumerate(ports):
        known = about.get(port)
        known = known if isinstance(known, Mapping) else {}
        member = _Member(path, keys[port])
        dtype, parts = parts_of(known, member.shape(), f"{keys[port]} in {path}")
        alias = known.get("alias")
        entries += [
            Entry(
                Row(
                    layer=layer,
                    port=port,
                    leaf=str(known.get("leaf") or ""),
                    alias=alias if isinstance(alias, str) else None,
                    type=str(known.get("type") or ""),
                    epoch=part.epoch,
                    batch=part.batch,
                    order=place + number * len(ports),
                ),
                _NpzPart(member, dtype, parts, number),
            )
            for number, part in enumerate(parts)
        ]
    structure = about.get("structure")
    model = stats.get("model")
    target = about.get("target")
    if not isinstance(target, dict):
        target = {"class": str(model)} if isinstance(model, str) else {}
    return Tree(
        entries=tuple(entries),
        structure=Structure.from_dict(structure)
        if isinstance(structure, Mapping)
        else Structure(blocks=(layer,)),
        mode=mode,
        inputs=plain(about.get("inputs")) if isinstance(about.get("inputs"), dict) else {},
        target=plain(target),
    )


class _Member:
    """One array inside an .npz; the last one read is kept, for its batches come in a row."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self._array: Array | None = None

    @property
    def where(self) -> str:
        return f"{self.name} in {self.path}"

    def shape(self) -> tuple[int, ...]:
        return tuple(self.load().shape)

    def load(self) -> Array:
        if self._array is None:
            self._array = self._read()
        return self._array

    def _read(self) -> Array:
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.name) as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        except OSError as error:
            raise LayoutError(f"Cannot read {self.path}: {error.strerror or error}.") from None
        except Exception as error:  # an archive made to break zipfile or numpy can raise anything
            raise LayoutError(unreadable(self.where, error)) from None


class _NpzPart:
    """Loads one batch of a member when it is asked for."""

    def __init__(
        self, member: _Member, dtype: torch.dtype | None, parts: tuple[Part, ...], index: int
    ) -> None:
        self.member = member
        self.dtype = dtype
        self.parts = parts
        self.index = index

    def __call__(self) -> torch.Tensor:
        return split(self.member.load(), self.dtype, self.parts, self.index, self.member.where)
