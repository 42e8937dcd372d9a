"""The tap over any compiled model.

A program hands out its layers' values when a run is over; from here on they are treated as those of
an eager module: the same selection, the same sink, the same recording. What is special to compiled
models is said in rows and checks: layers that the compiler dropped, names that would be guesses,
and whether the tapped model is still the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch

from ...errors import OptionError, SelectionError
from ...recording.schema import Structure
from ...selection import select, structure
from ...selection.patterns import WORDS, split
from ..base import Ports
from ..leaves import flatten, holds_tensor
from ..sink import Held, Sink, Slot
from ..unseen import unseen
from .base import HeardCall, Leaves, Options, Place, Program, Run, Runner
from .selfcheck import SelfCheck, check_leaves, check_linear
from .skeleton import skeleton
from .state import State, copied

__all__ = ["REFUSED", "ProgramTap", "joined"]

REFUSED = "its name would be a guess; --accept-inferred records it"
_LINEARS = 1 << 28  # weights of all linears together, up to which all are checked


Linears = Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class _Twin:
    """A run without taps: its output, the state that it began with, its inputs once more.

    `run` is what was run: the model as it is, or what its taps are to be held against.
    """

    whole: Any
    output: Leaves
    run: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    before: State
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]]


class ProgramTap:
    """Listens to the selected layers of a program.

    With `prefix`, the program is a part of something larger, and its layers are named behind it.
    `chosen` are then the places that were selected over all parts.
    """

    stopped_behind: str | None = None
    can_stop = False

    def __init__(
        self,
        program: Program,
        layers: Any,
        ports: Ports,
        *,
        default: bool,
        options: Options | None = None,
        prefix: str = "",
        chosen: Collection[str] | None = None,
    ) -> None:
        if ports.grads:
            raise OptionError(
                f"Gradients cannot be recorded from a compiled model ({program.runtime}): it has "
                "no backward pass. Leave --grads out, or record the eager model."
            )
        self.program = program
        self.ports = ports
        self.prefix = prefix
        self.notes: list[str] = list(program.notes)
        self._checks: list[SelfCheck] = []
        self._options = options or Options()
        by_name = {place.name: place for place in program.places}
        by_name.setdefault("", Place("", provenance="hook"))
        alone = chosen is None
        if chosen is None:
            chosen = self._select(list(by_name.values()), layers, default)
        places = [place for name, place in by_name.items() if name in chosen]
        places = [replace(p, provenance="hook") if not p.name else p for p in places]
        self._refuse(places, layers, alone)
        self.slots: Sequence[Slot] = [
            Slot(index, joined(prefix, place.name), place.type, provenance=place.provenance)
            for index, place in enumerate(places)
        ]
        self._slots = {place.name: slot for place, slot in zip(places, self.slots, strict=True)}
        self._lost = {place.name: why for place in places if (why := self._why_lost(place))}
        self._wanted = [place.name for place in places if place.name not in self._lost]
        self.structure: Structure = self._structure(list(by_name.values()))
        self._sink: Sink | None = None
        self._on_failure: Callable[[Exception], None] = _raise
        self._listeners: list[Callable[[tuple[Any, ...], Mapping[str, Any]], None]] = []
        self._runner: Runner | None = None
        self._undo: Callable[[], None] | None = None
        self._seen_shapes: set[Any] = set()
        self._pouring = Lock()
        self._own = hasattr(program, "unfused")  # whether the output is of a run without taps
        self._ran = False

    # Choosing.

    def _select(self, places: list[Place], layers: Any, default: bool) -> Collection[str]:
        tree = skeleton(places, getattr(self.program, "weights", None))
        if len(places) == 1:
            return self._select_root(tree, layers, default)
        if default and (tapped := getattr(self.program, "preferred", None)):
            return set(tapped)  # an instrumented model: its taps were chosen when it was compiled
        selection = select(tree, layers, default_fallback=default)
        self.notes += selection.notes
        return set(selection.names)

    def _select_root(self, tree: Any, layers: Any, default: bool) -> Collection[str]:
        """There is nothing but the model itself: whoever asks for more is told what to do."""
        known: str | None = getattr(self.program, "nameless", None)
        told = known or (
            f"This {self.program.runtime} model gives away its outputs alone: they are recorded as "
            "the root ''. To see inside, instrument it before it is compiled (docs/compiled.md)."
        )
        self._note(told)
        if default:
            return {""}
        try:
            return set(select(tree, layers).names)
        except SelectionError as error:
            wanted = layers if isinstance(layers, str) else ", ".join(layers)
            raise SelectionError(f"'{wanted}' selects nothing. {told}") from error

    def _structure(self, places: list[Place]) -> Structure:
        told = getattr(self.program, "structure", None)  # an instrumented model's manifest knows
        if told is None or not (told.blocks or told.embedding or told.final_norm):
            told = structure(skeleton(places, getattr(self.program, "weights", None)))
        found: Structure = told
        return Structure(
            blocks=tuple(joined(self.prefix, name) for name in found.blocks),
            embedding=None if found.embedding is None else joined(self.prefix, found.embedding),
            final_norm=None if found.final_norm is None else joined(self.prefix, found.final_norm),
        )

    def _why_lost(self, place: Place) -> str | None:
        if place.gone is not None:
            return place.gone
        if place.provenance == "inferred" and not self._options.accept_inferred:
            return REFUSED
        return None

    def _refuse(self, places: Sequence[Place], layers: Any, alone: bool) -> None:
        """A guess that was asked for by name is an error; one among many is a row.

        That nothing at all is left is an error too, unless other parts have something to record.
        """
        wanted = [layers] if isinstance(layers, str) else list(layers)
        named = {part for text in wanted for part in split(text)} - set(WORDS)
        for place in places:
            why, name = self._why_lost(place), joined(self.prefix, place.name)
            if why is not None and name in named:
                raise SelectionError(f"The layer '{name}' cannot be recorded: {why}.")
        lost = [place for place in places if self._why_lost(place)]
        if alone and places and len(lost) == len(places):
            raise SelectionError(
                f"None of the {len(lost)} selected layers can be recorded. '{lost[0].name}': "
                f"{self._why_lost(lost[0])}."
            )

    # Attaching and detaching.

    def attach(self, sink: Sink, on_failure: Callable[[Exception], None]) -> None:
        self._sink, self._on_failure = sink, on_failure
        for name, why in self._lost.items():
            for port in self.ports.names():
                sink.skip(self._slots[name], port, "", why)
        if sink.stop:
            self.notes.append(
                "A compiled model cannot be left early: it runs on behind the first divergence."
            )
        self._undo = self.program.divert(self.call)

    @property
    def names(self) -> list[str]:
        """Every layer that the program has, selected or not."""
        return [joined(self.prefix, place.name) for place in self.program.places]

    @property
    def lost(self) -> dict[str, str]:
        """Why selected layers are not recorded, by their names."""
        return {joined(self.prefix, name): why for name, why in self._lost.items()}

    @property
    def self_checks(self) -> list[SelfCheck]:
        """What was checked so far, by us and by the program itself."""
        return [*self._checks, *getattr(self.program, "self_checks", ())]

    @property
    def diverted(self) -> bool:
        """Whether calls of the user's own object come to us."""
        return self._undo is not None

    def detach(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        self._sink = None

    def let_go(self) -> None:
        self.detach()

    def on_root_call(self, listener: Callable[[tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        self._listeners.append(listener)

    def drain(self) -> None:
        """Nothing waits: a run is poured out when it ends."""

    def settle(self) -> None:
        """Nothing is left over from one step to the next."""

    def explain_silence(self, silent: Sequence[Slot]) -> tuple[list[str], list[Slot]]:
        lost = self.lost  # what is lost has been said, layer by layer, as skipped
        rest = [slot for slot in silent if slot.name not in lost]
        if not rest or not self._ran:
            return [], rest
        shown = ", ".join(f"'{slot.name}'" for slot in rest[:8]) + (", …" if rest[8:] else "")
        return [
            f"Nothing was heard from {len(rest)} of {len(self.slots)} selected layers: {shown}. "
            "The model ran without them: they stand in a branch or a loop that no run went into, "
            "or make no tensor."
        ], []

    def describe(self) -> dict[str, Any]:
        return {
            **self.program.describe(),
            "runtime": self.program.runtime,
            "absent": self.program.absent,
        }

    # Running.

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, early_stop: bool) -> Any:
        return self.call(args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model once with its taps, and pour out what was heard."""
        if self._sink is None:
            return self.program.plain(args, kwargs)
        self._ran = True
        with unseen():
            for listener in self._listeners:
                listener(args, kwargs)
        due = self._options.self_check and self._is_new(args, kwargs)
        given = _given(args, kwargs) if "" in self._slots and self.ports.inputs else []
        if not due:
            if self._runner is None:
                self._runner = self._tapped(())
            run = self._runner(args, kwargs)
            if self._own:
                run = replace(run, output=self.program.plain(args, kwargs))
            self._pour(run, given)
            return run.output
        return self._checked(args, kwargs, given)

    def _tapped(self, linears: Sequence[str]) -> Runner:
        wanted = [name for name in self._wanted if name]
        return self.program.tapped(wanted, inputs=self.ports.inputs, linears=linears)

    def _is_new(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether inputs of these shapes have not been checked yet."""
        leaves = flatten((args, dict(kwargs)))
        key = tuple((leaf, None if t is None else (t.shape, t.dtype)) for leaf, t in leaves)
        new = key not in self._seen_shapes
        self._seen_shapes.add(key)
        return new

    def _checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Leaves) -> Any:
        """Run with taps and without, on the same inputs, state and random numbers."""
        known = self._linears()
        twin = self._twin(args, kwargs)
        run = self._tapped(list(known))(args, kwargs)
        check = None if twin is None else self._check_output(twin, run.output)
        checks = [] if check is None else [check]
        run = self._with_own_output(run, args, kwargs, twin, check)
        checks += self._pour(run, given, known)
        failed = [check for check in checks if not check.passed]
        self._checks += checks
        for check in failed[:3]:
            self._note(f"Self-check failed: {check.text}")
        return run.output

    def _with_own_output(
        self,
        run: Run,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        twin: _Twin | None,
        check: SelfCheck | None,
    ) -> Run:
        """The run with the output that the model has without taps, bit for bit.

        Where taps make a runtime fuse otherwise, its last bits are others: from then on the model
        runs without taps too, for its output.
        """
        if hasattr(self.program, "unfused"):
            own = self.program.plain(args, kwargs)
            away = check_leaves(_leaves(own), flatten(run.output), exact=False, layer=self.prefix)
            if away.largest or not away.passed:
                far = "" if away.largest is None else f", by up to {away.largest:.3g}"
                self._note(
                    "The layers are recorded as the file computes them, one by one. Without taps "
                    "the runtime fuses some of them: the model's own output is recorded as it is "
                    f"then, and differs from theirs{far}."
                )
            return replace(run, output=own)
        if twin is None or check is None or not check.passed or not check.largest:
            return run
        if getattr(self.program, "repeatable", False):
            self._own = True
            return replace(run, output=twin.whole)
        return run

    def _twin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Twin | None:
        """A run without taps, where there can be one that nothing tells of afterwards."""
        if not getattr(self.program, "untapped", True):
            return None
        where = f" of '{self.prefix}'" if self.prefix else ""
        reason = getattr(self.program, "stateful", None)
        if reason is not None:
            self._note(
                f"Whether taps change the output{where} was not checked: a run more would change "
                f"the model's state ({reason})."
            )
            return None
        again, later = copied((args, dict(kwargs))), copied((args, dict(kwargs)))
        if again is None or later is None:
            self._note(
                f"Whether taps change the output{where} was not checked: the inputs cannot be "
                "copied for a run without taps."
            )
            return None
        before = State(self.program)
        plain = getattr(self.program, "unfused", self.program.plain)
        try:
            whole = plain(*again)
            output = _leaves(whole)
        finally:
            before.put_back()
        return _Twin(whole, output, plain, before, later)

    def _check_output(self, twin: _Twin, tapped: Any) -> SelfCheck | None:
        """Taps against none; None where even two runs without taps are not the same.

        Both begin with the state that the tapped run began with. A difference that another state
        makes is no chance.
        """
        exact = bool(getattr(self.program, "exact", True))
        found = check_leaves(twin.output, flatten(tapped), exact=exact, layer=self.prefix)
        if found.passed:
            return found
        after = State(self.program)
        twin.before.put_back()
        try:
            again = _leaves(twin.run(*twin.inputs))
        finally:
            after.put_back()
        if check_leaves(twin.output, again, exact=exact).passed:
            return found
        self._note(
            "The model is not repeatable: two runs without taps, on the same inputs, state and "
            "random numbers, differ. So whether taps change its output could not be checked."
        )
        return None

    def _linears(self) -> Linears:
        """The linear layers to check: all, or of a large model those that were selected."""
        known = dict(self.program.linears())
        size = sum(weight.numel() for weight, _ in known.values())
        if size > _LINEARS:
            known = {name: pair for name, pair in known.items() if name in self._slots}
        return known

    def _check_linear(self, call: HeardCall, known: Linears, found: dict[str, SelfCheck]) -> None:
        output = call.outputs[0][1] if call.outputs else None
        if call.layer not in known or call.operand is None or output is None:
            return
        weight, bias = known[call.layer]
        name = joined(self.prefix, call.layer)
        check = check_linear(name, weight, bias, call.operand, output)
        if check is not None and (name not in found or found[name].passed):
            found[name] = check

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # Pouring out.

    def _pour(self, run: Run, given: Leaves, known: Linears | None = None) -> list[SelfCheck]:
        """Write what was heard, and check the linear layers on the way.

        A call that was written is let go at once, so that not all are in memory until the last is.
        Runs of several threads are written one after the other, each with calls of one number.
        """
        sink = self._sink
        if sink is None:
            return []
        found: dict[str, SelfCheck] = {}
        calls = deque(run.calls)
        if isinstance(run.calls, list):
            run.calls.clear()
        try:
            with self._pouring, unseen(), torch.no_grad():
                while calls:
                    call = calls.popleft()
                    slot = self._slots.get(call.layer)
                    if slot is not None and call.layer not in self._lost:
                        self._write(sink, slot, call)
                    self._check_linear(call, known or {}, found)
                    del call
                if "" in self._slots:
                    root = HeardCall("", flatten(run.output), given)
                    self._write(sink, self._slots[""], root)
        except Exception as error:  # the model must not notice
            self._sink = None
            self._on_failure(error)
        return list(found.values())

    def _write(self, sink: Sink, slot: Slot, heard: HeardCall) -> None:
        call = sink.begin(slot)
        held: list[Held] = []
        if self.ports.inputs:
            given = [pair for pair in heard.inputs if pair[1] is not None]
            if given:
                held += sink.hold(slot, "input", given)
            else:
                sink.skip(slot, "input", "", "the compiled model does not show what it was given")
        if self.ports.outputs:
            held += sink.hold(slot, "output", heard.outputs)
        sink.emit(call, held)


def joined(prefix: str, name: str) -> str:
    """A layer's name behind that of the part it is in."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Leaves:
    """What the whole model was given, named as an eager call's inputs are, copied."""
    if len(args) == 1 and not any(holds_tensor(item) for item in kwargs.values()):
        found = flatten(args[0])
    else:
        found = [pair for i, item in enumerate(args) for pair in flatten(item, f"[{i}]")]
        found += [pair for key, item in kwargs.items() for pair in flatten(item, f"[{key!r}]")]
    return [(leaf, tensor.detach().clone()) for leaf, tensor in found if tensor is not None]


def _leaves(output: Any) -> Leaves:
    """Copies: an output may be a part of the state, which is put back."""
    return [(leaf, None if t is None else t.detach().clone()) for leaf, t in flatten(output)]


def _raise(error: Exception) -> None:
    raise error
