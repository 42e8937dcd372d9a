"""The monitor's hooks: one a layer, and one on the whole model that tells when a forward begins.

Eager, a hook hands the output over as it is. Traced by `torch.compile` it speaks each tensor to an
`Ear`, and the output is put together again when the graph runs. A hook stays behind other people's,
so that what is heard is what the next layer gets; layers whose results a hook would change
(`taps.fused`) are heard through torch's global hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..taps import compiled
from ..taps.fused import find_fused, listen_globally, why_silent
from ..taps.hearing import Ear, HooksGuarded, recomputing
from ..taps.leaves import flatten
from ..taps.listener import Listener
from ..taps.replaced import Replaced, replaced_note
from ..taps.session import TapWarning
from ..taps.unseen import unseen
from .choice import Chosen
from .moments import Moments
from .outputs import Form, compact, pick, snapshot, take_apart, tensors_of

__all__ = ["Heard", "Listening"]

_ROOT = 0


class Heard:
    """One output that arrived: its form, copies of its tensors, and where they were."""

    def __init__(self, form: Form) -> None:
        """`form` numbers the tensors as they are spoken; those it does not name are left out."""
        self._places = {number: new for new, (number, _) in enumerate(tensors_of(form))}
        self._copies: dict[int, tuple[torch.Tensor, str]] = {}
        self.form = compact(form)

    def take(self, number: int, tensor: torch.Tensor) -> None:
        place = self._places.get(number)
        if place is not None:
            self._copies[place] = (snapshot(tensor), str(tensor.device))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self._copies[place][0] for place in range(len(self._places))]

    @property
    def devices(self) -> list[str]:
        return [self._copies[place][1] for place in range(len(self._places))]


@dataclass(frozen=True)
class _Spoken:
    """What a site of a graph says: tensor `number` of the `count` of one output."""

    index: int
    form: Form
    number: int
    count: int


@dataclass(eq=False)
class _Arriving:
    """An output of which some tensors have arrived; what is not wanted is not copied."""

    wanted: Any
    heard: Heard | None
    numbers: set[int] = field(default_factory=set)


class Listening:
    """Hooks on the chosen layers, from `attach` to `detach`.

    `begin(args, kwargs)` is called when a forward of the whole model begins, `wants(index)` before
    an output is copied, `take(index, heard)` with the copies, `fail(index, error)` when something
    of ours went wrong: the model never notices. `passed(reason)`: a call had nothing to hear.
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: Sequence[Chosen],
        *,
        begin: Callable[[Any, Mapping[str, Any]], None],
        wants: Callable[[int], Any],
        take: Callable[[int, Any, Heard], None],
        fail: Callable[[int | None, Exception], None],
        moments: Moments,
        passed: Callable[[str], None],
    ) -> None:
        self._model = model
        self._chosen = chosen
        self._begin = begin
        self._wants = wants
        self._take = take
        self._fail = fail
        self._moments = moments
        self._passed = passed
        self._handles: list[RemovableHandle] = []
        self._own: list[tuple[int, nn.Module, RemovableHandle]] = []
        self._replaced: Replaced | None = None
        self._fused: set[int] = set()
        self._guarded = HooksGuarded(len(chosen) + 1)
        self._traced = [_Spoken(-1, ("none",), 0, 1)]
        self._arriving: dict[tuple[int, int], _Arriving] = {}  # by thread and first site
        self._ear = Ear(self._arrived)
        indices = {f"layer {index}": index for index in range(len(chosen))}
        self._register = _registry(self._traced, indices)
        self.notes: list[str] = []

    # Attaching and detaching.

    def attach(self) -> None:
        self._guarded.hold()
        is_compiled = compiled.contains_compiled(self._model)
        self._fused = set() if is_compiled else find_fused(self._model)
        before: dict[int, list[Callable[..., None]]] = {}
        after: dict[int, Callable[..., None]] = {}
        if id(self._model) in self._fused:
            before[id(self._model)] = [self._root_hook()]
        else:
            self._handles.append(
                self._model.register_forward_pre_hook(self._root_hook(), with_kwargs=True)
            )
        globally: dict[int, list[Callable[..., None]]] = {}
        for index, one in enumerate(self._chosen):
            if id(one.module) in self._fused:
                globally.setdefault(id(one.module), []).append(self._output_hook(index))
                after[id(one.module)] = _each(globally[id(one.module)])
                continue
            handle = one.module.register_forward_hook(self._output_hook(index))
            self._handles.append(handle)
            self._own.append((index, one.module, handle))
        if not is_compiled:
            heard = [self._chosen[index].layer for index, _, _ in self._own]
            self._replaced = Replaced(self._model, heard)
        if before or after:
            self._handles += listen_globally(before, after)
        if is_compiled:
            compiled.forget()
            self.notes.append(
                "The model is compiled: it compiled anew for the monitor's hooks, and does so "
                "again when they are removed. Fused kernels may differ in the last bits."
            )

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._handles and compiled.contains_compiled(self._model):
            compiled.forget()
        self._guarded.release()
        self._handles.clear()
        self._own.clear()
        self._arriving.clear()

    def explain(self, silent: Sequence[int]) -> list[str]:
        """Why some layers were never heard, where we know."""
        fused = [i for i in silent if id(self._chosen[i].module) in self._fused]
        return [why_silent([self._chosen[i].layer for i in fused])] if fused else []

    # The hooks.

    def _root_hook(self) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():
                for _, tensor in flatten((args, kwargs)):
                    if tensor is not None:
                        self._ear.speak(tensor, _ROOT)
                        break
                return
            if recomputing():
                return
            try:
                if self._passes_over((args, kwargs)):
                    return
                if self._replaced is not None and self._replaced.changed():
                    self._follow(self._replaced)
                self._stay_last()
                with unseen():
                    self._begin(args, kwargs)
            except TapWarning:  # where the user made warnings errors
                raise
            except Exception as error:  # the model must not notice
                self._fail(None, error)

        return Listener(hook)

    def _follow(self, replaced: Replaced) -> None:
        """Go over to modules that were put in the place of heard ones."""
        now = replaced.now()
        moved: list[str] = []
        for at, (index, module, handle) in enumerate(self._own):
            name = self._chosen[index].layer
            new = now.get(name, module)
            if new is module or isinstance(new, torch.jit.ScriptModule):
                continue
            handle.remove()
            self._handles.remove(handle)
            made = new.register_forward_hook(self._output_hook(index))
            self._handles.append(made)
            self._own[at] = (index, new, made)
            moved.append(name)
        if moved and replaced_note(moved) not in self.notes:
            self.notes.append(replaced_note(moved))

    def _output_hook(self, index: int) -> Callable[..., None]:
        register, name = self._register, f"layer {index}"

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                tensors: list[torch.Tensor] = []
                form = take_apart(output, tensors)
                site = register(name + "", form, len(tensors))
                for number, tensor in enumerate(tensors):
                    self._ear.speak(tensor, site + number)
                return
            try:
                self._heard(index, output)
            except TapWarning:  # where the user made warnings errors
                raise
            except Exception as error:  # the model must not notice
                self._fail(index, error)

        return Listener(hook)

    def _heard(self, index: int, output: Any) -> None:
        if recomputing() or self._passes_over(output):
            return
        wanted = self._wants(index)
        if wanted is None:
            return
        with unseen():
            tensors: list[torch.Tensor] = []
            form = pick(take_apart(output, tensors), self._chosen[index].leaf)
            heard = Heard(form)
            for number, _ in tensors_of(form):
                heard.take(number, tensors[number])
        self._take(index, wanted, heard)

    def _arrived(self, site: int, tensor: torch.Tensor) -> None:
        """A compiled graph runs, and one of the tensors that it speaks is there."""
        if recomputing() or self._passes_over():
            return
        spoken = self._traced[site]
        key = (get_ident(), site - spoken.number)
        try:
            with unseen():
                if site == _ROOT:
                    self._begin((), {})
                    return
                found = self._arriving.get(key)
                if found is None or spoken.number in found.numbers:  # or the last one broke off
                    found = self._arriving[key] = self._open(spoken)
                found.numbers.add(spoken.number)
                if found.heard is not None:
                    found.heard.take(spoken.number, tensor)
            if len(found.numbers) == spoken.count:
                del self._arriving[key]
                if found.heard is not None:
                    self._take(spoken.index, found.wanted, found.heard)
        except TapWarning:  # where the user made warnings errors
            self._arriving.pop(key, None)
            raise
        except Exception as error:  # the model must not notice
            self._arriving.pop(key, None)
            self._fail(spoken.index if site != _ROOT else None, error)

    def _open(self, spoken: _Spoken) -> _Arriving:
        wanted = self._wants(spoken.index)
        if wanted is None:
            return _Arriving(None, None)
        return _Arriving(wanted, Heard(pick(spoken.form, self._chosen[spoken.index].leaf)))

    def _passes_over(self, output: Any = None) -> bool:
        """Whether this is a call that computes no values of its own."""
        reason = _without_values(output if self._moments.recorded else None)
        if reason is not None:
            self._passed(reason)
        return reason is not None

    def _stay_last(self) -> None:
        """Others may have added hooks since: what we hear is what comes out behind theirs."""
        for _, module, handle in self._own:
            hooks = module._forward_hooks
            if handle.id in hooks and next(reversed(hooks)) != handle.id:
                hooks.move_to_end(handle.id)  # type: ignore[attr-defined]


