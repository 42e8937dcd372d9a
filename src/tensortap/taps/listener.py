"""A hook that stays with the model it was put on.

A user may copy or save the model while it is recorded (an average of weights, a checkpoint). The
copy is not what is recorded, and a closure cannot be pickled: so a listener turns into one that
does nothing when it is copied or saved. A saved one is made of Python's own library alone, so that
a checkpoint loads where tensortap is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

__all__ = ["Listener"]


class Listener:
    """Calls a function, until it is copied."""

    def __init__(self, listen: Callable[..., None] | None = None) -> None:
        self._listen = listen

    def __call__(self, *args: Any) -> None:
        if self._listen is not None:
            self._listen(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Listener:
        return Listener()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments and returns None
