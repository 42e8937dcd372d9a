"""The tap for eager modules: forward hooks for inputs and outputs, tensor hooks for gradients.

What makes this harder than three lines of hooks:
- Values are taken inside the hook, so nothing that happens later can change them.
- We record what the next module receives: our hook is kept behind everybody else's.
- A forward pass that runs inside backward is activation checkpointing at work, and no new call.
- Gradients come from tensor hooks: module backward hooks raise on in-place activations.
- Under `torch.compile` the hook is traced: it puts an operator into the graph (`in_graph`), or
  clones, and `drain` does the rest. While a CUDA graph is captured it only launches (`captures`).
- Whatever goes wrong in here is our trouble and never the model's.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..recording.schema import Port, Structure
from ..selection import Selection, select, structure
from ..selection.sites import type_name
from . import compiled, replays
from .base import Ports
from .captures import Captures, Event, part_of
from .describe import describe_module
from .fingerprint import fingerprints
from .fused import find_fused, listen_globally, why_silent
from .hearing import HooksGuarded
from .in_graph import InGraph
from .leaves import flatten, flatten_call
from .listener import Listener
from .plain import is_plain
from .plan import calls_without_running
from .programs.selfcheck import SelfCheck, check_linear
from .replaced import Replaced, replaced_note
from .shortcut import Quick, shortcut
from .shortcut_tensors import tensor_shortcut
from .sink import Call, Held, Sink, Slot
from .unseen import unseen

__all__ = ["EagerTap", "StopForward"]


class StopForward(BaseException):
    """Raised by us to end a forward pass early; no `except Exception` of a model holds it up."""


@dataclass(eq=False)
class _Place:
    """A selected module with what is in flight inside it."""

    slot: Slot
    module: nn.Module
    pending: dict[int, list[tuple[Call, list[Held]]]] = field(default_factory=dict)  # by thread
    awaiting_grads: list[Call] = field(default_factory=list)
    hooks: list[tuple[Any, RemovableHandle]] = field(default_factory=list)  # where, and which


class EagerTap:
    """Listens to the selected modules of an `nn.Module`."""

    def __init__(self, model: nn.Module, layers: Any, ports: Ports, *, default: bool) -> None:
        self.model = model
        self.ports = ports
        self.selection: Selection = select(model, layers, default_fallback=default)
        self.notes: list[str] = list(self.selection.notes)
        self.structure: Structure = structure(model)
        self._places = [
            _Place(Slot(index, site.name, site.type), site.module)
            for index, site in enumerate(self.selection.layers)
        ]
        self._scripted = [p for p in self._places if isinstance(p.module, torch.jit.ScriptModule)]
        if self._scripted:
            names = ", ".join(f"'{p.slot.name}'" for p in self._scripted[:4])
            self.notes.append(
                f"{len(self._scripted)} selected layers are TorchScript, which takes no hooks, and "
                f"are not recorded: {names}."
            )
        self.slots: Sequence[Slot] = [place.slot for place in self._places]
        self._sink: Sink | None = None
        self._on_failure: Callable[[Exception], None] = _raise
        self._handles: list[RemovableHandle] = []
        self._grad_handles: list[RemovableHandle] = []
        self._kept_last: list[tuple[Any, int]] = []  # where our hooks are, and which they are
        self._wants_inputs = False
        self._replaced: Replaced | None = None
        self._compiled: list[compiled.Entry] = []
        self._in_graph: InGraph | None = None
        self._captures: Captures | None = None
        self._guarded = HooksGuarded(1 + sum(1 for _ in model.modules()))
        self._restore: Callable[[], None] | None = None
        self._owner = 0  # the process that records
        self._stashed_before = 0
        self._given: dict[Any, Any] = {}  # what compiled layers were given whose end is to come
        self.self_checks: list[SelfCheck] = []
        self._checked: set[int] = set()
        self._unfinished: dict[int, int] | None = None
        self._rehearsed: dict[Any, dict[int, int]] = {}
        self.stopped_behind: str | None = None
        self._fused: set[int] = set()
        self._short_way = ports.outputs and not (ports.inputs or ports.grads)
        self.can_stop = False
        self._root_listeners: list[Callable[[tuple[Any, ...], Mapping[str, Any]], None]] = []

    # Attaching and detaching.

    def attach(self, sink: Sink, on_failure: Callable[[Exception], None]) -> None:
        self._sink, self._on_failure = sink, on_failure
        is_compiled = compiled.contains_compiled(self.model)
        self._fused = set() if is_compiled else find_fused(self.model)
        wants_inputs = self.ports.inputs or self.ports.grads or sink.judge is not None
        self._wants_inputs = wants_inputs
        self._listen_to_graphs(sink, is_compiled)
        self.can_stop = self._may_stop()
        if sink.stop and not self.can_stop:
            self.notes.append(
                "The model cannot be left early (it is compiled or offloaded, or gradients were "
                "asked for): it runs on behind the first divergence."
            )
        before: dict[int, list[Callable[..., None]]] = {}
        after: dict[int, Callable[..., None]] = {}
        keywords: dict[int, Callable[..., None]] = {}
        if id(self.model) in self._fused:
            before[id(self.model)] = [self._root_hook()]
        else:
            self._handles.append(
                self.model.register_forward_pre_hook(self._root_hook(), with_kwargs=True)
            )
        for place in self._places:
            if place in self._scripted:
                continue
            if id(place.module) in self._fused:
                after[id(place.module)] = self._output_hook(place)
                if wants_inputs:
                    before.setdefault(id(place.module), []).append(self._input_hook(place))
                if self.ports.inputs:
                    keywords[id(place.module)] = self._keywords_hook(place)
                continue
            self._hook_up(place)
        if not is_compiled:
            hooked = [place.slot.name for place in self._places if place.hooks]
            self._replaced = Replaced(self.model, hooked)
        if after or before:
            self._handles += listen_globally(before, after, keywords)
            if after and self.ports.grads and self.ports.inputs:
                self.notes.append(
                    f"Gradients of the keyword arguments of {len(after)} layers inside "
                    "nn.TransformerEncoderLayer are not recorded."
                )
        if is_compiled:
            self.notes.append(compiled.prepare(self.ports.grads, self._in_graph is not None))

    def _hook_up(self, place: _Place) -> None:
        """Put our hooks on a module, and remember which they are."""
        module = place.module
        if self._wants_inputs:
            handle = module.register_forward_pre_hook(self._input_hook(place), with_kwargs=True)
            place.hooks.append((module._forward_pre_hooks, handle))
        handle = module.register_forward_hook(self._output_hook(place))
        place.hooks.append((module._forward_hooks, handle))
        self._handles += [handle for _, handle in place.hooks]
        self._kept_last += [(hooks, handle.id) for hooks, handle in place.hooks]

    def _follow(self, replaced: Replaced, sink: Sink) -> None:
        """Go over to modules that were put in the place of heard ones."""
        now = replaced.now()
        moved = [
            place
            for place in self._places
            if place.hooks and now.get(place.slot.name, place.module) is not place.module
        ]
        for place in moved:
            for hooks, handle in place.hooks:
                handle.remove()
                self._handles.remove(handle)
                self._kept_last.remove((hooks, handle.id))
            place.hooks.clear()
            place.module = now[place.slot.name]
            place.slot.type = type_name(place.module)
            sink.forget(place.slot)
            if not isinstance(place.module, torch.jit.ScriptModule):
                self._hook_up(place)
        names = [place.slot.name for place in moved]
        if names and replaced_note(names) not in self.notes:  # it may be swapped at every step
            self.notes.append(replaced_note(names))

    def _listen_to_graphs(self, sink: Sink, is_compiled: bool) -> None:
        """Be there when layers run in graphs: compiled ones, captured ones, or both."""
        self._captures = Captures(
            sink,
            self.ports,
            slots=len(self.slots),
            dtypes=compiled.dtypes_of(self.model),
            pending=self._pending,
            before=self._before_capture,
            left=self._left_in_graphs,
            fail=self._fail,
        )
        replays.listen(self._captures)
        if is_compiled or compiled.graphs_may_come():
            self._guarded.hold()
        if self._captures.as_rows:
            self._in_graph = InGraph(
                sink,
                self.slots,
                self._captures,
                guarded=self._guarded,
                outputs=self.ports.outputs,
                pending=self._pending,
                check=self._check_heard if self.ports.inputs and self.ports.outputs else None,
                fail=self._fail,
            )
            if is_compiled:
                self._in_graph.prepare(compiled.devices_of(self.model))
        elif is_compiled:
            self._restore = compiled.around_each_run(self.model, self.drain)
        self._owner = os.getpid()
        atexit.register(self._at_exit)  # is called before the writer's, which was there before

    def _at_exit(self) -> None:
        """The interpreter ends with the recording open: keep what graphs have left behind."""
        if os.getpid() == self._owner:
            self._safely(self._drain_all)

    def detach(self) -> None:
        try:
            self._drain_all()
            self._finish_interrupted()
        finally:
            for handle in (*self._handles, *self._grad_handles):
                handle.remove()
            listened = bool(self._handles)
            self._handles.clear()
            self._kept_last.clear()
            self._grad_handles.clear()
            try:
                if listened and compiled.contains_compiled(self.model):
                    compiled.forget()
            finally:
                self._leave_graphs()
                self._sink = None

    def let_go(self) -> None:
        for handle in (*self._handles, *self._grad_handles):
            handle.remove()

    def _leave_graphs(self) -> None:
        atexit.unregister(self._at_exit)
        if self._restore is not None:
            self._restore()
        if self._in_graph is not None:
            self._in_graph.close()
        self._guarded.release()
        if self._captures is not None:
            replays.silence(self._captures)
            self.notes += self._captures.notes()
            self._captures.close()

    def on_root_call(self, listener: Callable[[tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        """Hear the arguments of every call of the whole model, for the inputs' digest."""
        self._root_listeners.append(listener)

    def explain_silence(self, silent: Sequence[Slot]) -> tuple[list[str], list[Slot]]:
        """Why some selected layers were not heard, and those for which we cannot say."""
        fused = [s for s in silent if id(self._places[s.index].module) in self._fused]
        rest = [s for s in silent if s not in fused]
        reasons = [why_silent([s.name for s in fused])] if fused else []
        return reasons, rest

    def describe(self) -> dict[str, Any]:
        described = describe_module(self.model)
        found = fingerprints(self.model)
        if found:
            described["fingerprints"] = found
        if compiled.contains_compiled(self.model):
            described["runtime"] = "torch.compile"
        return described

    # Running.

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, early_stop: bool) -> Any:
        to_the_end = any(not slot.name for slot in self.slots)  # the whole model is a layer too
        stops = early_stop and not to_the_end and self._may_stop()
        calls = self._rehearse(args, kwargs) if stops else {}
        self._unfinished = dict(calls) if calls else None
        try:
            output = self.model(*args, **kwargs)
        except StopForward as stop:
            if not self._diverged():
                self.stopped_behind = str(stop)
            return None
        finally:
            self._unfinished = None
        self.drain()
        return output

    def _diverged(self) -> bool:
        """Whether the run has left its reference and is to be stopped there."""
        return self._sink is not None and self._sink.ended and self.can_stop

    def _may_stop(self) -> bool:
        """Whether a forward pass may be left early without harm or loss."""
        offloaded = any(hasattr(module, "_hf_hook") for module in self.model.modules())
        return not (self.ports.grads or offloaded or compiled.contains_compiled(self.model))

    def _rehearse(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, int]:
        """How often each selected layer will run, so that the last call is known when it comes.

        A layer that a loop calls again must be heard to its last call. Where the number cannot be
        told beforehand, nothing is returned, and the model runs to its end.
        """
        leaves = flatten((args, dict(kwargs)))
        key = tuple((leaf, t.shape, t.dtype) for leaf, t in leaves if t is not None)
        if key not in self._rehearsed:
            sink, self._sink = self._sink, None
            try:
                calls, why = calls_without_running(self.model, args, kwargs, self.selection.layers)
            finally:
                self._sink = sink
            if why is not None:
                self.notes.append(
                    "The model was not stopped behind the last selected layer: how often layers "
                    f"run cannot be told beforehand ({why})."
                )
            index = {slot.name: slot.index for slot in self.slots}
            self._rehearsed[key] = {index[n]: c for n, c in calls.items() if n in index}
        return self._rehearsed[key]

    def _stop_if_done(self, place: _Place) -> None:
        if self._unfinished is None:
            return
        left = self._unfinished.get(place.slot.index, 0) - 1
        self._unfinished[place.slot.index] = left
        if left <= 0 and all(count <= 0 for count in self._unfinished.values()):
            raise StopForward(place.slot.name)

    # The hooks.

    def _root_hook(self) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling() or _recomputing():
                return
            try:
                if (
                    self._replaced is not None
                    and self._sink is not None
                    and self._replaced.changed()
                ):
                    self._follow(self._replaced, self._sink)
                self._stay_last()
                if replays.capturing():
                    return
                with unseen():
                    self._drain()
                    for listener in self._root_listeners:
                        listener(args, kwargs)
            except Exception as error:  # the model must not notice
                self._fail(error)

        return Listener(hook)

    def _input_hook(self, place: _Place) -> Callable[..., None]:
        traced = None
        if self._in_graph is not None and self.ports.inputs:
            traced = self._in_graph.hook_in(place.module, place.slot.index)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():
                if traced is not None:
                    traced(args, kwargs)
                elif self.ports.inputs:
                    compiled.stash(self._compiled, place.slot.index, "input", (args, kwargs))
                return
            sink = self._sink
            if sink is None or _recomputing():
                return
            try:
                with unseen():
                    if replays.capturing():
                        self._captured(place, "input", flatten_call(module, args, kwargs))
                        return
                    self._enter(place, sink, flatten_call(module, args, kwargs))
            except Exception as error:  # the model must not notice
                self._fail(error)

        return Listener(hook)

    def _keywords_hook(self, place: _Place) -> Callable[[dict[str, Any]], None]:
        """Keyword arguments that are told when the call is over: they join the other inputs."""

        def hook(kwargs: dict[str, Any]) -> None:
            sink, pending = self._sink, place.pending.get(get_ident())
            skipped = torch.compiler.is_compiling() or sink is None or not pending
            if skipped or replays.capturing() or _recomputing():
                return
            assert sink is not None and pending
            try:
                with unseen():
                    leaves = flatten_call(place.module, (), kwargs)
                    if leaves:
                        pending[-1][1].extend(sink.hold(place.slot, "input", leaves))
            except Exception as error:  # the model must not notice
                self._fail(error)

        return hook

    def _output_hook(self, place: _Place) -> Callable[..., None]:
        traced = None
        if self._in_graph is not None:
            traced = self._in_graph.hook_out(place.slot.index)

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if torch.compiler.is_compiling():
                if traced is not None:
                    traced(output)
                    return
                compiled.stash(
                    self._compiled, place.slot.index, "output", output if self.ports.outputs else ()
                )
                return
            sink = self._sink
            if sink is None:
                return
            if self._diverged():
                raise StopForward(place.slot.name)
            try:
                with unseen():
                    if replays.capturing():
                        self._captured(place, "output", flatten(output))
                        return
                    if _recomputing():
                        self._recomputed(place, output)
                    else:
                        self._leave(place, sink, output)
            except Exception as error:  # the model must not notice
                self._fail(error)
            if self._diverged():
                raise StopForward(place.slot.name)
            self._stop_if_done(place)

        sink = self._sink
        if sink is not None and self._short_way and sink.has_tensor_shortcut:
            return Quick(hook, tensor_shortcut(place.slot, sink), self)
        if sink is None or not (self._short_way and sink.has_shortcut):
            return Listener(hook)
        return Quick(hook, shortcut(place.slot, sink), self)

    def _enter(
        self, place: _Place, sink: Sink, leaves: list[tuple[str, torch.Tensor | None]]
    ) -> None:
        if self._behind:
            self._drain()
        call = sink.begin(place.slot)
        held = []
        if self.ports.inputs or sink.judge is not None:
            held = sink.hold(place.slot, "input", leaves, asked=self.ports.inputs)
        place.pending.setdefault(get_ident(), []).append((call, held))
        if self.ports.grads and self.ports.inputs:
            self._listen_to_grads(call, "grad_input", leaves)

    def _leave(self, place: _Place, sink: Sink, output: Any) -> None:
        if self._behind:
            self._drain()
        if self._short_way and isinstance(output, torch.Tensor) and sink.output(place.slot, output):
            return
        pending = place.pending.get(get_ident())
        if pending:
            call, held = pending.pop()
        else:
            call, held = sink.begin(place.slot), []
        leaves = flatten(output)
        if self.ports.outputs:
            held += sink.hold(place.slot, "output", leaves)
        sink.emit(call, held)
        if self.ports.grads and not self._listen_to_grads(call, "grad_output", leaves):
            place.awaiting_grads.append(call)

    def _captured(
        self, place: _Place, port: Port, leaves: list[tuple[str, torch.Tensor | None]]
    ) -> None:
        """A CUDA graph is captured: what its replays compute is kept by the graph itself."""
        wanted = self.ports.outputs
        if port == "input":
            judged = self._sink is not None and self._sink.judge is not None
            wanted = self.ports.inputs or judged
        if self._captures is not None and not _recomputing():
            self._captures.heard(place.slot, port, leaves if wanted else [])

    def _pending(self, slot: Slot, thread: int) -> list[tuple[Call, list[Held]]]:
        """Calls of a layer by a thread that have begun and not ended."""
        return self._places[slot.index].pending.setdefault(thread, [])

    def _before_capture(self) -> None:
        """A CUDA graph is about to be captured, or was replayed: by hand, or by a compiled model.

        What a compiled model has stashed stays: it may be running, and put back what was there.
        """
        if self._in_graph is not None:
            self._in_graph.tell()
        self._stashed_before = len(self._compiled)

    def _left_in_graphs(self) -> list[Event]:
        """What compiled graphs have said while a CUDA graph was captured."""
        events = [] if self._in_graph is None else self._in_graph.events()
        entries = self._compiled[self._stashed_before :]
        if entries:  # then a compiled model ran within the capture, and is not running any more
            del self._compiled[self._stashed_before :]
        for index, port, value in entries:
            module = self._places[index].module
            leaves = flatten_call(module, *value) if port == "input" else flatten(value)
            parts = [part_of(leaf, tensor) for leaf, tensor in leaves if tensor is not None]
            events.append(Event(self.slots[index], port, parts))
        return events

    @property
    def _behind(self) -> bool:
        """Whether compiled graphs have run whose calls are still to be told of."""
        return bool(self._compiled) or (self._in_graph is not None and self._in_graph.open)

    def _recomputed(self, place: _Place, output: Any) -> None:
        """Reentrant checkpointing ran the first forward without a graph: this one has it."""
        if self.ports.grads and place.awaiting_grads:
            self._listen_to_grads(place.awaiting_grads.pop(), "grad_output", flatten(output))

    def _listen_to_grads(
        self, call: Call, port: Port, leaves: list[tuple[str, torch.Tensor | None]]
    ) -> bool:
        """Hear the gradients of these tensors when they come; False where none will."""
        if not torch.is_grad_enabled():
            return False
        heard = False
        for leaf, tensor in leaves:
            if tensor is not None and tensor.requires_grad:
                register: Any = tensor.register_hook  # untyped in torch
                self._grad_handles.append(register(self._grad_hook(call, port, leaf)))
                heard = True
        return heard

    def _grad_hook(self, call: Call, port: Port, leaf: str) -> Callable[[torch.Tensor], None]:
        def hook(grad: torch.Tensor) -> None:
            sink = self._sink
            if sink is None:
                return
            try:
                with unseen():
                    sink.emit(call, sink.hold(call.slot, port, [(leaf, grad)]))
            except Exception as error:  # the model must not notice
                self._fail(error)

        return hook

    def _fail(self, error: Exception) -> None:
        """Something of ours went wrong: listen no more, and say so."""
        self._sink = None
        self._on_failure(error)

    # Keeping house.

    def drain(self) -> None:
        self._safely(self._drain)

    def _safely(self, act: Callable[[], None]) -> None:
        """Do what nobody asked for but us, outside of the hooks."""
        try:
            with unseen():
                act()
        except Exception as error:  # the model must not notice, nor who says that a step is over
            self._fail(error)

    def _drain(self) -> None:
        sink = self._sink
        if sink is None or not self._behind or replays.capturing():
            return
        if self._in_graph is not None:
            self._in_graph.tell()
        entries, self._compiled[:] = list(self._compiled), []
        for index, port, value in entries:
            slot = self.slots[index]
            # Where the graph breaks inside of a layer, the rest of its call comes later, from
            # another graph or from none.
            stack = self._places[index].pending.setdefault(get_ident(), [])
            if port == "input":
                call = sink.begin(slot)
                self._given[index] = value
                leaves = flatten_call(self._places[index].module, *value)
                stack.append((call, sink.hold(slot, "input", leaves)))
                continue
            call, held = stack.pop() if stack else (sink.begin(slot), [])
            if self.ports.outputs:
                held += sink.hold(slot, "output", flatten(value))
                self._check_linear(index, self._given.pop(index, None), value)
            sink.emit(call, held)

    def _drain_all(self) -> None:
        """The same, and what other threads have left: nothing runs any more."""
        if self._sink is not None and self._in_graph is not None and not replays.capturing():
            self._in_graph.tell(everyone=True)
        self._drain()

    def _check_heard(self, slot: Slot, port: Port, tensor: torch.Tensor) -> None:
        """The same of a value that is heard inside the graph, and kept until the layer ends."""
        if slot.index in self._checked or type(self._places[slot.index].module) is not nn.Linear:
            return
        key = (slot.index, get_ident())
        if port == "input":
            self._given[key] = ((tensor.detach().clone(),), {})
        else:
            self._check_linear(slot.index, self._given.pop(key, None), tensor)

    def _check_linear(self, index: int, given: Any, output: Any) -> None:
        """That a compiled linear gives its input times its weight, where both were recorded."""
        module = self._places[index].module
        if given is None or index in self._checked or type(module) is not nn.Linear:
            return
        others = len(module._forward_hooks) > 1 or len(module._forward_pre_hooks) > 1
        if others or not is_plain(module.weight):  # a hook or a quantiser has its part in it
            return
        self._checked.add(index)
        operand = flatten_call(module, *given)
        if len(operand) == 1 and operand[0][1] is not None and isinstance(output, torch.Tensor):
            name = self.slots[index].name
            with torch.no_grad():
                found = check_linear(name, module.weight, module.bias, operand[0][1], output)
            self.self_checks += [] if found is None else [found]

    def settle(self) -> None:
        """A step is over: forget hooks on graphs that are gone."""
        self._safely(self._drain_all)
        self._given.clear()
        self._grad_handles = [h for h in self._grad_handles if h.hooks_dict_ref() is not None]
        self._safely(self._finish_interrupted)
        for place in self._places:
            if place.awaiting_grads:
                place.awaiting_grads.clear()

    def _finish_interrupted(self) -> None:
        """Calls that never ended, because the model raised, still have their inputs."""
        for place in self._places:
            if not place.pending:  # once a step and a layer: make it quick
                continue
            stacks, place.pending = place.pending, {}
            for stack in stacks.values():
                while stack:
                    call, held = stack.pop()
                    if self._sink is not None:
                        self._sink.emit(call, held)

    def _stay_last(self) -> None:
        """Others may have added hooks since: what we record is what comes out behind theirs."""
        for hooks, ours in self._kept_last:
            if next(reversed(hooks)) != ours:
                hooks.move_to_end(ours)


def _recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass: activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _raise(error: Exception) -> None:
    raise error
