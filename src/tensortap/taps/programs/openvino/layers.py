"""The layers of an OpenVINO graph: which values each call of them returned and was given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..base import Place
from ..scopes import ModuleCall, Step, adopted, entering, leaving
from .calls import find_calls, prefixes
from .graph import Graph, Value
from .shared import find_lists, without_shared

__all__ = ["LayerCall", "Layers", "find_layers"]

_FOLDED = "the batch norm after it was folded into its weights"
_FROZEN = "freezing folded what follows it (a batch norm, a factor, a constant) into its weights"
_FUSED = "it was fused with the layer behind it, and its own value is not made"
_UNUSED = "nothing reads what it returns, so the compiler dropped it"
_WRITTEN = "it writes into a part of its own value, and what does so bears no layer's name"
_RENAMED = "the operation behind it lost its name and may be its last"
_REWRITTEN = "the compiler rewrote what reads it, and may have moved its last operation there"
_MOVED = "OpenVINO may have moved its last sum or product into the operation that reads it"
_UNCLEAR = "its calls cannot be told apart"
_WITH_AXES = ("Reduce", "Concat", "Interpolate", "Pad", "Slice", "Split", "StridedSlice")
_SUMS = ("Add", "Subtract")
_PRODUCTS = ("Multiply", "Divide")
_BEFORE_BIAS = ("MatMul", "Convolution", "GroupConvolution", "ConvolutionBackpropData", "MVN")
_AGAIN = re.compile(r"(.+)_\d+")
_FUSED_WEIGHT = re.compile(r".+_fused_[a-z]+")  # as torch.jit.freeze calls it
_TYPES = {
    "aten::linear": "Linear",
    "aten::embedding": "Embedding",
    "aten::layer_norm": "LayerNorm",
    "aten::group_norm": "GroupNorm",
    "aten::relu": "ReLU",
    "aten::relu_": "ReLU",
    "aten::gelu": "GELU",
    "aten::silu": "SiLU",
    "aten::silu_": "SiLU",
    "aten::tanh": "Tanh",
    "aten::sigmoid": "Sigmoid",
}
_RANKED = {
    "aten::_convolution": "Conv",
    "aten::convolution": "Conv",
    "aten::batch_norm": "BatchNorm",
    "aten::max_pool2d": "MaxPool",
    "aten::adaptive_avg_pool2d": "AdaptiveAvgPool",
}


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: the values that it returned, the main one first, and those it read."""

    layer: str
    number: int
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Layers:
    """All layers as places, and the calls of those that have values, as they finish."""

    places: tuple[Place, ...]
    calls: tuple[LayerCall, ...]
    own: Mapping[str, tuple[Value, ...]]  # the values that a layer made itself
    weights: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...]


def find_layers(graph: Graph) -> Layers:
    """The layers that the names in a graph tell of."""
    fixed = {value.key: value for value in graph.values if value.fixed}
    values = [value for value in graph.values if value.data]
    notes: list[str] = []
    if graph.wrapper:
        notes.append(
            f"Every layer lies in '{graph.wrapper}', as where openvino.convert_model puts a "
            "wrapper around a model: names are given without it."
        )
    calls = find_calls(values, fixed)
    known = {value.key: calls.of.get(value.key, ()) for value in values}
    steps = [
        Step(value.key, tuple(key for key in value.reads if key in known), known[value.key])
        for value in values
    ]
    lone = {v.key for v in values if v.spot is None and v.op != "Parameter" and not v.result}
    steps = adopted(steps, lone)
    by_key = {value.key: value for value in values}
    order = {value.key: index for index, value in enumerate(values)}
    out = without_shared(steps, leaving(steps, graph.results), values, fixed)
    into = entering(steps)
    further = _further_calls(values, fixed)
    lists = find_lists(steps, out, into)
    own: dict[str, list[Value]] = {}
    for value in values:
        if value.spot is not None and value.spot.path:
            own.setdefault(value.spot.path, []).append(value)
    gone: dict[str, str] = {}
    heard: list[tuple[int, int, LayerCall]] = []
    paths = dict.fromkeys(path for path, _ in out)
    for (path, number), keys in out.items():
        good = tuple(key for key in keys if by_key[key].names or by_key[key].result)
        if not keys:
            gone.setdefault(path, _UNUSED)
        elif keys[0] not in good:
            gone.setdefault(path, _FUSED)
        else:
            call = LayerCall(path, number, good, into.get((path, number), ()))
            heard.append((order[keys[0]], -path.count("."), call))
    gone = {**dict.fromkeys(_before_moved(steps, out, by_key, fixed), _MOVED), **gone}
    gone.update(dict.fromkeys(_before_renamed(steps, out, by_key), _RENAMED))
    gone.update(dict.fromkeys(_before_rewritten(steps, out, by_key), _REWRITTEN))
    gone.update(dict.fromkeys(_written(values, out), _WRITTEN))
    gone.update(dict.fromkeys(calls.unclear, _UNCLEAR))
    gone.update((path, _FOLDED) for path in paths if _is_folded(own.get(path, ()), fixed))
    fused, perhaps = _fused(out, own, fixed) if graph.frozen else (set(), set())
    gone.update(dict.fromkeys(fused, _FROZEN))
    gone.update((p, _inside(kind)) for p, kind in graph.hidden.items() if p not in paths)
    heard = [item for item in heard if item[2].layer not in lists and item[2].layer not in gone]
    heard = [item for item in heard if further.get(item[2].layer) != "again"]
    heard.sort(key=lambda item: item[:2])
    guessed = calls.guessed | perhaps
    guessed |= {path for path, what in further.items() if what == "perhaps"}
    again = [path for path, what in further.items() if what == "again"]
    if again:
        notes.append(
            f"ONNX wrote later calls of {len(again)} layers as layers of their own "
            f"('{again[0]}'): these calls are not recorded."
        )
    names = dict.fromkeys(item[2].layer for item in heard)
    names.update(dict.fromkeys(p for p in gone if p not in lists and further.get(p) != "again"))
    places = [
        Place(
            name,
            _type(own.get(name, ()), name, paths),
            "inferred" if name in guessed else "scope",
            gone.get(name),
        )
        for name in names
    ]
    return Layers(
        tuple(places),
        tuple(item[2] for item in heard),
        {path: tuple(found) for path, found in own.items()},
        _weights(own, fixed),
        tuple(notes),
    )


