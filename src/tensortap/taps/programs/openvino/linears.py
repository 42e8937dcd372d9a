"""Linear layers of an OpenVINO graph whose float weight is known, for the self-check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .graph import Graph, Value
from .layers import LayerCall, Layers

__all__ = ["Linear", "find_linears"]

_FLOAT = ("f16", "f32", "bf16")


@dataclass(frozen=True)
class Linear:
    """A product with a constant: what each call multiplied, and where the constants are."""

    operands: tuple[str, ...]  # by the number of the call
    weight: Any
    bias: Any
    transposed: bool  # whether the constant is stored in x out

    def parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = _float(self.weight)
        weight = weight.T if self.transposed else weight
        return weight, None if self.bias is None else _float(self.bias).reshape(-1)


def find_linears(model: Any, graph: Graph, layers: Layers) -> dict[str, Linear]:
    """Layers that do nothing but multiply by one constant, and may add another."""
    ops = model.get_ordered_ops()
    values = {value.key: value for value in graph.values}
    calls: dict[str, list[LayerCall]] = {}
    for call in layers.calls:
        calls.setdefault(call.layer, []).append(call)
    parents = {place.name.rpartition(".")[0] for place in layers.places}
    found: dict[str, Linear] = {}
    for place in layers.places:
        if place.gone or place.name in parents or place.provenance == "inferred":
            continue
        every = [_linear(call, values, ops) for call in calls.get(place.name, [])]
        own = layers.own.get(place.name, ())
        sure = _does_nothing_else(own, every) if own else place.type == "Linear"
        if every and sure and all(item is not None for item in every):
            first = every[0]
            assert first is not None
            if all(item is not None and item[1] == first[1] for item in every):
                constant = _constant(first[1], values, ops)
                bias = None if first[2] is None else _constant(first[2], values, ops)
                if constant is None or (first[2] is not None and bias is None):
                    continue
                operands = tuple(item[0] for item in every if item is not None)
                found[place.name] = Linear(operands, constant, bias, first[3])
    return found


def _does_nothing_else(own: Sequence[Value], calls: Sequence[Any]) -> bool:
    kinds = [value.op for value in own]
    return set(kinds) <= {"MatMul", "Add"} and kinds.count("MatMul") == len(calls)


def _linear(
    call: LayerCall, values: Mapping[str, Value], ops: Sequence[Any]
) -> tuple[str, str, str | None, bool] | None:
    """(what is multiplied, the weight, the bias, whether in x out) of one call, by key."""
    if len(call.outputs) != 1:
        return None
    product, bias = values[call.outputs[0]], None
    if product.op == "Add":
        constant = [key for key in product.reads if values[key].fixed]
        other = [key for key in product.reads if not values[key].fixed]
        if len(constant) != 1 or len(other) != 1:
            return None
        product, bias = values[other[0]], constant[0]
    if product.op != "MatMul" or len(product.reads) != 2:
        return None
    left, right = product.reads
    how = ops[product.node].get_attributes()
    if values[left].fixed or not values[right].fixed or how.get("transpose_a"):
        return None
    shape = values[right].shape
    if shape is None or len(shape) != 2:
        return None
    return left, right, bias, not how.get("transpose_b")


def _constant(key: str, values: Mapping[str, Value], ops: Sequence[Any]) -> Any:
    """The Constant behind a float weight, through the cast that opens a compressed one."""
    value = values[key]
    while value.op == "Convert":
        value = values[value.reads[0]]
    op = ops[value.node]
    return op if value.op == "Constant" and value.dtype in _FLOAT else None


def _float(constant: Any) -> torch.Tensor:
    kind = constant.output(0).get_element_type().get_type_name()
    data = np.ascontiguousarray(constant.data)
    shape = tuple(constant.output(0).get_shape())
    if kind == "bf16":
        flat = torch.from_numpy(data.view(np.int16).copy()).view(torch.bfloat16)
        return flat.reshape(shape).float()
    return torch.from_numpy(data.astype(np.float32)).reshape(shape)
