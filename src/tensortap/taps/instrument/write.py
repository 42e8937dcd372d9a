"""Writes models with taps in them, with their manifest, and tries what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ...errors import OptionError, TapError, TargetError
from ..fused import find_fused
from ..leaves import flatten
from ..programs.base import Options
from ..programs.opaque.manifest import Entry, Manifest, Part, digest, is_manifest, manifest_path
from ..programs.quiet import quietly
from .flat import flatten_model
from .formats import compile_module, format_of, told
from .wrapper import instrument

__all__ = ["ModuleSource", "Source", "Written", "check", "files_of", "shares", "twin_of", "write"]

_EXACT = ("torchscript", "pt2")
_CLOSE = 1e-5


@dataclass(frozen=True)
class Written:
    """What was written: the artefacts, their manifest, and what one run of them returns."""

    files: tuple[Path, ...]
    manifest_file: Path
    manifest: Manifest
    format: str
    nbytes: int
    reference: tuple[torch.Tensor, ...]
    output: Any


def files_of(path: Path, split: int) -> list[Path]:
    """The artefacts' files: `model.pt`, or `model.0.pt`, `model.1.pt`, … of a model in parts."""
    if split == 1:
        return [path]
    return [path.with_name(f"{path.stem}.{index}{path.suffix}") for index in range(split)]


def shares(manifest: Manifest, sizes: Sequence[int], count: int) -> list[tuple[str, ...]]:
    """The layers in `count` groups of about equal bytes, each a stretch of the execution order."""
    layers = manifest.layers
    if not 1 <= count <= len(layers):
        raise OptionError(
            f"--split is {count}, expected a number from 1 to {len(layers)}, the number of layers."
        )
    weight = dict.fromkeys(layers, 0)
    for entry, size in zip(manifest.entries, sizes, strict=True):
        weight[entry.layer] += size
    groups: list[list[str]] = [[]]
    done, total = 0, sum(weight.values())
    for index, layer in enumerate(layers):
        left = len(layers) - index
        full = (done + weight[layer] / 2) * count > total * len(groups)
        if groups[-1] and len(groups) < count and (full or left <= count - len(groups)):
            groups.append([])
        groups[-1].append(layer)
        done += weight[layer]
    return [tuple(group) for group in groups]


class Source(Protocol):
    """A model that taps can be put into, with the inputs that it is compiled on."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    comparable: bool  # whether it computes the same bits with taps and without

    def run(self) -> tuple[Any, Sequence[torch.Tensor], Manifest]:
        """The model's output, the taps on all chosen layers, and their manifest."""
        ...

    def compile(self, layers: Sequence[str], path: Path, form: str) -> Manifest:
        """Write the model with taps on these layers; the manifest of what was written."""
        ...

    def compile_bare(self, path: Path, form: str, manifest: Manifest) -> None:
        """Write the model without taps; the manifest has the names of its outputs."""
        ...


