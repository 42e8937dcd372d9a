"""The shortest way from a layer's output on a GPU into the region from which it goes to disk.

As in `shortcut`: almost always a layer gives a plain tensor of the shape it gave before, and there
is room for it. Then one copy is enqueued, and what to remember of it is put into a list. Whatever
is out of the ordinary goes the long way, which also begins a region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .shortcut import questions
from .sink import Sink, Slot

__all__ = ["tensor_shortcut"]


def tensor_shortcut(slot: Slot, sink: Sink) -> Callable[[Any], bool]:
    """Takes an output of this layer and says whether that was all there is to do."""
    plain, keep, order = torch.Tensor, sink.writer.keep_quickly, sink.next_order
    stream_of, capturing, _ = questions()
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    device = site = -1
    nbytes = 0

    def learn(output: torch.Tensor, index: int) -> None:
        nonlocal shape, dtype, device, site, nbytes
        site = sink.output_site(slot, output)
        shape, dtype, device, nbytes = output.shape, output.dtype, index, output.nbytes

    def take(output: Any) -> bool:
        if output.__class__ is not plain or not output.is_cuda or capturing():
            return False
        index = output.get_device()
        if output.shape != shape or output.dtype is not dtype or index != device:
            learn(output, index)
        call = slot.calls
        when = (order, sink.epoch, sink.batch, call)
        if not nbytes or not keep(output, nbytes, (index, stream_of(index)), site, when):
            return False
        slot.calls = call + 1
        slot.seen += 1
        return True

    return take
