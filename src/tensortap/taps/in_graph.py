"""Summaries of the layers of a compiled model, made inside its graph.

A hook that is traced by `torch.compile` puts an operator into the graph (`hearing`), with a number
that is its own: each traced call of a layer has one, so a layer that a graph calls twice has two.
When the graph runs, the operator takes the summary on the spot; the tensor is neither cloned nor
handed out. A compiler may run operators in another order than the model calls its layers, so the
calls are told of when the run is over, in the order in which they were traced. It is over when all
that was traced was heard, or else when its thread goes on to something else.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ..numerics import device as on_device
from ..recording.schema import Port
from .captures import Captures, Event
from .hearing import Ear, HooksGuarded, recomputing
from .leaves import shortened, signature_order, traceable
from .replays import capturing
from .shortcut import shortcut
from .sink import Call, Held, Sink, Slot
from .unseen import unseen

__all__ = ["InGraph"]

Pending = Callable[[Slot, int], list[tuple[Call, list[Held]]]]
Found = list[tuple[str, torch.Tensor | None]]
Check = Callable[[Slot, Port, torch.Tensor], None]
Quick = Callable[[torch.Tensor], bool]


@dataclass(eq=False, slots=True)
class _Traced:
    """A call of a hook that was traced: the tensors that it speaks have numbers in a row."""

    graph: str
    number: int
    slot: Slot
    port: Port
    leaves: tuple[str, ...]
    absent: tuple[str, ...]  # leaves that are None
    places: tuple[int, ...]  # of the leaves, when they are told of

    @property
    def alone(self) -> bool:
        """Whether the one tensor that it speaks is all there is to know of its call."""
        return self.port == "output" and len(self.leaves) == 1 and not self.absent


@dataclass(eq=False)
class _Run:
    """One run of one graph, as far as it was heard: by number."""

    graph: str
    captured: bool
    heard: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Idle:
    """What the core's shortcut asks of a tap, where nothing is under way that it would miss."""

    _sink: Sink
    _unfinished: None = None
    _compiled: tuple[()] = ()
    _in_graph: None = None


