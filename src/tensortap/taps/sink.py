"""Where a tap pours what it hears: gives each tensor its place, moment and order.

A tap says "this layer's output, these tensors"; the sink knows the epoch, batch and call, whether
tensors or summaries are kept, and what to do with a tensor that cannot be kept. With a judge, what
is kept is decided when a call ends.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from ..errors import TapError
from ..forks import make_known
from ..numerics.histogram import Histogram
from ..numerics.sampling import SKETCH, sample, sample_on
from ..numerics.summary import WIDTH
from ..recording.device_table import DeviceTables, Ticket, cuda_in_use
from ..recording.dtypes import dtype_name
from ..recording.rows import fill_row
from ..recording.schema import Port, Provenance, Site
from ..recording.writer import Writer
from .judging import Judge, Snapshots, Values
from .plain import Unrecordable, is_plain, plain_parts

__all__ = ["Call", "Held", "Keep", "Sink", "Slot", "Tally"]

Keep = Literal["tensors", "sketch", "summary"]
_CallKey = tuple[int, int, int, int]  # slot, epoch, batch, call


_UNTAKEABLE = (Unrecordable, TapError, RuntimeError, NotImplementedError, TypeError)


def _why(error: Exception) -> str:
    """Why one tensor could not be taken, in a line."""
    text = str(error).strip().split("\n", 1)[0].rstrip(".")
    if isinstance(error, Unrecordable | TapError):
        return text
    return f"it could not be brought to the CPU: {text}"


@dataclass(eq=False)
class Slot:
    """One selected layer while it is being listened to."""

    index: int
    name: str
    type: str
    alias: str | None = None
    provenance: Provenance = "hook"
    seen: int = 0
    next_call: Callable[[], int] = field(init=False)
    """The number of the next call in this step, which no other call gets."""

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Calls count from 0 again."""
        self.next_call = itertools.count().__next__


@dataclass(slots=True)
class Call:
    """One call of a layer: which, and when."""

    slot: Slot
    epoch: int
    batch: int
    call: int


@dataclass(eq=False, slots=True)
class Held:
    """A tensor's values, taken, whose row is not written yet.

    `asked` is False for an input that is held only in case its layer turns out to be the first that
    diverged. `values` are there for a judge to look at; `brief` ones before anything else runs.
    """

    port: Port
    leaf: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    number: int = -1
    row: np.ndarray[Any, Any] | None = None
    ticket: Ticket | None = None  # for a row that a device computes
    histogram: Histogram | None = None
    sketch: np.ndarray[Any, Any] | None = None
    values: Values | None = None
    asked: bool = True
    brief: bool = False


@dataclass
class Tally:
    """How many bytes of tensors were seen, and how many of them kept."""

    seen: int = 0
    kept: int = 0


