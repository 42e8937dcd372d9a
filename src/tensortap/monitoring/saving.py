"""Files of the monitor: their names, and how they are written.

    single_{key}_epoch{E}_batch{B}.pt      one output of a `single` layer
    epoch_{key}_epoch{E}.pt                an epoch of an `epoch_full` layer

`key` is the alias, or the layer's name without one. With `save_format="npy"` there is one `.npy` a
tensor, and a `.json` of the same stem with everything else. A file is written under another name
and renamed: nobody ever meets half of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..errors import OptionError
from ..recording.dtypes import dtype_name
from ..recording.schema import COMPARISON, MANIFEST

__all__ = ["Files", "SaveFormat", "file_names", "save_custom"]

SaveFormat = Literal["pt", "npy"]

_LONGEST = 120  # bytes; a file's name may have 255, and most of them are other people's
_CHUNK = 1 << 22  # elements
_TEMPORARY = ".tensortap-"


def file_names(keys: Iterable[str]) -> dict[str, str]:
    """A name for each key that any file system takes and no other key has, whatever its case."""
    keys = list(keys)
    plain = {key: _cut(re.sub(r"[^\w.\-]", "_", key)) or "root" for key in keys}
    taken: dict[str, str] = {}
    for key in sorted(keys, key=lambda key: (plain[key] != key, key)):
        name = plain[key]
        if name.lower() in taken or (name != key and key):
            tail = hashlib.blake2b(key.encode(errors="backslashreplace"), digest_size=4).hexdigest()
            name = f"{name}-{tail}"
        taken[name.lower()] = key
        plain[key] = name
    return plain


def _cut(name: str) -> str:
    return name.encode(errors="ignore")[:_LONGEST].decode(errors="ignore")


class Files:
    """Writes items into the output folder, and knows what it wrote.

    Data that was saved, cleared, and comes again for the same epoch (a loop that clears while the
    epoch runs) goes into a second file, `…_part2`: saving never takes away what was saved.
    """

    def __init__(
        self,
        folder: Path,
        singles: Iterable[str],
        epochs: Iterable[str],
        fmt: SaveFormat,
        rank: int,
    ) -> None:
        """`singles` and `epochs`: the keys of the two record types, which share no file."""
        self.folder = folder
        self.names = file_names(singles) | file_names(epochs)
        self.written: dict[str, None] = {}
        self._format = fmt
        self._rank = rank
        self._parts: dict[str, tuple[int, int]] = {}  # stem -> part, when it was written
        self._cleared: dict[str, int] = {}

    def single(self, key: str, item: dict[str, Any]) -> Path:
        stem = f"single_{self.names[key]}_epoch{item['epoch']}_batch{item['batch_idx']}"
        return self._save(key, stem, item)

    def epoch(self, key: str, item: dict[str, Any]) -> Path:
        return self._save(key, f"epoch_{self.names[key]}_epoch{item['epoch']}", item)

    def cleared(self, key: str) -> None:
        """What was held of this key is gone: its next files must not replace the last ones."""
        self._cleared[key] = self._cleared.get(key, 0) + 1

    def _save(self, key: str, stem: str, item: dict[str, Any]) -> Path:
        now = self._cleared.get(key, 0)
        part, when = self._parts.get(stem, (0, -1))
        part += when != now
        self._parts[stem] = (part, now)
        name = stem if part == 1 else f"{stem}_part{part}"
        if self._rank:
            name += f"_rank{self._rank}"
        if self._format == "pt":
            path = self.folder / f"{name}.pt"
            _atomically(path, lambda temporary: _torch_save(temporary, item))
            self.written[path.name] = None
            return path
        return self._save_arrays(name, item)

    def _save_arrays(self, name: str, item: dict[str, Any]) -> Path:
        listed = {**item, "output": self._arrays(name, item["output"], "")}
        path = self.folder / f"{name}.json"
        text = json.dumps(_jsonable(listed), indent=2, ensure_ascii=False, allow_nan=False)
        _atomically(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))
        self.written[path.name] = None
        return path

    def _arrays(self, name: str, value: Any, leaf: str) -> Any:
        """The output with the name of a file in the place of each tensor."""
        if isinstance(value, torch.Tensor):
            path = self.folder / f"{name}{leaf}.npy"
            stored = _storable(value.dtype)
            _atomically(path, lambda temporary: _save_array(temporary, value, stored))
            self.written[path.name] = None
            return {
                "npy": path.name,
                "dtype": dtype_name(value.dtype),
                "stored_as": dtype_name(stored),
                "shape": list(value.shape),
            }
        if isinstance(value, tuple | list):
            items = [self._arrays(name, item, f"{leaf}.{i}") for i, item in enumerate(value)]
            return {"tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, dict):
            texts = _texts(value)
            safe = file_names(texts)
            return {
                text: self._arrays(name, item, f"{leaf}.{safe[text]}")
                for text, item in zip(texts, value.values(), strict=True)
            }
        return value


def _texts(keys: Iterable[Any]) -> list[str]:
    """Keys as JSON has them, each its own: 1 and "1" may stand in one dict."""
    taken: dict[str, None] = {}
    for key in keys:
        text = str(key)
        while text in taken:
            text += "_"
        taken[text] = None
    return list(taken)


def save_custom(folder: Path, obj: Any, name: Any) -> Path:
    """`torch.save` inside the output folder and nowhere else."""
    if not isinstance(name, str | os.PathLike) or not os.fspath(name) or isinstance(name, bytes):
        raise OptionError(f"The name of a custom output must be a file's name, got {name!r}.")
    text = str(os.fspath(name))
    inside = folder.resolve()
    try:
        path = inside / text
        outside = Path(text).is_absolute() or ".." in Path(text).parts
        outside = outside or inside not in path.resolve().parents
        is_folder = path.is_dir()
    except (OSError, ValueError, RuntimeError):
        raise OptionError(f"{text!r} is no file name. Give one such as 'stats.pt'.") from None
    if outside:
        raise OptionError(
            f"{text!r} leads outside the output folder {folder}. Give a name inside it, such as "
            "'stats.pt', or save it yourself with torch.save."
        )
    if is_folder:
        raise OptionError(f"{text!r} is a folder in {folder}. Choose another name.")
    if path.parent == inside and is_recording_file(path.name):
        raise OptionError(f"{text!r} is a file of the recording in {folder}. Choose another name.")
    if re.fullmatch(r"earlier-\d+", path.relative_to(inside).parts[0]):
        raise OptionError(f"{text!r} lies where earlier runs are moved to. Choose another name.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"Cannot make the folder {path.parent}: {error.strerror or error}."
        ) from None
    try:
        _atomically(path, lambda temporary: _torch_save(temporary, obj))
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror or error}.") from None
    except Exception as error:  # whatever a pickler says of somebody's object
        raise OptionError(
            f"{type(obj).__name__} cannot be saved to {text!r}: {type(error).__name__}: {error}"
        ) from error
    return path


def is_recording_file(name: str) -> bool:
    """Whether a name belongs to the recording beside our files."""
    return name in (MANIFEST, COMPARISON) or name.lstrip(".").startswith("segment-r")


def _atomically(path: Path, write: Callable[[Path], object]) -> None:
    with _temporary(path) as temporary:
        write(temporary)
        temporary.replace(path)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(prefix=_TEMPORARY, suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    temporary.chmod(0o666 & ~_umask())
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _torch_save(path: Path, obj: Any) -> None:
    """`torch.save`, with the system's own words where the disk is full."""
    try:
        with path.open("wb") as file:
            torch.save(obj, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _storable(dtype: torch.dtype) -> torch.dtype:
    """What numpy can hold of this dtype: itself, or float32 (complex64), which loses nothing."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except (TypeError, RuntimeError):
        return torch.complex64 if dtype.is_complex else torch.float32
    return dtype


def _save_array(path: Path, tensor: torch.Tensor, stored: torch.dtype) -> None:
    """Write an .npy file piece by piece, since a tensor may not fit in memory."""
    kind = torch.empty(0, dtype=stored).numpy().dtype
    flat = tensor.reshape(-1)
    with path.open("wb") as file:
        header = {
            "descr": np.lib.format.dtype_to_descr(kind),
            "fortran_order": False,
            "shape": tuple(tensor.shape),
        }
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(flat), _CHUNK):
            file.write(flat[start : start + _CHUNK].to(stored).numpy().tobytes())


def _jsonable(value: Any) -> Any:
    """What JSON can hold: NaN becomes null, an infinity a word."""
    if isinstance(value, dict):
        return {
            text: _jsonable(item) for text, item in zip(_texts(value), value.values(), strict=True)
        }
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
