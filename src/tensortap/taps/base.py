"""What every tap is: something that listens inside one kind of runtime.

A tap is chosen by what the model is (`choose.py`). Those of other packages (entry point group
`tensortap.taps`) are asked before our own; the first that accepts a model gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from ..recording.schema import Port, Structure
from .sink import Sink, Slot

__all__ = ["Ports", "Tap", "TapFactory", "register", "registered"]


@dataclass(frozen=True)
class Ports:
    """Which ports are listened to."""

    inputs: bool = False
    outputs: bool = True
    grads: bool = False

    def names(self) -> list[Port]:
        wanted: list[tuple[bool, Port]] = [
            (self.inputs, "input"),
            (self.outputs, "output"),
            (self.grads and self.inputs, "grad_input"),
            (self.grads, "grad_output"),
        ]
        return [name for on, name in wanted if on]


class Tap(Protocol):
    """Listens inside one model, from `attach` to `detach`."""

    slots: Sequence[Slot]
    notes: list[str]
    structure: Structure
    stopped_behind: str | None  # the layer behind which forward passes were left early
    can_stop: bool  # whether a forward pass may be left early without harm, once attached

    def attach(self, sink: Sink, on_failure: Callable[[Exception], None]) -> None:
        """Begin to listen. What goes wrong inside a hook is told, never raised into the model."""
        ...

    def detach(self) -> None:
        """Leave no trace."""
        ...

    def let_go(self) -> None:
        """Hear nothing more, at once: no lock is taken and nothing is written. `detach` follows."""
        ...

    def on_root_call(self, listener: Callable[[tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        """Tell this listener the arguments of every call of the whole model."""
        ...

    def drain(self) -> None:
        """Hand over what a compiled graph has left behind."""
        ...

    def settle(self) -> None:
        """A step is over: hand over what is left of it."""
        ...

    def explain_silence(self, silent: Sequence[Slot]) -> tuple[list[str], list[Slot]]:
        """Why some selected layers were not heard, and those for which there is no reason."""
        ...

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, early_stop: bool) -> Any:
        """Run the model; with `early_stop` no further than the last selected layer."""
        ...

    def describe(self) -> dict[str, Any]:
        """The target for the manifest: class, parameters, dtypes, config."""
        ...


class TapFactory(Protocol):
    """Makes a tap for the models that it accepts."""

    name: str

    def accepts(self, model: object) -> bool: ...

    def __call__(self, model: Any, layers: Any, ports: Ports, *, default: bool) -> Tap: ...


_FACTORIES: list[TapFactory] = []


def register(factory: TapFactory) -> None:
    """Add a tap; the newest is asked first."""
    _FACTORIES.insert(0, factory)


def registered() -> list[TapFactory]:
    """The taps that others added, here or by their package's entry points."""
    return [*_FACTORIES, *(point.load() for point in entry_points(group="tensortap.taps"))]