@dataclass(eq=False)
class Sink:
    """Takes tensors from a tap and hands them to the writer."""

    writer: Writer
    keep: Keep = "tensors"
    limit: int = 1 << 30
    judge: Judge | None = None
    stop: bool = False
    both_grads: bool = False  # whether a layer's grad_output is followed by its grad_input
    epoch: int = 0
    batch: int = 0
    skipped: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    _order: Any = field(default_factory=itertools.count)
    _sites: dict[Any, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.snapshots = Snapshots(self.limit)
        self.next_order = self._order.__next__
        self._waiting: dict[_CallKey, tuple[Call, list[Held]]] = {}
        make_known(self)

    def in_child(self) -> None:
        """A forked child has the sink; its writer takes nothing there."""
        self._lock = threading.Lock()

    @cached_property
    def tables(self) -> DeviceTables:
        """Where summaries of a device's tensors are computed: there."""
        tables = DeviceTables(self.writer.put_rows)
        self.writer.on_pending(tables.send)
        return tables

    @property
    def has_shortcut(self) -> bool:
        """Whether summaries of plain outputs are all that is wanted, and a GPU may have them."""
        wanted = self.keep == "summary" and self.judge is None and not self.writer.histograms
        return wanted and cuda_in_use()

    @property
    def has_tensor_shortcut(self) -> bool:
        """Whether the tensors of plain outputs are all that is wanted, and a GPU may have them."""
        return self.keep == "tensors" and self.judge is None and cuda_in_use()

    @property
    def ended(self) -> bool:
        """Whether the model has diverged and should run no further."""
        return self.stop and self.judge is not None and self.judge.divergence is not None

    def begin(self, slot: Slot) -> Call:
        """Count a call of this layer in the current step."""
        with self._lock:
            call = Call(slot, self.epoch, self.batch, slot.next_call())
            slot.seen += 1
        return call

    def advance(self, slots: Iterable[Slot], *, epoch: int, batch: int) -> None:
        """Go to another moment: calls count from 0 again."""
        self.settle()
        self.epoch, self.batch = epoch, batch
        for slot in slots:
            slot.restart()

    def hold(
        self,
        slot: Slot,
        port: Port,
        leaves: Sequence[tuple[str, torch.Tensor | None]],
        *,
        asked: bool = True,
    ) -> list[Held]:
        """Take the values of these tensors now; what was not asked for is held for the judge."""
        if not asked:
            return self._hold_unasked(port, leaves)
        held: list[Held] = []
        for leaf, tensor in leaves:
            if tensor is None:
                self.skip(slot, port, leaf, "None stands where a tensor could")
                continue
            try:
                held += self._hold_one(port, leaf, tensor)
            except _UNTAKEABLE as error:
                self.skip(slot, port, leaf, _why(error))
        if not leaves:
            self.skip(slot, port, "", "it holds no tensor")
        return held

    def output(self, slot: Slot, tensor: torch.Tensor) -> bool:
        """The short way for the commonest case, a plain tensor whose summary is kept."""
        if self.keep != "summary" or self.judge is not None or not is_plain(tensor):
            return False
        if tensor.is_cuda and not self.writer.histograms:
            return False
        site = self.output_site(slot, tensor)
        with self._lock:
            call = slot.next_call()
            slot.seen += 1
        try:
            self.writer.summarize(site, (next(self._order), self.epoch, self.batch, call), tensor)
        except _UNTAKEABLE as error:
            self.skip(slot, "output", "", _why(error))
        return True

    def forget(self, slot: Slot) -> None:
        """A layer is another module now: what was known of its places may not hold."""
        with self._lock:
            for key in [key for key in self._sites if key[0] == slot.index]:
                del self._sites[key]

    def output_site(self, slot: Slot, tensor: torch.Tensor, leaf: str = "") -> int:
        """The site of a layer whose output is, or holds, this one plain tensor."""
        key = (slot.index, leaf, tensor.shape, tensor.dtype, tensor.device)
        site = self._sites.get(key)
        if site is None:
            held = Held("output", leaf, tensor.shape, tensor.dtype, tensor.device)
            site = self._sites[key] = self._site(slot, held)
        return site

    def emit(self, call: Call, held: Sequence[Held]) -> None:
        """Write the rows of what was taken, in the order in which calls finish.

        For a judge, the gradient of a layer's output waits for that of its input: only together
        do they say whether it was this layer that went wrong on the way back.
        """
        if self.judge is not None and self.both_grads:
            held = self._with_grads(call, held)
        if held:
            self._write(call, held)

    def settle(self) -> None:
        """Write what still waits: layers whose inputs have no gradient."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for call, held in waiting.values():
            self._write(call, held)

    def _with_grads(self, call: Call, held: Sequence[Held]) -> Sequence[Held]:
        """What to write now: with a grad_input, the grad_output that waited for it."""
        key = (call.slot.index, call.epoch, call.batch, call.call)
        ports = {item.port for item in held}
        with self._lock:
            if ports == {"grad_output"} and not any(item.brief for item in held):
                self._waiting.setdefault(key, (call, []))[1].extend(held)
                return []
            if ports == {"grad_input"} and key in self._waiting:
                return [*self._waiting.pop(key)[1], *held]
        return held

    def _write(self, call: Call, held: Sequence[Held]) -> None:
        kept = frozenset[str]()
        if self.judge is not None:
            with self._lock:
                kept = self.judge.keep(call, held)
        for item in held:
            if not item.asked and item.port not in kept:
                continue
            number = item.number
            if self.judge is not None and item.values is not None:
                number = self._kept(item) if item.port in kept else -1
            site = self._site(call.slot, item)
            moment = (next(self._order), call.epoch, call.batch, call.call)
            if item.ticket is not None:
                item.ticket.table.line(item.ticket, (site, moment))
            elif number < 0 and item.row is not None:
                self.writer.summary_line(site, moment, item.row, item.histogram, item.sketch)
            else:
                self.writer.line(site, moment, number)
            item.values = None

    def _kept(self, item: Held) -> int:
        """Store a tensor that the judge wants to see in full."""
        assert item.values is not None
        if self.keep != "tensors" or item.values.tensor is None:
            return -1
        self.tally.kept += item.values.nbytes
        return self.writer.take(item.values.tensor)

    def skip(self, slot: Slot, port: Port, leaf: str, reason: str) -> None:
        self.skipped[(slot.name, port, leaf, reason)] += 1

    def _hold_one(self, port: Port, leaf: str, tensor: torch.Tensor) -> list[Held]:
        if is_plain(tensor):
            return [self._take(port, leaf, tensor, tensor.device)]
        with torch.no_grad():
            parts = list(plain_parts(tensor, self.limit))
        return [self._take(port, leaf + tail, part, tensor.device) for tail, part in parts]

    def _hold_unasked(
        self, port: Port, leaves: Sequence[tuple[str, torch.Tensor | None]]
    ) -> list[Held]:
        held: list[Held] = []
        if self.judge is None or self.judge.divergence is not None:
            return held
        for leaf, tensor in leaves:
            if tensor is not None and is_plain(tensor):
                values = self.snapshots.hold(tensor)
                if values is not None:
                    found = Held(port, leaf, tensor.shape, tensor.dtype, tensor.device)
                    found.values, found.asked = values, False
                    held.append(found)
        return held

    def _take(self, port: Port, leaf: str, tensor: torch.Tensor, device: torch.device) -> Held:
        held = Held(port, leaf, tensor.shape, tensor.dtype, device)
        if self.judge is None and self.keep == "tensors":
            held.number = self.writer.take(tensor)
            return held
        if tensor.is_cuda and self.judge is None and not self.writer.histograms:
            sketch = sample_on(tensor, SKETCH) if self.keep == "sketch" else None
            if self.keep == "summary" or sketch is not None:
                held.ticket = self.tables.of(tensor.device).take(tensor, sketch)
                return held
        held.row = np.empty(WIDTH)
        held.histogram = fill_row(held.row, tensor, self.writer.histograms)
        if self.keep == "sketch":
            held.sketch = sample(tensor, SKETCH)
        if self.judge is not None:
            self.tally.seen += tensor.numel() * tensor.element_size()
            grad = port == "grad_output" and self.both_grads
            if port == "input" or grad:  # its layer runs before it is judged
                held.values = self.snapshots.hold(tensor)
            held.brief = held.values is None and grad
            if held.brief or not (port == "input" or grad):
                held.values = self.snapshots.now(tensor)
        return held

    def _site(self, slot: Slot, item: Held) -> int:
        key = (slot.index, item.port, item.leaf, item.shape, item.dtype, item.device)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self.writer.site(
                Site(
                    slot.name,
                    item.port,
                    item.leaf,
                    slot.alias,
                    slot.type,
                    tuple(item.shape),
                    dtype_name(item.dtype),
                    str(item.device),
                    slot.provenance,
                )
            )
        return site