def _inside(kind: str) -> str:
    what = "a branch" if kind == "If" else "a loop"
    return f"it lies inside {what} ({kind}), out of which OpenVINO hands no values"


def _is_folded(own: Sequence[Value], fixed: Mapping[str, Value]) -> bool:
    """ONNX's exporter folds a batch norm into a convolution, whose weight then loses its name."""
    for value in own:
        if value.op.endswith("Convolution") and value.spot is not None and not value.spot.repeats:
            weights = [fixed[key] for key in value.reads if key in fixed]
            if not any(weight.weight for weight in weights):
                return True
    return False


def _fused(
    out: Mapping[ModuleCall, Sequence[str]],
    own: Mapping[str, Sequence[Value]],
    fixed: Mapping[str, Value],
) -> tuple[set[str], set[str]]:
    """Layers into whose weights `torch.jit.freeze` folded what follows, and where it may have.

    A name tells of a factor or a batch norm, but not of a constant that was added to the bias of a
    convolution. Layers that return what such a layer does count too: what was folded may be code
    outside of them.
    """
    surely: set[str] = set()
    perhaps: set[str] = set()
    for (path, _), keys in out.items():
        values = own.get(path, ())
        weights = [fixed[key].weight or "" for v in values for key in v.reads if key in fixed]
        if any(_FUSED_WEIGHT.fullmatch(weight) for weight in weights):
            surely.update(keys)
        if any(v.op.endswith("Convolution") for v in values) and values[-1].op in _SUMS:
            perhaps.update(keys)

    def returning(made: set[str]) -> set[str]:
        return {path for (path, _), keys in out.items() if made & set(keys)}

    return returning(surely), returning(perhaps)


def _further_calls(values: Sequence[Value], fixed: Mapping[str, Value]) -> dict[str, str]:
    """ONNX: whether `relu_1` is the second call of `relu` ("again"), or may be ("perhaps")."""
    read: dict[str, set[str]] = {}
    for value in values:
        if value.spot is None or value.spot.repeats:
            continue
        weights = {k for k in value.reads if k in fixed and fixed[k].shape not in ((), (1,), None)}
        weights = {key for key in weights if fixed[key].dtype.startswith(("f", "bf"))}
        for path in prefixes(value.spot.path):
            read.setdefault(path, set()).update(weights)
    found: dict[str, str] = {}
    for path in read:
        for prefix in prefixes(path):
            match = _AGAIN.fullmatch(prefix)
            base = None if match is None else match[1]
            if base is None or base not in read:
                continue
            if read[prefix] & read[base]:
                found[path] = "again"
            elif not (read[prefix] and read[base]):
                found.setdefault(path, "perhaps")
    return found


def _before_renamed(
    steps: Sequence[Step], out: Mapping[ModuleCall, Sequence[str]], values: Mapping[str, Value]
) -> set[str]:
    """Layers whose value is read by an operation that lost its name, and so may be theirs."""
    left = {key: call for call, keys in out.items() for key in keys}
    reads = {
        key: step.calls
        for step in steps
        if values[step.name].renamed
        for key in step.inputs
        if key in left
    }
    return {
        path
        for (path, number), keys in out.items()
        if any(key in reads and (path, number) not in reads[key] for key in keys)
    }


