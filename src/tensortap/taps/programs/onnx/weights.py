"""Layers of an ONNX graph without scopes, told by the weights that their nodes read.

A product with `fc.weight`, and a sum with `fc.bias` behind it, is `fc`. That is sure where the node
reads all that the layer owns and no other layer's weights are the same. Layers that own no weights,
and those that hold others, have no names here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..weights import Role, open_checkpoint
from .files import Loaded
from .graph import Block, Node
from .layers import Call, Layers
from .linears import tensor_of

__all__ = ["add_by_names", "add_by_weights"]

UNREAD = "its weights are not in the model: it was folded into another layer, or quantised"
TIED = "other layers have the same weights, so its value cannot be told from theirs"
ELSEWHERE = "its weights are read by nodes that do not tell what it returns"
_FLOATS = {1, 10, 11, 16}


_ROLES = {
    "MatMul": Role(0, 1, (), "Linear"),
    "Gemm": Role(0, 1, (2,), "Linear"),
    "Conv": Role(0, 1, (2,)),
    "ConvTranspose": Role(0, 1, (2,)),
    "Gather": Role(1, 0, (), "Embedding"),
    "LayerNormalization": Role(0, 1, (2,), "LayerNorm"),
    "BatchNormalization": Role(0, 1, (2, 3, 4)),
}


@dataclass(frozen=True)
class _Names:
    """The parameters that each initialiser may be, and those that each layer needs."""

    of: Mapping[str, tuple[str, ...]]
    needed: Mapping[str, Sequence[str]]


def add_by_weights(layers: Layers, blocks: Sequence[Block], loaded: Loaded, path: Path) -> None:
    """Name what is not named yet by the tensors of a checkpoint."""
    checkpoint = open_checkpoint(path)
    digests: dict[tuple[Any, ...], list[str]] = {}
    kinds = {t.data_type for t in blocks[0].graph.initializer if t.data_type in _FLOATS}
    for name in checkpoint.shapes:
        tensor = checkpoint.read(name)
        if not tensor.is_floating_point():
            continue
        for kind in kinds:
            for form in (tensor, tensor.T) if tensor.dim() == 2 else (tensor,):
                key = _digest(form, kind)
                if name not in digests.setdefault(key, []):
                    digests[key].append(name)
    found = {}
    for tensor in blocks[0].graph.initializer:
        if tensor.data_type in _FLOATS and len(tensor.dims):
            names = digests.get(_digest(tensor_of(tensor, loaded), tensor.data_type))
            if names:
                found[tensor.name] = tuple(names)
    needed = {
        layer: [f"{layer}.{own}" if layer else own for own in names if own != "num_batches_tracked"]
        for layer, names in checkpoint.modules().items()
    }
    _add(layers, blocks[:1], _Names(found, needed), lambda node: True)
    _explain(layers, found, needed)


def add_by_names(layers: Layers, blocks: Sequence[Block], rewritten: set[Node]) -> None:
    """Name what stands in branches, whose nodes bear no scope, by the weights' own names."""
    inner = [block for block in blocks if block.chain and not block.in_loop]
    if layers.style != "metadata" or not inner:
        return
    own = {t.name: (t.name,) for t in blocks[0].graph.initializer if "." in t.name}
    needed: dict[str, list[str]] = {}
    for name in own:
        needed.setdefault(name.rsplit(".", 1)[0], []).append(name)
    _add(layers, inner, _Names(own, needed), lambda node: node not in rewritten)


def _digest(tensor: torch.Tensor, kind: int) -> tuple[Any, ...]:
    from .values import DTYPES

    whole = tensor.detach().to(DTYPES[kind]).contiguous()
    raw = whole.view(torch.uint8) if whole.dim() else whole.reshape(1).view(torch.uint8)
    return tuple(whole.shape), hashlib.blake2b(raw.numpy().tobytes(), digest_size=16).digest()


def _add(
    layers: Layers, blocks: Sequence[Block], names: _Names, fits: Callable[[Node], bool]
) -> None:
    before = {call.layer for call in layers.calls}
    found: dict[str, list[tuple[Call, str]]] = {}
    kinds: dict[str, str] = {}
    for block in blocks:
        for node in block.nodes:
            if node.op not in _ROLES or node.proto.domain or not fits(node):
                continue
            told = _look(node, block, names)
            if told is not None and told[0] not in before:
                found.setdefault(told[0], []).append((told[1], node.op))
                kinds.setdefault(told[0], _ROLES[node.op].type)
    for layer, calls in found.items():
        ops = {op for _, op in calls}
        if "Gather" in ops and len(ops) > 1:  # tied: the product is of another layer
            calls = [(call, op) for call, op in calls if op == "Gather"]
            ops = {"Gather"}
        if len(ops) > 1:
            layers.gone.setdefault(layer, ELSEWHERE)
            continue
        layers.calls += [call for call, _ in calls]
        layers.types.setdefault(layer, kinds[layer])
        layers.by_weight.add(layer)
        layers.gone.pop(layer, None)
        layers.doubts.pop(layer, None)
    layers.calls.sort(key=lambda call: call.order)


def _look(node: Node, block: Block, names: _Names) -> tuple[str, Call] | None:
    """The layer that a node is a call of, if that is sure."""
    role = _ROLES[node.op]
    inputs = list(node.proto.input)
    if len(inputs) <= max(role.data, role.weight) or not block.is_data(inputs[role.data]):
        return None
    owners = [name.rpartition(".") for name in _meant(inputs[role.weight], block, names)]
    layers = {layer for layer, _, own in owners if own == "weight"}
    if len(layers) != 1 or len(owners) != 1:
        return None
    layer = layers.pop()
    left = {name for name in names.needed.get(layer, ()) if name != f"{layer}.weight"}
    for index in role.others:
        if index < len(inputs) and inputs[index]:
            meant = set(_meant(inputs[index], block, names)) & left
            if not meant:
                return None  # a bias that is not its own: something was folded in
            left -= meant
    nodes = [node]
    if left and node.op == "MatMul":
        readers = block.readers.get(node.outputs[0], [])
        if len(readers) != 1 or readers[0].op != "Add" or node.outputs[0] in block.results:
            return None
        others = [name for name in readers[0].inputs if name != node.outputs[0]]
        left -= {name for other in others for name in _meant(other, block, names)}
        nodes.append(readers[0])
    if left:
        return None
    last = nodes[-1]
    depth = tuple(index for index, _ in block.chain)
    order = (*depth, last.index, -layer.count("."), 0)
    return layer, Call(
        layer, last.outputs[:1], (inputs[role.data],), order, block.chain, tuple(nodes)
    )


def _meant(name: str, block: Block, names: _Names) -> tuple[str, ...]:
    """The parameters that a constant may be, also through transposes and copies."""
    while name not in names.of and name in block.maker:
        node = block.maker[name]
        if node.op not in ("Transpose", "Identity"):
            return ()
        name = node.inputs[0]
    return names.of.get(name, ())


def _explain(
    layers: Layers, found: Mapping[str, Sequence[str]], needed: Mapping[str, Sequence[str]]
) -> None:
    heard = {call.layer for call in layers.calls}
    present = {name for names in found.values() for name in names}
    tied = {name for names in found.values() if len(names) > 1 for name in names}
    for layer, own in needed.items():
        if not layer or layer in heard:
            continue
        if not any(name in present for name in own):
            layers.gone.setdefault(layer, UNREAD)
        elif f"{layer}.weight" in tied:
            layers.gone.setdefault(layer, TIED)
        else:
            layers.gone.setdefault(layer, ELSEWHERE)
