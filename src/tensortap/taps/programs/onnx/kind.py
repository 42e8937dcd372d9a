"""ONNX models on ONNX Runtime.

Values of a graph become outputs by being named as such; what a layer returned is read off the
scopes that the exporter left (`scopes`, `layers`). A quantised model has lost most of
them, but kept the names of values: its float twin says which are whose.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ....errors import OptionError, TargetError
from ...leaves import flatten
from ..base import (
    Argument,
    HeardCall,
    Leaves,
    Options,
    Place,
    Provenance,
    Run,
    Runner,
    loose_leaves,
)
from .arguments import arguments_of, fed
from .codes import Code, codes_of
from .files import Loaded, check_operators, load, of_object, require
from .graph import Block, read_blocks
from .layers import Call, Layers, read_layers, settle_guesses
from .linears import Linear, find_linears
from .marked import from_metadata, is_marked
from .named import from_names
from .nodes import read_nodes, weights_of
from .session import open_session, run_names, run_session
from .taps import Wanted, with_outputs
from .twins import renamed
from .values import DTYPES, spelled, to_numpy
from .weights import add_by_names, add_by_weights

__all__ = ["KIND", "OnnxProgram"]

_TARGET = re.compile(r"(?:PARAMETER|BUFFER) target='([^'\n]+)'")
_LARGE = 1 << 30
_ABSENT = (
    "The ONNX graph holds no value with this layer's name: it was folded, fused, or nothing reads "
    "it."
)
_BY_NODE = (
    "This ONNX model holds no layers' names, so it is recorded node by node. To have names, give "
    "the model as it was exported with --names-from, or its checkpoint with --weights."
)
_NODES_OF = (
    "The model of --names-from, '{}', holds no layers' names either: values are named by its nodes."
)
_CODES = (
    "Quantised operators return integer codes: recorded is what these stand for, scale times (code "
    "less zero point)."
)
_NAMELESS = "The ONNX graph computes nothing: what it returns is what it was given, or constant."


class OnnxProgram:
    """An ONNX model, run by ONNX Runtime."""

    runtime = "onnx"
    exact = False  # with other outputs, ONNX Runtime fuses other nodes
    repeatable = True

    def __init__(self, loaded: Loaded, options: Options, session: Any = None) -> None:
        self.notes: list[str] = []
        self._loaded = loaded
        self._options = options
        self._theirs = session
        self._temporary: Any = None
        check_operators(loaded, options.custom_ops)
        self._loaded, self._blocks, layers = _understood(loaded, options)
        provenance: Provenance = "value-name" if layers.style == "nodes" else "scope"
        if options.names_from is not None:
            layers = self._named_by(options.names_from)
            provenance = "value-name"
        if options.weights is not None:
            add_by_weights(layers, self._blocks, loaded, options.weights)
        self._layers = layers
        self.notes += [*layers.notes, *_untaken(loaded.model.graph)]
        self.nameless: str | None = None if layers.names else _NAMELESS
        self.absent = self.nameless or (_BY_NODE if layers.style == "nodes" else _ABSENT)
        self.places: Sequence[Place] = _places(layers, provenance)
        self.arguments: Sequence[Argument] | None = arguments_of(loaded.model)
        self._results = [output.name for output in loaded.model.graph.output]
        if layers.style == "nodes":
            self.unfused = self._unfused
            self.exact = True

    def _named_by(self, path: Path) -> Layers:
        """The layers of the float model, where this one has values of the same names."""
        if not path.is_file():
            raise OptionError(f"The model to take names from, '{path}', does not exist.")
        other = load(path)
        other, blocks, layers = _understood(other, self._options)
        if not layers.calls:
            raise OptionError(
                f"'{path}' holds no layers' names either. Give the float model as "
                "torch.onnx.export wrote it."
            )
        twin = renamed(layers, self._blocks, blocks)
        mine, theirs = (
            [argument.name for argument in arguments_of(model)]
            for model in (self._loaded.model, other.model)
        )
        if mine != theirs or twin.alike * 2 < len(layers.calls):
            raise OptionError(
                f"'{path}' is not the model that {self._loaded.name} was made from: of "
                f"{len(layers.calls)} values of its layers, {twin.alike} are there by name; "
                f"it takes {', '.join(theirs)}, and this one {', '.join(mine)}."
            )
        found = twin.layers
        found.notes = [_NODES_OF.format(path) if n == _BY_NODE else n for n in found.notes]
        return found

    # Running.

    @cached_property
    def _session(self) -> Any:
        if self._theirs is not None:
            return self._theirs
        return open_session(self._loaded, self._options.custom_ops, whole=True)

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        inputs = fed(self.arguments or (), args, kwargs)
        return self._output(run_session(self._session, self._results, inputs))

    @cached_property
    def _bare_session(self) -> Any:
        return open_session(
            self._loaded, self._options.custom_ops, like=self._theirs, whole=True, fused=False
        )

    def _unfused(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model node by node, as it runs with taps on every node."""
        inputs = fed(self.arguments or (), args, kwargs)
        return self._output(run_session(self._bare_session, self._results, inputs))

    def _output(self, values: Mapping[str, Any]) -> Any:
        if len(self._results) == 1:
            return values[self._results[0]]
        return {name: values[name] for name in self._results}

    def tapped(self, layers: Sequence[str], *, inputs: bool, linears: Sequence[str]) -> Runner:
        heard = set(layers) | set(linears)
        calls = [call for call in self._layers.calls if call.layer in heard]
        known = self._linears
        operands = {
            id(call): operand
            for name in linears
            if name in known
            for call, operand in zip(known[name].calls, known[name].operands, strict=True)
        }
        given = {argument.name for argument in self.arguments or ()}
        wanted: list[Wanted] = []
        for call in calls:
            names = list(call.outputs)
            if inputs and call.layer in layers:
                names += [name for name in call.inputs if name not in given]
            wanted += [self._wanted(name, call) for name in names]
            if id(call) in operands and operands[id(call)] not in given:
                wanted.append(self._wanted(operands[id(call)], call))
        tapped = with_outputs(self._loaded.model, wanted)
        session = open_session(
            replace(self._loaded, model=tapped.model),
            self._options.custom_ops,
            like=self._theirs,
            fused=self._layers.style != "nodes",
        )
        names = list(
            dict.fromkeys([*self._results, *tapped.outputs.values(), *tapped.flags.values()])
        )

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
            feed = fed(self.arguments or (), args, kwargs)
            values = run_session(session, names, feed)

            def any_value(name: str, call: Call) -> Any:
                if name in feed:
                    fresh = feed[name]
                    return fresh.clone() if isinstance(fresh, torch.Tensor) else fresh
                key = self._wanted(name, call)
                if key not in tapped.outputs:
                    return None  # an input that was left out
                if key in tapped.flags and not int(values[tapped.flags[key]]):
                    return None
                return values[tapped.outputs[key]]

            def value(name: str, call: Call) -> torch.Tensor | None:
                found = any_value(name, call)
                return found if isinstance(found, torch.Tensor) else None

            heard: list[HeardCall] = []
            for call in calls:
                if call.leaves:
                    whole = [any_value(name, call) for name in call.outputs]
                    pairs = zip(whole, call.leaves, strict=True)
                    outputs: Leaves = [pair for item, leaf in pairs for pair in flatten(item, leaf)]
                else:
                    outputs = loose_leaves([value(name, call) for name in call.outputs])
                if all(item is None for _, item in outputs):
                    continue  # in a branch that was not taken
                read: Leaves = ()
                if inputs and call.layer in layers:
                    read = loose_leaves([value(name, call) for name in call.inputs])
                name = operands.get(id(call))
                operand = None if name is None else value(name, call)
                heard.append(HeardCall(call.layer, outputs, read, operand))
            return Run(self._output(values), heard)

        return run

    def _wanted(self, name: str, call: Call) -> Wanted:
        """A value that a call of a layer makes or reads, with the branch that makes it."""
        chain = call.chain
        while chain and name not in self._by_chain[chain].maker:
            chain = chain[:-1]
        code = self._codes.get(name) if call.leaves and not chain else None
        return Wanted(name, chain, self._by_chain[chain].types.get(name, 1), code)

    @cached_property
    def _codes(self) -> Mapping[str, Code]:
        return codes_of(self._blocks[0])

    @cached_property
    def _by_chain(self) -> dict[Any, Block]:
        return {block.chain: block for block in self._blocks}

    # Telling.

    @cached_property
    def _linears(self) -> Mapping[str, Linear]:
        sure = {p.name for p in self.places if p.provenance in ("scope", "weight")}
        return find_linears(
            [call for call in self._layers.calls if call.layer in sure],
            self._blocks[0],
            self._loaded,
        )

    def linears(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]:
        return {name: linear.read() for name, linear in self._linears.items()}

    @cached_property
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """The parameters that still bear their names, and their shapes."""
        if self._layers.style == "nodes":
            return weights_of(self._layers, self._blocks[0])
        return {
            tensor.name: tuple(tensor.dims)
            for tensor in self._loaded.model.graph.initializer
            if "." in tensor.name and "::" not in tensor.name
        }

    def describe(self) -> dict[str, Any]:
        onnx, runtime = require()
        model = self._loaded.model
        dtypes: Counter[str] = Counter()
        for tensor in model.graph.initializer:
            size = math.prod(tensor.dims)
            if size > 1 and (tensor.data_type not in (6, 7, 9) or len(tensor.dims) > 1):
                name = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
                known = DTYPES.get(tensor.data_type)
                dtypes[str(known).removeprefix("torch.") if known else name] += size
        found: dict[str, Any] = {
            "class": self._layers.types.get("") or model.graph.name or "ModelProto",
            "parameters": sum(dtypes.values()),
            "dtypes": dict(dtypes),
            "runtime": self.runtime,
            "onnxruntime": runtime.__version__,
            "providers": list(self._session.get_providers()),
            "producer": f"{model.producer_name} {model.producer_version}".strip(),
            "ir_version": int(model.ir_version),
            "opset": {item.domain or "ai.onnx": item.version for item in model.opset_import},
        }
        if self._loaded.file is not None:
            found["file"] = str(self._loaded.file)
        return found

    def divert(
        self, call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    ) -> Callable[[], None] | None:
        session = self._theirs
        if session is None:
            return None
        results = self._results

        def run(*args: Any, **kwargs: Any) -> list[Any]:
            given = run_names(session, args, kwargs)
            output = call((), dict(given["input_feed"]))
            values = output if len(results) > 1 else {results[0]: output}
            wanted = given["output_names"] or results
            unknown = [name for name in wanted if name not in values]
            if unknown:
                raise OptionError(
                    f"The ONNX model has no output '{unknown[0]}'. Expected: {', '.join(results)}."
                )
            return [to_numpy(values[name]) for name in wanted]

        before = session.__dict__.get("run")
        session.run = run

        def undo() -> None:
            if session.__dict__.get("run") is not run:
                return
            if before is None:
                del session.run
            else:
                session.run = before

        return undo