class ModuleSource:
    """An eager module."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        layers: str | Sequence[str],
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self._model = model
        self._wrapped = instrument(model, layers)
        self.comparable = not find_fused(model)  # which leave their fused path when they have taps

    def run(self) -> tuple[Any, Sequence[torch.Tensor], Manifest]:
        output, taps = told("run", lambda: self._wrapped(*self.args, **self.kwargs))
        return output, taps, self._wrapped.manifest

    def compile(self, layers: Sequence[str], path: Path, form: str) -> Manifest:
        wrapped = instrument(self._model, list(layers))
        told("run", lambda: wrapped(*self.args, **self.kwargs))
        flat, values = flatten_model(wrapped, self.args, self.kwargs)
        compile_module(flat, values, path, form, wrapped.manifest)
        return wrapped.manifest

    def compile_bare(self, path: Path, form: str, manifest: Manifest) -> None:
        flat, values = flatten_model(self._wrapped, self.args, self.kwargs, bare=True)
        compile_module(flat, values, path, form, manifest)


def write(
    source: Source,
    path: Path,
    *,
    to: str | None = None,
    split: int = 1,
    manifest_file: Path | None = None,
    overwrite: bool = False,
    plain: bool = False,
) -> Written:
    """Compile a model with its taps, in one artefact or several, and save it with its manifest.

    With `plain` it is compiled once more without taps, so that a recording can compare the two.
    """
    form = format_of(path, to)
    beside = _manifest_file(path, manifest_file)
    files = files_of(path, split)
    twin = twin_of(path) if plain and source.comparable else None
    _check_room([*files, beside, *([] if twin is None else [twin])], overwrite)
    old = _old_files(beside, path)
    with torch.no_grad():
        output, taps, manifest = source.run()
        if not taps:
            raise TargetError(
                "None of the selected layers returned a tensor, so there is nothing to tap. Select "
                "others with --layers."
            )
        sizes = [tap.numel() * tap.element_size() for tap in taps]
        parts = []
        for file, share in zip(files, shares(manifest, sizes, split), strict=True):
            _check_same(source.compile(share, file, form), manifest.of(share))
            parts.append(Part(file.name, share, digest(file)))
        if twin is not None:
            source.compile_bare(twin, form, manifest.of(()))
    manifest = replace(manifest, parts=tuple(parts), plain=None if twin is None else twin.name)
    manifest.save(beside)
    for file in old:
        if file not in (*files, twin):
            file.unlink(missing_ok=True)
    return Written(tuple(files), beside, manifest, form, sum(sizes), tuple(taps), output)


def twin_of(path: Path) -> Path:
    """Where the model without taps lies: `model.plain.pt` beside `model.pt`."""
    return path.with_name(f"{path.stem}.plain{path.suffix}")


def _old_files(manifest_file: Path, path: Path) -> list[Path]:
    """The artefacts that a manifest which is about to be replaced was written with."""
    if not manifest_file.is_file():
        return []
    try:
        known = Manifest.load(manifest_file)
    except TapError:
        return []
    files = [(manifest_file.with_name(part.file), part.digest) for part in known.parts]
    found = [file for file, mark in files if file.is_file() and digest(file) == mark]
    if known.plain is not None and known.plain == twin_of(path).name:
        found.append(manifest_file.with_name(known.plain))
    return found


def _manifest_file(path: Path, given: Path | None) -> Path:
    if given is None:
        return manifest_path(path)
    if given.parent.resolve() != path.parent.resolve() or not is_manifest(given):
        raise OptionError(
            f"--manifest is '{given}', expected a file in the folder of '{path}' whose name ends "
            "in .taps.json: a manifest lies beside its artefact."
        )
    return given


def _check_room(files: Sequence[Path], overwrite: bool) -> None:
    for file in files:
        if not file.parent.is_dir():
            raise OptionError(f"The folder '{file.parent}' does not exist.")
        if file.exists() and not overwrite:
            raise OptionError(f"'{file}' exists already. Replace it with --overwrite.")
        if file.is_dir():
            raise OptionError(f"'{file}' is a folder.")


def _check_same(part: Manifest, expected: Manifest) -> None:
    """The compiler ran the model once more: it must have run the same layers in the same order."""
    found = [_identity(entry) for entry in part.entries]
    if found != [_identity(entry) for entry in expected.entries]:
        raise TargetError(
            "While it was compiled the model ran other layers, or in another order, than it did "
            "before: its control flow depends on something that compiling changes."
        )


def _identity(entry: Entry) -> tuple[str, str, int]:
    return entry.layer, entry.leaf, entry.call


# Trying it.


def check(written: Written, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Load what was written, run it once, and say where its taps are not the eager model's."""
    from ..programs.opaque.program import OpaqueProgram, open_with_manifest
    from ..programs.opaque.split import SplitProgram

    program = open_with_manifest(written.manifest_file, None, Options())
    assert isinstance(program, OpaqueProgram | SplitProgram)
    parts = program.parts if isinstance(program, SplitProgram) else (program,)
    expected = dict(zip(map(_identity, written.manifest.entries), written.reference, strict=True))
    failed: list[str] = []
    with torch.no_grad(), quietly():
        for part in parts:
            own, taps = told("check", partial(part.taps, args, kwargs))
            failed += _unlike_output(written, own)
            assert part.manifest is not None
            for entry, tap in zip(part.manifest.entries, taps, strict=True):
                why = _unlike(expected[_identity(entry)], tap, written.format in _EXACT)
                if why:
                    failed.append(f"'{entry.layer}'{entry.leaf}: {why}")
        if program.untapped:
            bare = told("check", partial(program.plain, args, kwargs))
            failed += [f"without taps, {why}" for why in _unlike_output(written, bare)]
    return failed


def _unlike_output(written: Written, own: Any) -> list[str]:
    """Where the model's own output is another; a cache, which is no tensor, is no part of it."""
    ours = dict(flatten(written.output))
    theirs = dict(flatten(own))
    if list(ours) != list(theirs):
        return [f"the model's own output has {list(theirs)}, expected {list(ours)}"]
    found = []
    for leaf, tensor in ours.items():
        got = theirs[leaf]
        if tensor is None or got is None:
            continue
        why = _unlike(tensor, got, written.format in _EXACT)
        if why:
            found.append(f"the model's own output{leaf}: {why}")
    return found


def _unlike(expected: torch.Tensor, got: torch.Tensor, exact: bool) -> str | None:
    if expected.shape != got.shape:
        return f"the shape is {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    left, right = expected.cpu().to(wide), got.cpu().to(wide)
    other = ~((left == right) | (left.isnan() & right.isnan()))
    if not other.any():
        return None
    off = float((left[other] - right[other]).abs().max())
    finite = left.abs()[left.isfinite()]
    allowed = 0.0 if exact or not finite.numel() else _CLOSE * float(finite.max())
    return None if off <= allowed else f"off by up to {off:.3g}"
