"""Turning any tensor into flat, contiguous pieces in the order of its elements.

Both backends work on such pieces, so what a view, a conjugate bit or a quantised tensor means is
settled here, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tensortap.errors import OptionError

__all__ = ["check_summarizable", "first_elements", "paired_pieces", "pieces", "plain"]

_SMALL = {
    name
    for name in ("float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16")
    if hasattr(torch, name)
} | {f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)}


def check_summarizable(tensor: torch.Tensor) -> None:
    """Refuse, in words, what has no elements to count."""
    if tensor.is_meta:
        raise OptionError(
            f"A meta tensor of shape {tuple(tensor.shape)} holds no values to summarise. "
            "Materialise the model on a real device first."
        )
    if tensor.layout != torch.strided:
        raise OptionError(
            f"A tensor in layout {tensor.layout} is not summarised as it is: "
            "pass tensor.values() for what is stored, or tensor.to_dense() for everything."
        )
    if tensor.is_nested:
        raise OptionError("A nested tensor is not summarised as it is: pass tensor.values().")
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _SMALL:
        raise OptionError(
            f"A tensor of dtype {name} packs its values below a byte and cannot be summarised. "
            "Unpack it to a wider type first."
        )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values as they read: no graph, no lazy conjugate or sign, no quantisation."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.resolve_conj().resolve_neg()


def pieces(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Flat contiguous pieces of at most `limit` elements, in order, without copying the whole."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), limit):
            yield flat[start : start + limit]
    elif tensor.numel() <= limit:
        yield tensor.contiguous().view(-1)
    else:
        inner = tensor.numel() // tensor.shape[0]
        step = max(1, limit // inner)
        for start in range(0, tensor.shape[0], step):
            part = tensor[start : start + step] if inner <= limit else tensor[start]
            yield from pieces(part, limit)


def paired_pieces(
    reference: torch.Tensor, candidate: torch.Tensor, limit: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`pieces` of two tensors of one shape, cut at the same places whatever their strides."""
    if reference.is_contiguous() and candidate.is_contiguous():
        left, right = reference.view(-1), candidate.view(-1)
        for start in range(0, left.numel(), limit):
            yield left[start : start + limit], right[start : start + limit]
    elif reference.numel() <= limit:
        yield reference.contiguous().view(-1), candidate.contiguous().view(-1)
    else:
        inner = reference.numel() // reference.shape[0]
        step = max(1, limit // inner)
        for start in range(0, reference.shape[0], step):
            part = slice(start, start + step) if inner <= limit else start
            yield from paired_pieces(reference[part], candidate[part], limit)


def first_elements(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` elements in logical order, touching no more of a strided view than that."""
    while tensor.dim() and tensor.numel() > count:
        inner = tensor.numel() // tensor.shape[0]
        rows = math.ceil(count / inner)
        if rows > 1 or tensor.dim() == 1:
            tensor = tensor[:rows]
            break
        tensor = tensor[0]
    return tensor.reshape(-1)[:count]