def _understood(loaded: Loaded, options: Options) -> tuple[Loaded, list[Block], Layers]:
    """The graph and its layers; its nodes, where it knows of no layer.

    What stands in the model's own functions is then brought into the graph, which calls them.
    """
    model = loaded.model
    typed = _typed(model).graph
    blocks = read_blocks(model.graph, typed)
    owners = _owners(model)
    scopes = from_metadata(blocks, owners) if is_marked(blocks) else from_names(blocks)
    layers = read_layers(blocks, scopes, owners)
    settle_guesses(layers, accepted=options.accept_inferred)
    add_by_names(layers, blocks, scopes.rewritten)
    if layers.calls or options.weights is not None:
        return loaded, blocks, layers
    if model.functions:
        from onnx import inliner

        loaded = replace(loaded, model=inliner.inline_local_functions(model))
        typed = _typed(loaded.model).graph
        blocks = read_blocks(loaded.model.graph, typed)
    nodes = read_nodes(blocks, typed)
    if nodes.names:
        nodes.notes.append(_BY_NODE)
    if codes_of(blocks[0]):
        nodes.notes.append(_CODES)
    return loaded, blocks, nodes


def _untaken(graph: Any) -> list[str]:
    """What of the model's own output is no tensor, and so is returned and not recorded."""
    told = {output.name: spelled(output.type) for output in graph.output}
    return [
        f"The output '{name}' of the ONNX model is {what}: it is returned, and not recorded."
        for name, what in told.items()
        if what is not None
    ]


