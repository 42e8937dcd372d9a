"""Copying memory and knowing what was copied, with or without the compiled core.

The writer's snapshot is a copy that must be made anyway; a digest taken on the way costs next to
nothing and tells whether the same content was stored before. Digests are comparable within one
process only.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Sequence

from tensortap.numerics.native import core

__all__ = ["copy_digest", "copy_into", "digest", "digest_many"]


def copy_into(dst_ptr: int, src_ptr: int, nbytes: int, threads: int = 0) -> None:
    """Copy between addresses that do not overlap; `threads` is a most, 0 torch's own number."""
    if core is not None:
        core.copy(dst_ptr, src_ptr, nbytes, threads)
    elif nbytes:
        ctypes.memmove(dst_ptr, src_ptr, nbytes)


def digest(ptr: int, nbytes: int, threads: int = 0) -> bytes:
    """A 128-bit digest of the bytes at an address, their order and their number."""
    if core is not None:
        result: bytes = core.digest(ptr, nbytes, threads)
        return result
    content = (ctypes.c_char * nbytes).from_address(ptr) if nbytes else b""
    return hashlib.blake2b(content, digest_size=16).digest()


def digest_many(stretches: Sequence[tuple[int, int]], threads: int = 0) -> list[bytes]:
    """The digests of many (address, bytes), without the GIL from the first to the last."""
    if core is None or not stretches:
        return [digest(ptr, nbytes) for ptr, nbytes in stretches]
    table = array("Q", (number for stretch in stretches for number in stretch))
    found = array("Q", bytes(16 * len(stretches)))
    core.digest_many(table.buffer_info()[0], len(stretches), found.buffer_info()[0], threads)
    raw = found.tobytes()
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]


def copy_digest(dst_ptr: int, src_ptr: int, nbytes: int, threads: int = 0) -> bytes:
    """Copy and digest in one pass over the source."""
    if core is not None:
        result: bytes = core.copy_digest(dst_ptr, src_ptr, nbytes, threads)
        return result
    copy_into(dst_ptr, src_ptr, nbytes, threads)
    return digest(dst_ptr, nbytes)
