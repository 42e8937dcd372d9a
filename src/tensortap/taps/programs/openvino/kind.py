"""OpenVINO: an `openvino.Model`, or the .xml and .bin files of one.

Values inside are made outputs of a copy of the model (`Model.add_results`), which is compiled for
the CPU in float32, so that values compare. Names come from the friendly names (names.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ....errors import MissingExtraError, OptionError
from ..base import Argument, Options, Place, Program, Run, Runner
from .compiled import CompiledProgram
from .file import looks_like, open_file
from .graph import Graph, read
from .layers import Layers, find_layers
from .linears import find_linears
from .names import best_name
from .running import Engine, Tapped
from .values import arguments

__all__ = ["KIND", "OpenVINOProgram"]

_NAMELESS = (
    "The names of this OpenVINO model tell of no module, as in models converted from an exported "
    "program, from ONNX of torch's newer exporter, or from scripted TorchScript: its outputs alone "
    "can be recorded. Convert the torch module itself with openvino.convert_model(module, "
    "example_input=…), name a sibling that knows with --names-from (the .pt2 or .onnx that it was "
    "converted from), or instrument the model before it is converted (tensortap instrument)."
)
_PRECISION = (
    "OpenVINO runs in float32 here (INFERENCE_PRECISION_HINT f32, no dynamic quantisation), so "
    "that values compare; deployed, the CPU may choose bfloat16 or float16."
)


class OpenVINOProgram:
    """An OpenVINO model on the CPU."""

    runtime = "openvino"
    exact = False  # with taps, other operations are fused
    absent = (
        "The OpenVINO graph holds no operation with this layer's name: it was folded or fused, it "
        "does nothing, or nothing reads what it returns."
    )

    def __init__(self, model: Any, options: Options, file: Path | None = None) -> None:
        self._model = model
        self._file = file
        self._options = options
        self.notes: list[str] = [_PRECISION]
        graph = self._graph
        self._layers: Layers = self._named(options.names_from)
        self.notes += self._layers.notes
        self.nameless: str | None = None if self._layers.places else _NAMELESS
        if self.nameless is not None:
            self.notes.append(self.nameless)
        self.places: Sequence[Place] = [*self._layers.places, Place("", provenance="hook")]
        self.weights: Mapping[str, tuple[int, ...]] = {**self._layers.weights, **graph.weights}
        names = _names((port.get_names() for port in model.inputs), "input")
        self.arguments: Sequence[Argument] | None = arguments(model, names)
        self._outputs = _names((port.get_names() for port in model.outputs), "output")
        if graph.stateful:
            self.notes.append(
                "The model has a state (ReadValue): it begins empty in this recording and goes on "
                "from run to run, apart from the state of any other compiled copy."
            )

    @cached_property
    def _graph(self) -> Graph:
        return read(self._model)

    def _named(self, sibling: Path | None) -> Layers:
        if sibling is None:
            return find_layers(self._graph)
        from .sibling import named_by

        ops = self._model.get_ordered_ops()
        return named_by(sibling, self._graph, {op.get_name(): op.get_friendly_name() for op in ops})

    @cached_property
    def _engine(self) -> Engine:
        assert self.arguments is not None
        return Engine(self._model, self._graph, self.arguments, self._outputs)

    def tapped(self, layers: Sequence[str], *, inputs: bool, linears: Sequence[str]) -> Runner:
        known = self._linears
        operands = {name: known[name].operands for name in linears if name in known}
        wanted = set(layers) | set(operands)
        calls = [call for call in self._layers.calls if call.layer in wanted]
        return Tapped(self._engine, calls, set(layers) if inputs else set(), operands)

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        run: Run = self._engine.plain(args, kwargs)
        return run.output

    @cached_property
    def _linears(self) -> dict[str, Any]:
        return find_linears(self._model, self._graph, self._layers)

    def linears(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]:
        return {name: found.parameters() for name, found in self._linears.items()}

    def describe(self) -> dict[str, Any]:
        import openvino

        dtypes: dict[str, int] = {}
        for op in self._model.get_ordered_ops():
            if op.get_type_name() == "Constant" and op.get_output_size():
                size = 1
                for length in op.output(0).get_shape():
                    size *= length
                kind = op.output(0).get_element_type().get_type_name()
                if size > 1 and kind.startswith(("f", "bf", "u", "i4", "i8", "n")):
                    dtypes[kind] = dtypes.get(kind, 0) + size
        described: dict[str, Any] = {
            "class": f"openvino.Model {self._model.get_friendly_name()}",
            "parameters": sum(dtypes.values()),
            "dtypes": dtypes,
            "runtime": self.runtime,
            "openvino": openvino.__version__,
            "device": "cpu",
            "precision": "f32",
        }
        if self._file is not None:
            described["file"] = str(self._file)
        return described

    def divert(
        self, call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    ) -> Callable[[], None] | None:
        return None  # an openvino.Model is not called at all


def _names(all_names: Any, word: str) -> list[str]:
    found: list[str] = []
    for index, names in enumerate(all_names):
        name = best_name(names) or f"{word}{index}"
        found.append(name if name not in found else f"{word}{index}")
    return found


class _Kind:
    name = "openvino"
    suffixes = (".xml",)
    uses = frozenset({"names_from"})

    def accepts(self, model: object) -> bool:
        known = sys.modules.get("openvino")
        if known is None:
            return False
        return isinstance(model, known.Model | known.CompiledModel | known.InferRequest)

    def recognises(self, path: Path) -> bool:
        return looks_like(path)

    def program(self, model: Any, options: Options) -> OpenVINOProgram:
        try:
            import openvino
        except ImportError:
            raise MissingExtraError("openvino", "openvino", "Recording an OpenVINO model") from None
        if isinstance(model, str | Path):
            return OpenVINOProgram(open_file(Path(model)), options, Path(model))
        if not isinstance(model, openvino.Model):
            raise OptionError(
                f"An openvino.{type(model).__name__} does not give back the model that it was made "
                "from, so its layers cannot be tapped. Hand over the openvino.Model, or the .xml "
                "file, that was compiled."
            )
        return OpenVINOProgram(model, options)

    def outputs(self, model: Any) -> Program:
        """For one that some object holds, and that cannot be opened: what it returns."""
        return CompiledProgram(model)


KIND = _Kind()
