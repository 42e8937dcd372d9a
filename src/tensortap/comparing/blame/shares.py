"""Shares of the final error: what is left of it with the reference's tensors at a layer.

A share is what is left with the reference's input at the layer, less what is left with its output
there, over the whole. With the output alone, every layer behind a bug would get the credit of all
that came before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...recording.schema import Port
from ...taps.patching import leaves_of
from ..judge import AGAINST_ESTIMATE
from ..precision import estimated_floor
from .one_layer import CapturedCall, capture
from .results import BlamedLayer
from .stage import Put, Stage, Watcher, measured
from .trace import Errors, Trace, first_float

__all__ = ["MOST_CALLS", "Baggage", "MadeHere", "Shares"]

_ENDS: tuple[Port, Port] = ("input", "output")
MOST_CALLS = 8


@dataclass
class Baggage:
    """What is kept of the worst layer so far: its calls, and what it makes of good inputs."""

    calls: list[CapturedCall] = field(default_factory=list)
    outputs: list[tuple[int, int, dict[str, torch.Tensor]]] = field(default_factory=list)
    problem: str = ""
    dropped: bool = False


class MadeHere:
    """Watches a layer that runs on the reference's inputs."""

    def __init__(self, trace: Trace) -> None:
        self.errors = Errors()
        self.baggage = Baggage()
        self._inherited = Errors()
        self._trace = trace
        self.nth: int | None = None  # the call of a pass that is meant, where it is one

    @property
    def inherited(self) -> float:
        """The relative error that its own inputs make in the candidate's run; NaN if unknown."""
        return self._inherited.error

    def enter(
        self, stage: Stage, layer: str, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        counts = self._trace.counts.get((layer, stage.batch, call))
        if self.baggage.problem or counts is None or self._passed_over(stage, layer):
            return
        try:
            self.baggage.calls.append(capture(stage, layer, call, args, kwargs, counts))
        except Exception as error:  # deepcopy runs the user's code
            self.baggage.problem = f"its arguments cannot be copied: {type(error).__name__}"

    def leave(self, stage: Stage, layer: str, call: int, output: Any) -> None:
        if self._passed_over(stage, layer):
            return
        own = leaves_of(output)
        records = stage.known.at(layer, "output", stage.batch, call)
        for leaf, tensor in own.items():
            record = records.get(leaf)
            inexact = tensor.is_floating_point() or tensor.is_complex()
            if record is not None and inexact and record.shape == tuple(tensor.shape):
                self.errors.add(leaf, measured(record.tensor(), tensor))
        before = self._trace.own.get((layer, stage.batch, call))
        main = first_float(own)
        if before is not None and main is not None and before.shape == main.shape:
            self._inherited.add("", measured(main.detach().to("cpu"), before))
        kept = {leaf: t.detach().to("cpu", copy=True) for leaf, t in own.items() if leaf in records}
        self.baggage.outputs.append((stage.batch, call, kept))

    def _passed_over(self, stage: Stage, layer: str) -> bool:
        """Whether a call does not run on the reference's inputs."""
        if self.nth is not None:
            return stage.nth != self.nth
        return stage.nth > 0 and stage.feeds_itself(layer)


class Shares:
    """Measures layers in one stage, and makes no run twice."""

    def __init__(
        self,
        stage: Stage,
        trace: Trace,
        total: float,
        *,
        precisions: tuple[str | None, ...],
        infer: bool = True,
        scale: float = 1.0,
        parent: str | None = None,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        self.stage = stage
        self.trace = trace
        self.total = total
        self._precisions = precisions
        self._infer = infer
        self._scale = scale
        self._parent = parent
        self._told = told
        self.by_call = False  # look at the calls of a pass one by one
        self.first: str | None = None  # whatever comes before it counts as its own, if it must
        self._left: dict[Put, float] = {}
        self._up_to: dict[tuple[str, ...], float] = {}
        self._made: dict[str, MadeHere] = {}
        self._ran: set[Put] = set()
        self._listeners: dict[Put, list[str]] = {}

    def expect(self, layers: Iterable[str]) -> None:
        """Say which layers will be asked for, so that one run can serve two of them."""
        for layer in layers:
            twin = self._twin(layer)
            if twin is not None:
                self._listeners.setdefault(twin, []).append(layer)

    def left(self, where: Put) -> float:
        """The squared error that is left with the reference's tensors at one port."""
        if where in self._left:
            return self._left[where]
        if self._infer and self.trace.no_op(where):
            self._left[where] = self.total
            return self.total
        twin = self._twin(where.layer) if where.port == "input" else None
        if twin is not None:
            if twin not in self._left:
                self._listeners.setdefault(twin, []).append(where.layer)
            self._left[where] = self.left(twin)
            return self._left[where]
        self._left[where] = self._run(where)
        return self._left[where]

    def left_up_to(self, layers: Sequence[str], next_one: str | None) -> float:
        """What is left with the reference's outputs at all of these: they cut any residual stream.

        Where each of them hands its output to the next, the last alone does the same. `next_one`
        then runs on the reference's inputs.
        """
        linked = all(self.trace.follows(b, a) for a, b in itertools.pairwise(layers))
        if (linked and not self.trace.repeated) or len(layers) == 1:
            if next_one is not None:
                self._listeners.setdefault(Put(layers[-1], "output"), []).append(next_one)
            return self.left(Put(layers[-1], "output"))
        key = tuple(layers)
        if key not in self._up_to:
            watch: dict[str, Watcher] = {}
            if next_one is not None:
                watch[next_one] = self._made[next_one] = MadeHere(self.trace)
            self._up_to[key] = self.stage.run([Put(name, "output") for name in layers], watch)
            self._told()
        return self._up_to[key]

    def _run(self, where: Put) -> float:
        hearers = list(dict.fromkeys(self._listeners.get(where, [])))
        if where.port == "input":
            hearers.append(where.layer)
        watch: dict[str, Watcher] = {}
        for layer in hearers:
            made = self._made.get(layer) if where.nth else None  # one call after the other
            made = made or MadeHere(self.trace)
            made.nth = where.nth
            watch[layer] = self._made[layer] = made
        left = self.stage.run([where], watch)
        self._ran.add(where)
        self._told()
        return left

    def _twin(self, layer: str) -> Put | None:
        return self.trace.twin(layer) if self._infer else None

    def share(self, layer: str) -> float:
        """The layer's share of the squared error in this stage."""
        if not self.total or self.trace.exact(layer):
            return 0.0
        calls = self._calls(layer)
        if calls:
            return sum(self._of_call(layer, nth) for nth in range(calls))
        return (self._before(layer) - self.left(Put(layer, "output"))) / self.total

    def cost(self, layer: str) -> int:
        """How many runs a layer's share still takes."""
        if not self.total or self.trace.exact(layer):
            return 0
        calls = self._calls(layer)
        if calls:
            return 2 * calls
        return sum(not self._told_already(Put(layer, port)) for port in _ENDS)

    def planned(self, layers: Iterable[str]) -> int:
        """How many runs the shares of these layers take in all, as far as it can be told."""
        runs: set[Put] = set()
        for layer in layers:
            if not self.total or self.trace.exact(layer):
                continue
            runs |= {Put(layer, end) for end in _ENDS if not self._told_already(Put(layer, end))}
            twin = self._twin(layer)
            if twin is not None:
                runs.discard(Put(layer, "input"))
                runs |= set() if self._told_already(twin) else {twin}
        return len(runs)

    def _told_already(self, where: Put) -> bool:
        if where in self._left or (self._infer and self.trace.no_op(where)):
            return True
        if where.port == "input":
            if not self.stage.known.has(where.layer, "input"):
                return True
            twin = self._twin(where.layer)
            return twin is not None and twin in self._left
        return False

    def _calls(self, layer: str) -> int:
        """How many calls of a pass are looked at one by one: each with what it alone adds."""
        calls = self.trace.repeated.get(layer, 0) if self.by_call else 0
        return 0 if self.stage.feeds_itself(layer) or calls > MOST_CALLS else calls

    def _of_call(self, layer: str, nth: int) -> float:
        before, after = (self.left(Put(layer, port, nth)) for port in _ENDS)
        return (before - after) / self.total

    def _before(self, layer: str) -> float:
        where = Put(layer, "input")
        if not self.stage.known.has(layer, "input"):
            return self.total if layer == self.first else math.nan
        if where in self.stage.problems and where not in self.trace.fitting:
            return math.nan  # nothing of it could be put in
        return self.left(where)

    def row(
        self, layer: str, type_name: str, operations: int, share: float | None = None
    ) -> BlamedLayer:
        """All that is known of a layer; `share` where it is known from elsewhere."""
        if share is None:
            share = self.share(layer) * self._scale
        handed, given = self.trace.inputs[layer], self.trace.outputs[layer]
        made = self._made.get(layer)
        known = self.stage.known.has(layer, "input")
        notes = [
            self.stage.problems[w]
            for w in (Put(layer, "input"), Put(layer, "output"))
            if w in self.stage.problems
        ]
        if made is not None:
            made_here, inherited = made.errors.error, made.inherited
        elif not math.isnan(self.trace.made_alone(layer)):
            made_here, inherited = self.trace.made_alone(layer), self.trace.inherited[layer].error
        elif known and self._infer and self.trace.no_op(Put(layer, "input")):
            made_here, inherited = given.error, math.nan  # its inputs are the reference's
        else:
            made_here = inherited = math.nan
        if not known and layer == self.first:
            notes.append("its inputs are not in the reference: what comes before counts as its own")
        elif not known:
            notes.append("its inputs are not in the reference: its share is unknown")
        dtypes = given.dtypes
        floor = (
            AGAINST_ESTIMATE
            * estimated_floor(dtypes, self._precisions, max(1, operations), handed.offset)
            if dtypes
            else math.nan
        )
        return BlamedLayer(
            layer=layer,
            type=type_name,
            made_here=made_here,
            accumulated=given.error,
            handed=handed.error,
            amplification=_ratio(inherited, handed.error),
            share=share,
            floor=floor,
            parent=self._parent,
            how=self._how(layer),
            note="; ".join(notes),
        )

    def made_here(self, layer: str) -> float:
        """What a layer makes of the reference's inputs, if it has run on them; NaN otherwise."""
        made = self._made.get(layer)
        if made is not None:
            return made.errors.error
        if self.trace.no_op(Put(layer, "input")):
            return self.trace.outputs[layer].error
        return self.trace.made_alone(layer)

    def has_run(self, layer: str) -> bool:
        """Whether what a layer makes of the reference's inputs is still at hand."""
        made = self._made.get(layer)
        return made is not None and not made.baggage.dropped

    def baggage(self, layer: str) -> Baggage:
        """What is kept of a layer on the reference's inputs; runs it so if it has not run yet."""
        if not self.has_run(layer):
            self._left[Put(layer, "input")] = self._run(Put(layer, "input"))
        return self._made[layer].baggage

    def drop(self, layer: str) -> None:
        """Let go of what was kept of a layer."""
        made = self._made.get(layer)
        if made is not None:
            made.baggage = Baggage(dropped=True)

    def _how(self, layer: str) -> str:
        if self._parent is not None and not self._infer:
            return "within"
        if self.trace.exact(layer):
            return "inferred"
        ran = any(where.layer == layer for where in self._ran) or self._twin(layer) in self._ran
        return "patched" if ran else "inferred"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 and math.isfinite(part) and math.isfinite(whole) else math.nan
