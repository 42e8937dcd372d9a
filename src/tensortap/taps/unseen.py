"""Working inside somebody's forward pass without being seen.

A user may run the model under a mode of their own (a flop counter, a debug mode). What we do to
take a copy is no part of their model, so their modes must not see it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["unseen"]


def unseen() -> AbstractContextManager[object]:
    """A context in which torch operations reach no mode and no subclass."""
    if torch._C._len_torch_dispatch_stack():
        return _unseen_by_dispatch()
    return torch._C.DisableTorchFunction()


@contextlib.contextmanager
def _unseen_by_dispatch() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
