"""What is captured of a model in CUDA graphs, and what each replay of them says.

While a graph is captured, a hook may launch kernels and nothing else. Where summaries are wanted it
launches the summary's kernel into a row that belongs to this graph for good; where values are, it
clones them into the graph's own memory. Behind each replay, rows and clones hold what that replay
computed: the calls that were captured are then gone through once more, as if they were made now.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from ..numerics import device as on_device
from ..numerics.summary import WIDTH
from ..recording.device_table import ROWS, Ticket
from ..recording.schema import Port
from .base import Ports
from .plain import is_plain
from .replays import capturing
from .sink import Call, Held, Sink, Slot
from .unseen import unseen

__all__ = ["Captures", "Event", "Part", "part_of"]

_ROOM = 2048  # rows that are free, at least, when a capture begins
_PARTS = 4 << 20  # bytes of a graph for what rows leave until they are settled

# What a graph that may be replayed writes to must stay, whether its recording is open or not. There
# may be several recordings of one graph.
_KEPT: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


@dataclass(eq=False, slots=True)
class Part:
    """One tensor of a captured call: its row among the graph's, or a clone of it."""

    leaf: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    row: int = -1
    clone: torch.Tensor | None = None


def part_of(leaf: str, tensor: torch.Tensor) -> Part:
    """A tensor that is ours and lives in the graph's memory."""
    return Part(leaf, tensor.shape, tensor.dtype, tensor.device, clone=tensor)


@dataclass(eq=False, slots=True)
class Event:
    """What a hook was given while a graph was captured."""

    slot: Slot
    port: Port
    parts: Sequence[Part]
    absent: Sequence[tuple[str, str]] = ()  # leaf and reason


@dataclass(eq=False)
class _Captured:
    """One graph: its calls in order, and the rows that it writes."""

    events: list[Event] = field(default_factory=list)
    block: torch.Tensor | None = None
    first: int = 0
    rows: int = 0
    scratch: tuple[torch.Tensor, torch.Tensor] | None = None
    parts: torch.Tensor | None = None
    left: int = 0  # bytes of them
    settled: int = 0  # rows that are complete
    kept: list[Any] = field(default_factory=list)  # what the graph writes to
    stream: int = 0  # whose launches come one behind the other, so that they share the scratch
    plain: list[tuple[Slot, int]] | None = None  # slot and site of each row, if that is all


