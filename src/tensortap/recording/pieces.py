"""Tensors as plain bytes: where they lie, and how to walk over one that is too large to copy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

__all__ = ["address_of", "bytes_at", "pieces"]


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's bytes when they can be taken as they lie, else 0.

    Strided tensors, conjugate and negative views must be resolved by torch first.
    """
    if (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    ):
        return tensor.data_ptr()
    return 0


def bytes_at(address: int, nbytes: int) -> memoryview:
    """The bytes at an address; the caller keeps their owner alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def pieces(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Contiguous CPU parts of a tensor, in row-major order, each of at most about `limit` bytes."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return
    if address_of(tensor):
        step = max(1, limit // tensor.element_size())
        yield from torch.split(tensor.view(-1), step)
        return
    if nbytes <= limit or tensor.dim() == 0:
        yield tensor.to("cpu").resolve_conj().resolve_neg().contiguous()
        return
    rows = max(1, limit * tensor.shape[0] // nbytes)
    for part in torch.split(tensor, rows):
        if part.shape[0] == 1:
            yield from pieces(part[0], limit)
        else:
            yield part.to("cpu").resolve_conj().resolve_neg().contiguous()
