"""What to do with tensors that are not plain memory: a treatment for each, or a sentence.

| kind | what is recorded |
|---|---|
| sparse | its dense form, when that fits the budget |
| quantised (also subclasses that `dequantize`) | the values that the model computes with |
| nested | jagged: its `.values()`; else each component |
| DTensor | this rank's local part |
| a collective's result (AsyncCollectiveTensor) | its values, after the collective ended |
| other wrapper subclasses | their inner tensors, by name |
| other subclasses | their values |
| meta, fake | nothing, with the reason |

What one wrapper holds may be another: the local part of a DTensor may be a collective's result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Unrecordable", "is_plain", "plain_parts"]

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_DEEPEST = 16


class Unrecordable(Exception):
    """This tensor has no values that could be stored; the message is the reason."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is ordinary memory, as almost all are."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and not tensor.is_nested
    )


def plain_parts(
    tensor: torch.Tensor, limit: int, depth: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Ordinary tensors that stand for this one: (suffix of the leaf, tensor)."""
    if is_plain(tensor):
        yield "", tensor
        return
    if depth >= _DEEPEST:
        raise Unrecordable(f"a {type(tensor).__name__} inside of {depth} other wrappers")
    for suffix, part in _opened(tensor, limit):
        for tail, plain in plain_parts(part, limit, depth + 1):
            yield suffix + tail, plain


def _opened(tensor: torch.Tensor, limit: int) -> Iterator[tuple[str, torch.Tensor]]:
    """What one tensor that is not plain holds; it may itself be of a special kind."""
    _refuse_empty(tensor)
    if tensor.is_nested:
        yield from _nested(tensor)
    elif tensor.layout is not torch.strided:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > limit:
            raise Unrecordable(
                f"a {tensor.layout} tensor whose dense form of {nbytes} bytes does not fit the "
                f"budget of {limit}"
            )
        yield "", tensor.to_dense()
    elif tensor.is_quantized:
        yield "", tensor.dequantize()
    elif hasattr(tensor, "to_local"):
        yield ".to_local()", tensor.to_local()
    elif hasattr(tensor, "trigger_wait"):
        # Until the collective ends, the inner buffer holds this rank's part of the sum.
        yield "", tensor.trigger_wait()
    elif hasattr(tensor, "__tensor_flatten__"):
        yield from _wrapper(tensor)
    else:
        yield "", tensor.as_subclass(torch.Tensor)


def _refuse_empty(tensor: torch.Tensor) -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor):
        raise Unrecordable("a fake tensor holds no values")
    if tensor.is_meta:
        raise Unrecordable("a meta tensor holds no values; load the weights first")


def _nested(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if tensor.layout is torch.jagged:
        yield ".values()", tensor.values()
        return
    for index, part in enumerate(tensor.unbind()):
        yield f"[{index}]", part


def _wrapper(tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A subclass that wraps other tensors, such as torchao's quantised weights."""
    if callable(getattr(type(tensor), "dequantize", None)) and (
        type(tensor).dequantize is not torch.Tensor.dequantize
    ):
        yield ".dequantize()", tensor.dequantize()
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield f".{name}", getattr(tensor, name)