def _typed(model: Any) -> Any:
    """The model with types on its values, as far as they can be worked out."""
    import onnx

    if model.ByteSize() > _LARGE:
        return model
    try:
        return onnx.shape_inference.infer_shapes(model)
    except Exception:  # a graph that inference does not know is still one that runs
        return model


def _owners(model: Any) -> list[str]:
    """The layers that had weights when the model was exported, as the dynamo exporter lists."""
    found: dict[str, None] = {}
    for entry in model.graph.metadata_props:
        if entry.key.endswith("graph_signature"):
            for target in _TARGET.findall(entry.value):
                if "." in target:
                    found[target.rsplit(".", 1)[0]] = None
    return list(found)


def _places(layers: Layers, provenance: Provenance) -> list[Place]:
    places = []
    for name in layers.names:
        kind = layers.types.get(name, "")
        if name in layers.gone:
            places.append(Place(name, kind, provenance, layers.gone[name]))
        else:
            known: Provenance = "weight" if name in layers.by_weight else provenance
            places.append(Place(name, kind, "inferred" if name in layers.doubts else known))
    places.append(Place("", layers.types.get("", ""), provenance))
    return places


class _OnnxKind:
    name = "onnx"
    suffixes = (".onnx",)
    uses = frozenset({"weights", "names_from", "custom_ops"})

    def accepts(self, model: object) -> bool:
        return any(
            isinstance(model, found)
            for found in (_proto_class(), _session_class(), _export_class())
            if found
        )

    def recognises(self, path: Path) -> bool:
        return path.suffix.lower() == ".onnx"

    def program(self, model: Any, options: Options) -> OnnxProgram:
        require()
        if isinstance(model, str | Path):
            return OnnxProgram(load(Path(model)), options)
        export, session = _export_class(), _session_class()
        if session is not None and isinstance(model, session):
            return OnnxProgram(_of_session(model), options, model)
        if export is not None and isinstance(model, export):
            return _of_export(model, options)
        return OnnxProgram(of_object(model), options)


