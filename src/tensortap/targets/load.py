"""Loading a target by its name on the command line."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..errors import OptionError, TapError, TargetError
from ..taps.programs.base import Options as ProgramOptions
from .artefacts import SUFFIXES, check_usable, is_artefact, load_artefact, models_in, with_inputs
from .casting import cast_target, unheeded
from .options import arguments, given, parse_dtype, takes
from .target import Target, describe

__all__ = ["load_target"]

_FORMS = "file.py:function, package.module:function, hf:DIR or a compiled model's file"


def load_target(
    spec: str,
    options: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    *,
    prompts: Sequence[str] = (),
    input_ids: str | os.PathLike[str] | None = None,
    inputs_from: Sequence[str | os.PathLike[str]] = (),
    compiled: ProgramOptions | None = None,
    plan: bool = False,
) -> Target:
    """Turn `file.py:function`, `package.module:function`, `hf:DIR` or a model file into a Target.

    `inputs_from` are files with the inputs of a batch each, in place of the target's own;
    `compiled` says more about a compiled model; a `plan` of a model file needs no inputs. The
    function gets the options by name and returns a Target or `(model, inputs)`. Its file's
    folder (for a package, the working directory) can be imported from until it returns. A `dtype`
    that it does not take is applied to what it returns.
    """
    values = given(options or {}, sets)
    if is_artefact(spec):
        return load_artefact(
            spec,
            values,
            prompts=prompts,
            input_ids=input_ids,
            inputs_from=inputs_from,
            options=compiled,
            plan=plan,
        )
    if spec.startswith("hf:"):
        from .hf import load_checkpoint

        target = load_checkpoint(
            spec, values, prompts=prompts, input_ids=input_ids, inputs_from=inputs_from
        )
        check_usable(target, compiled or ProgramOptions())
        return target
    if prompts or input_ids is not None:
        option = "--prompt" if prompts else "--input-ids"
        raise OptionError(
            f"{option} is for hf:DIR targets; the function of {spec!r} makes its own inputs. "
            "Hand values to it with --set key=value."
        )
    place, name = _split(spec)
    is_file = place.endswith(".py") or "/" in place or os.sep in place
    folder = Path(place).resolve().parent if is_file else Path.cwd()
    with _importable(folder):
        module = _import_file(place) if is_file else _import_module(place)
        function = _function(module, name, place)
        dtype = None if takes(function, "dtype") else values.pop("dtype", None)
        if isinstance(dtype, str):
            dtype = parse_dtype(dtype)
        keywords = arguments(function, values, f"The target {spec!r}")
        result = _call(function, keywords, spec, module)
    target = _to_target(result, spec, values)
    check_usable(target, compiled or ProgramOptions())
    if inputs_from:
        target = with_inputs(target, inputs_from, compiled)
    if dtype is not None:
        return cast_target(target, dtype, spec)
    if not takes(function, "dtype", by_name=True):  # it went into **options
        dtype = unheeded(target, values.get("dtype"))
    return target if dtype is None else cast_target(target, dtype, spec, "leaves the dtype aside")


def _split(spec: str) -> tuple[str, str]:
    """The place of a function, and its name."""
    place, colon, name = spec.rpartition(":")
    path = Path(spec)
    if path.suffix == ".py" and path.is_file():
        raise TargetError(f"Which function in {spec!r} builds the model? Write {spec}:FUNCTION.")
    if path.is_dir():
        near = " or ".join(repr(str(file)) for file in models_in(path)[:3])
        hint = f" Did you mean {near}?" if near else ""
        if (path / "config.json").is_file():
            hint = f" It is a checkpoint: write hf:{spec}."
        raise TargetError(f"{spec!r} is a folder, no target. Expected {_FORMS}.{hint}")
    if not colon or not place or not name:
        raise TargetError(f"{spec!r} is no target. Expected {_FORMS}.")
    if place.lower().endswith(SUFFIXES) and Path(place).is_file():
        raise TargetError(
            f"{place!r} is a compiled model, which has no function {name!r}. Name the file alone."
        )
    return place, name


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    entry = str(folder)
    added = entry not in sys.path
    if added:
        sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if added:
            with contextlib.suppress(ValueError):  # the target may have taken it out itself
                sys.path.remove(entry)


def _import_file(place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        near = [
            str(other)
            for other in sorted(path.parent.glob("*.py"))
            if difflib.SequenceMatcher(None, other.name, path.name).ratio() > 0.6
        ]
        hint = f" Did you mean {' or '.join(repr(name) for name in near[:3])}?" if near else ""
        what = "is not a file" if path.exists() else "does not exist"
        raise TargetError(f"The target's file {place!r} {what}.{hint}")
    # A name of its own, so that a target called `json.py` hides nothing.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"_tensortap_target_{digest}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise TargetError(
            f"The target's file {place!r} is not a Python file (its name must end in .py)."
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file does when it is imported
        del sys.modules[name]
        if isinstance(error, TapError):
            raise
        raise TargetError(
            f"The target's file {place!r} cannot be imported: {_told(error)}"
        ) from error
    return module


def _import_module(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except TapError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise TargetError(
                f"There is no module {error.name!r} for the target {place!r}, neither installed "
                f"nor in the working directory. For a file, write {place.replace('.', '/')}.py:…"
            ) from error
        raise TargetError(
            f"The target's module {place!r} cannot be imported: {_told(error)}"
        ) from error
    except (Exception, SystemExit) as error:  # whatever a user's module does when it is imported
        raise TargetError(
            f"The target's module {place!r} cannot be imported: {_told(error)}"
        ) from error


def _function(module: ModuleType, name: str, place: str) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(module) if not n.startswith("_")]
            own = [
                n for n in names if getattr(vars(module)[n], "__module__", None) == module.__name__
            ]
            near = difflib.get_close_matches(name, names, n=3) or own[:5]
            hint = f" Near: {', '.join(repr(n) for n in near)}." if near else ""
            raise TargetError(f"{place!r} has no function {name!r}.{hint}")
        found = getattr(found, part)
    if isinstance(found, nn.Module | Target) or not callable(found):
        raise TargetError(
            f"{name!r} in {place!r} is {describe(found)}, not a function. Write a function that "
            "returns (model, inputs)."
        )
    function: Callable[..., Any] = found
    return function


def _call(
    function: Callable[..., Any], keywords: Mapping[str, Any], spec: str, module: ModuleType
) -> object:
    try:
        return function(**keywords)
    except TapError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's function does
        raise TargetError(
            f"The target {spec!r} failed: {_told(error, getattr(module, '__file__', None))}"
        ) from error


def _told(error: BaseException, file: str | None = None) -> str:
    """An exception in one line: its type, its message, and where; in the user's file if we can."""
    message = " ".join(str(error).split()) or "no message"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename != __file__
    ]
    inside = [frame for frame in frames if file is not None and frame.filename == file]
    places = (inside or frames)[-1:]
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in places)
    return f"{type(error).__name__}: {message}{where}"


def _to_target(result: object, spec: str, values: Mapping[str, Any]) -> Target:
    if isinstance(result, Target):
        target = result
    elif isinstance(result, tuple) and len(result) == 2:
        try:
            target = Target(*result)
        except TargetError as error:
            raise TargetError(f"The target {spec!r} returned rubbish. {error}") from error
    else:
        raise TargetError(
            f"The target {spec!r} returned {describe(result)}, expected a tensortap.Target or "
            "(model, inputs)."
        )
    mode = values.get("mode")
    if target.mode is None and mode is not None:
        target = replace(target, mode=str(mode))
    return target if target.name else replace(target, name=spec)
