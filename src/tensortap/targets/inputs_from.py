"""`--inputs-from FILE`: the arguments of one run, from a file that runs no code.

| file | holds |
|---|---|
| `.safetensors`, `.npz` | tensors by the names of the arguments, or by position: `0`, `1`, … |
| `.npy` | the first argument |
| `.json` | an object with a number or a nested list an argument, or one list: the first argument |

Files come from anywhere. Nothing is unpickled, and a file that says it holds more than it does, or
more than anybody feeds a model with, is refused before room is made for it.
"""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import OptionError
from ..taps.programs.nearby import near_files

__all__ = ["LARGEST", "SUFFIXES", "Given", "read_inputs"]

LARGEST = 4 << 30
"""The most bytes of tensors that one file may hold."""
_LARGEST_TEXT = 64 << 20
_MOST_VALUES = 1 << 16
SUFFIXES = (".safetensors", ".npz", ".npy", ".json")
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
_DIMENSIONS = 64


@dataclass(frozen=True)
class Given:
    """A value that a file holds for one argument.

    A number of a JSON file stays a number. `typed` is False where the file has no dtypes of its
    own, so that the values may become what the model declares; `wide` where numpy makes every
    number a float64, whether that was meant or not.
    """

    value: Tensor | bool | int | float
    typed: bool = True
    wide: bool = False


class _Damaged(Exception):
    """What is wrong with a file, without its name."""


def read_inputs(path: str | os.PathLike[str]) -> dict[str, Given]:
    """What a file holds, by the names of arguments, or by position as decimal numbers."""
    path = Path(path)
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise OptionError(f"The --inputs-from file '{path}' {what}.{near_files(path, SUFFIXES)}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        why = "is a pickle, which can run code and is not loaded" if suffix in _PICKLES else (
            "is of no kind that inputs are read from"
        )  # fmt: skip
        raise OptionError(
            f"The --inputs-from file '{path}' {why}. Expected {', '.join(SUFFIXES)}; "
            'safetensors.torch.save_file({"input_ids": ids}, "in.safetensors") writes one.'
        )
    read = {
        ".safetensors": _safetensors,
        ".npz": _npz,
        ".npy": _npy,
        ".json": _json,
    }[suffix]
    try:
        found = read(path)
    except _Damaged as error:
        raise OptionError(f"The --inputs-from file '{path}' {error}.") from error
    except OSError as error:
        raise OptionError(
            f"The --inputs-from file '{path}' cannot be read: {error.strerror or _line(error)}."
        ) from error
    except Exception as error:  # four parsers, each with a dozen ways to choke on rubbish
        raise OptionError(
            f"The --inputs-from file '{path}' is damaged, or no {suffix} file: {_line(error)}"
        ) from error
    if not found:
        raise OptionError(f"The --inputs-from file '{path}' holds nothing: no argument is named.")
    return {name: _at_home(given) for name, given in found.items()}


def _at_home(given: Given) -> Given:
    """In memory as torch lays it out: elsewhere, products may differ in their last bits."""
    if not isinstance(given.value, Tensor):
        return given
    return replace(given, value=given.value.clone())


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0].strip() if lines else type(error).__name__
    text = text if len(text) <= 200 else text[:199] + "…"
    return text if text.endswith(".") else f"{text}."


def _check_total(nbytes: int) -> None:
    if nbytes > LARGEST:
        raise _Damaged(
            f"holds {nbytes / 2**30:.1f} GiB of tensors; at most {LARGEST / 2**30:.0f} GiB are "
            "read as the inputs of one run"
        )


