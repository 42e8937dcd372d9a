"""A Python object that holds compiled models: each is tapped where it is.

    class Neuron:                       # `tap.record(Neuron(), …)` names the layers of the part
        def __init__(self):             # `models.0.model.<layer>`, and the part itself
            self.models = [Wrapper()]   # `models.0.model`.

Whoever calls the part, and however, is heard. What the object holds of eager modules is recorded by
the eager tap beside them, in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import OptionError, TapError
from ...recording.schema import Structure
from ...selection import Selection, select, structure
from ...selection.sites import sites
from ..base import Ports
from ..describe import describe_module
from ..eager import EagerTap
from ..leaves import flatten
from ..programs.base import Options, Place, Program
from ..programs.kinds import kind_of, open_program
from ..programs.opaque.program import KIND as OPAQUE
from ..programs.selfcheck import SelfCheck
from ..programs.skeleton import skeleton
from ..programs.tap import ProgramTap, joined
from ..programs.using import check_used, only_used
from ..sink import Held, Sink, Slot
from ..unseen import unseen
from .parts import Part, find_parts
from .standin import StandIn

__all__ = ["InsideTap", "Part", "find_parts"]


class InsideTap:
    """Listens to the compiled parts of an object, and to its eager layers where it has some."""

    stopped_behind: str | None = None
    can_stop = False

    def __init__(
        self,
        model: Any,
        parts: Sequence[Part],
        layers: Any,
        ports: Ports,
        *,
        default: bool,
        options: Options | None = None,
    ) -> None:
        self.model = model
        self.ports = ports
        self.notes: list[str] = []
        self._parts = list(parts)
        programs = self._open_all(options or Options())
        places, weights = self._places(programs)
        tree = skeleton(places, weights)
        self.structure: Structure = structure(tree)
        self.names = [place.name for place in places]
        selection = select(tree, layers, default_fallback=default)
        self.notes += [note for note in selection.notes if note not in self.notes]
        self._eager = self._eager_tap(selection, ports)
        self._root: Slot | None = None
        slots: list[Slot] = [] if self._eager is None else list(self._eager.slots)
        if not isinstance(model, nn.Module) and "" in selection.names:
            self._root = Slot(len(slots), "", type(model).__name__)
            slots.append(self._root)
        self._taps = [
            self._part_tap(part, program, selection, layers, ports, options)
            for part, program in zip(parts, programs, strict=True)
        ]
        for tap in self._taps:
            for slot in tap.slots:
                slot.index = len(slots)
                slots.append(slot)
        self.slots: Sequence[Slot] = slots
        self._sink: Sink | None = None
        self._on_failure: Callable[[Exception], None] = _raise
        self._listeners: list[Callable[[tuple[Any, ...], Mapping[str, Any]], None]] = []
        self._undo = ExitStack()
        self._running = False

    # Choosing.

    def _open_all(self, options: Options) -> list[Program]:
        kinds = [kind_of(part.model) for part in self._parts]
        uses = [frozenset[str]() if kind is None else kind.uses for kind in kinds]
        check_used(options, frozenset().union(*uses), "any of the compiled parts of this object")
        return [
            self._open(part, only_used(options, used))
            for part, used in zip(self._parts, uses, strict=True)
        ]

    def _open(self, part: Part, options: Options) -> Program:
        try:
            return open_program(part.model, options)
        except TapError as error:
            self.notes.append(f"Of '{part.name}' the outputs alone are recorded. {error}")
            outputs = getattr(kind_of(part.model), "outputs", None)
            if outputs is None:
                return OPAQUE.program(part.model, only_used(options, ()))
            found: Program = outputs(part.model)
            return found

    def _places(
        self, programs: Sequence[Program]
    ) -> tuple[list[Place], dict[str, tuple[int, ...]] | None]:
        """Every layer under the name that it has from outside, and the shapes of its weights."""
        places: list[Place] = []
        weights: dict[str, tuple[int, ...]] = {}
        if isinstance(self.model, nn.Module):
            for site in sites(self.model):
                if not self._is_in_part(site.name):
                    places.append(Place(site.name, site.type, "hook"))
                    for key, tensor in site.module._parameters.items():
                        if tensor is not None:
                            weights[joined(site.name, key)] = _sizes(tensor)
        elif callable(self.model):
            places.append(Place("", type(self.model).__name__, "hook"))
        for part, program in zip(self._parts, programs, strict=True):
            known = {place.name: place for place in program.places}
            known.setdefault("", Place("", type(part.model).__name__, "hook"))
            for name, place in known.items():
                kind = place.type or ("" if name else type(part.model).__name__)
                places.append(Place(joined(part.name, name), kind, place.provenance, place.gone))
            for name, shape in (getattr(program, "weights", None) or {}).items():
                weights[joined(part.name, name)] = tuple(shape)
        return places, weights or None

    def _is_in_part(self, name: str) -> bool:
        return any(
            name == known or name.startswith(f"{known}.")
            for part in self._parts
            for known in part.names
        )

    def _eager_tap(self, selection: Selection, ports: Ports) -> EagerTap | None:
        if not isinstance(self.model, nn.Module):
            return None
        chosen = [name for name in selection.names if not self._is_in_part(name)]
        if not chosen:
            return None
        tap = EagerTap(self.model, chosen, ports, default=False)
        self.notes += [note for note in tap.notes if note not in self.notes]
        tap.notes = self.notes
        return tap

    def _part_tap(
        self,
        part: Part,
        program: Program,
        selection: Selection,
        layers: Any,
        ports: Ports,
        options: Options | None,
    ) -> ProgramTap:
        prefix = f"{part.name}."
        chosen = {n.removeprefix(prefix) for n in selection.names if n.startswith(prefix)}
        if part.name in selection.names:
            chosen.add("")
        tap = ProgramTap(
            program,
            layers,
            ports,
            default=False,
            options=options,
            prefix=part.name,
            chosen=chosen,
        )
        self.notes += [note for note in tap.notes if note not in self.notes]
        tap.notes = self.notes
        return tap

    # Attaching and detaching.

    def attach(self, sink: Sink, on_failure: Callable[[Exception], None]) -> None:
        self._sink, self._on_failure = sink, on_failure
        try:
            if self._eager is not None:
                self._undo.callback(self._eager.detach)
                self._eager.attach(sink, on_failure)
            for part, tap in zip(self._parts, self._taps, strict=True):
                if not tap.slots:
                    continue
                tap.on_root_call(self._part_called)
                self._undo.callback(tap.detach)
                tap.attach(sink, on_failure)
                if not tap.diverted:
                    self._replace(part, tap)
        except BaseException:
            self.detach()
            raise

    def _replace(self, part: Part, tap: ProgramTap) -> None:
        """Hold something in the part's place that runs it with taps, and is it otherwise."""
        closed = [name for name, h in zip(part.names, part.holders, strict=True) if not h.open]
        if closed:
            raise OptionError(
                f"'{closed[0]}' stands in a tuple that nothing else holds, and cannot be tapped "
                "there. Put it into a list, or into an attribute."
            )
        returned = getattr(tap.program, "returned", None)
        call = tap.call if returned is None else partial(returned, tap.call)
        stand_in = StandIn(part.model, call)
        for holder in part.holders:
            self._undo.callback(holder.restore, part.model)
            holder.put(stand_in)

    def detach(self) -> None:
        """Everything is put back, whatever goes wrong on the way."""
        undo, self._undo = self._undo, ExitStack()
        self._sink = None
        undo.close()

    def let_go(self) -> None:
        self.detach()

    def on_root_call(self, listener: Callable[[tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        self._listeners.append(listener)
        if self._eager is not None:
            self._eager.on_root_call(listener)

    def _part_called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Where nobody else hears what the whole was given, its first part does."""
        if self._eager is None and not self._running:
            for listener in self._listeners:
                listener(args, kwargs)

    # While it runs.

    def drain(self) -> None:
        if self._eager is not None:
            self._eager.drain()

    def settle(self) -> None:
        if self._eager is not None:
            self._eager.settle()

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, early_stop: bool) -> Any:
        if not callable(self.model):
            raise OptionError(
                f"A {type(self.model).__name__} cannot be called, so rec.run(…) cannot run it. "
                "Call what runs it inside the with block, such as its generate(…); its parts "
                f"({', '.join(repr(part.name) for part in self._parts[:3])}) are heard."
            )
        if early_stop:
            self._note("A model with compiled parts is not left early: it ran to its end.")
        sink = self._sink
        given: list[Held] = []
        if self._eager is None:
            with unseen():
                for listener in self._listeners:
                    listener(args, kwargs)
        if sink is not None and self._root is not None and self.ports.inputs:
            with unseen(), torch.no_grad():
                given = sink.hold(self._root, "input", _given(args, kwargs))
        self._running = True
        try:
            output = self.model(*args, **kwargs)
        finally:
            self._running = False
        self.drain()
        self._pour(output, given)
        return output

    def _pour(self, output: Any, held: list[Held]) -> None:
        sink = self._sink
        leaves = flatten(output)
        empty = [leaf or "the output itself" for leaf, tensor in leaves if tensor is None]
        if empty and not isinstance(self.model, nn.Module):
            self._note(
                f"What {type(self.model).__name__} returned holds None where a tensor could be: "
                f"{', '.join(empty[:4])}. The compiled part does not return it, as with sampling "
                "on the device: record its generate(…), its head's own output, or instrument the "
                "model before it is compiled (docs/compiled.md)."
            )
        if sink is None or self._root is None:
            return
        try:
            with unseen(), torch.no_grad():
                call = sink.begin(self._root)
                if self.ports.outputs:
                    held = held + sink.hold(self._root, "output", leaves)
                sink.emit(call, held)
        except Exception as error:  # the model must not notice
            self._sink = None
            self._on_failure(error)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # Telling.

    @property
    def self_checks(self) -> list[SelfCheck]:
        return [check for tap in self._taps for check in tap.self_checks]

    @property
    def lost(self) -> dict[str, str]:
        return {name: why for tap in self._taps for name, why in tap.lost.items()}

    def explain_silence(self, silent: Sequence[Slot]) -> tuple[list[str], list[Slot]]:
        notes: list[str] = []
        rest: list[Slot] = []
        for tap in (self._eager, *self._taps):
            if tap is not None:
                mine = {id(slot) for slot in tap.slots}
                why, left = tap.explain_silence([slot for slot in silent if id(slot) in mine])
                notes += why
                rest += left
        if self._root is not None and any(slot is self._root for slot in silent):
            notes.append(
                f"The root '' is what rec.run(…) returns; {type(self.model).__name__} was not run "
                "by it."
            )
        return notes, rest

    def describe(self) -> dict[str, Any]:
        parts = {
            part.name: tap.describe() for part, tap in zip(self._parts, self._taps, strict=True)
        }
        if isinstance(self.model, nn.Module):
            described = describe_module(self.model)
        else:
            kind = type(self.model)
            dtypes: dict[str, int] = {}
            for about in parts.values():
                for name, count in about.get("dtypes", {}).items():
                    dtypes[name] = dtypes.get(name, 0) + count
            described = {
                "class": f"{kind.__module__}.{kind.__qualname__}",
                "parameters": sum(about.get("parameters") or 0 for about in parts.values()),
                "dtypes": dtypes,
            }
        described["parts"] = parts
        described["runtime"] = ", ".join(dict.fromkeys(tap.program.runtime for tap in self._taps))
        described["absent"] = self._taps[0].program.absent
        return described


def _given(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor | None]]:
    if len(args) == 1 and not kwargs:
        found = flatten(args[0])
    else:
        found = [pair for i, item in enumerate(args) for pair in flatten(item, f"[{i}]")]
        found += [pair for key, item in kwargs.items() for pair in flatten(item, f"[{key!r}]")]
    return [pair for pair in found if pair[1] is not None]


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tuple(tensor.shape)
    except RuntimeError:  # a lazy parameter has none yet
        return ()


def _raise(error: Exception) -> None:
    raise error
