"""The layers of an exported program: those with a value, and those without, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from ..base import Place
from ..scopes import ModuleCall
from .branches import BranchPlan
from .graph import Reading
from .nodes import eager_name, is_quantising, operator_of
from .plan import CallPlan, Signature, attribute

__all__ = ["UNREAD", "folded", "places_of", "signatures_of"]

UNREAD = (
    "nothing reads what it returns, or it passes its input on: the graph holds no value that is "
    "surely its output"
)
_NOTHING = "no operation of the graph is its own: it passes its input on, or it is never called"
_BRANCH = f"{_NOTHING}, or it runs in a branch of torch.cond, where the export keeps no names"
_FOLDED = "a batch norm was folded into it, so that its own output is not computed"
_INTO = "it was folded into the layer before it"


def signatures_of(exported: Any, reading: Reading) -> dict[ModuleCall, Signature]:
    """What calls returned, of the modules whose signature the export was told to keep."""
    found: dict[ModuleCall, Signature] = {}
    for entry in [] if exported is None else exported.module_call_graph:
        kept = entry.signature
        if not entry.fqn or kept is None or kept.out_spec is None:
            continue
        if len(kept.outputs) != kept.out_spec.num_leaves:
            continue  # it was inside a region of its own, where export loses track
        path, _, number = str(entry.fqn).partition("@")
        path = eager_name(path)
        names = [
            reading.resolve(item.name) if type(item).__name__ == "TensorArgument" else None
            for item in kept.outputs
        ]
        found[(path, int(number or 0))] = Signature(tuple(names), kept.out_spec)
    return found


def places_of(
    reading: Reading,
    calls: Sequence[CallPlan],
    branches: Mapping[str, tuple[BranchPlan, BranchPlan]],
    names: Sequence[str],
    module: fx.GraphModule,
) -> list[Place]:
    """Every layer once, as first calls finish; at the end those that no node belongs to."""
    inner = [branch for pair in branches.values() for branch in pair]
    types = dict(reading.types)
    everything = list(calls)
    for branch in inner:
        everything += branch.all_calls()
        for name, kind in branch.all_types().items():
            types.setdefault(name, kind)
    found: dict[str, Place] = {}
    for plan in everything:
        gone = None if any(pick is not None for pick in plan.outputs) else UNREAD
        known = found.get(plan.layer)
        if known is None:
            kind = types.get(plan.layer, "")
            found[plan.layer] = Place(plan.layer, kind, plan.provenance, gone)
        elif known.gone is not None and gone is None:
            found[plan.layer] = replace(known, gone=None, provenance=plan.provenance)
    owners = [str(n.target).rpartition(".")[0] for n in module.graph.nodes if n.op == "get_attr"]
    for name in dict.fromkeys([*names, *owners]):
        path = eager_name(name.partition("@")[0])
        if not path or path in found or path == "_guards_fn" or _is_graph(module, name):
            continue
        if any(other.startswith(f"{path}.") for other in found):
            continue  # a list of layers, which is never called
        found[path] = Place(path, gone=_BRANCH if branches else _NOTHING)
    return [*found.values(), Place("", types.get("", ""))]


def folded(
    places: Sequence[Place],
    reading: Reading,
    other: Reading | None,
) -> tuple[list[Place], list[str]]:
    """Convolutions of a quantised graph, into which batch norms may have been folded.

    The quantiser folds them before it does anything else: the convolution's value is then the batch
    norm's. A convolution without a bias has none in it, and one with a bias that is not its own has
    one. Of the others the float model's graph tells; without it, their names are guesses.
    """
    biases = _biases(reading)
    if not biases:
        return list(places), []
    known = {} if other is None else _norms(other)
    guessed = 0
    result = []
    for place in places:
        if place.name in biases and place.gone is None:
            bias = biases[place.name]
            if place.name in known or (bias and eager_name(bias) != f"{place.name}.bias"):
                place = replace(place, gone=_FOLDED)  # folding gives a bias to whoever has none
            elif other is None and bias:
                place = replace(place, provenance="inferred")
                guessed += 1
        result.append(place)
    here = {place.name for place in places}
    for norm in known.values():
        if norm not in here:
            result.insert(-1, Place(norm, "BatchNorm", gone=_INTO))
        else:
            result = [replace(p, gone=_INTO) if p.name == norm else p for p in result]
    if not guessed:
        return result, []
    return result, [
        f"{guessed} convolutions of this quantised program may have had batch norms "
        "folded into them, and nothing in it says so: their names are inferred. The float "
        "program says which (--names-from float.pt2)."
    ]


def _biases(reading: Reading) -> dict[str, str | None]:
    """The layers that are convolutions, with the attribute that each reads its bias from.

    One that does anything besides is none: what it returns is not the convolution's value.
    """
    found: dict[str, str | None] = {}
    more: set[str] = set()
    for step in reading.steps:
        if not step.calls or is_quantising(reading.nodes[step.name]):
            continue
        path = step.calls[-1][0]
        more.update(outer for outer, _ in step.calls[:-1])
        if operator_of(reading.nodes[step.name]).startswith("conv"):
            found[path] = found.get(path) or attribute(reading, step.name, 2)
        else:
            more.add(path)
    return {path: bias for path, bias in found.items() if path not in more}


def _norms(float_model: Reading) -> dict[str, str]:
    """Convolutions whose output a batch norm reads, and that batch norm."""
    made = {step.name: step for step in float_model.steps}
    found = {}
    for step in float_model.steps:
        if not operator_of(float_model.nodes[step.name]).endswith("batch_norm") or not step.inputs:
            continue
        source = made.get(step.inputs[0])
        if source is None or not step.calls or not source.calls:
            continue
        if operator_of(float_model.nodes[source.name]).startswith("conv"):
            found[source.calls[-1][0]] = step.calls[-1][0]
    return found


def _is_graph(module: fx.GraphModule, path: str) -> bool:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return isinstance(value, fx.GraphModule)
