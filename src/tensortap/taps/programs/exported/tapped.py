"""An exported program with taps as a program of its own, to be exported again and compiled."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ....errors import OptionError, TargetError
from ...leaves import children
from ..base import Provenance
from .listen import leaves_of
from .plan import Pick
from .surgery import copied, with_taps

if TYPE_CHECKING:
    from .kind import ExportProgram

__all__ = ["Tapped", "example_of", "exported_again", "tapped_export", "tapped_program"]


@dataclass(frozen=True)
class Tapped:
    """One tap: which layer's call, and where in what it returned."""

    layer: str
    call: int
    leaf: str
    type: str
    provenance: Provenance


def tapped_program(
    program: ExportProgram, layers: Sequence[str]
) -> tuple[fx.GraphModule, list[Tapped]]:
    """A module that returns (output, taps), and what each tap is, in order.

    It takes what the model takes. Layers that are gone, or run in a branch of a `torch.cond`, have
    no taps: the program's notes say so.
    """
    known = {place.name: place for place in program.places}
    for layer in layers:
        if layer not in known:
            raise OptionError(f"The exported program has no layer '{layer}'.")
    wanted = set(layers)
    picks: list[Pick] = []
    entries: list[Tapped] = []
    for plan in program.calls:
        if plan.layer not in wanted or known[plan.layer].gone is not None:
            continue
        marks = [_Mark(pick) for pick in plan.outputs if pick is not None]
        left = iter(marks)
        values = [None if pick is None else next(left) for pick in plan.outputs]
        for leaf, mark in _leaves(plan, values):
            place = known[plan.layer]
            picks.append(replace(mark.pick, copy=len(picks)))
            entries.append(Tapped(plan.layer, plan.number, leaf, place.type, place.provenance))
    heard = {entry.layer for entry in entries}
    lost = [name for name in layers if name and name not in heard]
    if lost:
        program.notes.append(
            f"{len(lost)} layers have no tap in the graph ('{lost[0]}'"
            f"{', …' if len(lost) > 1 else ''}): they are gone, or run in a branch of torch.cond."
        )
    return with_taps(program.module, picks), entries


def tapped_export(
    program: ExportProgram, layers: Sequence[str]
) -> tuple[torch.export.ExportedProgram, list[Tapped]]:
    """The same, exported again for the inputs that the program was exported with."""
    module, entries = tapped_program(program, layers)
    example = example_of(program)
    if example is None:
        raise TargetError(
            "The exported program holds no example inputs, so it cannot be exported again with "
            "taps. Export the model again, or use tapped_program and export what it returns."
        )
    return exported_again(program, module, *example), entries


def example_of(program: ExportProgram) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The inputs that a program was exported with, where it still has them."""
    example = getattr(program.exported, "example_inputs", None)
    if not example:
        return None
    args, kwargs = example
    return tuple(args), dict(kwargs)


def exported_again(
    program: ExportProgram,
    module: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> torch.export.ExportedProgram:
    """A module made from a program's, exported with the sizes that vary in the program."""
    own = copied(module)
    own._forward_pre_hooks.clear()
    own._forward_pre_hooks_with_kwargs.clear()
    for node in list(own.graph.nodes):  # what they check is checked by the program itself
        if node.op == "call_module" and node.target == "_guards_fn":
            own.graph.erase_node(node)
    own.recompile()
    shapes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    for leaf, argument in zip(leaves, program.arguments or (), strict=False):
        free = [i for i, size in enumerate(argument.shape or ()) if size is None]
        if isinstance(leaf, torch.Tensor) and free:
            shapes[leaf] = dict.fromkeys(free, torch.export.Dim.AUTO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(own, args, dict(kwargs), dynamic_shapes=shapes, strict=False)


class _Mark:
    """Stands for a tensor; it is no dataclass, since those are taken apart."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick


def _leaves(plan: Any, values: list[Any]) -> list[tuple[str, _Mark]]:
    """The leaf that each pick of a call stands at."""
    if plan.spec is None:
        named = leaves_of(plan, values)
    else:
        named = _walk(pytree.tree_unflatten(values, plan.spec), "")
    return [(leaf, mark) for leaf, mark in named if isinstance(mark, _Mark)]


def _walk(value: Any, leaf: str) -> list[tuple[str, Any]]:
    if isinstance(value, _Mark):
        return [(leaf, value)]
    return [pair for name, item in children(value) for pair in _walk(item, leaf + name)]
