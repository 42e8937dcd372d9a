"""Compiles an instrumented model to a file, one function a format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import MissingExtraError, OptionError, TapError, TargetError
from ..leaves import flatten
from ..programs.opaque.manifest import Manifest
from ..programs.quiet import quietly

__all__ = ["FORMATS", "compile_export", "compile_module", "format_of", "told"]

FORMATS: dict[str, tuple[str, ...]] = {
    "torchscript": (".pt", ".pth", ".ts", ".jit", ".torchscript"),
    "pt2": (".pt2", ".ep"),
    "onnx": (".onnx",),
    "openvino": (".xml",),
    "aoti": (".pt2",),
}


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


def compile_module(
    flat: nn.Module, values: Mapping[str, Any], path: Path, form: str, manifest: Manifest
) -> None:
    """Compile a module that takes these values, in order, and returns (output, taps)."""
    if not values:
        raise TargetError("The inputs hold no tensor, so there is nothing to compile the model on.")
    given = tuple(values.values())
    with quietly():
        if form == "torchscript":
            told(form, lambda: _trace(flat, given, {}).save(str(path)))
        elif form == "openvino":
            told(
                form,
                lambda: _openvino(_trace(flat, given, {}), given, path, _leaves(values), manifest),
            )
        else:
            export = told(form, lambda: torch.export.export(flat, given, strict=False))
            named = all(isinstance(value, torch.Tensor) for value in given)
            _from_export(export, path, form, list(values) if named else None, manifest)


def compile_export(
    export: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    path: Path,
    form: str,
    manifest: Manifest,
) -> None:
    """Compile an exported program that returns (output, taps)."""
    with quietly():
        if form not in ("torchscript", "openvino"):
            _from_export(export, path, form, None, manifest)
            return
        if args and kwargs:
            raise TargetError(
                "The program was exported with arguments by position and by name; "
                f"{form} takes the one or the other. Write it as pt2, onnx or aoti."
            )
        traced = told(form, lambda: _trace(export.module(), args, kwargs))
        if form == "torchscript":
            told(form, lambda: traced.save(str(path)))
        else:
            example = args or dict(kwargs)
            told(form, lambda: _openvino(traced, example, path, manifest.inputs, manifest))


def _trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    trace: Any = torch.jit.trace  # untyped in torch
    given = {"example_kwarg_inputs": dict(kwargs)} if kwargs else {"example_inputs": args}
    return trace(model, strict=False, check_trace=False, **given)


def _from_export(
    export: Any, path: Path, form: str, inputs: list[str] | None, manifest: Manifest
) -> None:
    work: dict[str, Callable[[], Any]] = {
        "pt2": lambda: _save(export, path),
        "aoti": lambda: _aoti(export, path),
        "onnx": lambda: _onnx(export, path, inputs, manifest),
    }
    told(form, work[form])


def _save(export: Any, path: Path) -> None:
    save: Any = torch.export.save
    save(export, str(path))


def _aoti(export: Any, path: Path) -> None:
    from torch import _inductor

    package: Any = _inductor.aoti_compile_and_package
    package(export, package_path=str(path))


def _onnx(export: Any, path: Path, inputs: list[str] | None, manifest: Manifest) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("onnx and onnxscript", "onnx", "Writing ONNX") from error
    to_onnx: Any = torch.onnx.export
    to_onnx(
        export,
        (),
        str(path),
        dynamo=True,
        verbose=False,
        input_names=inputs,
        output_names=_output_names(manifest),
    )


def _openvino(
    traced: Any,
    example: Any,
    path: Path,
    inputs: Sequence[str],
    manifest: Manifest,
) -> None:
    try:
        import openvino
    except ImportError as error:
        raise MissingExtraError("openvino", "openvino", "Writing OpenVINO IR") from error
    library: Any = openvino
    model = library.convert_model(traced, example_input=example)
    names = _output_names(manifest)
    if len(names) != len(model.outputs):
        raise TargetError(
            f"OpenVINO made {len(model.outputs)} outputs of {len(names)} tensors: it cannot take "
            "this model with these taps."
        )
    for output, name in zip(model.outputs, names, strict=True):
        output.get_tensor().set_names({name})
    for given, name in zip(model.inputs, inputs, strict=False):
        given.get_tensor().set_names({name})
    library.save_model(model, str(path), compress_to_fp16=False)


def _leaves(values: Mapping[str, Any]) -> list[str]:
    """Names for a runtime that takes tensors alone: `past.0` and `past.1` where `past` has two."""
    found: list[str] = []
    for name, value in values.items():
        count = sum(tensor is not None for _, tensor in flatten(value))
        alone = isinstance(value, torch.Tensor)
        found += [name] if alone else [f"{name}.{index}" for index in range(count)]
    return found


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


_STEPS = {"run": "The model failed on its inputs", "check": "What was written cannot be run"}


def told(what: str, work: Callable[[], Any]) -> Any:
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
