"""What a target prints is no data of ours: it goes to stderr, whoever prints it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout

__all__ = ["aside"]


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Let stdout be stderr, for Python and for libraries and processes that know no `print`."""
    with redirect_stdout(sys.stderr), _descriptor_aside():
        yield


@contextlib.contextmanager
def _descriptor_aside() -> Iterator[None]:
    try:
        kept = os.dup(1)
    except OSError:  # there is no stdout
        yield
        return
    try:
        _flush()
        with contextlib.suppress(OSError):  # no stderr: then it stays
            os.dup2(2, 1)
        try:
            yield
        finally:
            _flush()
            os.dup2(kept, 1)
    finally:
        os.close(kept)


def _flush() -> None:
    """Write what is still held back, in Python and in C, to where it was meant to go."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        (sys.__stdout__ or sys.stderr).flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
