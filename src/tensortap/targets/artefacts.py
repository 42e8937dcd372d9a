"""A model file as a target: `model.pt`, `model.pt2`, `model.onnx`, `model.xml`, `model.taps.json`.

It is opened as the compiled model that it is, and its inputs come from files of their own. Opening
TorchScript, or a library of custom operators, runs code that the file brings along.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import OptionError, TargetError
from ..taps.programs.base import Options, Program
from ..taps.programs.kinds import kind_of, open_program
from ..taps.programs.nearby import near_files
from ..taps.programs.opaque.manifest import is_manifest, manifest_beside, manifest_path
from .fitting import Takes, fit
from .inputs_from import SUFFIXES as INPUT_SUFFIXES
from .inputs_from import read_inputs
from .target import Batch, Target

__all__ = ["SUFFIXES", "check_usable", "is_artefact", "load_artefact", "models_in", "with_inputs"]

SUFFIXES = (
    ".pt", ".pth", ".ts", ".jit", ".torchscript", ".pt2", ".ep", ".onnx", ".xml", ".taps.json",
)  # fmt: skip
_FUNCTION_OPTIONS = ("mode", "seq_len", "samples", "device", "dtype", "seed")
_WEIGHTS = (".safetensors", ".bin", ".ckpt", ".gguf")


def is_artefact(spec: str) -> bool:
    """Whether this names a file, there or not, and not a function that builds a model."""
    if spec.startswith("hf:"):
        return False
    path = Path(spec)
    if path.suffix == ".py":
        return False
    return path.is_file() or spec.lower().endswith(SUFFIXES)


def models_in(folder: Path) -> list[Path]:
    """The model files in a folder."""
    return sorted(item for item in folder.iterdir() if item.name.lower().endswith(SUFFIXES))


def load_artefact(
    spec: str,
    values: Mapping[str, Any],
    *,
    prompts: Sequence[str] = (),
    input_ids: object = None,
    inputs_from: Sequence[str | os.PathLike[str]] = (),
    options: Options | None = None,
    plan: bool = False,
) -> Target:
    """Open a model file, and fit the inputs of other files to it; a `plan` needs none."""
    _check_given(spec, values, prompts, input_ids)
    options = options or Options()
    path = Path(spec)
    _check_files(path, options)
    program, notes = _open(path, options)
    target = Target(program, Batch(), name=spec, notes=notes)
    if inputs_from:
        return with_inputs(target, inputs_from, options)
    if plan:
        return target
    takes = Takes.of(program)
    told = f" {takes}" if takes.arguments else ""
    raise OptionError(
        f"The model file '{spec}' brings no inputs along. Give --inputs-from FILE "
        f"({', '.join(INPUT_SUFFIXES)}), with a tensor an argument.{told}"
    )


def _open(path: Path, options: Options) -> tuple[Program, tuple[str, ...]]:
    """The program of a file; a manifest that lies beside it is taken unless another is named."""
    if options.manifest is not None or is_manifest(path):
        return open_program(path, options), ()
    try:
        beside = manifest_beside(path)
        if beside is None:
            return open_program(path, options), ()
        program = open_program(path, replace(options, manifest=beside))
    except TargetError as error:
        found = manifest_path(path)
        if str(found) not in str(error):
            raise
        raise TargetError(
            f"{error} It was found beside the model: move '{found}' away to record the model "
            "without it."
        ) from error
    return program, (f"The names of the model's extra outputs are those of '{beside}', beside it.",)


def with_inputs(
    target: Target, files: Sequence[str | os.PathLike[str]], options: Options | None = None
) -> Target:
    """The target with the inputs of these files, each a batch, in place of its own."""
    model = target.model
    declared = model
    if not _is_eager(model) and not isinstance(model, Program) and kind_of(model) is not None:
        declared = open_program(model, options)
    takes = Takes.of(declared)
    called = f"'{target.name}'" if target.name else "the model"
    device = _device(model)
    batches: list[Batch] = []
    notes: list[str] = []
    for file in files:
        batch, told = fit(read_inputs(file), takes, f"'{file}'", called)
        batches.append(batch if device is None else _moved(batch, device))
        notes += [text for text in told if text not in notes]
    return replace(target, inputs=batches, notes=(*target.notes, *notes))


def check_usable(target: Target, options: Options) -> None:
    """Refuse what is said about a compiled model where the model is none."""
    given = {
        "--weights": options.weights,
        "--names-from": options.names_from,
        "--accept-inferred": options.accept_inferred,
        "--no-self-check": not options.self_check,
        "--custom-ops": options.custom_ops,
    }
    wrong = [flag for flag, value in given.items() if value]
    if wrong and _is_eager(target.model) and not _has_parts(target.model):
        raise OptionError(
            f"{' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} for compiled models; that "
            f"of '{target.name}' is a {type(target.model).__name__}, whose layers have names of "
            "their own. Leave it out."
        )


def _is_eager(model: object) -> bool:
    return isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule)


def _has_parts(model: object) -> bool:
    from ..taps.inside import find_parts

    return bool(find_parts(model))


def _check_given(
    spec: str, values: Mapping[str, Any], prompts: Sequence[str], input_ids: object
) -> None:
    wrong = [f"--{key.replace('_', '-')}" for key in values if key in _FUNCTION_OPTIONS]
    wrong += [f"--set {key}=…" for key in values if key not in _FUNCTION_OPTIONS]
    tokens = ["--prompt"] * bool(prompts) + ["--input-ids"] * (input_ids is not None)
    if not wrong and not tokens:
        return
    named = [*wrong, *tokens]
    where = " Token ids go into a file: --inputs-from FILE." if tokens else ""
    raise OptionError(
        f"'{spec}' is a compiled model: {' and '.join(named)} cannot change it any more, and "
        f"{'is' if len(named) == 1 else 'are'} for functions that build a model, and for hf:DIR."
        f"{where}"
    )


def _check_files(path: Path, options: Options) -> None:
    graph = path.with_suffix(".xml")
    if path.suffix == ".bin" and path.is_file() and graph.is_file():
        raise TargetError(f"'{path}' holds the weights of '{graph}'. Name that one.")
    if path.is_file() and path.suffix.lower() in _WEIGHTS and options.runtime is None:
        raise TargetError(
            f"'{path}' holds weights and no model. Name a function that builds the model "
            "(file.py:function), a checkpoint's folder (hf:DIR), or a compiled model "
            f"({', '.join(SUFFIXES)})."
        )
    others: list[tuple[str, Path | None]] = [
        ("--manifest", options.manifest),
        ("--weights", options.weights),
        ("--names-from", options.names_from),
        *(("--custom-ops", library) for library in options.custom_ops),
    ]
    for flag, other in others:
        if other is None or other.is_file():
            continue
        if flag == "--weights" and other.is_dir():
            continue  # a checkpoint in several files
        what = "is a folder, not a file" if other.is_dir() else "does not exist"
        raise OptionError(f"The {flag} file '{other}' {what}.{near_files(other)}")


def _device(model: Any) -> torch.device | None:
    """Where a module's weights are, when that is not where files are read to."""
    if not isinstance(model, nn.Module):
        return None
    devices = {parameter.device for parameter in model.parameters()}
    found = devices.pop() if len(devices) == 1 else None
    return None if found is None or found.type in ("cpu", "meta") else found


def _moved(batch: Batch, device: torch.device) -> Batch:
    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return Batch(
        tuple(move(value) for value in batch.args),
        {name: move(value) for name, value in batch.kwargs.items()},
    )
