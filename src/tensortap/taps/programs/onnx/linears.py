"""The linear layers of an ONNX graph: calls that are a product with a weight, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .files import Loaded, weight
from .graph import Block, Node
from .layers import Call
from .values import DTYPES

__all__ = ["Linear", "find_linears", "tensor_of"]

_FLOATS = {1, 10, 11, 16}


@dataclass(frozen=True)
class Linear:
    """A linear layer: where its weight and bias lie, and what each call multiplies."""

    weight: Any
    transposed: bool  # in x out, as a product reads it
    bias: Any
    loaded: Loaded
    calls: tuple[Call, ...]
    operands: tuple[str, ...]

    def read(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight, out x in, and the bias."""
        found = tensor_of(self.weight, self.loaded)
        bias = None if self.bias is None else tensor_of(self.bias, self.loaded)
        return (found.T if self.transposed else found), bias


@dataclass(frozen=True)
class _Product:
    weight: str
    transposed: bool
    bias: str | None
    operand: str


def find_linears(calls: Sequence[Call], block: Block, loaded: Loaded) -> Mapping[str, Linear]:
    """The layers of which every call is one product with the same weight."""
    tensors = {tensor.name: tensor for tensor in block.graph.initializer}
    by_layer: dict[str, list[Call]] = {}
    for call in calls:
        by_layer.setdefault(call.layer, []).append(call)
    found = {}
    for name, many in by_layer.items():
        products = [_product(call, block, tensors) for call in many]
        sure = [product for product in products if product is not None]
        same = {(product.weight, product.transposed, product.bias) for product in sure}
        if len(sure) != len(many) or len(same) != 1:
            continue
        one = sure[0]
        found[name] = Linear(
            tensors[one.weight],
            one.transposed,
            None if one.bias is None else tensors[one.bias],
            loaded,
            tuple(many),
            tuple(product.operand for product in sure),
        )
    return found


def _product(call: Call, block: Block, tensors: Mapping[str, Any]) -> _Product | None:
    if call.chain or len(call.outputs) != 1 or not 1 <= len(call.nodes) <= 2:
        return None
    last = call.nodes[-1]
    if last.outputs != call.outputs:
        return None
    if len(call.nodes) == 1 and last.op == "Gemm":
        return _gemm(last, tensors)
    first = call.nodes[0]
    if first.op != "MatMul" or len(first.inputs) != 2 or first.proto.domain:
        return None
    found = _weight(first.inputs[1], block, tensors)
    if found is None or first.inputs[0] in block.constants:
        return None
    bias = None
    if len(call.nodes) == 2:
        if last.op != "Add" or first.outputs[0] not in last.inputs:
            return None
        bias = next((name for name in last.inputs if name != first.outputs[0]), None)
        while bias in block.maker and block.maker[bias].op == "Identity":
            bias = block.maker[bias].inputs[0]  # equal weights were made one
        if bias is None or not _is_bias(bias, tensors):
            return None
    return _Product(found[0], found[1], bias, first.inputs[0])


def _gemm(node: Node, tensors: Mapping[str, Any]) -> _Product | None:
    numbers = {item.name: item for item in node.proto.attribute}
    scaled = any(name in numbers and numbers[name].f != 1 for name in ("alpha", "beta"))
    flipped = "transA" in numbers and numbers["transA"].i
    operand, held, *rest = node.inputs
    if scaled or flipped or not _is_weight(held, tensors) or operand in tensors:
        return None
    if rest and not _is_bias(rest[0], tensors):
        return None
    turned = "transB" in numbers and bool(numbers["transB"].i)
    return _Product(held, not turned, rest[0] if rest else None, operand)


def _weight(name: str, block: Block, tensors: Mapping[str, Any]) -> tuple[str, bool] | None:
    """(the initialiser, whether it is read in x out), also through a transpose."""
    transposed = True
    while name not in tensors and name in block.maker:
        node = block.maker[name]
        if node.op == "Transpose":
            order = node.attribute("perm")
            if order is not None and list(order.ints) != [1, 0]:
                return None
            transposed = not transposed
        elif node.op != "Identity":
            return None
        name = node.inputs[0]
    return (name, transposed) if _is_weight(name, tensors) else None


def _is_weight(name: str, tensors: Mapping[str, Any]) -> bool:
    tensor = tensors.get(name)
    return tensor is not None and len(tensor.dims) == 2 and tensor.data_type in _FLOATS


def _is_bias(name: str, tensors: Mapping[str, Any]) -> bool:
    tensor = tensors.get(name)
    return tensor is not None and len(tensor.dims) == 1 and tensor.data_type in _FLOATS


def tensor_of(proto: Any, loaded: Loaded) -> torch.Tensor:
    """A weight of the model as a tensor."""
    array = weight(proto, loaded.folder)
    dtype = DTYPES[proto.data_type]
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view("int16").copy()).view(dtype)
    return torch.from_numpy(array.copy())