def _registry(traced: list[_Spoken], indices: Mapping[str, int]) -> Callable[[str, Form, int], int]:
    """Called while a graph is traced, and then a constant: the first site of an output's form.

    The layer is named by a text, on which a graph is guarded: blocks of one class share graphs as
    long as nothing tells them apart, and a number could become a symbol.
    """
    known: dict[tuple[str, Form], int] = {}

    def register(name: str, form: Form, count: int) -> int:
        if (name, form) not in known:
            known[(name, form)] = len(traced)
            traced.extend(_Spoken(indices[name], form, number, count) for number in range(count))
        return known[(name, form)]

    constant: Any = torch.compiler.assume_constant_result  # untyped in torch
    return constant(register)  # type: ignore[no-any-return]


def _without_values(output: Any) -> str | None:
    """What a model is called for that has no values: to be traced, with fakes, or transformed."""
    if torch._C._get_tracing_state() is not None or _checks_a_trace():
        return "while it was traced (torch.jit.trace, TensorBoard's add_graph, ONNX export)"
    if torch._C._functorch.maybe_current_level() is not None:
        return "inside a transform of torch.func"
    if output is not None and any(_is_empty(tensor) for _, tensor in flatten(output)):
        return "with fake or meta tensors, which hold no values"
    return None


def _checks_a_trace() -> bool:
    """`torch.jit.trace` calls the model again, to compare."""
    return getattr(torch.jit._trace, "_trace_module_map", None) is not None


def _is_empty(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and (type(tensor).__name__ == "FakeTensor" or tensor.is_meta)


def _each(hooks: list[Callable[..., None]]) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        for listen in hooks:
            listen(*args)

    return hook
