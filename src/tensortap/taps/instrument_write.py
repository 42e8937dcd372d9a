"""Compiles an instrumented model to a file, one function a format, and tries what came out."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import MissingExtraError, OptionError, TapError, TargetError
from .instrument import Instrumented, instrument
from .instrument_flat import flatten_model
from .leaves import flatten
from .programs.base import Options
from .programs.manifest import Entry, Manifest, Part, digest, is_manifest, manifest_path

__all__ = ["FORMATS", "Written", "check", "files_of", "format_of", "shares", "write"]

FORMATS: dict[str, tuple[str, ...]] = {
    "torchscript": (".pt", ".pth", ".ts", ".jit", ".torchscript"),
    "pt2": (".pt2", ".ep"),
    "onnx": (".onnx",),
    "openvino": (".xml",),
    "aoti": (".pt2",),
}
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


def format_of(path: Path, to: str | None) -> str:
    """The format that the user names, or that the file's name does."""
    if to is not None:
        if to not in FORMATS:
            raise OptionError(f"--to is {to!r}, expected one of {', '.join(FORMATS)}.")
        if path.suffix.lower() not in FORMATS[to]:
            raise OptionError(
                f"A file of the format {to} is named {' or '.join(FORMATS[to])}, got '{path}'."
            )
        return to
    for name, suffixes in FORMATS.items():
        if path.suffix.lower() in suffixes:
            return name
    raise OptionError(
        f"The name of '{path}' does not say which format it is to have. Name the format with --to: "
        f"{', '.join(FORMATS)}."
    )


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


def write(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    path: Path,
    *,
    layers: str | Sequence[str] = "blocks",
    to: str | None = None,
    split: int = 1,
    manifest_file: Path | None = None,
    overwrite: bool = False,
) -> Written:
    """Instrument a model, compile it with these inputs, and save it with its manifest."""
    form = format_of(path, to)
    beside = _manifest_file(path, manifest_file)
    files = files_of(path, split)
    _check_room([*files, beside], overwrite)
    with torch.no_grad():
        wrapped = instrument(model, layers)
        output, taps = _told("run", lambda: wrapped(*args, **kwargs))
        manifest = wrapped.manifest
        if not taps:
            raise TargetError(
                f"None of the {len(wrapped.layers)} selected layers returned a tensor, so there is "
                "nothing to tap. Select others with --layers."
            )
        sizes = [tap.numel() * tap.element_size() for tap in taps]
        parts = []
        for file, share in zip(files, shares(manifest, sizes, split), strict=True):
            part = wrapped if split == 1 else instrument(model, list(share))
            _write(part, args, kwargs, file, form)
            _check_same(part, manifest.of(share))
            parts.append(Part(file.name, share, digest(file)))
    manifest = replace(manifest, parts=tuple(parts))
    manifest.save(beside)
    return Written(tuple(files), beside, manifest, form, sum(sizes), tuple(taps), output)


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


def _check_same(part: Instrumented, expected: Manifest) -> None:
    """The compiler ran the model once more: it must have run the same layers in the same order."""
    found = [_identity(entry) for entry in part.manifest.entries]
    if found != [_identity(entry) for entry in expected.entries]:
        raise TargetError(
            "While it was compiled the model ran other layers, or in another order, than it did "
            "before: its control flow depends on something that compiling changes."
        )


def _identity(entry: Entry) -> tuple[str, str, int]:
    return entry.layer, entry.leaf, entry.call


# One function a format.


def _write(
    wrapped: Instrumented, args: tuple[Any, ...], kwargs: Mapping[str, Any], path: Path, form: str
) -> None:
    flat, values = flatten_model(wrapped, args, kwargs)
    if not values:
        raise TargetError("The inputs hold no tensor, so there is nothing to compile the model on.")
    compilers: dict[str, Callable[..., None]] = {
        "torchscript": _torchscript,
        "pt2": _exported,
        "onnx": _onnx,
        "openvino": _openvino,
        "aoti": _aoti,
    }
    with _quietly():
        _told(form, lambda: compilers[form](flat, values, path, wrapped))


def _trace(flat: nn.Module, values: Mapping[str, Any]) -> Any:
    trace: Any = torch.jit.trace  # untyped in torch
    return trace(flat, tuple(values.values()), strict=False, check_trace=False)


