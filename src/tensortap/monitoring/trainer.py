"""Document 004's wrapper: a training function that takes callbacks, with a monitor around it."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from ..errors import OptionError
from ..taps.session import TapWarning
from .monitor import Monitor
from .telling import failure_of

__all__ = ["MonitoredTrainer"]

T = TypeVar("T")
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
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
                monitor.close(failure_of(error, "the run raised"))
                raise
            if _is_unfinished(result):
                warnings.warn(
                    f"{_name(fn)} returned a {type(result).__name__}, before training was over. "
                    "The monitor goes on: call monitor.remove_hooks() when training has ended.",
                    TapWarning,
                    stacklevel=2,
                )
            else:
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
            "epoch and a batch begin. Where it calls monitor.set_epoch and monitor.set_batch_idx "
            "itself, it needs no wrapper: run it inside 'with monitor:'."
        )
    return signature, taken


def _with(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ours: dict[str, Callable[[int], None]],
) -> _Arguments:
    """The arguments with our callbacks, each with the caller's own behind it.

    A caller may give callbacks in their places, or call the function as if it took none: what then
    stands where a callback belongs is for the parameters behind it.
    """
    positions = [
        name
        for name, p in signature.parameters.items()
        if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    theirs = [value for name, value in zip(positions, args, strict=False) if name in ours]
    in_order = _put_in(signature, positions, list(args), kwargs, ours)
    if not theirs:
        return in_order
    around = _put_around(signature, positions, list(args), kwargs, ours)
    may_be = all(_may_be_callback(value) for value in theirs)
    return (
        in_order
        if may_be and (_fits(signature, in_order) or not _fits(signature, around))
        else around
    )


def _put_in(
    signature: inspect.Signature,
    positions: list[str],
    given: list[Any],
    kwargs: dict[str, Any],
    ours: dict[str, Callable[[int], None]],
) -> _Arguments:
    """Our callbacks in the place of the caller's, or else by name."""
    for name, our in ours.items():
        place = positions.index(name) if name in positions else len(given)
        if place < len(given):
            given[place] = _both(our, given[place])
        else:
            kwargs = {**kwargs, name: _both(our, kwargs.get(name, _default(signature, name)))}
    return tuple(given), kwargs


def _put_around(
    signature: inspect.Signature,
    positions: list[str],
    waiting: list[Any],
    kwargs: dict[str, Any],
    ours: dict[str, Callable[[int], None]],
) -> _Arguments:
    """Our callbacks between the arguments of the caller, who gave none by position."""
    kwargs = dict(kwargs)
    given: list[Any] = []
    both = {
        name: _both(our, kwargs.pop(name, _default(signature, name))) for name, our in ours.items()
    }
    for name in positions:
        if not waiting:
            break
        given.append(both.pop(name) if name in both else waiting.pop(0))
    return (*given, *waiting), {**kwargs, **both}


def _default(signature: inspect.Signature, name: str) -> Any:
    return signature.parameters[name].default if name in signature.parameters else None


def _may_be_callback(value: Any) -> bool:
    """Models and classes can be called too, and are no callbacks."""
    return value is None or (callable(value) and not isinstance(value, nn.Module | type))


def _fits(signature: inspect.Signature, arguments: _Arguments) -> bool:
    args, kwargs = arguments
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _is_unfinished(result: Any) -> bool:
    return inspect.isgenerator(result) or inspect.isasyncgen(result) or inspect.isawaitable(result)


def _both(our: Callable[[int], None], theirs: Any) -> Callable[[int], Any]:
    if not callable(theirs) or theirs is inspect.Parameter.empty:
        return our

    def callback(number: int, *args: Any, **kwargs: Any) -> Any:
        our(number)
        return theirs(number, *args, **kwargs)

    return callback


def _name(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", None) or type(fn).__name__)
