"""What a run may change beyond its outputs, kept and put back.

The self-check runs a model once more than its user does, and that run must leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .base import Program

__all__ = ["State", "restore"]


class State:
    """Random numbers and a program's state as they are now, to be put back behind a run."""

    def __init__(self, program: Program) -> None:
        buffers = getattr(program, "buffers", None)
        self._kept = [] if buffers is None else [(b, b.detach().clone()) for b in buffers()]
        keep = getattr(program, "keep", None)
        self._restore: Callable[[], None] | None = None if keep is None else keep()
        self._random = torch.get_rng_state()
        started: Any = torch.cuda.is_initialized  # untyped in torch
        self._on_gpus = torch.cuda.get_rng_state_all() if started() else []

    def put_back(self) -> None:
        torch.set_rng_state(self._random)
        if self._on_gpus:
            torch.cuda.set_rng_state_all(self._on_gpus)
        if self._restore is not None:
            self._restore()
        for buffer, kept in self._kept:
            restore(buffer, kept)


def restore(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    """Give a tensor its former content back; one that has it still is not touched."""
    with torch.no_grad():
        if not _same(tensor, kept):
            tensor.detach().copy_(kept)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit: a zero may have lost its sign, and NaN is equal to nothing."""
    if left.shape != right.shape or left.layout != torch.strided or left.is_quantized:
        return False
    return torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)
