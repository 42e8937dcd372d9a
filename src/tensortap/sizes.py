"""Sizes in bytes, as they are given: a number, or a text such as `64MiB`."""

from __future__ import annotations

import re
from typing import Any

from .errors import OptionError

__all__ = ["parse_size", "size_in_bytes"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_WORDS = {1 << 20: "1 MiB (1048576 bytes)"}


def parse_size(text: str) -> int:
    """`1GiB`, `512 MB`, `64M` or plain bytes."""
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise OptionError(f"{text!r} is no size. Write it as 1GiB, 512MB, or a number of bytes.")
    power = " kmgt".index(match[2].lower() or " ")
    base = 1000 if match[4] and not match[3] else 1024
    return int(float(match[1]) * base**power)


def size_in_bytes(name: str, value: Any, least: int = 0) -> int:
    """A size that an option was given: a number of bytes, or a text such as "64MiB"."""
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except OptionError as error:
            raise OptionError(f"{name}: {error}") from None
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionError(
            f'{name} must be a number of bytes, or a text such as "64MiB", got {value!r}.'
        )
    if value < least:
        words = _WORDS.get(least, f"{least} bytes")
        raise OptionError(f"{name} must be at least {words}, got {value}.")
    return value
