"""When a step ends: heard from the optimizer, so that any training loop works as it is.

torch tells everybody when an optimizer steps. Those that hold a parameter of the watched model are
ours. With several of them (one for matrices, one for the rest) the step is over when the last one
has stepped; which that is, is learnt in the first step.
"""

from __future__ import annotations

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


class Clock:
    """Calls `before` ahead of the first optimizer of a step, and `after` behind the last."""

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[], None],
        after: Callable[[], None],
        *,
        forwards: Callable[[], int],
        only: torch.optim.Optimizer | None = None,
    ) -> None:
        self._model = model
        self._before = before
        self._after = after
        self._forwards = forwards
        self._only = None if only is None else weakref.ref(only)
        self._ours: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._last: Callable[[], Any] = lambda: None  # whose step ends the step
        self._stepped: list[int] = []  # the optimizers of the step that is being taken
        self.moved: set[int] = set()  # the ids of the parameters that they hold
        self._ended = False
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        apart: Any = torch.compiler.disable  # a compiled step has no business in our code
        self._handles = [
            register_optimizer_step_pre_hook(apart(self._pre)),
            register_optimizer_step_post_hook(apart(self._post)),
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._only is not None:
            return self._only() is optimizer
        known = self._ours.get(optimizer)
        if known is None:
            mine = {id(p) for p in self._model.parameters()}
            known = any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
            self._ours[optimizer] = known
        return known

    def _pre(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._is_ours(optimizer):
            return None
        if self._ended and self._last() is not optimizer and not self._forwards():
            self._last = weakref.ref(optimizer)  # it steps behind the one that ended the step
            return None
        if id(optimizer) in self._stepped:  # the one that should have ended the step did not come
            self._end()
        if not self._stepped:
            self._ended = False
            given = _with_closure(args, kwargs, self._before)
            if given is None:
                self._before()
        else:
            given = None
        self._stepped.append(id(optimizer))
        self.moved.update(id(p) for group in optimizer.param_groups for p in group["params"])
        return given

    def _post(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._stepped:
            return
        if self._last() is None:
            self._last = weakref.ref(optimizer)
        if self._last() is optimizer:
            self._end()

    def _end(self) -> None:
        self._stepped.clear()
        self._ended = True
        self._after()
        self.moved.clear()


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
