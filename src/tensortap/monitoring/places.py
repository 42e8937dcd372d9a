"""Listening to the layers of a model that trains.

One hook a layer, eager or traced. In eager mode it reduces the outputs on the spot and listens for
their gradients by tensor hooks; traced by `torch.compile` it speaks to an `Ear`, and the same
reduction happens when the graph runs. What is computed is decided at run time (`Gate`), so one
graph serves every cadence.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import WatchAlarm
from ..recording.dtypes import dtype_name
from ..recording.schema import Port, Site
from ..selection.sites import Site as Layer
from ..selection.sites import type_name, unwrap
from ..taps.compiled import contains_compiled
from ..taps.fused import find_fused, listen_globally
from ..taps.hearing import Ear, HooksGuarded, recomputing
from ..taps.leaves import flatten, traceable
from ..taps.listener import Listener
from ..taps.plain import is_plain, plain_parts
from ..taps.replaced import Replaced
from ..taps.unseen import unseen

__all__ = ["Gate", "Places"]

Take = Callable[[Site, int, torch.Tensor], object]
_DENSE_LIMIT = 1 << 28


@dataclass(eq=False)
class Gate:
    """What is heard in the step that runs."""

    open: bool = False
    outputs: bool = True
    grads: bool = True
    over: bool = False  # the next forward pass begins another step


@dataclass(eq=False)
class _Place:
    """A layer that is, or can be, listened to."""

    index: int
    name: str
    type: str
    module: nn.Module
    on: bool = True
    handle: RemovableHandle | None = None
    awaiting_grads: list[int] = field(default_factory=list)


class Places:
    """The layers of one model, from `attach` to `detach`."""

    def __init__(
        self,
        model: nn.Module,
        gate: Gate,
        take: Take,
        on_failure: Callable[[Exception], None],
        *,
        on_forward: Callable[[], None],
        on_replaced: Callable[[list[str]], None],
        traces_grads: bool,
        training_only: bool = True,
    ) -> None:
        self._model = model
        self._inner = unwrap(model)  # a traced hook must not reach it by way of its wrapper
        self._gate = gate
        self._take = take
        self._on_failure = on_failure
        self._on_forward = on_forward
        self._on_replaced = on_replaced
        self._replaced: Replaced | None = None
        self._training_only = training_only
        self._leaf_handles: list[RemovableHandle] = []
        self._traces_grads = traces_grads
        self._ear = Ear(by_leaf=self._hear)
        self._guarded = HooksGuarded(1 + sum(1 for _ in model.modules()))
        self._places: list[_Place] = []
        self._by_module: dict[int, _Place] = {}
        self._handles: list[RemovableHandle] = []
        self._heard_globally: dict[int, Callable[..., None]] = {}
        self._fused: set[int] = set()
        self._sites: dict[Any, Site] = {}
        self._calls: defaultdict[Any, int] = defaultdict(int)
        self._lock = threading.Lock()
        self._beginning = threading.RLock()
        self._repeats: defaultdict[tuple[int, str, int], int] = defaultdict(int)
        self._open_calls: defaultdict[Any, list[int]] = defaultdict(list)
        self._training: bool | None = None  # inside a forward pass of the whole model
        self.forwards = 0
        self.evaluations = 0
        self.unheard: dict[tuple[str, str], str] = {}

    # Which layers.

    @property
    def names(self) -> list[str]:
        """The layers that are listened to now."""
        return [place.name for place in self._places if place.on]

    def choose(self, layers: Sequence[Layer]) -> None:
        """Listen to these layers and no others. New ones get a hook."""
        wanted = {id(layer.module) for layer in layers}
        for place in self._places:
            place.on = id(place.module) in wanted
        before = len(self._places)
        for layer in layers:
            if id(layer.module) not in self._by_module:
                self._add(layer)
        if len(self._places) > before and self._replaced is not None:
            self._look_after()

    def beyond(self, layers: Sequence[Layer]) -> list[str]:
        """Those that have no hook yet: a compiled graph would never hear them."""
        return [layer.name for layer in layers if id(layer.module) not in self._by_module]

    def _add(self, layer: Layer) -> None:
        place = _Place(len(self._places), layer.name, layer.type, layer.module)
        self._places.append(place)
        self._by_module[id(layer.module)] = place
        if isinstance(layer.module, torch.jit.ScriptModule):
            self.unheard[(layer.name, "")] = "it is TorchScript, which takes no hooks"
            return
        hook = self._hook(place)
        if id(layer.module) in self._fused:
            self._heard_globally[id(layer.module)] = hook
        else:
            place.handle = layer.module.register_forward_hook(hook)
            self._handles.append(place.handle)

    # Attaching and detaching.

    def attach(self, layers: Sequence[Layer]) -> None:
        self._guarded.hold()
        self._fused = set() if contains_compiled(self._model) else find_fused(self._model)
        root = self._model
        if id(root) not in self._fused:
            self._handles += [
                root.register_forward_pre_hook(Listener(self._enter)),
                root.register_forward_hook(Listener(self._leave), always_call=True),
            ]
        if self._fused:
            self._handles += listen_globally({}, self._heard_globally)
        self.choose(layers)
        self._look_after()

    def _look_after(self) -> None:
        """Notice from now on when one of the hooked modules is replaced."""
        if not contains_compiled(self._model):
            hooked = [place.name for place in self._places if place.handle is not None]
            self._replaced = Replaced(self._model, hooked)

    def detach(self) -> None:
        self._gate.open = False
        self._guarded.release()
        self._drop_leaf_hooks()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._heard_globally.clear()

    def begin(self) -> None:
        """A step begins: calls count from 0 again."""
        self._calls.clear()
        self._open_calls.clear()
        self._repeats.clear()
        self._drop_leaf_hooks()
        self.forwards = self.evaluations = 0
        for place in self._places:
            place.awaiting_grads.clear()

    def _drop_leaf_hooks(self) -> None:
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()

    # Hooks on the whole model: does it train, or is this an evaluation?

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or recomputing():
            return
        self._training = self._counts() and torch.is_grad_enabled()
        self.evaluations += torch.is_grad_enabled() and not self._training
        self._stay_last()
        if self._training:
            self._forward()
        try:
            if self._replaced is not None and self._replaced.changed():
                self._follow(self._replaced)
        except Exception as error:  # the model must not notice
            self._on_failure(error)

    def _forward(self) -> None:
        """A forward pass of training: the first after an optimizer's step begins another step."""
        if self._gate.over:
            with self._beginning:  # forwards may run in several threads, and a step begins once
                if self._gate.over:
                    try:
                        self._on_forward()
                    except WatchAlarm:
                        raise
                    except Exception as error:  # the model must not notice
                        self._on_failure(error)
        self.forwards += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and not recomputing():
            self._training = None

    def _trains(self) -> bool:
        return self._counts() if self._training is None else self._training

    def _counts(self) -> bool:
        return self._inner.training or not self._training_only

    def _follow(self, replaced: Replaced) -> None:
        """Go over to modules that were put in the place of heard ones."""
        now = replaced.now()
        moved: list[str] = []
        for place in self._places:
            module = now.get(place.name, place.module)
            if place.handle is None or module is place.module:
                continue
            self._handles.remove(place.handle)
            place.handle.remove()
            del self._by_module[id(place.module)]
            place.module, place.type, place.handle = module, type_name(module), None
            self._by_module[id(module)] = place
            for key in [key for key in self._sites if key[0] == place.index]:
                del self._sites[key]
            moved.append(place.name)
            if isinstance(module, torch.jit.ScriptModule):
                self.unheard[(place.name, "")] = "it is TorchScript, which takes no hooks"
                continue
            place.handle = module.register_forward_hook(self._hook(place))
            self._handles.append(place.handle)
        if moved:
            self._on_replaced(moved)

    def _stay_last(self) -> None:
        """Others may have added hooks since: what we hear is what comes out behind theirs."""
        for place in self._places:
            hooks = place.module._forward_hooks
            if place.handle is not None and next(reversed(hooks)) != place.handle.id:
                hooks.move_to_end(place.handle.id)  # type: ignore[attr-defined]

    # Hooks on layers.

    def _hook(self, place: _Place) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                self._trace(place, output)
                return
            if not self._trains():
                return
            if not recomputing():
                self._forward()
            if not (self._gate.open and place.on):
                return
            try:
                with unseen():
                    self._heard(place, output)
            except Exception as error:  # the model must not notice
                self._on_failure(error)

        return Listener(hook)

    def _heard(self, place: _Place, output: Any) -> None:
        if torch._C._functorch.maybe_current_level() is not None:
            self.unheard[(place.name, "")] = "it ran inside a torch.func transform"
            return
        leaves = flatten(output)
        if recomputing():
            awaiting = place.awaiting_grads
            wanted = self._gate.grads and awaiting
            if wanted and self._listen_to_grads(place, awaiting[-1], leaves):
                awaiting.pop()
            return
        with self._lock:  # forwards may run in several threads
            call = self._calls[place.index]
            self._calls[place.index] = call + 1
        if self._gate.outputs:
            for leaf, tensor in leaves:
                if tensor is not None:
                    self._take_any(place, "output", leaf, call, tensor)
        if self._gate.grads and not self._listen_to_grads(place, call, leaves):
            place.awaiting_grads.append(call)

    def _listen_to_grads(
        self, place: _Place, call: int, leaves: Sequence[tuple[str, torch.Tensor | None]]
    ) -> bool:
        if not torch.is_grad_enabled():
            return False
        for leaf, tensor in leaves:
            if tensor is not None and tensor.requires_grad:
                register: Any = tensor.register_hook  # untyped in torch
                handle = register(self._grad_hook(place, call, leaf))
                if tensor.is_leaf:  # it outlives the step, and so would the hook
                    self._leaf_handles.append(handle)
        return True

    def _grad_hook(self, place: _Place, call: int, leaf: str) -> Callable[[torch.Tensor], None]:
        def hook(grad: torch.Tensor) -> None:
            if not (self._gate.open and self._gate.grads and place.on):
                return
            try:
                with unseen():
                    again = self._repeats[(place.index, leaf, call)]
                    self._repeats[(place.index, leaf, call)] = again + 1
                    number = call + again * self._calls[place.index]  # one more backward pass
                    self._take_any(place, "grad_output", leaf, number, grad)
            except Exception as error:  # the model must not notice
                self._on_failure(error)

        return hook

    # Inside compiled graphs.

    def _trace(self, place: _Place, output: Any) -> None:
        """Called while a graph is traced: nothing here may depend on what changes later."""
        if not (torch.is_grad_enabled() and (self._inner.training or not self._training_only)):
            return
        ear, site = self._ear, 2 * place.index
        for leaf, tensor in traceable(output):
            if tensor is None:
                continue
            ear.speak(tensor, site, leaf)
            if self._traces_grads and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(_speaker(ear, site + 1, leaf))  # type: ignore[no-untyped-call]

    def _hear(self, site: int, tensor: torch.Tensor, leaf: str) -> None:
        """A graph runs, and one of its tensors is there."""
        gate, place = self._gate, self._places[site >> 1]
        if not site & 1 and not recomputing():
            self._forward()
        if not (gate.open and place.on):
            return
        try:
            with unseen():
                key = (place.index, leaf)
                if site & 1:
                    if gate.grads:
                        open_calls = self._open_calls[key]
                        call = open_calls.pop() if open_calls else 0
                        self._take_any(place, "grad_output", leaf, call, tensor)
                elif not recomputing():
                    with self._lock:
                        call = self._calls[key]
                        self._calls[key] = call + 1
                        self._open_calls[key].append(call)
                    if gate.outputs:
                        self._take_any(place, "output", leaf, call, tensor)
        except Exception as error:  # the model must not notice
            self._on_failure(error)

    # Taking.

    def _take_any(
        self, place: _Place, port: Port, leaf: str, call: int, tensor: torch.Tensor
    ) -> None:
        if is_plain(tensor):
            self._take(self._site(place, port, leaf, tensor), call, tensor)
            return
        try:
            with torch.no_grad():
                for tail, part in plain_parts(tensor, _DENSE_LIMIT):
                    self._take(self._site(place, port, leaf + tail, part), call, part)
        except Exception as error:  # a tensor of a kind that has no values to look at
            self.unheard[(place.name, leaf)] = str(error).split("\n", 1)[0]

    def _site(self, place: _Place, port: Port, leaf: str, tensor: torch.Tensor) -> Site:
        key = (place.index, port, leaf, tensor.shape, tensor.dtype, tensor.device)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(
                place.name,
                port,
                leaf,
                None,
                place.type,
                tuple(tensor.shape),
                dtype_name(tensor.dtype),
                str(tensor.device),
            )
        return site


def _speaker(ear: Ear, site: int, leaf: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def hook(grad: torch.Tensor) -> torch.Tensor:
        ear.speak(grad, site, leaf)
        return grad  # compiled autograd would take nothing for no gradient

    return hook
