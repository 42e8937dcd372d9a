"""A checkpoint as a source of names: which tensors there are, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import OptionError

__all__ = ["Checkpoint", "Role", "open_checkpoint"]

_NESTED = ("state_dict", "model_state_dict", "model", "module")
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Role:
    """Where an operation has its data, its weight, and the rest of its layer's tensors."""

    data: int
    weight: int
    others: tuple[int, ...] = ()
    type: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, with shapes that are known without reading them."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]

    def modules(self) -> dict[str, list[str]]:
        """The modules that own tensors, each with the names of its own, in the file's order."""
        found: dict[str, list[str]] = {}
        for name in self.shapes:
            found.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
        return found


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a file, or in a folder of safetensors files."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise OptionError(f"The folder '{path}' of --weights holds no .safetensors file.")
        return _safetensors(path, files)
    if not path.is_file():
        raise OptionError(f"The file of --weights, '{path}', does not exist.")
    if path.suffix == ".safetensors":
        return _safetensors(path, [path])
    if path.suffix in _PICKLED:
        return _pickled(path)
    raise OptionError(
        f"'{path}' is no checkpoint that --weights can read: expected .safetensors or one of "
        f"{', '.join(_PICKLED)}."
    )


def _safetensors(path: Path, files: list[Path]) -> Checkpoint:
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    homes: dict[str, tuple[Path, str]] = {}
    for file in files:
        for key, shape in _shapes(file).items():
            shapes[_cleaned(key)] = shape
            homes[_cleaned(key)] = (file, key)

    def read(name: str) -> torch.Tensor:
        file, key = homes[name]
        with safe_open(str(file), framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(key)
        return tensor

    return Checkpoint(path, shapes, read)


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            keys: list[str] = list(opened.keys())
            return {key: tuple(opened.get_slice(key).get_shape()) for key in keys}
    except (SafetensorError, OSError) as error:
        raise OptionError(
            f"The checkpoint '{file}' is damaged, or no .safetensors file: {error}."
        ) from error


def _pickled(path: Path) -> Checkpoint:
    """Tensors alone are loaded: a file that would run code is refused by torch."""
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file of before torch 1.6 cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch says of a file that is no checkpoint
        why = "it is damaged, or no checkpoint of torch"
        if type(error).__name__ == "UnpicklingError":
            why = "it holds more than tensors, or none, and loading that could run code"
        raise OptionError(
            f"The checkpoint '{path}' is not read: {why}. Save the model's state_dict() with "
            "safetensors, and name that file."
        ) from error
    tensors = _tensors(loaded)
    if not tensors:
        raise OptionError(
            f"The checkpoint '{path}' holds no tensors by name: got a {type(loaded).__name__}, "
            "expected a state_dict."
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Checkpoint(path, shapes, tensors.__getitem__)


def _tensors(loaded: Any) -> dict[str, torch.Tensor]:
    if not isinstance(loaded, Mapping):
        return {}
    found = {_cleaned(str(k)): v for k, v in loaded.items() if isinstance(v, torch.Tensor)}
    if not found:
        for key in _NESTED:
            if found := _tensors(loaded.get(key)):
                break
    return found


def _cleaned(name: str) -> str:
    return name.replace("_orig_mod.", "")
