"""Opens files that come from elsewhere, and regular ones alone.

A FIFO waits for ever, a device never ends, a socket cannot be read, and a link may lead to itself.
All of them are an OSError here whose text says what the file is: callers turn that into a sentence.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["must_be_regular", "open_regular", "read_regular"]

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def must_be_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """What the system says of a regular file; an OSError for every other kind."""
    return _regular(Path(path).stat(), path)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, opened to be read; an OSError for every other kind, without waiting."""
    must_be_regular(path)  # to open a device may do something already
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _regular(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a regular file that has at most `most` of them."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most + 1) if size <= most else b""
    if size > most or len(data) > most:
        raise OSError(
            errno.EFBIG, f"it has {max(size, len(data))} bytes, more than {most}", os.fspath(path)
        )
    return data


def _regular(found: os.stat_result, path: str | os.PathLike[str]) -> os.stat_result:
    if stat.S_ISREG(found.st_mode):
        return found
    what = next((words for test, words in _KINDS if test(found.st_mode)), "of an unknown kind")
    raise OSError(errno.EINVAL, f"it is {what}, not a regular file", os.fspath(Path(path)))
