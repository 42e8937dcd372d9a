"""The shortest way from a layer's output on a GPU to its summary row.

Where the host is what a model waits for, every microsecond in a hook counts once a layer. Almost
always a layer gives a plain tensor of the shape it gave before, on the stream it ran on before:
then all that is left to do is to launch one kernel with three addresses. Everything else is worked
out when something changes, and whatever is out of the ordinary goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..numerics import device as on_device
from ..numerics.native import core
from ..recording.device_table import ROW_BYTES, ROWS, DeviceTable, cuda_in_use
from .listener import Listener
from .sink import Sink, Slot

__all__ = ["DRIVER", "Quick", "questions", "shortcut"]

DRIVER = "libcuda.so.1"
_MOST_KNOWN = 64  # shapes of a layer's output

_compiling = torch.compiler.is_dynamo_compiling  # a constant to both: True while it traces
_backward = torch._C._current_graph_task_id
_functions = torch._C._len_torch_function_stack
_dispatches = torch._C._len_torch_dispatch_stack


class Way:
    """How the last output of a layer went: in the core where that can be, else in Python."""

    __slots__ = ("native", "take")

    def __init__(self, take: Callable[[Any], bool] | None = None) -> None:
        self.native: Any = None
        self.take: Any = take


@dataclass(frozen=True, slots=True)
class _Known:
    """What was worked out for outputs of one shape and dtype on one stream."""

    shape: torch.Size
    dtype: torch.dtype
    device: int
    stream: int
    site: int
    table: DeviceTable
    launch: Callable[[int, int, int], object]
    room: int  # bytes that the launch leaves for later
    native: Any


def shortcut(slot: Slot, sink: Sink, leaf: str = "") -> Way:
    """Takes an output of this layer and says whether that was all there is to do.

    Threads share it, each with outputs of its own: so a call works with one `_Known` from its
    questions to its launch.
    """
    way = Way()
    known: dict[Any, _Known | None] = {}
    plain, order = torch.Tensor, sink.next_order
    stream_of, capturing, current = questions()
    last: _Known | None = None

    def learn(output: torch.Tensor, index: int, stream: int) -> _Known | None:
        """Take up another shape, dtype or stream; None for what goes the long way."""
        nonlocal last
        key = (output.shape, output.dtype, index, stream)
        found = known.get(key)
        if found is None and key not in known:
            lean, table = on_device.lean(output, stream), sink.tables.of(output.device)
            if lean is not None and table.make_parts() is not None:
                site = sink.output_site(slot, output, leaf)
                native = _native(output, stream, slot, sink, table, site, lean.room)
                found = _Known(*key, site, table, lean.launch, lean.room, native)
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[key] = found
        if found is not None:
            last, way.native = found, found.native
        return found

    def take(output: Any) -> bool:
        if output.__class__ is not plain or not output.is_cuda or not output.is_contiguous():
            return False
        address = output.data_ptr()
        if not address or address & 15 or output.is_neg() or capturing():
            return False
        index = output.get_device()
        if index != current():  # whose launches need another context
            return False
        stream, now = stream_of(index), last
        if (
            now is None
            or output.shape != now.shape
            or output.dtype is not now.dtype
            or index != now.device
            or stream != now.stream
        ):
            now = learn(output, index, stream)
        if now is None:
            return False
        table = now.table
        with table.lock:
            row = table.next_row()
            if row < 0:
                return False
            now.launch(table.room(now.room), address, table.address + row * ROW_BYTES)
            slot.seen += 1
            table.add(now.site, (order(), sink.epoch, sink.batch, slot.next_call()))
        return True

    way.take = take
    return way


def _native(
    output: torch.Tensor,
    stream: int,
    slot: Slot,
    sink: Sink,
    table: DeviceTable,
    site: int,
    room: int,
) -> Any:
    """The core's own way for outputs like this one, or None: see native/shortcut.cpp."""
    bare, parts = on_device.bare(output) if core is not None else None, table.parts
    if core is None or bare is None or parts is None:
        return None
    try:
        return core.Shortcut(
            library=DRIVER,
            function=bare.function,
            programs=bare.programs,
            threads=bare.threads,
            shared=bare.shared,
            stream=stream,
            values=list(bare.values),
            places=(bare.parts, bare.x, bare.row),
            type=torch.Tensor,
            shape=output.shape,
            dtype=output.dtype,
            device=output.get_device(),
            stream_of=questions()[0],
            backward=_backward,
            functions=_functions,
            dispatches=_dispatches,
            table=table,
            lock=table.lock,
            state=table.state.ctypes.data,
            lines=table.lines.ctypes.data,
            slot=slot,
            sink=sink,
            order=sink.next_order,
            site=site,
            rows=ROWS,
            row_bytes=ROW_BYTES,
            row_address=table.address,
            parts=parts.data_ptr(),
            parts_bytes=parts.nbytes,
            room=room,
        )
    except RuntimeError:  # a driver that does not say what a kernel takes
        return None


class Quick(Listener):
    """A forward hook that tries the shortcut first. A user's modes must not see what it asks.

    Not while something is under way that a shortcut would miss: `state` is the tap's.
    """

    def __init__(self, listen: Callable[..., None], way: Way, state: Any) -> None:
        super().__init__(listen)
        self._way = way
        self._state = state

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if not _compiling():
            try:
                native = self._way.native
                if native is not None and native(output, self._state):
                    return
                if self._straight() and self._way.take(output):
                    return
            except Exception:  # the long way knows what to do about it
                pass
        super().__call__(module, args, output)

    def _straight(self) -> bool:
        state = self._state
        return not (
            state._sink is None
            or state._unfinished is not None
            or state._compiled
            or (state._in_graph is not None and state._in_graph.open)
            or _backward() != -1
            or _functions()
            or _dispatches()
        )


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