class InGraph:
    """Speaks while graphs are traced, hears when they run."""

    def __init__(
        self,
        sink: Sink,
        slots: Sequence[Slot],
        captures: Captures,
        *,
        guarded: HooksGuarded,
        outputs: bool,
        pending: Pending,
        check: Check | None,
        fail: Callable[[Exception], None],
    ) -> None:
        """`pending`: calls of a layer by a thread that have begun; `outputs`: whether they end.

        `check` is shown each value as it is heard, but for those of captured graphs.
        """
        self._sink: Sink | None = sink
        self._slots = slots
        self._captures = captures
        self._outputs = outputs
        self._pending = pending
        self._check = check
        self._fail = fail
        self._of: list[_Traced] = []  # by number
        self._size: Counter[str] = Counter()  # how many numbers a graph has
        self._inputs = False  # whether calls begin with an input
        self._in_order: set[str] = set()  # graphs that run as they were traced
        self._unsure: set[str] = set()  # graphs that broke off when we looked
        self._quick: dict[int, Quick | None] = {}  # by number, of those
        self._runs: dict[int, _Run] = {}  # by thread
        self._events: dict[int, list[Event]] = {}  # of captured runs that are over, by thread
        self._streams: dict[torch.device, Any] = {}
        self._raw: dict[int, int] = {}
        self._lock = threading.Lock()
        self._guarded = guarded
        self._ear = Ear(self._hear, captured=True)
        self._register = self._registry()

    @property
    def open(self) -> bool:
        """Whether a graph has run in this thread whose calls are still to be told of."""
        return bool(self._runs) and get_ident() in self._runs

    def close(self) -> None:
        self._sink = None
        self._runs.clear()

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Have rows on these devices: inside `reduce-overhead`, memory belongs to its graphs."""
        for device in devices:
            if device.type == "cuda":
                self._make_rows(device)

    # While a graph is traced.

    def hook_in(self, module: nn.Module, index: int) -> Callable[[Any, Any], None]:
        """What a traced pre-hook of this layer does."""
        name, speak = f"layer {index}", self._speak
        rank = tuple(signature_order(module))
        self._inputs = True

        def hook(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            given = list(traceable(kwargs))
            if len(args) == 1 and all(tensor is None for _, tensor in given):
                speak(name, "input", list(traceable(args[0])), ())
                return
            found = [pair for i, item in enumerate(args) for pair in traceable(item, f"[{i}]")]
            speak(name, "input", [*found, *given], rank)

        return hook

    def hook_out(self, index: int) -> Callable[[Any], None]:
        """What a traced hook of this layer does."""
        name, speak, wanted = f"layer {index}", self._speak, self._outputs

        def hook(output: Any) -> None:
            if wanted:
                speak(name, "output", list(traceable(output)), ())

        return hook

    def _speak(self, name: str, port: str, found: Found, rank: tuple[str, ...]) -> None:
        leaves = tuple([leaf for leaf, tensor in found if tensor is not None])
        absent = tuple([leaf for leaf, tensor in found if tensor is None])
        number = self._register(name + "", port + "", leaves, absent, rank)
        for leaf, tensor in found:
            if tensor is not None:
                self._ear.speak(tensor, number, leaf)
                number = number + 1

    def _registry(self) -> Callable[..., int]:
        """Called while a graph is traced, and then a constant: the first number of a call.

        The layer is named by a text, on which a graph is guarded: blocks of one class share graphs
        as long as nothing tells them apart, and a number could become a symbol.
        """

        def register(
            name: str,
            port: Port,
            leaves: tuple[str, ...],
            absent: tuple[str, ...],
            rank: tuple[str, ...],
        ) -> int:
            self._guarded.hold()
            slot = self._slots[int(name.rpartition(" ")[2])]
            texts = tuple(shortened(leaf) for leaf in leaves)
            nothing = () if port == "input" else tuple(shortened(leaf) for leaf in absent)
            with self._lock:
                number = len(self._of)
                traced = _Traced(
                    _graph(), number, slot, port, texts, nothing, _places(leaves, rank)
                )
                self._of += [traced] * len(leaves)
                self._size[traced.graph] += len(leaves)
            if not leaves and port == "output" and self._sink is not None:
                slot.seen += 1  # nothing will be heard of it, as often as it runs
                self._skip_absent(self._sink, traced)
                if not absent:
                    self._sink.skip(slot, port, "", "it holds no tensor")
            return number

        # What torch.compiler.assume_constant_result does, but for importing all that compiles.
        setattr(register, "_dynamo_marked_constant", True)  # noqa: B010
        return register

    # When it runs.

    def _hear(self, number: int, tensor: torch.Tensor) -> None:
        sink = self._sink
        if sink is None or recomputing():
            return
        quick = self._quick.get(number)
        try:
            if quick is not None and _unwatched():
                if self._runs:
                    self.tell()  # another graph ran before
                if quick(tensor):
                    return
            with unseen():
                self._take(sink, number, tensor)
        except Exception as error:  # the model must not notice
            self._fail(error)

    def _take(self, sink: Sink, number: int, tensor: torch.Tensor) -> None:
        traced, thread = self._of[number], get_ident()
        captured = tensor.is_cuda and capturing()
        run = self._runs.get(thread)
        if run is not None and (
            run.graph != traced.graph or run.captured != captured or number in run.heard
        ):
            self._end(thread)
        leaf = traced.leaves[number - traced.number]
        if captured:
            event = self._captures.heard(traced.slot, traced.port, [(leaf, tensor)], told=False)
            self._note(thread, traced.graph, captured, number, event)
            return
        with self._beside(tensor) if tensor.is_cuda else nullcontext():
            held = sink.hold(traced.slot, traced.port, [(leaf, tensor)])
            known = self._note(thread, traced.graph, captured, number, held)
            if traced.graph in self._in_order:
                self._tell_at_once(number, thread)
            elif known == self._size[traced.graph]:
                self._end(thread)
            if self._check is not None and not leaf:
                self._check(traced.slot, traced.port, tensor)

    def _note(self, thread: int, graph: str, captured: bool, number: int, heard: Any) -> int:
        """How much was heard in this thread's run, which another may have told of just now."""
        with self._lock:
            run = self._runs.get(thread)
            if run is None:
                run = self._runs[thread] = _Run(graph, captured)
            run.heard[number] = heard
            return len(run.heard)

    def tell(self, *, everyone: bool = False) -> None:
        """What ran in this thread is over, or in every one: tell of the calls in it.

        Another thread may be in the middle of a run: what is told of by halves is two calls.
        """
        for thread in list(self._runs) if everyone else (get_ident(),):
            run = self._runs.get(thread)
            if run is not None and not run.captured:
                self._end(thread)

    def events(self) -> list[Event]:
        """What this thread has captured since it was asked last."""
        thread = get_ident()
        run = self._runs.get(thread)
        if run is not None and run.captured:
            self._end(thread)
        return self._events.pop(thread, [])

    def _end(self, thread: int) -> None:
        with self._lock:
            run, sink = self._runs.pop(thread, None), self._sink
        if run is None or sink is None:
            return
        for traced, values in self._calls(run):
            if run.captured:
                parts = [part for event in values if event is not None for part in event.parts]
                absent = [why for event in values if event is not None for why in event.absent]
                events = self._events.setdefault(thread, [])
                events.append(Event(traced.slot, traced.port, parts, absent))
                if not self._outputs:
                    events.append(Event(traced.slot, "output", ()))
            else:
                self._tell_one(sink, traced, [held for some in values for held in some], thread)

        if not run.captured:
            self._learn(sink, run)

    def _learn(self, sink: Sink, run: _Run) -> None:
        """A graph that speaks in the order of its calls, one tensor each, needs no waiting.

        Its operators run in the same order every time.
        """
        numbers = list(run.heard)
        if self._inputs or len(numbers) < self._size[run.graph]:
            return
        if run.graph in self._in_order or run.graph in self._unsure or numbers != sorted(numbers):
            return
        if all(self._of[number].alone for number in numbers):
            for number in numbers:
                self._quick[number] = self._quick_way(sink, self._of[number], run.heard[number])
            self._in_order.add(run.graph)  # at last: other threads may be running it

    def _quick_way(self, sink: Sink, traced: _Traced, heard: list[Held]) -> Quick | None:
        slot, leaf = traced.slot, traced.leaves[0]
        devices = {held.device.type for held in heard}
        if devices == {"cpu"} and not leaf:
            return lambda tensor: tensor.is_cpu and sink.output(slot, tensor)
        if devices == {"cuda"} and sink.has_shortcut:
            way, state = shortcut(slot, sink, leaf), _Idle(sink)

            def quick(tensor: torch.Tensor) -> bool:
                native = way.native  # which knows the stream that it was made on: ours
                if native is not None and native(tensor, state):
                    return True
                return self._on_own_stream(tensor) and bool(way.take(tensor))

            return quick
        return None

    def _tell_at_once(self, number: int, thread: int) -> None:
        """In such a graph a call is over when it is heard; unless it is new to us."""
        if number not in self._quick:
            graph = self._of[number].graph
            self._in_order.discard(graph)
            self._unsure.add(graph)
            for other in [n for n in list(self._quick) if self._of[n].graph == graph]:
                self._quick.pop(other, None)
        self._end(thread)

    def _calls(self, run: _Run) -> Iterable[tuple[_Traced, list[Any]]]:
        """The calls of a run as they were traced, each with what was heard of it."""
        calls: dict[int, dict[int, Any]] = {}
        for number in sorted(run.heard):
            traced = self._of[number]
            place = traced.places[number - traced.number]
            calls.setdefault(traced.number, {})[place] = run.heard[number]
        for first, found in calls.items():
            yield self._of[first], [found[place] for place in sorted(found)]

    def _tell_one(self, sink: Sink, traced: _Traced, held: list[Held], thread: int) -> None:
        slot = traced.slot
        self._skip_absent(sink, traced)
        begun = self._pending(slot, thread)
        if traced.port == "input":
            call = sink.begin(slot)
            if self._outputs:
                begun.append((call, held))
            else:
                sink.emit(call, held)
            return
        # Where the graph breaks inside of a layer, its call began in another graph, or in none.
        call, before = begun.pop() if begun else (sink.begin(slot), [])
        sink.emit(call, [*before, *held])

    @staticmethod
    def _skip_absent(sink: Sink, traced: _Traced) -> None:
        for leaf in traced.absent:
            sink.skip(traced.slot, traced.port, leaf, "None stands where a tensor could")

    # On a device.

    def _on_own_stream(self, tensor: torch.Tensor) -> bool:
        index = tensor.get_device()
        return index >= 0 and torch._C._cuda_getCurrentRawStream(index) == self._raw.get(index)

    @contextmanager
    def _beside(self, tensor: torch.Tensor) -> Iterator[None]:
        """On the stream that our rows belong to, in order with the one that runs.

        `reduce-overhead` warms up on a stream of its own, with memory of its own: what is allocated
        there and kept is an error, and what our launches need is there on our stream already.
        """
        device = tensor.device
        own = self._streams.get(device)
        if own is None:  # memory that another thread asks for is nobody's pool
            helper = threading.Thread(target=self._make_rows, args=(device,))
            helper.start()
            helper.join()
            own = self._streams[device]
        current = torch.cuda.current_stream(device)
        if current == own:
            yield
            return
        own.wait_stream(current)
        with torch.cuda.stream(own):
            yield
        current.wait_stream(own)

    def _make_rows(self, device: torch.device) -> None:
        sink = self._sink
        if sink is None:
            return
        with torch.cuda.device(device), torch.no_grad(), torch.inference_mode(False):
            sink.tables.of(device)
            on_device.fill_on(torch.zeros(4, device=device), on_device.empty_rows(1, device)[0])
        stream = torch.cuda.current_stream(device)
        self._streams[device] = stream
        self._raw[stream.device_index] = stream.cuda_stream


def _unwatched() -> bool:
    """Whether no mode of the user's would see what we do."""
    return not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def _graph() -> str:
    """The graph that is traced now; another attempt at it is another one."""
    return str(torch._guards.CompileContext.current_trace_id())


def _places(leaves: tuple[str, ...], rank: tuple[str, ...]) -> tuple[int, ...]:
    """Keyword arguments come in the order of the signature, whatever the order of the call."""

    def key(index: int) -> int:
        name = leaves[index].partition("']")[0].removeprefix("['")
        given = leaves[index].startswith("['")
        return (rank.index(name) if name in rank else len(rank)) if given else -1

    order = sorted(range(len(leaves)), key=key if rank else None)
    return tuple(order.index(i) for i in range(len(leaves)))
