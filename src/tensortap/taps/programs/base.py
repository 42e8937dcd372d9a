"""What every compiled model is to us, whatever runs it.

The names of its layers are what a compiler loses first. So every layer says how its name is known:

| provenance | the name is |
|---|---|
| hook | the module's own: it called us, or an instrumented model did |
| scope | written on the nodes of the graph by the compiler |
| value-name | carried over from a sibling's values (a float model's, for a quantised one) |
| weight | that of the weight which the node reads, found in a checkpoint |
| inferred | a guess from the shape of the graph: refused unless it is asked for |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ...recording.schema import Provenance

__all__ = [
    "Argument",
    "HeardCall",
    "Kind",
    "Leaves",
    "Options",
    "Place",
    "Program",
    "Provenance",
    "Run",
    "Runner",
    "is_program",
    "loose_leaves",
]

Leaves = Sequence[tuple[str, torch.Tensor | None]]
"""Tensors with the leaf that each stands at."""


@dataclass(frozen=True)
class Place:
    """A layer that a compiled model has, or had: then `gone` says why no value of it is left."""

    name: str
    type: str = ""
    provenance: Provenance = "scope"
    gone: str | None = None


@dataclass(frozen=True)
class Argument:
    """One thing that a compiled model takes, as far as it says so; a size of None may vary."""

    name: str
    dtype: torch.dtype | None = None
    shape: tuple[int | None, ...] | None = None
    required: bool = True


@dataclass(frozen=True)
class HeardCall:
    """One call of a layer: what it returned, and where asked for what it was given.

    `operand` is what a linear layer multiplied, where its weight is known and is to be checked.
    """

    layer: str
    outputs: Leaves = ()
    inputs: Leaves = ()
    operand: torch.Tensor | None = None


@dataclass(frozen=True)
class Run:
    """One run of a tapped model: its own output, and its layers' calls as they finished."""

    output: Any
    calls: Sequence[HeardCall]


class Runner(Protocol):
    """A compiled model with taps on some layers."""

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run: ...


@runtime_checkable
class Program(Protocol):
    """A compiled model.

    The self-check runs it once more without taps. For that a program may also offer:

    | attribute | says |
    |---|---|
    | `exact` | whether taps leave every bit as it was; true where it is not said |
    | `repeatable` | whether it can run twice for one call: then its output is that without taps |
    | `unfused(args, kwargs)` | the model without taps, computed as it is with taps |
    | `untapped` | whether it can run without taps; true where it is not said |
    | `buffers()` | the tensors that a run may write into |
    | `keep()` | keeps what else a run changes, and returns what puts it back |
    | `stateful` | why a run changes what cannot be put back, so that there must be none; or None |
    """

    runtime: str
    places: Sequence[Place]  # every layer, each once, in the order in which first calls finish
    arguments: Sequence[Argument] | None  # None where the model does not say what it takes
    absent: str  # why a layer that the eager model has may have no place here: a whole sentence
    notes: list[str]

    def tapped(self, layers: Sequence[str], *, inputs: bool, linears: Sequence[str]) -> Runner:
        """The model with taps on these layers; of `linears`, which may be others, also operands."""
        ...

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model as it is, without taps."""
        ...

    def linears(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]:
        """The linear layers whose float weight (out x in) and bias are known."""
        ...

    def describe(self) -> dict[str, Any]:
        """For the manifest: class, parameters, dtypes, and what tells one file from another."""
        ...

    def divert(
        self, call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    ) -> Callable[[], None] | None:
        """Until the returned function is called, calling the user's own object runs `call`.

        None where the object cannot be made to do so; it is then replaced where it is held.
        """
        ...


def is_program(model: object) -> bool:
    """Whether something is a Program; what is none is asked for nothing that it could make up."""
    return hasattr(type(model), "tapped") and isinstance(model, Program)


@dataclass(frozen=True)
class Options:
    """What a user says about a compiled model beyond the model itself."""

    runtime: str | None = None
    manifest: Path | None = None  # names for the extra outputs of an instrumented model
    weights: Path | None = None  # a checkpoint whose tensors give names to a graph without any
    names_from: Path | None = None  # the float model whose names a quantised one has lost
    accept_inferred: bool = False
    self_check: bool = True
    custom_ops: tuple[Path, ...] = field(default=())  # libraries that the user allows to be loaded


class Kind(Protocol):
    """One runtime: which objects and files are its own, and how they become programs."""

    name: str  # what `--runtime` takes
    suffixes: tuple[str, ...]
    uses: frozenset[str]  # of weights, names_from and custom_ops, those that mean something to it

    def accepts(self, model: object) -> bool:
        """Whether a live object is one of these; must not import the runtime."""
        ...

    def recognises(self, path: Path) -> bool:
        """Whether a file, of a suffix that fits, is one of these; it is looked at, never run."""
        ...

    def program(self, model: Any, options: Options) -> Program:
        """The program of a live object or of a file's path."""
        ...


def loose_leaves(values: Sequence[torch.Tensor | None]) -> Leaves:
    """Leaves for values whose place in the layer's return value is not known, the main one first.

    One alone is called what a plain tensor is; of several each is `?0`, `?1`, … so that a
    comparison knows to pair them by shape.
    """
    if len(values) == 1:
        return [("", values[0])]
    return [(f"?{index}", value) for index, value in enumerate(values)]
