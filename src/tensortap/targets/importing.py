"""Finding the function that a target names, in a file or in a module."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..errors import OptionError, TapError, TargetError
from .artefacts import SUFFIXES, models_in
from .failing import LEAVING
from .options import parse_device
from .target import Target, describe, is_model

__all__ = ["Found", "call", "finding", "folder_of", "importable", "is_file"]

_FORMS = "file.py:function, package.module:function, hf:DIR or a compiled model's file"


@dataclass(frozen=True)
class Found:
    """A target's function, what stands beside it, and how it is called in a sentence."""

    spec: str
    function: Callable[..., Any]
    module: ModuleType | None


@contextlib.contextmanager
def finding(target: str | Callable[..., Any]) -> Iterator[Found]:
    """Import the function; its folder can be imported from until the block ends."""
    if not isinstance(target, str):
        yield _given(target)
        return
    place, name = _split(target)
    with importable(folder_of(target)):
        module = _import_file(place) if is_file(place) else _import_module(place)
        yield Found(target, _function(module, name, place), module)


def folder_of(spec: str) -> Path:
    """Where a target lives: its file's folder, or the working directory."""
    place = spec.rpartition(":")[0]
    return Path(place).resolve().parent if is_file(place) else Path.cwd()


def is_file(place: str) -> bool:
    """Whether a target's function is in a file, not in a module."""
    return place.endswith(".py") or "/" in place or os.sep in place


def _given(function: Callable[..., Any]) -> Found:
    """A function that the caller holds already."""
    if isinstance(function, nn.Module | Target) or not callable(function):
        raise TargetError(
            f"The target is {describe(function)}, expected the name of one, such as "
            "'model.py:build', or a function that returns (model, inputs)."
        )
    home = getattr(function, "__module__", None) or "?"
    name = getattr(function, "__qualname__", type(function).__name__)
    return Found(f"{home}:{name}", function, sys.modules.get(home))


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
def importable(folder: Path) -> Iterator[None]:
    """Let modules in a folder be found before all others until the block ends."""
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
    except LEAVING as error:  # whatever a user's file does when it is imported
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
    except LEAVING as error:  # whatever a user's module does when it is imported
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
    if isinstance(found, nn.Module | Target) or (not callable(found) and is_model(found)):
        return lambda: found  # a variable that holds what a function would return
    if not callable(found):
        raise TargetError(
            f"{name!r} in {place!r} is {describe(found)}, neither a function nor a model. Write a "
            "function that returns (model, inputs), or a model and give --inputs-from FILE."
        )
    function: Callable[..., Any] = found
    return function


def call(found: Found, keywords: Mapping[str, Any]) -> object:
    """What the function returns; what it raises is said with its place."""
    try:
        return found.function(**keywords)
    except TapError:
        raise
    except LEAVING as error:  # whatever a user's function does
        raise TargetError(
            f"The target {found.spec!r} failed: "
            f"{_told(error, getattr(found.module, '__file__', None))}"
            f"{_about(keywords.get('device'))}"
        ) from error


def _about(device: object) -> str:
    """That torch has no such device: what a function was given says why it failed."""
    if not isinstance(device, str):
        return ""
    try:
        parse_device(device)
    except OptionError as error:
        return f". {error}"
    return ""


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
