"""An OpenVINO model as values with spots: what can be tapped, and what each value is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .names import Spot, parse, parse_values, weight_name

__all__ = ["Graph", "Value", "read"]

_WRAPPERS = ("If", "Loop", "TensorIterator")
_NOBODYS = ("Parameter", "FakeQuantize")  # a quantiser is named after what reads it
# torch operations that may do nothing, and are then left out.
_NOTHING = frozenset(
    (
        *("to", "float", "type_as", "contiguous", "clone", "detach", "alias", "dropout"),
        *("view", "reshape", "flatten", "expand", "expand_as", "squeeze", "unsqueeze"),
        *("permute", "transpose", "slice", "narrow", "select", "cat", "pad"),
        *("add", "sub", "mul", "div"),
    )
)


@dataclass(frozen=True)
class Value:
    """One output of one operation. `node` counts in the graph's order, `port` among its outputs.

    `fixed` values do not depend on the inputs; `weight` is then the parameter that it is called
    after. `data` is False for shapes, sizes and axes. A value with `names` was a value of the model
    that was converted; one without is a step inside one of its operations. Where OpenVINO leaves
    out a last operation that does nothing, the one before it is `renamed`: it bears the other's. So
    is one whose names tell of several modules.
    """

    key: str
    node: int
    port: int
    op: str
    reads: tuple[str, ...]
    spot: Spot | None
    names: tuple[str, ...]
    dtype: str
    fixed: bool
    data: bool
    result: bool
    renamed: bool
    shape: tuple[int, ...] | None
    rank: int | None
    weight: str | None


@dataclass(frozen=True)
class Graph:
    """All values in the order in which they are made, and what else the model tells."""

    values: tuple[Value, ...]
    results: tuple[str, ...]  # the values that the model returns, in order
    weights: dict[str, tuple[int, ...]]
    hidden: dict[str, str]  # modules inside a branch or loop: which operation hides them
    stateful: bool
    frozen: bool = False  # whether torch.jit.freeze made it: weights have no names of their own
    wrapper: str = ""  # what stood before every module's name, and is left out


def read(model: Any) -> Graph:
    """Look at a model; nothing is run."""
    ops = model.get_ordered_ops()
    index = {op.get_name(): number for number, op in enumerate(ops)}
    results = [_source(result.input(0), index) for result in model.get_results()]
    returned = set(results)
    values: dict[str, Value] = {}
    weights: dict[str, tuple[int, ...]] = {}
    hidden: dict[str, str] = {}
    stateful = frozen = False
    for number, op in enumerate(ops):
        kind = op.get_type_name()
        stateful |= kind in ("ReadValue", "Assign")
        if kind in ("Result", "Sink"):
            continue
        if kind == "Constant":
            name = weight_name(op.get_friendly_name())
            if name is not None:
                weights[name] = tuple(op.output(0).get_shape())
        if kind in _WRAPPERS:
            for body in _bodies(op):
                for path in _inner_paths(body):
                    hidden.setdefault(path, kind)
        reads = tuple(_source(port, index) for port in op.inputs())
        sources = [values[key] for key in reads if key in values]
        fixed = kind == "Constant" or (
            bool(sources) and kind != "ReadValue" and all(source.fixed for source in sources)
        )
        named = None if kind in _NOBODYS else parse(op.get_friendly_name())
        for port, output in enumerate(op.outputs()):
            key = f"{number}:{port}"
            names = tuple(sorted(output.get_names()))
            told = [weight_name(name) for name in (op.get_friendly_name(), *names)]
            weight = next((name for name in told if fixed and name is not None), None)
            frozen |= weight is not None and told[0] is None
            dtype = output.get_element_type().get_type_name()
            spot, unclear = named, False
            if named is None and kind not in _NOBODYS and not fixed:
                spot, unclear = parse_values(names)
            values[key] = Value(
                key=key,
                node=number,
                port=port,
                op=kind,
                reads=reads,
                spot=spot,
                names=names,
                dtype=dtype,
                fixed=fixed,
                data=not fixed and _is_data(kind, dtype, sources),
                result=key in returned,
                renamed=unclear
                or (key in returned and kind != "Parameter" and _is_renamed(kind, spot)),
                shape=_shape(output),
                rank=_rank(output),
                weight=weight,
            )
    found = tuple(_reclaimed(list(_with_biases(list(values.values())))))
    return _unwrapped(Graph(found, tuple(results), weights, hidden, stateful, frozen))


def _unwrapped(graph: Graph) -> Graph:
    """OpenVINO puts a model whose arguments it must sort into one of its own, as `model`."""
    spots = [v.spot for v in graph.values if v.spot is not None and v.data]
    paths = {spot.path for spot in spots}
    inner = {path.split(".")[1] for path in paths if path.count(".")}
    if len(inner) < 2 or any(path.partition(".")[0] != "model" for path in paths):
        return graph

    def bare(path: str) -> str:
        return "" if path == "model" else path.removeprefix("model.")

    def unwrapped(value: Value) -> Value:
        spot = None if value.spot is None else replace(value.spot, path=bare(value.spot.path))
        weight = None if value.weight is None else bare(value.weight)
        return replace(value, spot=spot, weight=weight)

    return replace(
        graph,
        values=tuple(unwrapped(value) for value in graph.values),
        weights={bare(name): shape for name, shape in graph.weights.items()},
        hidden={bare(path): kind for path, kind in graph.hidden.items()},
        wrapper="model",
    )


def _shape(output: Any) -> tuple[int, ...] | None:
    shape = output.get_partial_shape()
    return tuple(shape.to_shape()) if shape.is_static else None


def _rank(output: Any) -> int | None:
    rank = output.get_partial_shape().rank
    return None if rank.is_dynamic else int(rank.get_length())


def _source(port: Any, index: dict[str, int]) -> str:
    output = port.get_source_output()
    return f"{index[output.get_node().get_name()]}:{output.get_index()}"


def _is_data(kind: str, dtype: str, sources: Sequence[Value]) -> bool:
    """Whether a value is an activation: whole numbers made of shapes alone are not."""
    if kind == "ShapeOf":
        return False
    if dtype.startswith(("f", "bf")) or not sources:
        return True
    return any(source.data for source in sources)


def _is_renamed(kind: str, spot: Spot | None) -> bool:
    if spot is None:
        return True
    whole, _, last = spot.kind.rpartition("/")
    return last != kind and whole.rpartition("::")[2] in _NOTHING


def _reclaimed(values: list[Value]) -> Iterator[Value]:
    """A product that lost its name is that of the layer whose weight it reads."""
    by_key = {value.key: value for value in values}
    for value in values:
        if not value.renamed:
            yield value
            continue
        sources = [by_key[key] for key in value.reads]
        if value.op == "MatMul" and len(sources) == 2 and sources[1].weight is not None:
            owner, _, name = sources[1].weight.rpartition(".")
            if owner and name == "weight":
                product = Spot(owner, "aten::linear/MatMul", 0)
                value = replace(value, spot=product, renamed=False)
        elif value.op == "Add" and len(sources) == 2:
            made = next((s for s in sources if s.op == "MatMul" and not s.names), None)
            bias = next((s for s in sources if s.fixed), None)
            spot = None if made is None or bias is None else made.spot
            if spot is not None and spot.kind == "aten::linear/MatMul":
                spot = replace(spot, kind="aten::linear/Add")
                value = replace(value, spot=spot, renamed=False)
        yield value


def _with_biases(values: list[Value]) -> Iterator[Value]:
    """ONNX's Gemm and Conv become two operations, of which an output of the model loses its name.

    `/fc/Gemm/WithoutBiases` is then the product alone, and the sum behind it is called `29`.
    """
    made = {(v.spot.path, v.spot.kind, v.spot.number) for v in values if v.spot is not None}
    readers: dict[str, list[Value]] = {}
    for value in values:
        for key in value.reads:
            readers.setdefault(key, []).append(value)
    moved: dict[str, Spot] = {}
    for value in values:
        spot = value.spot
        if spot is None or not spot.kind.endswith("/WithoutBiases"):
            continue
        whole = replace(spot, kind=spot.kind.removesuffix("/WithoutBiases"))
        behind = readers.get(value.key, [])
        lost = (whole.path, whole.kind, whole.number) not in made
        if lost and len(behind) == 1 and behind[0].spot is None:
            moved[behind[0].key] = whole
    for value in values:
        if value.key in moved:
            value = replace(value, spot=moved[value.key], renamed=False)
        yield value


def _bodies(op: Any) -> list[Any]:
    found = []
    for getter in ("get_then_body", "get_else_body", "get_function"):
        ask = getattr(op, getter, None)
        if ask is None:
            continue
        try:
            found.append(ask())
        except TypeError:  # an If's get_function wants to know which, and was asked above
            continue
    return found


def _inner_paths(body: Any) -> Iterator[str]:
    for op in body.get_ordered_ops():
        spot = parse(op.get_friendly_name())
        if spot is not None:
            yield spot.path
        if op.get_type_name() in _WRAPPERS:
            for inner in _bodies(op):
                yield from _inner_paths(inner)
