"""Looks into a pickle without loading it: does it name code other than torch's own?

Only used to tell a file that wants to run something from one that is merely broken, once the safe
loader has refused it.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["names_code"]

_MOST = 16 << 20
_HARMLESS = ("torch", "collections", "_codecs")


def names_code(path: Path) -> bool:
    """Whether a .pt file names functions or classes that are not torch's."""
    return any(
        module.split(".")[0] not in _HARMLESS for data in _pickles(path) for module in _named(data)
    )


def _pickles(path: Path) -> Iterator[bytes]:
    """The pickles in a file of torch.save, old or new."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".pkl"):
                    with archive.open(name) as file:
                        yield file.read(_MOST)
    except (zipfile.BadZipFile, OSError, RuntimeError, ValueError, NotImplementedError):
        with path.open("rb") as raw:
            yield raw.read(_MOST)


def _named(data: bytes) -> Iterator[str]:
    """The modules that a stream of pickles takes something from."""
    stream = io.BytesIO(data)
    strings: list[str] = []
    try:
        while stream.tell() < len(data):
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name in ("GLOBAL", "INST"):
                    yield str(argument)
                elif opcode.name == "STACK_GLOBAL":
                    yield strings[-2] if len(strings) > 1 else "?"
                elif isinstance(argument, str):
                    strings.append(argument)
    except (ValueError, IndexError, EOFError, UnicodeDecodeError, OverflowError):
        return