def _of_session(session: Any) -> Loaded:
    path, held = getattr(session, "_model_path", None), getattr(session, "_model_bytes", None)
    if path:
        return load(Path(path))
    if not held:
        raise TargetError(
            "This ONNX Runtime session does not say which model it runs. Make it from a path or "
            "from bytes, or give the model's file."
        )
    import onnx

    try:
        return of_object(onnx.load_model_from_string(held))
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(
            "The model of this ONNX Runtime session cannot be read: it was made from bytes that "
            f"are no ONNX model ({type(error).__name__}). Give the model's .onnx file."
        ) from error


def _of_export(program: Any, options: Options) -> OnnxProgram:
    """A torch.onnx.ONNXProgram: a large one goes through a file, as ONNX demands."""
    size = sum(
        getattr(value.const_value, "nbytes", 0) or 0
        for value in program.model.graph.initializers.values()
    )
    if size < _LARGE:
        return OnnxProgram(of_object(program.model_proto), options)
    folder = tempfile.TemporaryDirectory(prefix="tensortap-onnx-")
    path = Path(folder.name) / "model.onnx"
    program.save(str(path), external_data=True)
    result = OnnxProgram(load(path), options)
    result._temporary = folder  # it goes away with the program
    return result


def _proto_class() -> Any:
    return getattr(sys.modules.get("onnx"), "ModelProto", None)


def _session_class() -> Any:
    return getattr(sys.modules.get("onnxruntime"), "InferenceSession", None)


def _export_class() -> Any:
    return getattr(sys.modules.get("torch.onnx"), "ONNXProgram", None)


KIND = _OnnxKind()
