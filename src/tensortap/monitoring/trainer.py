"""Document 004's wrapper: a training function that takes callbacks, with a monitor around it."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import OptionError
from ..taps.session import TapWarning
from .monitor import Monitor
from .words import reason_of

__all__ = ["MonitoredTrainer"]

T = TypeVar("T")
_CALLBACKS = ("epoch_callback", "batch_callback")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class MonitoredTrainer:
    """Runs training functions with a monitor, whatever they do with it.

    trainer = tap.MonitoredTrainer(monitor)
    monitored_train = trainer.wrap_training_function(train)
    result = monitored_train(config, device)
    """

    def __init__(self, monitor: Monitor) -> None:
        if not isinstance(monitor, Monitor):
            raise OptionError(f"MonitoredTrainer takes a Monitor, got {monitor!r}.")
        self.monitor = monitor

    def wrap_training_function(self, fn: Callable[..., T]) -> Callable[..., T]:
        """The same function, which gets `epoch_callback` and `batch_callback`.

        What an epoch recorded is saved when the next one begins, and when the function returns or
        raises; then the hooks are removed. It returns what `fn` returns. Callbacks of the
        caller's own are called too.
        """
        signature, taken = _looked_at(fn)
        missing = [name for name in _CALLBACKS if name not in taken]
        if missing:
            warnings.warn(
                f"{_name(fn)} takes no {missing[0]}: "
                + (
                    "call monitor.set_epoch(epoch) in it, or nothing is recorded."
                    if missing == ["epoch_callback"]
                    else "batches are counted as the model's forwards."
                ),
                TapWarning,
                stacklevel=2,
            )

        @functools.wraps(fn)
        def monitored(*args: Any, **kwargs: Any) -> T:
            monitor = self.monitor
            if monitor.closed:
                warnings.warn(
                    "The hooks of this monitor were removed: this run is not recorded. Make a new "
                    "Monitor for each run.",
                    TapWarning,
                    stacklevel=2,
                )
            ours = {
                "epoch_callback": monitor.create_epoch_callback(),
                "batch_callback": monitor.create_batch_callback(),
            }
            try:
                args, kwargs = _with(signature, args, kwargs, {n: ours[n] for n in taken})
                result = fn(*args, **kwargs)
            except BaseException as error:
                monitor.close(reason_of(error))
                raise
            monitor.remove_hooks()
            return result

        return monitored


def _looked_at(fn: Any) -> tuple[inspect.Signature, list[str]]:
    """What a function takes; an OptionError where it cannot be wrapped."""
    if not callable(fn):
        raise OptionError(f"wrap_training_function takes a function, got {fn!r}.")
    inner = fn.func if isinstance(fn, functools.partial) else fn
    call = inner if inspect.isroutine(inner) else type(inner).__call__
    for kind, test in (
        ("a generator", inspect.isgeneratorfunction),
        ("a coroutine", inspect.iscoroutinefunction),
        ("a generator", inspect.isasyncgenfunction),
    ):
        if test(call):
            raise OptionError(
                f"{_name(fn)} is {kind}: it returns before training is over. Wrap the function "
                "that runs it to its end."
            )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        raise OptionError(
            f"What {_name(fn)} takes cannot be read. Wrap it in a function that takes "
            "epoch_callback and batch_callback."
        ) from None
    parameters = signature.parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    taken = [
        name
        for name in _CALLBACKS
        if (parameters[name].kind in _BY_NAME if name in parameters else anything)
    ]
    if not taken:
        raise OptionError(
            f"{_name(fn)} takes neither epoch_callback nor batch_callback, so it cannot tell the "
            "monitor where it is. Give it these two arguments (or **kwargs) and call them when an "
            "epoch and a batch begin, or call monitor.set_epoch and monitor.set_batch_idx in it."
        )
    return signature, taken


def _with(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ours: dict[str, Callable[[int], None]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with our callbacks, each with the caller's own behind it."""
    positions = [
        name
        for name, p in signature.parameters.items()
        if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    given = list(args)
    for name, our in ours.items():
        parameter = signature.parameters.get(name)
        place = positions.index(name) if name in positions else len(given)
        if place < len(given):
            given[place] = _both(our, given[place])
        elif name in kwargs:
            kwargs = {**kwargs, name: _both(our, kwargs[name])}
        else:
            default = None if parameter is None else parameter.default
            kwargs = {**kwargs, name: _both(our, default)}
    return tuple(given), kwargs


def _both(our: Callable[[int], None], theirs: Any) -> Callable[[int], Any]:
    if not callable(theirs) or theirs is inspect.Parameter.empty:
        return our

    def callback(number: int, *args: Any, **kwargs: Any) -> Any:
        our(number)
        return theirs(number, *args, **kwargs)

    return callback


def _name(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", None) or type(fn).__name__)
