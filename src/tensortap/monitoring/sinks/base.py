"""Where the numbers of a watch go: one small protocol, and the names by which sinks are asked for.

A sink is called from a background thread, one call at a time, so it may be slow and may block; what
it raises costs the sink its place, never the training run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from ...errors import OptionError, TapError

__all__ = ["FunctionSink", "Sink", "Sinks", "register_sink", "sink_names", "sink_of", "sinks_of"]

GROUP = "tensortap.sinks"


@runtime_checkable
class Sink(Protocol):
    """Takes the numbers of a step: a chart, a file, a terminal."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take what `values_of` made of step number `step`."""
        ...

    def close(self) -> None:
        """Nothing more will come; write out what is held."""
        ...


Maker = Callable[[str], Sink]
"""Makes a sink from what stands after the colon: "runs/tb" in "tensorboard:runs/tb"."""


class FunctionSink:
    """A function of (values, step) as a sink."""

    def __init__(self, function: Callable[[Mapping[str, float], int], object]) -> None:
        self.function = function

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.function(values, step)

    def close(self) -> None:
        pass


def _tensorboard(where: str) -> Sink:
    from .tensorboard import TensorBoardSink

    return TensorBoardSink(where or "runs/tensorboard")


def _wandb(project: str) -> Sink:
    from .wandb import WandbSink

    return WandbSink(project=project or None)


def _stdout(form: str) -> Sink:
    from .stdout import StdoutSink

    return StdoutSink(form=form or "line")


_MAKERS: dict[str, Maker] = {"stdout": _stdout, "tensorboard": _tensorboard, "wandb": _wandb}


def register_sink(name: str, maker: Maker) -> None:
    """Make a sink known under a name; packages do so with an entry point in `GROUP`."""
    if not name.isidentifier():
        raise OptionError(f"A sink's name is one word, as 'tensorboard', but got {name!r}.")
    if name in sink_names():
        raise OptionError(f"There is a sink {name!r} already. Choose another name.")
    _MAKERS[name] = maker


def sink_names() -> list[str]:
    """The sinks that can be named, sorted."""
    return sorted({*_MAKERS, *(point.name for point in entry_points(group=GROUP))})


def sink_of(spec: object) -> Sink:
    """A sink from a sink, a function of (values, step), or a text: "tensorboard:runs/tb"."""
    if isinstance(spec, str):
        return _named(spec)
    if not isinstance(spec, type):
        if isinstance(spec, Sink):
            return spec
        adapted = _adapted(spec)
        if adapted is not None:
            return adapted
        if callable(spec):
            return FunctionSink(spec)
    raise OptionError(
        f"A sink is an object with log(values, step) and close(), a function of (values, step), or "
        f"a text such as 'tensorboard:runs/tb', but got {_shown(spec)}. "
        f"The names are: {', '.join(sink_names())}."
    )


def sinks_of(specs: object) -> Sinks:
    """Several sinks, or one that stands alone."""
    if isinstance(specs, str) or not isinstance(specs, Iterable):
        specs = [specs]
    return Sinks(sink_of(spec) for spec in specs)


class Sinks:
    """Several sinks as one that never raises: a sink that fails is dropped, and said in words."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self.sinks = list(sinks)

    def __len__(self) -> int:
        return len(self.sinks)

    def log(self, values: Mapping[str, float], step: int) -> list[str]:
        """Hand a step's numbers to every sink; what went wrong, one sentence a sink dropped."""
        problems = []
        for sink in list(self.sinks):
            reason = _logged(sink, values, step)
            if reason is not None:
                self.sinks.remove(sink)
                problems.append(
                    f"The sink {_shown(sink)} failed at step {step} and gets nothing more: {reason}"
                )
                problems.extend(_closed(sink))
        return problems

    def close(self) -> list[str]:
        """Close every sink, once; what went wrong."""
        sinks, self.sinks = self.sinks, []
        return [problem for sink in sinks for problem in _closed(sink)]


def _logged(sink: Sink, values: Mapping[str, float], step: int) -> str | None:
    try:
        sink.log(dict(values), step)  # of its own: a sink may change it
    except BaseException as error:  # a library that calls sys.exit ends itself alone
        return _reason(error)
    return None


def _closed(sink: Sink) -> list[str]:
    try:
        sink.close()
    except BaseException as error:
        return [f"The sink {_shown(sink)} could not be closed: {_reason(error)}"]
    return []


def _named(spec: str) -> Sink:
    name, _, argument = spec.partition(":")
    maker = _MAKERS.get(name) or _installed(name)
    if maker is None:
        raise OptionError(
            f"There is no sink {name!r} (in {spec!r}). The sinks are: {', '.join(sink_names())}."
        )
    sink = maker(argument)
    if not isinstance(sink, Sink):
        raise OptionError(
            f"The sink {name!r} of an installed package made {_shown(sink)}, which has no "
            "log(values, step) and close(). Ask its maker."
        )
    return sink


def _installed(name: str) -> Maker | None:
    for point in entry_points(group=GROUP):
        if point.name == name:
            try:
                maker: Maker = point.load()
            except Exception as error:
                raise OptionError(
                    f"The sink {name!r} ({point.value}) could not be imported: {_reason(error)}"
                ) from error
            return maker
    return None


def _adapted(spec: object) -> Sink | None:
    """The sink of a SummaryWriter or a wandb run, which people have at hand."""
    if callable(getattr(spec, "add_scalar", None)):
        from .tensorboard import TensorBoardSink

        return TensorBoardSink(spec)
    if callable(getattr(spec, "define_metric", None)):
        from .wandb import WandbSink

        return WandbSink(spec)
    return None


def _shown(value: Any) -> str:
    if isinstance(value, FunctionSink):
        return getattr(value.function, "__qualname__", repr(value.function))
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _reason(error: BaseException) -> str:
    text = str(error) or "(no message)"
    return text if isinstance(error, TapError) else f"{type(error).__name__}: {text}"
