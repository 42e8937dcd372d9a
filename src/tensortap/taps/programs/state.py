"""What a run may change beyond its outputs, kept and put back.

The self-check runs a model once more than its user does, and that run must leave no trace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ..leaves import flatten
from .base import Program

__all__ = ["State", "copied", "restore"]

_LINE = 64  # bytes; what torch allocates begins at a multiple


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


def copied(value: Any) -> Any:
    """The same inputs once more, so that a model that writes into them finds them unwritten.

    They lie in memory as the first do: by the alignment torch chooses how it adds up. None where
    they cannot be copied.
    """
    try:
        return copy.deepcopy(value, _aligned_copies(value))
    except Exception:  # whatever a user hands to a model may refuse to be copied
        return None


def _aligned_copies(value: Any) -> dict[int, Any]:
    """For deepcopy: copies of the tensors that it would not copy as they are.

    A file that is mapped into memory has its tensors anywhere, and not where torch's own begin;
    what an eager layer made for a compiled one has a graph behind it, which deepcopy refuses. Those
    that share their memory with others are left to deepcopy, which knows of that.
    """
    tensors = {id(tensor): tensor for _, tensor in flatten(value) if tensor is not None}
    return {
        key: _like(tensor)
        for key, tensor in tensors.items()
        if _is_odd(tensor) and not any(_meet(tensor, other) for other in tensors.values())
    }


def _is_odd(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and (tensor.data_ptr() % _LINE != 0 or not tensor.is_leaf)
    )


def _meet(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory; what is not contiguous may have any of its storage's."""
    if other is tensor:
        return False
    if other.layout != torch.strided or not other.is_contiguous():
        return other.device.type == "cpu"
    first, last = other.data_ptr(), other.data_ptr() + other.numel() * other.element_size()
    return first < tensor.data_ptr() + tensor.numel() * tensor.element_size() and (
        tensor.data_ptr() < last
    )


def _like(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.numel() * tensor.element_size()
    room = torch.empty(size + _LINE, dtype=torch.uint8)
    start = (tensor.data_ptr() - room.data_ptr()) % _LINE
    made = room[start : start + size].view(tensor.dtype).view(tensor.shape)
    return made.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


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
