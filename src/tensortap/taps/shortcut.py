"""The shortest way from a layer's output on a GPU to its summary row.

Where the host is what a model waits for, every microsecond in a hook counts once a layer. Almost
always a layer gives a plain tensor of the shape it gave before, on the stream it ran on before:
then all that is left to do is to launch one kernel with two addresses. Everything else is worked
out when something changes, and whatever is out of the ordinary goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..numerics import device as on_device
from ..numerics.native import core
from ..recording.device_table import ROW_BYTES, ROWS, DeviceTable, cuda_in_use
from .listener import Listener
from .sink import Sink, Slot

__all__ = ["DRIVER", "Quick", "questions", "shortcut"]

DRIVER = "libcuda.so.1"

_Known = tuple[int, DeviceTable, Callable[[int, int], object], Any]

_compiling = torch.compiler.is_compiling
_backward = torch._C._current_graph_task_id
_functions = torch._C._len_torch_function_stack
_dispatches = torch._C._len_torch_dispatch_stack


def shortcut(slot: Slot, sink: Sink, leaf: str = "") -> Callable[[torch.Tensor], bool]:
    """Takes an output of this layer and says whether that was all there is to do."""
    known: dict[Any, _Known | None] = {}
    plain, order = torch.Tensor, sink.next_order
    stream_of, capturing, current = questions()
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    device = stream = site = -1
    table: Any = None
    launch: Any = None
    native: Any = None  # the same as `take`, in the core

    def learn(output: torch.Tensor, index: int) -> bool:
        """Take up another shape, dtype or stream; False for what goes the long way."""
        nonlocal shape, dtype, device, stream, site, table, launch, native
        now = stream_of(index)
        key = (output.shape, output.dtype, index, now)
        if key not in known:
            bound = on_device.lean(output, now)
            if bound is None:
                known[key] = None
            else:
                own, rows = sink.output_site(slot, output, leaf), sink.tables.of(output.device)
                known[key] = own, rows, bound, _native(output, now, slot, sink, rows, own)
        found = known[key]
        if found is None:
            return False
        shape, dtype, device, stream = key
        site, table, launch, native = found
        return True

    def take(output: Any) -> bool:
        if native is not None and native(output):
            return True
        if output.__class__ is not plain or not output.is_cuda or not output.is_contiguous():
            return False
        address = output.data_ptr()
        if not address or address & 15 or output.is_neg() or capturing():
            return False
        index = output.get_device()
        if index != current():  # whose launches need another context
            return False
        if (
            output.shape != shape
            or output.dtype is not dtype
            or index != device
            or stream_of(index) != stream
        ) and not learn(output, index):
            return False
        with table.lock:
            row = table.used
            if row == ROWS:
                table.send()
                row = 0
            launch(address, table.address + row * ROW_BYTES)
            table.used = row + 1
            call = slot.calls
            slot.calls = call + 1
            slot.seen += 1
            table.lines.append((row, (site, (order(), sink.epoch, sink.batch, call))))
        return True

    return take


def _native(
    output: torch.Tensor, stream: int, slot: Slot, sink: Sink, table: DeviceTable, site: int
) -> Any:
    """The core's own way for outputs like this one, or None: see native/shortcut.cpp."""
    bare = on_device.bare(output, stream) if core is not None else None
    if core is None or bare is None:
        return None
    try:
        return core.Shortcut(
            DRIVER,
            bare.function,
            bare.programs,
            bare.threads,
            bare.shared,
            stream,
            list(bare.values),
            bare.x,
            bare.row,
            torch.Tensor,
            output.shape,
            output.dtype,
            output.get_device(),
            questions()[0],
            table,
            table.lock,
            slot,
            sink,
            sink.next_order,
            site,
            ROWS,
            ROW_BYTES,
            table.address,
        )
    except RuntimeError:  # a driver that does not say what a kernel takes
        return None


class Quick(Listener):
    """A forward hook that tries the shortcut first. A user's modes must not see what it asks.

    Not while something is under way that a shortcut would miss: `state` is the tap's.
    """

    def __init__(self, listen: Callable[..., None], take: Callable[[Any], bool], state: Any):
        super().__init__(listen)
        self._take = take
        self._state = state

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if _compiling():
            super().__call__(module, args, output)
            return
        state = self._state
        if not (
            state._sink is None
            or state._unfinished is not None
            or state._compiled
            or (state._in_graph is not None and state._in_graph.open)
            or _backward() != -1
            or _functions()
            or _dispatches()
        ):
            try:
                if self._take(output):
                    return
            except Exception:  # the long way knows what to do about it
                pass
        super().__call__(module, args, output)


def questions() -> tuple[Callable[[int], int], Callable[[], bool], Callable[[], int]]:
    """A device's current stream; whether it is being captured; the current device."""
    if not cuda_in_use():
        return (lambda device: 0), (lambda: False), (lambda: -1)
    found = torch._C
    return (
        found._cuda_getCurrentRawStream,
        found._cuda_isCurrentStreamCapturing,
        found._cuda_getDevice,
    )
