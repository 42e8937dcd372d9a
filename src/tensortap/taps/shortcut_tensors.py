"""The shortest way from a layer's output on a GPU into the region from which it goes to disk.

As in `shortcut`: almost always a layer gives a plain tensor of the shape it gave before, and there
is room for it. Then one copy is enqueued, and what to remember of it is put into a list. Whatever
is out of the ordinary goes the long way, which also begins a region.
"""

from __future__ import annotations

from typing import Any

import torch

from .shortcut import Way, questions
from .sink import Sink, Slot

__all__ = ["tensor_shortcut"]


def tensor_shortcut(slot: Slot, sink: Sink) -> Way:
    """Takes an output of this layer and says whether that was all there is to do."""
    plain, keep, order = torch.Tensor, sink.writer.keep_quickly, sink.next_order
    stream_of, capturing, _ = questions()
    last: tuple[torch.Size, torch.dtype, int, int, int] | None = None

    def learn(output: torch.Tensor, index: int) -> tuple[torch.Size, torch.dtype, int, int, int]:
        nonlocal last
        site = sink.output_site(slot, output)
        last = (output.shape, output.dtype, index, site, output.nbytes)
        return last

    def take(output: Any) -> bool:
        if output.__class__ is not plain or not output.is_cuda or output.is_quantized:
            return False
        if capturing():
            return False
        index, now = output.get_device(), last  # which another thread may replace meanwhile
        if now is None or output.shape != now[0] or output.dtype is not now[1] or index != now[2]:
            now = learn(output, index)
        *_, site, nbytes = now
        when = (order, sink.epoch, sink.batch, slot.next_call)
        if not nbytes or not keep(output, nbytes, (index, stream_of(index)), site, when):
            return False
        slot.seen += 1
        return True

    return Way(take)