def _export(flat: nn.Module, values: Mapping[str, Any]) -> Any:
    return torch.export.export(flat, tuple(values.values()), strict=False)


def _torchscript(flat: nn.Module, values: Mapping[str, Any], path: Path, _: Any) -> None:
    _trace(flat, values).save(str(path))


def _exported(flat: nn.Module, values: Mapping[str, Any], path: Path, _: Any) -> None:
    save: Any = torch.export.save
    save(_export(flat, values), str(path))


def _aoti(flat: nn.Module, values: Mapping[str, Any], path: Path, _: Any) -> None:
    from torch import _inductor

    package: Any = _inductor.aoti_compile_and_package
    package(_export(flat, values), package_path=str(path))


def _onnx(flat: nn.Module, values: Mapping[str, Any], path: Path, wrapped: Instrumented) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("onnx and onnxscript", "onnx", "Writing ONNX") from error
    named = all(isinstance(value, torch.Tensor) for value in values.values())
    export: Any = torch.onnx.export
    export(
        flat,
        tuple(values.values()),
        str(path),
        dynamo=True,
        verbose=False,
        input_names=list(values) if named else None,
        output_names=_output_names(wrapped.manifest),
    )


def _openvino(
    flat: nn.Module, values: Mapping[str, Any], path: Path, wrapped: Instrumented
) -> None:
    try:
        import openvino
    except ImportError as error:
        raise MissingExtraError("openvino", "openvino", "Writing OpenVINO IR") from error
    library: Any = openvino
    example = tuple(values.values())
    model = library.convert_model(_trace(flat, values), example_input=example)
    names = _output_names(wrapped.manifest)
    if len(names) != len(model.outputs):
        raise TargetError(
            f"OpenVINO made {len(model.outputs)} outputs of {len(names)} tensors: it cannot take "
            "this model with these taps."
        )
    for output, name in zip(model.outputs, names, strict=True):
        output.get_tensor().set_names({name})
    for given, name in zip(model.inputs, values, strict=False):
        given.get_tensor().set_names({name})
    library.save_model(model, str(path), compress_to_fp16=False)


def _output_names(manifest: Manifest) -> list[str]:
    """Names for runtimes that want one an output; for the eye alone, order is what counts."""
    own = [f"output{leaf.leaf}" for leaf in manifest.output if leaf.tensor]
    taps = [f"tap:{e.layer}{e.leaf}" + (f"@{e.call}" if e.call else "") for e in manifest.entries]
    seen: dict[str, int] = {}
    unique = []
    for name in (*own, *taps):
        count = seen[name] = seen.get(name, 0) + 1
        unique.append(name if count == 1 else f"{name}#{count}")
    return unique


# Trying it.


def check(written: Written, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Load what was written, run it once, and say where its taps are not the eager model's."""
    from .programs.opaque import OpaqueProgram, open_with_manifest
    from .programs.split import SplitProgram

    program = open_with_manifest(written.manifest_file, None, Options())
    assert isinstance(program, OpaqueProgram | SplitProgram)
    parts = program.parts if isinstance(program, SplitProgram) else (program,)
    expected = dict(zip(map(_identity, written.manifest.entries), written.reference, strict=True))
    failed: list[str] = []
    with torch.no_grad(), _quietly():
        for part in parts:
            own, taps = _told("check", partial(part.taps, args, kwargs))
            failed += _unlike_output(written, own)
            assert part.manifest is not None
            for entry, tap in zip(part.manifest.entries, taps, strict=True):
                why = _unlike(expected[_identity(entry)], tap, written.format in _EXACT)
                if why:
                    failed.append(f"'{entry.layer}'{entry.leaf}: {why}")
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


_STEPS = {"run": "The model failed on its inputs", "check": "What was written cannot be run"}


def _told(what: str, work: Callable[[], Any]) -> Any:
    """Do it; whatever a compiler raises is a sentence."""
    try:
        return work()
    except TapError:
        raise
    except Exception as error:  # a model's, or a compiler's
        if os.environ.get("TENSORTAP_TRACEBACK"):
            raise
        begin = _STEPS.get(what, f"The instrumented model cannot be written as {what}")
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = (lines or ["no message"])[0][:400]
        raise TargetError(f"{begin}: {type(error).__name__}: {told}") from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Compilers are talkative about what is not the user's doing."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "openvino")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
