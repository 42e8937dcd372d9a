"""Checkpoints on disk: which tensors there are, each read when it is asked for.

A safetensors file, a folder of them, with an index or without, a transformers folder (`hf:DIR`),
and what torch.save wrote, of which tensors alone are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import OptionError
from ...recording.kinds import parse
from ...regular_files import open_regular, read_regular

__all__ = ["Entry", "WeightFiles", "is_checkpoint", "open_weights"]

_LARGEST = 100 << 20  # bytes of a header, an index, a config
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_NESTED = ("state_dict", "model_state_dict", "model", "module")
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BOOL": "bool",
    **{
        f"{kind}{bits}": f"{word}{bits}"
        for kind, word in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint; `read` opens its file again, and holds nothing."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor] = field(repr=False, compare=False)


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a checkpoint by name, and its config where there is one."""

    path: str
    entries: Mapping[str, Entry] = field(repr=False)
    config: Mapping[str, Any] | None = field(default=None, repr=False)


def is_checkpoint(path: str) -> bool:
    """Whether a path names a checkpoint, and not a recording."""
    if path.startswith("hf:"):
        return True
    here = Path(path).expanduser()
    if here.is_dir():
        return not (here / "recording.json").exists() and bool(_files(here))
    return here.suffix in (".safetensors", *_PICKLED)


def open_weights(path: str) -> WeightFiles:
    """The checkpoint at a path. Shapes are known at once, values are read later."""
    here = Path(path.removeprefix("hf:")).expanduser()
    if not here.exists():
        raise OptionError(f"The checkpoint '{path}' does not exist.")
    files = _files(here) if here.is_dir() else [here]
    if not files:
        raise OptionError(
            f"The folder '{path}' holds no weights: expected .safetensors files, or one of "
            f"{', '.join(_PICKLED)}."
        )
    entries: dict[str, Entry] = {}
    for file in files:
        if not file.exists():
            raise OptionError(f"The index of '{path}' names '{file.name}', which does not exist.")
        read = _safetensors if file.suffix == ".safetensors" else _pickled
        if file.suffix not in (".safetensors", *_PICKLED):
            raise OptionError(
                f"'{file}' is not a checkpoint: expected .safetensors or one of "
                f"{', '.join(_PICKLED)}."
            )
        entries.update(read(file))
    return WeightFiles(path, entries, _config(here if here.is_dir() else here.parent, here))


def _files(folder: Path) -> list[Path]:
    """The files of a folder's weights: those of the index, or all that there are."""
    index = next(iter(sorted(folder.glob("*.index.json"))), None)
    if index is not None:
        return _indexed(index)
    found = sorted(folder.glob("*.safetensors"))
    return found or [file for file in sorted(folder.iterdir()) if file.suffix in _PICKLED]


def _indexed(index: Path) -> list[Path]:
    try:
        named = parse(read_regular(index, _LARGEST))["weight_map"].values()
        return [index.parent / name for name in dict.fromkeys(named)]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise OptionError(f"The index '{index}' cannot be read: {error!r}.") from error


def _safetensors(file: Path) -> dict[str, Entry]:
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = parse(opened.read(length)) if length <= _LARGEST else None
        if not isinstance(header, dict):
            raise ValueError("its header does not fit into it")
        with safe_open(str(file), framework="pt") as checked:  # the library's own checks
            names = list(checked.keys())
    except (ValueError, SafetensorError) as error:
        raise OptionError(f"'{file}' is not a whole safetensors file: {error}.") from error

    def reader(name: str) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            with safe_open(str(file), framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

        return read

    return {
        name: Entry(
            name,
            tuple(header[name]["shape"]),
            _DTYPES.get(header[name]["dtype"], str(header[name]["dtype"])),
            reader(name),
        )
        for name in names
    }


def _pickled(file: Path) -> dict[str, Entry]:
    """What torch.save wrote; only tensors are loaded, and they stay in the file."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # an old file cannot be mapped
        loaded = _loaded(file)
    except Exception as error:
        raise _unloadable(file, error) from error
    for key in _NESTED:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping):
        raise OptionError(f"'{file}' holds no tensors by name, but a {type(loaded).__name__}.")
    found = _tensors(loaded)
    if not found:
        raise OptionError(f"'{file}' holds no tensors by name.")
    return {
        name: Entry(
            name,
            tuple(value.shape),
            str(value.dtype).removeprefix("torch."),
            lambda value=value: value.detach(),  # type: ignore[misc]
        )
        for name, value in found.items()
    }


def _loaded(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _unloadable(file, error) from error


def _unloadable(file: Path, error: Exception) -> OptionError:
    if "Weights only load failed" in str(error):
        return OptionError(
            f"'{file}' holds more than tensors, and loading the rest would run code that the file "
            "brings. Save its weights alone: torch.save(model.state_dict(), FILE)."
        )
    return OptionError(
        f"'{file}' is damaged, or torch.save did not write it ({type(error).__name__}: "
        f"{_line(error)})."
    )


def _tensors(loaded: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a dict by name; those of the dicts inside where it has none itself."""
    found = {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    if not found:
        for name, inner in loaded.items():
            if isinstance(inner, Mapping):
                found |= {f"{name}.{key}": value for key, value in _tensors(inner).items()}
    return found


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _config(folder: Path, given: Path) -> Mapping[str, Any] | None:
    """The config beside the weights; of a single file only where the folder is a checkpoint's."""
    file = folder / "config.json"
    if not file.exists() or not (given.is_dir() or given.name.startswith(("model", "pytorch"))):
        return None
    try:
        config = parse(read_regular(file, _LARGEST))
    except ValueError as error:
        raise OptionError(f"The config '{file}' is not JSON: {error}.") from error
    return config if isinstance(config, dict) else None
