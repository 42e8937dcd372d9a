"""Which runtime a compiled model is for: told by the object, or by a look into its file."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import OptionError, TargetError
from .base import Kind, Options, Program, is_program
from .nearby import near_files
from .using import check_used

__all__ = ["kind_of", "kinds", "open_program"]

# In the order in which they are asked.
_HOMES = (
    ("torchscript.kind", "KIND"),
    ("exported.kind", "KIND"),
    ("aoti", "KIND"),
    ("onnx.kind", "KIND"),
    ("openvino.kind", "KIND"),
    ("torchscript.ops", "KIND"),
)
_OPAQUE = ("opaque.program", "KIND")


def kinds() -> list[Kind]:
    """Every runtime, in the order in which they are asked; what is merely callable comes last."""
    return [_load(*home) for home in (*_HOMES, _OPAQUE)]


def _load(home: str, name: str) -> Kind:
    kind: Kind = getattr(import_module(f".{home}", __package__), name)
    return kind


def kind_of(model: object) -> Kind | None:
    """The runtime of a live object, or None; what is merely callable is of none."""
    return next((kind for kind in kinds() if kind.name != "opaque" and kind.accepts(model)), None)


def open_program(model: Any, options: Options | None = None) -> Program:
    """The program of a compiled model: an object, or the path of its file."""
    options = options or Options()
    if is_program(model):
        program: Program = model
        return program
    if isinstance(model, str | os.PathLike):
        return _open_file(Path(model), options)
    kind = _forced(options) if options.runtime else kind_of(model)
    if kind is None or options.manifest is not None:  # the manifest names what comes out
        kind = _load(*_OPAQUE)
    if not kind.accepts(model):
        raise OptionError(
            f"A {type(model).__module__}.{type(model).__qualname__} is no model for the runtime "
            f"'{kind.name}'. Leave --runtime out, or name another: {_names()}."
        )
    return _opened(kind, model, options)


def _opened(kind: Kind, model: Any, options: Options) -> Program:
    check_used(options, kind.uses, f"a model of the runtime '{kind.name}'")
    return kind.program(model, options)


def _open_file(path: Path, options: Options) -> Program:
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise TargetError(f"The model file '{path}' {what}.{near_files(path)}")
    if options.manifest is not None or path.name.endswith(".taps.json"):
        from .opaque.program import open_with_manifest

        return open_with_manifest(path, options.manifest, options)
    if options.runtime:
        return _opened(_forced(options), path, options)
    fitting = [
        kind
        for kind in kinds()
        if any(path.name.lower().endswith(suffix) for suffix in kind.suffixes)
    ]
    if not fitting:
        raise TargetError(
            f"'{path}' is of no kind that is known by its name: expected one of {_suffixes()}. "
            f"Name the runtime with --runtime: {_names()}."
        )
    for kind in fitting:
        if kind.recognises(path):
            return _opened(kind, path, options)
    return fitting[0].program(path, options)  # it says what is wrong with the file


def _forced(options: Options) -> Kind:
    for kind in kinds():
        if kind.name == options.runtime:
            return kind
    raise OptionError(f"There is no runtime '{options.runtime}'. Expected one of: {_names()}.")


def _names() -> str:
    return ", ".join(kind.name for kind in kinds())


def _suffixes() -> str:
    return ", ".join(dict.fromkeys(suffix for kind in kinds() for suffix in kind.suffixes))
