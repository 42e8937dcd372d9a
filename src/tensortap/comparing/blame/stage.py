"""Runs the candidate with the reference's tensors put in at some layers.

What is left of the final error after such a run says who makes it: nothing else is changed, every
run starts from the same state, and the model is as it was afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ...errors import TapError, TargetError
from ...numerics.difference import Difference, difference
from ...recording.schema import Port
from ...taps.isolation import unchanged
from ...taps.leaves import flatten
from ...taps.patching import (
    absent_arguments,
    call_with,
    cast_like,
    leaves_of,
    leaves_of_call,
    match_leaves,
    put,
    put_call,
    why_not_put,
)
from ...targets import Target
from ..measure import picked
from ..touched import Touched
from .alone import mark_ours
from .choices import same_choice
from .levels import contains
from .pairing import apart_in
from .reference import Known

__all__ = [
    "Final",
    "Put",
    "Stage",
    "Watcher",
    "WholeModel",
    "copied",
    "measured",
    "squares",
]

# An output that is NaN where the reference is a number has no distance from it, but is wrong: it
# counts as so many times the reference's size, far more than any number of finite errors.
_NOT_FINITE = 1e3
_LARGEST = 1e150  # whose square is still a number


class Put(NamedTuple):
    """The reference's tensors stand at a port of a layer: at all calls, or at one of a pass."""

    layer: str
    port: Port
    nth: int | None = None


@dataclass(frozen=True)
class Final:
    """The output whose error is to be explained."""

    layer: str
    leaf: str


