"""The files that a recording's numbers come from, so that `--resume` sees when one has changed.

Each is known by the digest of its bytes; what is very large, by its size and time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import OptionError
from ..artefacts import is_artefact
from ..failing import LEAVING
from ..importing import importable, is_file

__all__ = ["digests", "option_files", "target_files"]

_LARGE = 64 << 20  # a file beyond this is known by its size and time, not by its bytes
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".json", ".model", ".txt")


def digests(files: Mapping[str, Iterable[Path]]) -> dict[str, dict[str, str]]:
    """The name and the digest of each; several files that are one thing have one digest."""
    found = {}
    for what, paths in files.items():
        there = [path for path in paths if path.exists()]
        parts = [file for path in there for file in (_checkpoint(path) or [path])]
        parts = [path for path in parts if path.is_file()]
        if parts:
            each = [_digest(path) for path in parts]
            if len(parts) > 1:
                names = [f"{path.name} {digest}" for path, digest in zip(parts, each, strict=True)]
                each = [hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]]
            found[what] = {"name": there[0].name, "digest": each[0]}
    return found


def target_files(target: str | Callable[..., Any]) -> list[Path]:
    """The file with a target's code, a compiled model's files, or those of a checkpoint."""
    if not isinstance(target, str):
        file = getattr(sys.modules.get(getattr(target, "__module__", "")), "__file__", None)
        return [Path(file)] if file else []
    if target.startswith("hf:"):
        return [Path(target.removeprefix("hf:")).expanduser()]
    if is_artefact(target):
        return _with_parts(Path(target))
    place = target.rpartition(":")[0]
    if is_file(place):
        return [Path(place)]
    origin = _origin(place)
    return [] if origin is None else [Path(origin)]


def option_files(options: Mapping[str, Any], sets: Iterable[str]) -> dict[str, list[Path]]:
    """Files and checkpoints that are named by options of the target's function."""
    pairs = [*options.items(), *(text.partition("=")[::2] for text in sets)]
    found = {}
    for key, value in ((key, value) for key, value in pairs if value):
        with contextlib.suppress(OSError, ValueError, TypeError):  # a text that is no path
            path = Path(value).expanduser()
            if path.is_file() or (path / "config.json").is_file():
                found[f"set {key}"] = [path]
    return found


def _checkpoint(folder: Path) -> list[Path]:
    """What of a folder is a model: its configuration, tokeniser and weights."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file())


def _with_parts(path: Path) -> list[Path]:
    """A compiled model's file, and what else of it lies beside it: weights, names of taps."""
    beside = (f"{path.name}.data", f"{path.name}_data", f"{path.stem}.bin", f"{path.stem}.data")
    parts = [path.with_name(name) for name in (*beside, f"{path.stem}.taps.json")]
    return [path, *(part for part in dict.fromkeys(parts) if part != path and part.is_file())]


def _origin(module: str) -> str | None:
    """Where a module comes from; that there is none is said when it is loaded."""
    try:
        with importable(Path.cwd()):
            spec = importlib.util.find_spec(module)
    except LEAVING:  # whatever the package around it does when it is imported
        return None
    return None if spec is None or not spec.has_location else spec.origin


def _digest(path: Path) -> str:
    try:
        about = path.stat()
        if about.st_size > _LARGE:
            return f"{about.st_size} bytes of {about.st_mtime_ns}"
        return _of_bytes(str(path.absolute()), about.st_size, about.st_mtime_ns)
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror or error}.") from None


@functools.lru_cache(maxsize=256)
def _of_bytes(path: str, size: int, time: int) -> str:
    """Once for all modes, as long as the file is as large and as old."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
