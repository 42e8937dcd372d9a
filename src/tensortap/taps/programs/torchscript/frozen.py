"""Frozen TorchScript: weights are constants of the graph, and no layer has a name.

With a checkpoint the constants are found in it by content, and the ops that read them are layers.
Without one the model is recorded op by op.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from ....errors import OptionError
from ..base import Options, Place
from ..weights import Checkpoint, open_checkpoint
from .anchors import Weight, anchors
from .containers import containers
from .graphs import nodes_of
from .nodes import GraphProgram, NodeTap
from .ops import linears_of, ops_program
from .state import state_of
from .tree import Tree

__all__ = ["frozen_program", "matched"]

_ABSENT = (
    "The TorchScript model is frozen: only layers whose weights were found in the checkpoint have "
    "names, and an activation has none."
)
_NO_NAMES = (
    "This TorchScript model is frozen: its layers have lost their names, so it is recorded op by "
    "op. To have names, give the checkpoint that it was made from: --weights FILE.safetensors."
)
_UNCLEAR = "what its layers make does not come together in one value"


def frozen_program(module: Any, file: str | None, options: Options) -> GraphProgram:
    """A frozen model, with names from a checkpoint where there is one."""
    if options.weights is None:
        return ops_program(module, file, runtime="torchscript", notes=[_NO_NAMES])
    checkpoint = open_checkpoint(options.weights)
    graph = module._c._get_method("forward").graph.copy()
    constants = {
        node.output().unique(): tensor
        for node in nodes_of(graph)
        if node.kind() == "prim::Constant"
        and isinstance(tensor := node.output().toIValue(), torch.Tensor)
        and tensor.dim() > 0
    }
    values = matched(constants, checkpoint)
    if not values:
        raise OptionError(
            f"None of the {len(constants)} weights in the frozen TorchScript model is in the "
            f"checkpoint '{options.weights}' ({len(checkpoint.shapes)} tensors): it is another "
            "model's, or the compiler has changed them all. Leave --weights out to record it op by "
            "op."
        )
    needed = {
        module: keys
        for module, names in checkpoint.modules().items()
        if module and (keys := [k for k in names if checkpoint.shapes[f"{module}.{k}"]])
    }
    found = anchors(graph, values, needed)
    tensors = _by_name(constants, values)
    guesses = containers(graph, found, needed)
    named = {tap.name for tap in found.taps}
    taps = sorted(
        [*found.taps, *(tap for tap in guesses if tap.name not in named)],
        key=lambda tap: (tap.end, -tap.name.count(".")),
    )
    places = {tap.name: Place(tap.name, tap.type, tap.provenance) for tap in taps}
    for name, why in found.why.items():
        places.setdefault(name, Place(name, "", "weight", why))
    for name in list(needed):
        while "." in name:
            name = name.rpartition(".")[0]
            if any(not rest.split(".")[0].isdigit() for rest in _below(name, needed)):
                places.setdefault(name, Place(name, "", "inferred", _UNCLEAR))
    return GraphProgram(
        "torchscript",
        module,
        graph,
        taps,
        [*places.values(), Place("", str(module.original_name), "hook")],
        absent=_ABSENT,
        notes=_notes(taps, len(constants), len(values)),
        linears=linears_of(found, tensors),
        weights=tensors,
        state=state_of(Tree(module._c)),
        file=file,
    )


def _below(name: str, modules: Iterable[str]) -> list[str]:
    start = f"{name}."
    return [module[len(start) :] for module in modules if module.startswith(start)]


def _notes(taps: list[NodeTap], constants: int, values: int) -> list[str]:
    sure = len({tap.name for tap in taps if tap.provenance == "weight"})
    guessed = len({tap.name for tap in taps if tap.provenance == "inferred"})
    return [
        f"This TorchScript model is frozen. {values} of {constants} constants were found in the "
        f"checkpoint: {sure} layers are named by their weights, {guessed} by inference."
    ]


def matched(constants: dict[int, torch.Tensor], checkpoint: Checkpoint) -> dict[int, Weight]:
    """Which constants are tensors of the checkpoint, or their transposes, bit for bit."""
    wanted: dict[tuple[int, ...], set[torch.dtype]] = {}
    marks: dict[tuple[torch.dtype, tuple[int, ...], bytes], list[int]] = {}
    for unique, tensor in constants.items():
        shape = tuple(tensor.shape)
        wanted.setdefault(shape, set()).add(tensor.dtype)
        marks.setdefault((tensor.dtype, shape, _digest(tensor)), []).append(unique)
    names: dict[tuple[int, bool], list[str]] = {}
    for name, shape in checkpoint.shapes.items():
        straight, turned = wanted.get(shape, set()), wanted.get(shape[::-1], set())
        if not shape or not (straight or (turned and len(shape) == 2)):
            continue
        tensor = checkpoint.read(name)
        for dtype in straight:
            for unique in marks.get((dtype, shape, _digest(tensor.to(dtype))), ()):
                names.setdefault((unique, False), []).append(name)
        for dtype in turned if len(shape) == 2 else ():
            other = tensor.to(dtype).t()
            for unique in marks.get((dtype, shape[::-1], _digest(other)), ()):
                names.setdefault((unique, True), []).append(name)
    found: dict[int, Weight] = {}
    for (unique, transposed), known in names.items():
        if unique not in found:  # a symmetric matrix is taken as it is
            found[unique] = Weight(tuple(known), transposed, _is_doubtful(constants[unique]))
    return found


def _by_name(
    constants: dict[int, torch.Tensor], values: dict[int, Weight]
) -> dict[str, torch.Tensor]:
    return {
        name: constants[unique].t() if weight.transposed else constants[unique]
        for unique, weight in values.items()
        for name in weight.names
    }


def _is_doubtful(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0 or (tensor.dim() == 3 and tensor.shape[1] == 1):
        return True
    return bool((tensor == tensor.reshape(-1)[0]).all())


def _digest(tensor: torch.Tensor) -> bytes:
    """What tells the content of tensors apart."""
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).digest()