class Watcher(Protocol):
    """Sees the calls of a layer in a run, before its output is replaced."""

    def enter(
        self,
        stage: Stage,
        layer: str,
        call: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None: ...

    def leave(self, stage: Stage, layer: str, call: int, output: Any) -> None: ...


def measured(reference: torch.Tensor, candidate: torch.Tensor) -> Difference:
    """The difference of two tensors, wherever they are, without percentiles."""
    return difference(reference, candidate.detach().to("cpu"), percentiles=False)


def squares(found: Difference, scale: float) -> float:
    """The squared error in all, in units of `scale`; what is no number counts as a large one."""
    size = found.row.ref_l2 / math.sqrt(found.finite) if found.finite else 0.0
    wrong = _NOT_FINITE * (size / scale or 1.0)
    return min(found.row.d_l2 / scale, _LARGEST) ** 2 + found.disagreeing * wrong**2


def copied(value: Any) -> Any:
    """A copy that nothing can reach the original by; tensors come without their history."""
    tensors = [t for _, t in flatten(value) if t is not None]
    return copy.deepcopy(value, {id(t): t.detach().clone() for t in tensors})


@contextlib.contextmanager
def _our_trouble(layer: str) -> Iterator[None]:
    """What goes wrong in our hooks is not the model's fault, and not said as if it were."""
    try:
        yield
    except TapError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise TapError(f"blame failed at layer '{layer}', not the model: {text}") from error


@dataclass(eq=False)
class Stage(ABC):
    """Something that can be run, with layers inside that tensors can be put at.

    A layer that feeds itself in one pass gets the reference's input at its first call alone: put at
    every call, it would hide what the layer hands to itself. Those are the `feeding` ones. `nth`
    says of the call that is being watched which one of the pass it is. At `routers` tokens choose
    the experts that they have in the reference, for rounding decides between near ties anew in each
    run. Tokens that are `touched` by another choice all the same are left out of the final error,
    as long as any others are left.
    """

    known: Known
    modules: Mapping[str, nn.Module]
    final: Final
    runs: int = 0
    seconds: float = 0.0  # of the last run
    batch: int = 0
    scale: float = 1.0
    nth: int = 0
    feeding: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    problems: dict[Put, str] = field(default_factory=dict)
    touched: Touched | None = None
    routers: frozenset[str] = frozenset()
    _left: float = 0.0
    _measured: int = 0
    _where: str = ""
    _in_pass: Counter[str] = field(default_factory=Counter)

    def run(self, puts: Sequence[Put] = (), watch: Mapping[str, Watcher] | None = None) -> float:
        """One run over all batches: the squared error that is left at the final output."""
        self.runs += 1
        self._left, self._measured = 0.0, 0
        self._where = ", ".join(f"{p.port} of '{p.layer}'" for p in puts[:2])
        began = time.perf_counter()
        with self._hooked(set(puts), watch or {}):
            self._play()
        self.seconds = time.perf_counter() - began
        if not self._measured:
            raise TapError(
                f"The output {self.final.leaf or ''} of layer '{self.final.layer}' never came in a "
                "run of the candidate, so there is no final error to explain."
            )
        return self._left

    @property
    @abstractmethod
    def top(self) -> str:
        """The layer whose call is a pass."""

    @abstractmethod
    def _play(self) -> None:
        """Run what is on the stage, over all its batches."""

    def feeds_itself(self, layer: str) -> bool:
        """Whether a layer's output comes back to its input within a pass."""
        return any(contains(name, layer) for name in self.feeding)

    # Putting tensors in.

    def replacements(
        self, module: nn.Module, where: Put, call: int, own: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The reference's tensors for these leaves, cast; what does not fit is noted."""
        records = self.known.at(where.layer, where.port, self.batch, call)
        if where.port == "input":
            names = match_leaves(module, own, records)
        else:
            names = {leaf: leaf for leaf in own if leaf in records}
        found = {}
        for leaf, theirs in names.items():
            reference = records[theirs].tensor()
            reason = why_not_put(reference, own[leaf])
            if reason:
                self.problems.setdefault(where, f"{leaf or where.port} was left alone: {reason}")
            else:
                found[leaf] = cast_like(reference, own[leaf])
        return found

    def misfed(self, layer: str) -> bool:
        """Whether a layer was given something in whose place the reference's cannot stand."""
        return any(where.layer == layer and where.port == "input" for where in self.problems)

    def absent(
        self, module: nn.Module, where: Put, call: int, args: tuple[Any, ...], kwargs: Any
    ) -> dict[str, Any]:
        """The reference's values for parameters that the candidate leaves out or gives None for.

        A mask that is lost on the way to a layer, or a state that is not carried, is what the layer
        was handed, not what it makes. A state of several tensors comes as a tuple.
        """
        records = self.known.at(where.layer, "input", self.batch, call)
        own = leaves_of_call(module, args, kwargs)
        floats = next((t for t in own.values() if t.is_floating_point()), None)
        found: dict[str, Any] = {}
        if floats is None:
            return found
        for name, leaves in absent_arguments(module, args, kwargs, records).items():
            values = {}
            for rest, leaf in leaves.items():
                value = records[leaf].tensor()
                if value.is_floating_point():
                    values[rest] = cast_like(value, floats)
                else:
                    values[rest] = value.to(device=floats.device, copy=True)
            if list(values) == [""]:
                found[name] = values[""]
            elif list(values) == [f"[{index}]" for index in range(len(values))]:
                found[name] = tuple(values.values())
        return found

    @contextlib.contextmanager
    def _hooked(self, puts: set[Put], watch: Mapping[str, Watcher]) -> Iterator[None]:
        names = dict.fromkeys(
            [self.top, *(p.layer for p in puts), *watch, *self.routers, self.final.layer]
        )
        handles = []
        try:
            for name in names:
                module, stack = self.modules[name], list[tuple[int, int]]()
                handles += [
                    module.register_forward_pre_hook(
                        self._before(name, stack, puts, watch.get(name)), with_kwargs=True
                    ),
                    module.register_forward_hook(
                        self._after(name, stack, puts, watch.get(name)), with_kwargs=True
                    ),
                ]
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(
        self, name: str, stack: list[tuple[int, int]], puts: set[Put], watcher: Watcher | None
    ) -> Callable[..., Any]:
        where = Put(name, "input")

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if name == self.top:
                self._in_pass.clear()
            call, nth = self.calls[name], self._in_pass[name]
            self.calls[name] += 1
            self._in_pass[name] += 1
            stack.append((call, nth))
            every = where in puts and not (nth and self.feeds_itself(name))
            if every or where._replace(nth=nth) in puts:
                own = leaves_of_call(module, args, kwargs)
                leaves = self.replacements(module, where, call, own)
                more = self.absent(module, where, call, args, kwargs)
                args, kwargs = put_call(module, args, kwargs, leaves)
                args, kwargs = call_with(module, args, kwargs, more)
            if watcher is not None:
                self.nth = nth
                with _our_trouble(name):
                    watcher.enter(self, name, call, args, kwargs)
            return args, kwargs

        return mark_ours(hook)

    def _after(
        self, name: str, stack: list[tuple[int, int]], puts: set[Put], watcher: Watcher | None
    ) -> Callable[..., Any]:
        where = Put(name, "output")

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            call, self.nth = stack.pop()
            if name in self.routers:
                with _our_trouble(name):
                    known = self.known.at(name, "output", self.batch, call)
                    output = put(output, same_choice(leaves_of(output), known))
            if watcher is not None:
                with _our_trouble(name):
                    watcher.leave(self, name, call, output)
            if where in puts or where._replace(nth=self.nth) in puts:
                leaves = self.replacements(module, where, call, leaves_of(output))
                output = put(output, leaves)
            if name == self.final.layer:
                with _our_trouble(name):
                    self._measure(call, output)
            return output

        return hook

    def _measure(self, call: int, output: Any) -> None:
        record = self.known.at(self.final.layer, "output", self.batch, call).get(self.final.leaf)
        own = leaves_of(output).get(self.final.leaf)
        if record is None or own is None:
            return
        if tuple(own.shape) != record.shape:
            raise TapError(
                f"The final output, {record.where()}, has the shape {list(record.shape)} in the "
                f"reference and {list(own.shape)} in the candidate: they cannot be compared. Run "
                "the candidate on the inputs that the reference was recorded with. If it had "
                "these, record it too: tensortap compare names the layer that changed the shape."
            )
        reference = record.tensor()
        apart = None if self.touched is None else apart_in(self.touched, record)
        if apart is not None and apart.axes and len(apart.clean):
            reference, own = (picked(t, apart.axes, apart.clean) for t in (reference, own))
        self._left += squares(measured(reference, own), self.scale)
        self._measured += 1


@dataclass(eq=False)
class WholeModel(Stage):
    """The candidate on its inputs."""

    target: Target = None  # type: ignore[assignment]
    beginning: Callable[[int], None] | None = None  # told the number of each batch

    @property
    def top(self) -> str:
        return ""

    def _play(self) -> None:
        with unchanged(self.target.model), torch.compiler.set_stance("force_eager"):
            for number, batch in enumerate(self.target.batches[: self.known.batches]):
                self.batch = number
                self.calls.clear()
                if self.beginning is not None:
                    self.beginning(number)
                try:
                    self.target(copied(batch))
                except TapError:
                    raise
                except Exception as error:  # whatever a user's model raises
                    lines = str(error).strip().splitlines() or ["no message"]
                    put_in = f" with the reference's {self._where}" if self._where else ""
                    raise TargetError(
                        f"The model failed in batch {number}{put_in}: {type(error).__name__}: "
                        f"{lines[0]}"
                    ) from error