class Captures:
    """The CUDA graphs of one recording: an `Onlooker` of theirs."""

    def __init__(
        self,
        sink: Sink,
        ports: Ports,
        *,
        slots: int,
        dtypes: Iterable[torch.dtype],
        pending: Callable[[Slot, int], list[tuple[Call, list[Held]]]],
        before: Callable[[], None],
        left: Callable[[], Iterable[Event]],
        fail: Callable[[Exception], None],
    ) -> None:
        """`dtypes`: what to be ready for. `pending`: calls of a layer by a thread that have begun.

        `before` tells of what ran before; it may be called while a compiled model runs. `left` are
        the events of a capture that are still to be told of.
        """
        self._sink: Sink | None = sink
        self._ports = ports
        self._dtypes = [dtype for dtype in dtypes if dtype.is_floating_point]
        self._pending = pending
        self._before = before
        self._left = left
        self._fail = fail
        self.as_rows = sink.keep == "summary" and sink.judge is None and not sink.writer.histograms
        self._room = max(_ROOM, 8 * slots)
        # A block a device and its rows in use; not here while a capture writes to it.
        self._free: dict[torch.device, tuple[torch.Tensor, int]] = {}
        self._lock = threading.Lock()
        self._now: dict[int, _Captured] = {}  # by thread
        self._graphs: weakref.WeakKeyDictionary[Any, _Captured] = weakref.WeakKeyDictionary()
        self._captured = 0  # graphs that hold something of ours
        self.unknown = 0  # replays of graphs that were captured before we listened

    def close(self) -> None:
        """Hear no more. What graphs write to stays with them."""
        self._sink = None
        self._graphs.clear()
        self._free.clear()

    def notes(self) -> list[str]:
        """What a user should know about the graphs that were captured, or that were before."""
        notes = []
        if self.unknown:
            times = "once" if self.unknown == 1 else f"{self.unknown} times"
            notes.append(
                f"CUDA graphs that were captured before this recording began were replayed {times}:"
                " what runs in them cannot be heard. Capture them inside the with block."
            )
        if not self._captured:
            return notes
        kept = "summed up" if self.as_rows else "cloned"
        graphs = "A CUDA graph was" if self._captured == 1 else f"{self._captured} CUDA graphs were"
        text = (
            f"{graphs} captured. The layers' values are {kept} inside, also in replays after this "
            "recording; each replay is a call, and the capture itself is none."
        )
        if self._ports.grads:
            text += " Gradients inside are not recorded."
        return [*notes, text]

    # While a graph is captured.

    def begins(self, graph: Any) -> None:
        sink = self._sink
        if sink is None:
            return
        try:
            with unseen():
                self._before()
                if "tables" in sink.__dict__:
                    sink.tables.send()  # or it would be captured too, where the stream is the same
                found = _Captured()
                if self.as_rows:
                    self._make_room(found)
            self._now[get_ident()] = found
            self._graphs[graph] = found
            found.kept += (found.block, found.scratch, found.parts)
            _KEPT.setdefault(graph, []).append(found.kept)
        except Exception as error:  # the model must not notice
            self._fail(error)

    def ends(self, graph: Any) -> None:
        found = self._now.pop(get_ident(), None)
        if found is None or self._sink is None:
            return
        try:
            with unseen():
                if not self._ended(found):
                    self._graphs.pop(graph, None)
                    return
                found.events += self._left()
                if not self._ports.inputs:  # with which a call may have begun in another graph
                    found.plain = _plain(self._sink, found)
                found.kept += (part.clone for event in found.events for part in event.parts)
                self._captured += bool(found.events)
        except Exception as error:  # the model must not notice
            self._fail(error)

    def _ended(self, found: _Captured) -> bool:
        """Have the last rows settled; False where the capture is spoilt, as torch will say."""
        unused = not found.left and not found.settled
        try:
            self._settle(found)
        except Exception:
            self._left()  # nobody will replay it
            return False
        finally:
            self._give_back(found)
        if unused:  # nothing in the graph writes there
            found.kept[:] = [kept for kept in found.kept if kept is not found.parts]
            found.parts = None
        return True

    def _make_room(self, found: _Captured) -> None:
        """Rows and kernels before the capture begins: in it nothing is allocated or compiled."""
        device = torch.device("cuda", torch.cuda.current_device())
        found.scratch, found.stream = on_device.scratch_on(device), _stream(device)
        if found.scratch is not None:
            with suppress(torch.OutOfMemoryError):  # it goes without
                found.parts = on_device.parts_on(device, _PARTS)
        if self._borrow(found, device):
            self._warm(found)
        torch.cuda.synchronize(device)  # whose stream a replay does not wait for; torch just did it

    def _warm(self, found: _Captured) -> None:
        """Compile what the model's dtypes need; of another one, torch makes the summaries."""
        block = found.block
        assert block is not None
        for dtype in self._dtypes:
            try:
                one = torch.zeros(16, dtype=torch.float32, device=block.device).to(dtype)
            except (RuntimeError, TypeError):  # packed: nothing can be cast to it
                continue
            on_device.fill_on(one, block[0])
            if found.parts is not None and on_device.leave_on(one, block[0], found.parts):
                on_device.settle(block[:1])

    def _borrow(self, found: _Captured, device: torch.device) -> bool:
        """Rows that nobody else writes to, another thread's capture included; are they new?"""
        with self._lock:
            block, used = self._free.pop(device, (None, 0))
        fresh = block is None or len(block) - used < self._room
        if fresh:
            with torch.inference_mode(False):
                # Zeros: a row of another stream may be looked at before it was written.
                block = torch.zeros(4 * self._room, WIDTH, dtype=torch.float64, device=device)
            used = 0
        found.block, found.first = block, used
        return fresh

    def _give_back(self, found: _Captured) -> None:
        """The rows behind the last one of a graph are free again."""
        if found.block is None:
            return
        device, used = found.block.device, found.first + found.rows
        with self._lock:
            other = self._free.get(device)
            if other is None or len(other[0]) - other[1] < len(found.block) - used:
                self._free[device] = (found.block, used)

    def heard(
        self,
        slot: Slot,
        port: Port,
        leaves: Iterable[tuple[str, torch.Tensor | None]],
        *,
        told: bool = True,
    ) -> Event | None:
        """Capture what keeps these tensors' values; `told`: it is the next thing that happens."""
        sink = self._sink
        if sink is None:
            return None
        found = self._now.get(get_ident())
        if found is None:
            sink.skip(slot, port, "", "it was captured in a CUDA graph that we did not see begin")
            return None
        parts, absent = [], []
        for leaf, tensor in leaves:
            reason = "None stands where a tensor could"
            if tensor is not None:
                try:
                    parts.append(self._keep(found, leaf, tensor))
                    continue
                except Exception as error:  # the capture goes on
                    reason = str(error).strip().split("\n", 1)[0].rstrip(".")
            absent.append((leaf, reason))
        event = Event(slot, port, parts, absent)
        if told:
            found.events += self._left()
            found.events.append(event)
        return event

    def _keep(self, found: _Captured, leaf: str, tensor: torch.Tensor) -> Part:
        part = Part(leaf, tensor.shape, tensor.dtype, tensor.device)
        if not is_plain(tensor):
            raise TypeError("a tensor of its kind cannot be taken inside a CUDA graph")
        with torch.no_grad():
            if not self.as_rows:
                part.clone = tensor.detach().clone()
                return part
            if found.block is None or tensor.device != found.block.device:
                raise TypeError(f"it is on {tensor.device}, another device than its CUDA graph")
            if found.first + found.rows >= len(found.block):
                self._room *= 4
                raise TypeError(
                    f"its CUDA graph holds more than {found.rows} values; capture it again"
                )
            values = tensor.detach()
            if not values.is_contiguous() or values.data_ptr() % 16:  # what every kernel can read
                values = values.clone(memory_format=torch.contiguous_format)
            self._fill(found, values, found.block[found.first + found.rows])
        part.row = found.rows
        found.rows += 1
        return part

    def _fill(self, found: _Captured, values: torch.Tensor, row: torch.Tensor) -> None:
        """Have the graph fill a row: by halves, where that is possible, as it takes less time."""
        same = _stream(values.device) == found.stream
        if same and found.parts is not None:
            if found.left > found.parts.nbytes // 2:  # which is more than any tensor wants
                self._settle(found)
            took = on_device.leave_on(values, row, found.parts[found.left // 8 :])
            found.left += took
            if took:
                return
        on_device.fill_on(values, row, found.scratch if same else None)

    def _settle(self, found: _Captured) -> None:
        """Have the graph complete the rows that it has left until now."""
        if not found.left or found.block is None:
            return
        device = found.block.device
        there: Any = nullcontext()
        if _stream(device) != found.stream:
            other: Any = torch.cuda.ExternalStream  # untyped in torch
            there = torch.cuda.stream(other(found.stream, device))
        with there:
            on_device.settle(found.block[found.first + found.settled : found.first + found.rows])
        found.settled, found.left = found.rows, 0

    # Behind a replay.

    def replayed(self, graph: Any) -> None:
        sink, found = self._sink, self._graphs.get(graph)
        if sink is None:
            return
        if found is None:
            self.unknown += 1
            return
        if not found.events:
            return
        try:
            with unseen():
                if capturing():  # a graph within a graph
                    for event in found.events:
                        why = "it ran in a CUDA graph that is part of another"
                        sink.skip(event.slot, event.port, "", why)
                    return
                self._before()
                self._again(sink, found)
        except Exception as error:  # the model must not notice
            self._fail(error)

    def _again(self, sink: Sink, found: _Captured) -> None:
        """Go through the captured calls: they were made once more."""
        if found.plain is not None and found.block is not None:
            table, order = sink.tables.of(found.block.device), sink.next_order
            epoch, batch = sink.epoch, sink.batch
            for start in range(0, found.rows, ROWS):
                lines = []
                for slot, site in found.plain[start : start + ROWS]:
                    lines.append((site, (order(), epoch, batch, slot.next_call())))
                    slot.seen += 1
                first = found.first + start
                table.put(found.block[first : first + len(lines)], lines)
            return
        tickets: list[Ticket] = []
        for event in found.events:
            slot, port = event.slot, event.port
            stack = self._pending(slot, get_ident())  # a call may end in another graph
            if port == "input":
                held: list[Held] = []
                call = sink.begin(slot)
                stack.append((call, held))
            else:
                call, held = stack.pop() if stack else (sink.begin(slot), [])
            for leaf, reason in event.absent:
                sink.skip(slot, port, leaf, reason)
            for part in event.parts:
                if part.clone is not None:
                    asked = self._ports.inputs or port != "input"
                    held += sink.hold(slot, port, [(part.leaf, part.clone)], asked=asked)
                    continue
                self._bring(sink, found, tickets, part.row)
                item = Held(port, part.leaf, part.shape, part.dtype, part.device)
                item.ticket = tickets[part.row]
                held.append(item)
            if port != "input":
                sink.emit(call, held)

    def _bring(self, sink: Sink, found: _Captured, tickets: list[Ticket], row: int) -> None:
        """Copy the graph's rows, as far as this one, to where rows wait to come over."""
        while row >= len(tickets):
            assert found.block is not None
            start = len(tickets)
            some = found.block[found.first + start : found.first + min(found.rows, start + ROWS)]
            tickets += sink.tables.of(found.block.device).take_rows(some)


def _stream(device: torch.device) -> int:
    """The address of a device's current stream; 0 for its default one."""
    return torch.cuda.current_stream(device).cuda_stream


def _plain(sink: Sink, found: _Captured) -> list[tuple[Slot, int]] | None:
    """Each row's slot and site, where every call is one output, in the order of the rows."""
    if not found.events:
        return None
    rows = []
    for index, event in enumerate(found.events):
        if event.port != "output" or event.absent or len(event.parts) != 1:
            return None
        part: Any = event.parts[0]  # of a tensor it has what makes a site
        if part.row != index:
            return None
        rows.append((event.slot, sink.output_site(event.slot, part, part.leaf)))
    return rows