def _safetensors(path: Path) -> dict[str, Given]:
    _check_total(path.stat().st_size)
    with safe_open(str(path), framework="pt") as file:
        return {name: Given(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def _npy(path: Path) -> dict[str, Given]:
    with path.open("rb") as file:
        return {"0": _array(file, path.stat().st_size, "")}


def _npz(path: Path) -> dict[str, Given]:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        names = [entry.filename.removesuffix(".npy") for entry in entries]
        if len(entries) > _MOST_VALUES:
            raise _Damaged(f"holds {len(entries)} arrays; no model takes as many")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise _Damaged(f"holds {twice!r} twice")
        _check_total(sum(entry.file_size for entry in entries))
        if names and all(re.fullmatch(r"arr_\d+", name) for name in names):
            names = [name.removeprefix("arr_") for name in names]  # as np.savez(file, a, b) does
        found = {}
        for name, entry in zip(names, entries, strict=True):
            with archive.open(entry) as file:
                found[name] = _array(file, entry.file_size, name)
        return found


def _array(file: IO[bytes], nbytes: int, name: str) -> Given:
    """One array in numpy's format; its header is believed only as far as the bytes go."""
    where = f"holds {name!r}, which" if name else "holds an array that"
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise _Damaged(f"{where} is of a version of numpy's format that is not read: {version}")
    header: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(file)
    shape, by_columns, dtype = header
    if dtype.hasobject:
        raise _Damaged(f"{where} is made of Python objects (a pickle), which are not loaded")
    if (
        dtype.kind not in "biufc"
        or dtype.itemsize > 16
        or dtype.type in (np.longdouble, np.clongdouble)
    ):
        raise _Damaged(
            f"{where} is of the dtype {dtype}, which torch does not have; bfloat16 and 8-bit "
            "floats go into a .safetensors file"
        )
    count = math.prod(shape)
    if any(size < 0 for size in shape) or len(shape) > _DIMENSIONS:
        raise _Damaged(f"{where} has an impossible shape")
    _check_total(count * dtype.itemsize)
    if count * dtype.itemsize > nbytes:
        raise _Damaged(
            f"{where} says it has {count} values of {dtype}, more than its {nbytes} bytes can hold"
        )
    data = file.read(count * dtype.itemsize)
    if len(data) < count * dtype.itemsize:
        raise _Damaged(f"{where} ends before its last value")
    flat = np.frombuffer(data, dtype=dtype, count=count)
    array = flat.reshape(shape, order="F" if by_columns else "C")
    array = np.array(array, dtype=dtype.newbyteorder("="), order="C")  # a copy that can be written
    return Given(torch.from_numpy(array), wide=array.dtype == np.float64)


def _json(path: Path) -> dict[str, Given]:
    if path.stat().st_size > _LARGEST_TEXT:
        raise _Damaged(
            f"is larger than {_LARGEST_TEXT >> 20} MiB of text; write a .safetensors or .npz file"
        )
    text = path.read_bytes().decode("utf-8")  # a UnicodeDecodeError is a ValueError
    values = json.loads(text, object_pairs_hook=_pairs, parse_int=_whole)
    if isinstance(values, list):
        return {"0": _listed(values, "")}
    if not isinstance(values, dict):
        raise _Damaged(
            f"holds {_kind(values)}, expected an object with a key an argument, or a list"
        )
    return {name: _listed(value, name) for name, value in values.items()}


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Damaged(f"names {next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def _whole(text: str) -> int:
    value = int(text) if len(text) < 24 else 1 << 63
    if not -(1 << 63) <= value < 1 << 63:
        raise _Damaged(f"holds the number {text[:24]}, which does not fit into 64 bits")
    return value


def _listed(value: Any, name: str) -> Given:
    """A number as it is, a nested list as a tensor of int64, float32 or bool."""
    where = f"has in {name!r}" if name else "holds"
    if isinstance(value, bool | int | float):
        return Given(value, typed=False)
    if not isinstance(value, list):
        raise _Damaged(f"{where} {_kind(value)}, expected a number or a list of numbers")
    try:
        array = np.array(value)
    except ValueError as error:
        reason = _line(error).rstrip(".")
        raise _Damaged(f"{where} a list whose rows do not fit together: {reason}") from error
    if array.dtype.kind not in "bif":
        odd = next(
            (_kind(item) for item in _flat(value) if not isinstance(item, bool | int | float)), ""
        )
        raise _Damaged(f"{where} a list with {odd or 'mixed values'}, expected numbers alone")
    if array.dtype.kind != "b" and any(isinstance(item, bool) for item in _flat(value)):
        raise _Damaged(f"{where} a list of numbers and true or false, expected one of both")
    return Given(torch.from_numpy(array), typed=False)


def _flat(value: Any) -> Iterable[Any]:
    if not isinstance(value, list):
        yield value
        return
    for item in value:
        yield from _flat(item)


def _kind(value: Any) -> str:
    if value is None:
        return "null (leave the argument out)"
    if isinstance(value, str):
        return f"the text {value[:20]!r}"
    return "an object" if isinstance(value, dict) else f"the number {value}"
