"""Names for an OpenVINO graph that has lost them, from the file that it was converted from.

OpenVINO keeps the names of an ONNX model's values, and of the nodes of an exported program once it
has decomposed that in its own way. So a layer's value is known by name, if the sibling's is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import OptionError, TapError
from ..base import Options, Place, Provenance
from ..quiet import quietly
from .graph import Graph
from .layers import LayerCall, Layers

__all__ = ["named_by"]

_NODE = re.compile(r"([^/]+)/(aten\.[\w.]+)(?:/.*)?")


@dataclass(frozen=True)
class _Call:
    layer: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class _Sibling:
    calls: Sequence[_Call]
    places: Mapping[str, Place]
    operators: Mapping[str, str] | None = None  # of the nodes, where that is known


def named_by(path: Path, graph: Graph, names: Mapping[str, str]) -> Layers:
    """The layers of the sibling whose values this graph has; `names` are those of operations."""
    if not path.is_file():
        raise OptionError(f"The model to take names from, '{path}', does not exist.")
    if path.suffix.lower() == ".onnx":
        sibling = _onnx(path)
    elif path.suffix.lower() == ".pt2":
        sibling = _exported(path)
        _check_operators(path, sibling, names)
    else:
        raise OptionError(
            f"Names for an OpenVINO model come from the .onnx or the .pt2 file that it was "
            f"converted from; '{path}' is neither."
        )
    known = {name: value.key for value in graph.values if value.data for name in value.names}
    order = {value.key: index for index, value in enumerate(graph.values)}
    numbers: dict[str, int] = {}
    found: list[LayerCall] = []
    lost: dict[str, str] = {}
    for call in sibling.calls:
        number = numbers[call.layer] = numbers.get(call.layer, -1) + 1
        outputs = tuple(known[name] for name in call.outputs if name in known)
        if not call.outputs or call.outputs[0] not in known:
            lost[call.layer] = "OpenVINO no longer makes its value: it was folded or fused"
            continue
        inputs = tuple(known[name] for name in call.inputs if name in known)
        found.append(LayerCall(call.layer, number, outputs, inputs))
    if 2 * len(found) < len(sibling.calls) or not found:
        raise OptionError(
            f"'{path}' is not the model that this one was converted from: of "
            f"{len(sibling.calls)} values of its layers, {len(found)} are here by name."
        )
    found = [call for call in found if call.layer not in lost]
    found.sort(key=lambda call: (order[call.outputs[0]], -call.layer.count(".")))
    heard = dict.fromkeys(call.layer for call in found)
    places = [_place(sibling.places.get(name), name, None) for name in heard]
    rest = {n: p.gone for n, p in sibling.places.items() if n and n not in heard and p.gone}
    places += [_place(sibling.places.get(n), n, why) for n, why in {**rest, **lost}.items()]
    note = f"Layers are named after '{path.name}', by the names of {len(found)} values."
    return Layers(tuple(places), tuple(found), {}, {}, (note,))


def _place(theirs: Place | None, name: str, gone: str | None) -> Place:
    kind = "" if theirs is None else theirs.type
    guess = theirs is not None and theirs.provenance == "inferred"
    provenance: Provenance = "inferred" if guess else "value-name"
    return Place(name, kind, provenance, gone)


def _onnx(path: Path) -> _Sibling:
    from ..kinds import open_program

    program: Any = open_program(path, Options())
    calls = [
        _Call(call.layer, tuple(call.outputs), tuple(call.inputs))
        for call in program._layers.calls
        if not call.chain  # what lies in a branch has no value outside of it
    ]
    return _Sibling(calls, {place.name: place for place in program.places})


def _exported(path: Path) -> _Sibling:
    """The program as OpenVINO decomposes it: by its own decoder, so that nodes go by one name."""
    from ..exported.files import load_exported
    from ..exported.kind import ExportProgram

    exported = load_exported(path)
    try:
        from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

        with quietly():  # it tells of every operator that it need not decompose
            decoder: Any = TorchFXPythonDecoder.from_exported_program(exported)
        module = decoder.pt_module
    except (ImportError, AttributeError, RuntimeError) as error:
        raise TapError(
            f"OpenVINO cannot decompose '{path}', so its names cannot be carried over: {error}"
        ) from error
    program = ExportProgram(module)
    calls = [
        _Call(
            plan.layer,
            tuple(f"{pick.node}:0" for pick in plan.outputs if pick is not None),
            tuple(f"{pick.node}:0" for pick in plan.inputs),
        )
        for plan in program.calls
        if all(not pick.graph for pick in plan.outputs if pick is not None)
    ]
    operators = {node.name: str(node.target) for node in module.graph.nodes}
    return _Sibling(calls, {place.name: place for place in program.places}, operators)


def _check_operators(path: Path, sibling: _Sibling, names: Mapping[str, str]) -> None:
    """Every node that is called alike must do alike, or the numbers in the names are others."""
    for name in names.values():
        match = _NODE.fullmatch(name)
        ours = None if match is None else (sibling.operators or {}).get(match[1])
        if match is not None and ours is not None and ours != match[2]:
            raise OptionError(
                f"'{path}' is not the model that this one was converted from: its node "
                f"'{match[1]}' is {ours}, and here it is {match[2]}."
            )
