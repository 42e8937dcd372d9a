"""Where a recording lies: a local folder, or any folder that fsspec can reach.

The rest of the format knows only five things about a place: its names, its small texts, how to
take a finished file in under its final name, how to look at a stretch of bytes, and how to remove
a file. A local file is memory-mapped, privately, so that a user's in-place operation never reaches
the disk; a remote one is read by ranges.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol

from ..errors import DamagedError, RecordingError
from ..regular_files import must_be_regular, open_regular, read_regular

__all__ = ["LARGEST_TEXT", "LocalStore", "RemoteStore", "Store", "open_store"]

LARGEST_TEXT = 64 << 20
"""Bytes of a small text beside the segments, where nothing else is said."""

_URL = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class Store(Protocol):
    """A folder that holds the files of one recording."""

    url: str

    def names(self) -> list[str]: ...
    def read_text(self, name: str, most: int = LARGEST_TEXT) -> str: ...
    def write_text(self, name: str, text: str) -> None: ...
    def rewrite(self, name: str, text: str) -> None: ...
    def size(self, name: str) -> int: ...
    def view(self, name: str, start: int, stop: int) -> memoryview: ...
    def scratch(self, name: str) -> Path: ...
    def commit(self, scratch: Path, name: str) -> None: ...
    def sync(self, names: list[str]) -> None: ...
    def remove(self, name: str) -> None: ...
    def make(self) -> None: ...
    def drop(self) -> None: ...


def open_store(path: str | os.PathLike[str]) -> Store:
    """The store behind what the user typed: a path, or a URL such as `s3://bucket/runs/fp32`."""
    text = os.fspath(path)
    if _URL.match(text) and not text.startswith("file://"):
        return RemoteStore(text)
    return LocalStore(Path(text.removeprefix("file://")))


class LocalStore:
    """A folder on this machine; it stays where it is when the process changes its own."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = str(root)
        self._maps: dict[str, mmap.mmap] = {}

    def make(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordingError(
                f"Cannot create the folder {self.url}: {error.strerror}. Choose another place."
            ) from None

    def drop(self) -> None:
        """Remove the folder, if nothing is in it."""
        with contextlib.suppress(OSError):
            self.root.rmdir()

    def names(self) -> list[str]:
        return sorted(p.name for p in self.root.iterdir()) if self.root.is_dir() else []

    def read_text(self, name: str, most: int = LARGEST_TEXT) -> str:
        return read_regular(self._inside(name), most).decode("utf-8")

    def write_text(self, name: str, text: str) -> None:
        scratch = self.scratch(name)
        try:
            scratch.write_text(text, encoding="utf-8")
            self.commit(scratch, name)
        except OSError:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise

    def rewrite(self, name: str, text: str) -> None:
        """Put another text into a file that is there, where no new one can be made.

        It takes no inode and mostly no room, and is one write: a reader that comes meanwhile meets
        the old text or the new one. If it does not fit, the old one is put back.
        """
        path = self._inside(name)
        before, after = read_regular(path, LARGEST_TEXT), text.encode("utf-8")
        blank = after.ljust(len(before))  # JSON may end in spaces: nothing old is left behind it
        fd = os.open(path, os.O_WRONLY)
        try:
            if os.pwrite(fd, blank, 0) < len(blank):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.ftruncate(fd, len(after))
        except OSError:
            os.pwrite(fd, before, 0)
            os.ftruncate(fd, len(before))
            raise
        finally:
            os.close(fd)

    def size(self, name: str) -> int:
        return must_be_regular(self._inside(name)).st_size

    def view(self, name: str, start: int, stop: int) -> memoryview:
        if start >= stop:
            return memoryview(b"")
        mapped = self._maps.get(name)
        if mapped is None:
            with open_regular(self._inside(name)) as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[name] = mapped
        return memoryview(mapped)[start:stop]

    def scratch(self, name: str) -> Path:
        return self.root / f".{name}.{os.getpid()}.tmp"

    def commit(self, scratch: Path, name: str) -> None:
        self._maps.pop(name, None)
        scratch.replace(self.root / name)

    def sync(self, names: list[str]) -> None:
        for path in (*(self.root / name for name in names), self.root):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def remove(self, name: str) -> None:
        self._maps.pop(name, None)
        (self.root / name).unlink(missing_ok=True)

    def _inside(self, name: str) -> Path:
        path = self.root / name
        try:
            real = path.resolve()
        except RuntimeError:  # what Python before 3.13 says of a link that leads to itself
            raise OSError(errno.ELOOP, "its links lead in a circle", str(path)) from None
        if not real.is_relative_to(self.root.resolve()):
            raise DamagedError(
                f"{path} leads out of its folder, to {real}. A recording holds its own "
                "files; copy the real file into the folder to read it."
            )
        if real != path and path.is_symlink() and not real.exists():
            raise DamagedError(f"{path} is a link to {real}, where there is nothing.")
        return path


class RemoteStore:
    """A folder behind an fsspec URL; files are made locally and sent when they are whole."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        try:
            fs, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise RecordingError(f"Cannot reach {url}: {error}") from None
        self._fs: Any = fs
        self._root: str = root.rstrip("/")
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def make(self) -> None:
        self._fs.makedirs(self._root, exist_ok=True)

    def drop(self) -> None:
        """A folder that is empty is none, where most files lie remotely."""

    def names(self) -> list[str]:
        if not self._fs.isdir(self._root):
            return []
        self._fs.invalidate_cache()
        return sorted(str(p).rsplit("/", 1)[-1] for p in self._fs.ls(self._root, detail=False))

    def read_text(self, name: str, most: int = LARGEST_TEXT) -> str:
        size = self.size(name)
        if size > most:
            text = f"it has {size} bytes, more than {most}"
            raise OSError(errno.EFBIG, text, f"{self.url}/{name}")
        return bytes(self._fs.cat_file(self._at(name))).decode("utf-8")

    def write_text(self, name: str, text: str) -> None:
        self._fs.pipe_file(self._at(name), text.encode("utf-8"))

    def rewrite(self, name: str, text: str) -> None:
        self.write_text(name, text)

    def size(self, name: str) -> int:
        return int(self._fs.size(self._at(name)))

    def view(self, name: str, start: int, stop: int) -> memoryview:
        if start >= stop:
            return memoryview(b"")
        return memoryview(bytearray(self._fs.cat_file(self._at(name), start=start, end=stop)))

    def scratch(self, name: str) -> Path:
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="tensortap-")
        return Path(self._scratch.name) / name

    def commit(self, scratch: Path, name: str) -> None:
        self._fs.put_file(str(scratch), self._at(name))
        scratch.unlink()

    def sync(self, names: list[str]) -> None:
        """What was sent is the other side's to keep."""

    def remove(self, name: str) -> None:
        if self._fs.exists(self._at(name)):
            self._fs.rm_file(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def __del__(self) -> None:
        scratch = getattr(self, "_scratch", None)  # not even None when opening failed
        if scratch is not None:
            shutil.rmtree(scratch.name, ignore_errors=True)
