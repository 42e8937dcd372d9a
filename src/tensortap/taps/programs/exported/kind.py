"""Exported programs: `.pt2` files, `torch.export.ExportedProgram` and the graph modules of both.

Every node of an exported graph says which module calls it was traced in. So a layer's value is
what leaves its call (`scopes.py`); where the export was told to keep a module's signature, even the
place of every value in what it returned is known.

In a graph that was quantised (PT2E), a layer's output is the value that its own node made, before
it is quantised for whoever reads it: that is what the layer returned in the eager model too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ....errors import OptionError, TargetError
from ....recording.dtypes import dtype_name
from ..base import Argument, HeardCall, Options, Place, Run, Runner
from ..diverting import divert_forward
from .arguments import Binder
from .branches import branch_plans
from .files import holds_export, load_exported
from .graph import read, tensor_at
from .listen import Listening
from .nodes import eager_name, scopes_of
from .places import folded, places_of, signatures_of
from .plan import CallPlan, plan_calls
from .shared import join_names
from .surgery import copied
from .written import written_attributes

__all__ = ["KIND", "ExportProgram", "open_exported"]

_ABSENT = (
    "The exported graph holds no operation of this layer: it passes its input on, "
    "nothing reads what it returns, or it was folded into another."
)


class ExportProgram:
    """An exported program with its layers."""

    runtime = "export"
    exact = True
    absent = _ABSENT

    def __init__(
        self,
        module: fx.GraphModule,
        *,
        exported: Any = None,
        live: fx.GraphModule | None = None,
        file: Path | None = None,
        float_model: ExportProgram | None = None,
    ) -> None:
        self.module = module  # runs the model as it is; nobody else holds it
        self.exported = exported
        self._live = live
        self._file = file
        self.notes: list[str] = []
        self.reading = read(module)
        joined = join_names(self.reading, module, exported)
        signatures = signatures_of(exported, self.reading)
        self.calls, linears = plan_calls(
            self.reading, {joined.call(call): kept for call, kept in signatures.items()}
        )
        self.branches = branch_plans(module, self.reading)
        self._linear_calls = {
            plan.layer: linear for plan, linear in zip(self.calls, linears, strict=True) if linear
        }
        self._binder = Binder(module)
        self.arguments: Sequence[Argument] | None = self._binder.arguments
        names = [] if exported is None else [str(e.fqn) for e in exported.module_call_graph]
        found = [
            replace(place, provenance="inferred")
            if place.name in joined.doubts and place.gone is None
            else place
            for place in places_of(self.reading, self.calls, self.branches, names, module)
            if place.name not in joined.first
        ]
        self.places: Sequence[Place] = found
        if self.reading.quantised:
            other = None if float_model is None else float_model.reading
            self.places, notes = folded(found, self.reading, other)
            self.notes += notes

    @property
    def all_calls(self) -> list[CallPlan]:
        """Every call that the graph can make, those in branches too."""
        inner = [branch for pair in self.branches.values() for branch in pair]
        return [*self.calls, *(call for branch in inner for call in branch.all_calls())]

    def tapped(self, layers: Sequence[str], *, inputs: bool, linears: Sequence[str]) -> Runner:
        listening = Listening(
            self.module,
            self.calls,
            self.branches,
            layers=set(layers),
            inputs=inputs,
            linears=set(linears),
        )

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
            output, taps = self._run(listening.module, args, kwargs)
            calls: list[HeardCall] = listening.heard(taps)
            return Run(output, calls)

        return run

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._run(self.module, args, kwargs)

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The user's arguments as the export takes them."""
        return self._binder.bind(args, kwargs)

    def _run(self, module: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        bound_args, bound_kwargs = self._binder.bind(args, kwargs)
        try:
            return module(*bound_args, **bound_kwargs)
        except (AssertionError, TypeError, ValueError) as error:
            words = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise TargetError(
                f"The exported program does not take these inputs: {words} "
                "What it was exported with decides what it takes."
            ) from error

    def linears(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]:
        found: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        written = written_attributes(self.module)
        for layer, linear in self._linear_calls.items():
            if linear.weight in written:  # behind the run it is no more what it was in it
                continue
            weight = tensor_at(self.module, linear.weight)
            bias = None if linear.bias is None else tensor_at(self.module, linear.bias)
            if isinstance(weight, torch.Tensor) and weight.is_floating_point():
                found[layer] = (weight.detach(), None if bias is None else bias.detach())
        return found

    @property
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the parameters that the graph reads, by name."""
        return {
            eager_name(name): tuple(tensor.shape)
            for name, tensor in self._constants()
            if isinstance(tensor, torch.nn.Parameter)
        }

    def buffers(self) -> Iterator[torch.Tensor]:
        """What a run may change."""
        written = written_attributes(self.module)
        for name, tensor in self._constants():
            if name in written or not isinstance(tensor, torch.nn.Parameter):
                yield tensor

    def _constants(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in dict.fromkeys(self.reading.weights.values()):
            value = tensor_at(self.module, name) if name else None
            if isinstance(value, torch.Tensor):
                yield name, value

    def describe(self) -> dict[str, Any]:
        dtypes: Counter[str] = Counter()
        for name, tensor in self._constants():
            if isinstance(tensor, torch.nn.Parameter) or name.startswith("_frozen_param"):
                dtypes[dtype_name(tensor.dtype)] += tensor.numel()
        described: dict[str, Any] = {
            "class": self._class(),
            "parameters": sum(dtypes.values()),
            "dtypes": dict(dtypes),
            "runtime": self.runtime,
            "torch": str(torch.__version__),
            "quantised": self.reading.quantised,
        }
        if self._file is not None:
            described["file"] = str(self._file)
        return described

    def _class(self) -> str:
        for node in self.module.graph.nodes:
            for _, path, kind in scopes_of(node):
                if not path and kind:
                    return kind
        return "torch.export.ExportedProgram"

    def divert(
        self, call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    ) -> Callable[[], None] | None:
        live = self._live
        if live is None:  # an ExportedProgram cannot be called
            return None
        return divert_forward(live.__dict__, call)


def open_exported(model: Any, options: Options) -> ExportProgram:
    """The program of an exported program, of a graph module, or of a file."""
    other = None
    if options.names_from is not None:
        other = ExportProgram(load_exported(options.names_from).module())
    if isinstance(model, str | Path):
        path = Path(model)
        if not path.is_file():
            raise TargetError(f"The model file '{path}' does not exist.")
        exported = load_exported(path)
        return ExportProgram(exported.module(), exported=exported, file=path, float_model=other)
    if isinstance(model, torch.export.ExportedProgram):
        return ExportProgram(model.module(), exported=model, float_model=other)
    if KIND.accepts(model):
        return ExportProgram(copied(model), live=model, float_model=other)
    raise OptionError(
        f"A {type(model).__module__}.{type(model).__qualname__} is no exported program: expected "
        "a torch.export.ExportedProgram, its .module(), or a .pt2 file."
    )


class _Kind:
    name = "export"
    suffixes: tuple[str, ...] = (".pt2", ".ep")
    uses = frozenset({"names_from"})

    def accepts(self, model: object) -> bool:
        if isinstance(model, torch.export.ExportedProgram):
            return True
        if not isinstance(model, fx.GraphModule):
            return False
        nodes = list(model.graph.nodes)
        called = {node.target for node in nodes if node.op == "call_module"} - {"_guards_fn"}
        return not called and any(
            node.op == "call_function" and node.meta.get("nn_module_stack") for node in nodes
        )

    def recognises(self, path: Path) -> bool:
        return holds_export(path)

    def program(self, model: Any, options: Options) -> ExportProgram:
        return open_exported(model, options)


KIND = _Kind()
