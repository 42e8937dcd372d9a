"""TorchScript: models that were scripted or traced, as objects or in files without their source.

Loading such a file runs the code in it, as running any model does; telling what a file is runs
nothing and unpickles nothing.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from ....errors import TargetError
from ..base import Options, Program

__all__ = ["KIND", "SUFFIXES", "TorchScriptKind", "is_frozen", "opened"]

SUFFIXES = (".pt", ".pth", ".ts", ".jit", ".torchscript")


class TorchScriptKind:
    """ScriptModules and their files."""

    name = "torchscript"
    suffixes = SUFFIXES
    uses = frozenset({"weights"})

    def accepts(self, model: object) -> bool:
        return isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction)

    def recognises(self, path: Path) -> bool:
        return _is_script(_members(path))

    def program(self, model: Any, options: Options) -> Program:
        module, file = opened(model)
        if isinstance(module, torch.jit.ScriptModule) and is_frozen(module):
            from .frozen import frozen_program

            return frozen_program(module, file, options)
        program = _named(module, file)
        if options.weights is not None:
            program.notes.append(
                f"The checkpoint '{options.weights}' was not needed: this TorchScript model is not "
                "frozen, and has the names of its layers."
            )
        return program


KIND = TorchScriptKind()


def _named(module: Any, file: str | None) -> Program:
    """A model that still knows its layers, or a function, which has none."""
    if isinstance(module, torch.jit.ScriptFunction):
        from .ops import function_program

        return function_program(module, file)
    from .program import ScriptProgram

    return ScriptProgram(module, file)


def opened(model: Any) -> tuple[Any, str | None]:
    """A ScriptModule or ScriptFunction, and the file that it came from."""
    if not isinstance(model, Path | str):
        _check_forward(model)
        return model, None
    path = Path(model)
    members = _members(path)
    if not _is_script(members):
        raise TargetError(_what_it_is(path, members))
    try:
        place = None if torch.cuda.is_available() else "cpu"
        module = torch.jit.load(str(path), map_location=place)  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError, OSError) as error:
        raise TargetError(
            f"The TorchScript file '{path}' cannot be loaded by torch {torch.__version__}: "
            f"{_reason(error)}"
        ) from error
    _check_forward(module)
    return module, str(path)


def is_frozen(module: Any) -> bool:
    """Whether a model's weights became constants of its graph, and its layers lost their names."""
    if next(iter(module.parameters()), None) is not None:
        return False
    graph = module._c._get_method("forward").graph
    if any(node.kind() == "prim::CallMethod" for node in graph.findAllNodes("prim::CallMethod")):
        return False
    return any(
        isinstance(value := node.output().toIValue(), torch.Tensor) and value.dim() > 0
        for node in graph.findAllNodes("prim::Constant")
        if node.output().type().kind() == "TensorType"
    )


def _check_forward(module: Any) -> None:
    if isinstance(module, torch.jit.ScriptModule) and not module._c._has_method("forward"):
        methods = ", ".join(module._c._method_names()) or "none"
        raise TargetError(
            f"The TorchScript model {module.original_name} has no method 'forward' to run "
            f"(it has: {methods}). Compile one that has it, or a module that calls the other."
        )


def _members(path: Path) -> list[str] | None:
    """The names of the files in an archive; None where it is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return None


def _is_script(members: list[str] | None) -> bool:
    """A TorchScript archive has code and constants; one of weights has neither."""
    inner = [name.partition("/")[2] for name in members or ()]
    return "constants.pkl" in inner and any(name.startswith("code/") for name in inner)


def _what_it_is(path: Path, members: list[str] | None) -> str:
    if not path.is_file():
        return f"The model file '{path}' does not exist."
    if members is None:
        return (
            f"'{path}' is no TorchScript file: it is no zip archive. If it holds weights alone, "
            "name a function that builds the model, as in model.py:build, instead."
        )
    inner = [name.partition("/")[2] for name in members]
    if "data.pkl" in inner:
        return (
            f"'{path}' is what torch.save writes: weights, or a pickled module, which is not "
            "loaded since that would run code. Name a function that builds the model, as in "
            "model.py:build, or save the model with torch.jit.save or torch.export.save."
        )
    return (
        f"'{path}' is no TorchScript file: it has no code in it. If torch.export.save wrote it, "
        "open it with --runtime export, or with --runtime aoti if AOTInductor did; else save the "
        "model again with torch.jit.save."
    )


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((line for line in lines if not line.endswith(":")), "".join(lines[:1]))
    return text[:300] + ("" if text.endswith(".") else ".")
