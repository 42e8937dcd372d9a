"""When optimizers step: heard from torch, so that any training loop works as it is.

torch tells everybody when an optimizer steps. Those that hold a parameter of the watched model are
ours; a model may have several (one for matrices, one for the rest), and each speaks for the
parameters that it holds. When a step is over is not for the clock to say: that shows at the next
forward pass.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

__all__ = ["Clock"]

Before = Callable[[int, set[int], bool], None]
"""Called with an optimizer's identity, the ids of the parameters that it holds, and whether it
runs forward and backward itself."""
After = Callable[[int, set[int]], None]


class Clock:
    """Calls `before` ahead of an optimizer's step, when gradients are there, and `after` behind."""

    def __init__(
        self,
        model: nn.Module,
        before: Before,
        after: After,
        *,
        only: torch.optim.Optimizer | None = None,
    ) -> None:
        self._model = model
        self._before = before
        self._after = after
        self._only = None if only is None else weakref.ref(only)
        self._ours: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._running: list[weakref.ref[Any]] = []  # one inside the other: Lookahead, SAM, ZeRO

    def attach(self) -> None:
        _HOOKS.add(self)

    def detach(self) -> None:
        _HOOKS.remove(self)

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._only is not None:
            return self._only() is optimizer
        known = self._ours.get(optimizer)
        if not known:  # parameters may be added to an optimizer, or replaced in the model
            mine = {id(parameter) for parameter in self._model.parameters()}
            known = not mine.isdisjoint(_held(optimizer))
            self._ours[optimizer] = known
        return known

    def pre(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._is_ours(optimizer):
            return None

        def before(inside: bool = True) -> None:
            self._before(id(optimizer), _held(optimizer), inside)

        if self._running:  # or one that raised, and is no more
            self._running = [ref for ref in self._running if _is_stepping(ref())]
        self._running.append(weakref.ref(optimizer))
        given = _with_closure(args, kwargs, before)
        if given is None:
            before(inside=False)
        return given

    def post(self, optimizer: Any) -> None:
        if not self._is_ours(optimizer):
            return
        outer = next((i for i, ref in enumerate(self._running) if ref() is optimizer), 0)
        del self._running[outer:]
        if not self._running:
            self._after(id(optimizer), _held(optimizer))


class _Hooks:
    """One pair of torch's global hooks for all clocks.

    torch walks over its hooks while they run, so none may come or go while another thread trains:
    clocks are a tuple that is replaced whole, and the hooks go when no other thread knows them.
    """

    def __init__(self) -> None:
        self._clocks: tuple[Clock, ...] = ()
        self._handles: list[RemovableHandle] = []
        self._inside = 0
        self._threads: set[int] = set()  # that have stepped
        self._lock = threading.Lock()

    def add(self, clock: Clock) -> None:
        with self._lock:
            self._clocks = (*self._clocks, clock)
            if not self._handles:
                apart: Any = torch.compiler.disable  # a compiled step has no business in our code
                self._handles = [
                    register_optimizer_step_pre_hook(apart(self._pre)),
                    register_optimizer_step_post_hook(apart(self._post)),
                ]

    def remove(self, clock: Clock) -> None:
        with self._lock:
            self._clocks = tuple(other for other in self._clocks if other is not clock)
            alone = self._threads <= {threading.get_ident()}
            if not self._clocks and not self._inside and alone:
                for handle in self._handles:
                    handle.remove()
                self._handles.clear()
                self._threads.clear()

    def _pre(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._count(1)
        try:
            given: tuple[Any, Any] | None = None
            for clock in self._clocks:
                changed = clock.pre(optimizer, args, kwargs)
                if changed is not None:
                    given = args, kwargs = changed
            return given
        finally:
            self._count(-1)

    def _post(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._count(1)
        try:
            for clock in self._clocks:
                clock.post(optimizer)
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self._inside += more
            self._threads.add(threading.get_ident())


_HOOKS = _Hooks()


def _is_stepping(optimizer: Any) -> bool:
    """Whether an optimizer's step is under way: one of its functions is on the stack."""
    frame = sys._getframe()
    while optimizer is not None and frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _with_closure(args: Any, kwargs: Any, before: Callable[[], None]) -> tuple[Any, Any] | None:
    """The arguments of a step whose closure runs forward and backward, and `before` behind them.

    Lightning trains that way, and LBFGS: the gradients are made inside the optimizer's step.
    """
    closure = kwargs["closure"] if "closure" in kwargs else args[1] if len(args) > 1 else None
    if not callable(closure):
        return None
    told = False

    def run(*inner: Any, **named: Any) -> Any:
        nonlocal told
        result = closure(*inner, **named)
        if not told:
            told = True
            with torch.no_grad():
                before()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": run}
    return (args[0], run, *args[2:]), kwargs
