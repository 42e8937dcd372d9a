"""Names and paths that cannot leave their folder.

Layer names, modes and trees come from elsewhere: a name must never choose where a file is written,
and a tree must never make us read what lies outside it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import LayoutError

__all__ = ["folder", "inside", "listing", "safe_name", "writing"]

_LONGEST = 180
_UNSAFE = re.compile(r"[\x00-\x1f\x7f/\\:*?\"<>|]")


def safe_name(name: str, what: str) -> str:
    """A file name for a layer or mode; one that tries to leave its folder is refused.

    Characters that some file system cannot hold become `_`, and a name too long for one is cut
    and told apart by a digest.
    """
    parts = re.split(r"[/\\]", name)
    if name.startswith((".", "/", "\\", "~")) or ".." in parts or "\x00" in name:
        raise LayoutError(
            f"The {what} {name!r} tries to leave its folder and cannot become a file name. "
            "Nothing was written under it."
        )
    safe = _UNSAFE.sub("_", name).strip()
    if not safe:
        raise LayoutError(f"The {what} {name!r} cannot become a file name: nothing of it is left.")
    if len(safe.encode("utf-8", "replace")) > _LONGEST:
        digest = hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=6).hexdigest()
        safe = safe.encode("ascii", "replace").decode().replace("?", "_")
        safe = f"{safe[: _LONGEST - 13]}-{digest}"
    return safe


def listing(source: Path) -> list[str]:
    """The names in a folder, sorted; empty when it is none."""
    try:
        return sorted(entry.name for entry in source.iterdir()) if source.is_dir() else []
    except OSError as error:
        raise LayoutError(f"Cannot read {source}: {error.strerror or error}.") from None


def inside(source: Path, name: str) -> Path:
    """The path of a file of a tree; a link that leads out of the tree is refused."""
    path = source / name
    try:
        real = path.resolve()
    except RuntimeError:  # what Python before 3.13 says of a link that leads to itself
        raise LayoutError(f"{path} cannot be read: its links lead in a circle.") from None
    if not real.is_relative_to(source.resolve()):
        raise LayoutError(
            f"{path} leads out of its folder, to {real}. A tree holds its own files; "
            "copy the real file into it to import it."
        )
    if not real.is_file():
        raise LayoutError(f"{path} is no file.")
    return path


def folder(out: Path) -> None:
    """Make the folder that a tree goes to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LayoutError(
            f"Cannot create the folder {out}: {error.strerror or error}. Choose another place."
        ) from None


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A scratch path that takes the real name when all was written, and is gone otherwise.

    Renaming replaces a link instead of writing through it.
    """
    scratch = path.with_name(f".{path.name[:100]}.{os.getpid()}.tmp")
    try:
        yield scratch
        scratch.replace(path)
    except OSError as error:
        raise LayoutError(f"Cannot write {path}: {error.strerror or error}.") from None
    finally:
        scratch.unlink(missing_ok=True)