def _before_rewritten(
    steps: Sequence[Step], out: Mapping[ModuleCall, Sequence[str]], values: Mapping[str, Value]
) -> set[str]:
    """Layers before an operation of the compiler's own: a sum that has swallowed a transpose."""
    readers: dict[str, list[Step]] = {}
    for step in steps:
        value = values[step.name]
        ours = value.spot is None and not value.names and not value.result
        if ours and value.op.startswith(_WITH_AXES):
            for key in step.inputs:
                readers.setdefault(key, []).append(step)
    return {
        path
        for (path, number), keys in out.items()
        if any((path, number) not in step.calls for key in keys for step in readers.get(key, ()))
    }


def _before_moved(
    steps: Sequence[Step],
    out: Mapping[ModuleCall, Sequence[str]],
    values: Mapping[str, Value],
    fixed: Mapping[str, Value],
) -> set[str]:
    """Layers whose last sum or product with a constant may lie in the operation that reads them.

    OpenVINO joins neighbouring sums and products with constants: `(h + bias) * 0.5` becomes
    `h * 0.5 + (bias * 0.5)`, and two factors or two summands become one. The result has the name
    of the operation after the layer, and the layer's own last operation is gone. Where such an
    operation still follows a sum, nothing was joined.
    """
    readers: dict[str, list[Step]] = {}
    for step in steps:
        for key in dict.fromkeys(step.inputs):
            readers.setdefault(key, []).append(step)
    found = set()
    for (path, number), keys in out.items():
        for key in keys:
            reads = readers.get(key, [])
            if len(reads) != 1 or values[key].result:
                continue  # what is read twice is not joined
            outside = (path, number) not in reads[0].calls
            if outside and _may_hold(values[key], values[reads[0].name], fixed):
                found.add(path)
    return found


def _may_hold(last: Value, reader: Value, fixed: Mapping[str, Value]) -> bool:
    """Whether a reader may hold what a layer did after its `last` operation."""
    constant = _constant(reader, fixed)
    if constant is None:
        return False
    own = _constant(last, fixed)
    if own is not None and (last.op in _SUMS or reader.op not in _SUMS):
        return False  # these two would have been joined themselves
    single = constant.shape is not None and set(constant.shape) <= {1}
    ours = reader.spot is None and not reader.names and not reader.result
    return ours or not single or own is not None or last.op in _BEFORE_BIAS


def _constant(value: Value, fixed: Mapping[str, Value]) -> Value | None:
    """What a value adds to its only other source, or multiplies it by."""
    if value.op not in (*_SUMS, *_PRODUCTS):
        return None
    constants = [fixed[key] for key in value.reads if key in fixed]
    return constants[0] if len(constants) == 1 and len(value.reads) == 2 else None


def _written(values: Sequence[Value], out: Mapping[ModuleCall, Sequence[str]]) -> set[str]:
    """Layers that wrote into a part of their own value: what does it bears nobody's name."""
    sources: dict[str, set[str]] = {}
    writes = []
    for value in values:
        if value.spot is None:
            sources[value.key] = {found for key in value.reads for found in sources.get(key, {key})}
            if value.op.startswith("Scatter"):
                writes.append(sources[value.key])
    return {path for (path, _), keys in out.items() if any(len(w & set(keys)) > 1 for w in writes)}


def _type(own: Sequence[Value], name: str, paths: Mapping[str, None]) -> str:
    """The class of a module that did one thing alone, where that tells it."""
    if any(path.startswith(f"{name}.") for path in paths):
        return ""
    kinds = {value.spot.kind.split("/")[0] for value in own if value.spot is not None}
    if len(kinds) != 1:
        return ""
    (kind,) = kinds
    if kind in _RANKED:
        rank = next((value.rank for value in own if value.rank is not None), None)
        return f"{_RANKED[kind]}{rank - 2}d" if rank in (3, 4, 5) else ""
    return _TYPES.get(kind, "")


def _weights(
    own: Mapping[str, Sequence[Value]], fixed: Mapping[str, Value]
) -> dict[str, tuple[int, ...]]:
    """The largest constant that each layer reads stands for its weight where names are lost."""
    found: dict[str, tuple[int, ...]] = {}
    for path, values in own.items():
        for value in values:
            for key in value.reads:
                shape = fixed[key].shape if key in fixed else None
                if not shape or not fixed[key].dtype.startswith(("f", "bf")) or set(shape) == {1}:
                    continue
                name = f"{path}.weight"
                if name not in found or len(shape) > len(found[name]):
                    found[name] = shape
    return found
