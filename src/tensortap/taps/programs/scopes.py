"""Which values leave and enter a module's call, in any graph whose nodes know their calls.

A compiler keeps the nodes and forgets the functions: that a value is what a module returned has to
be read off the graph. A value that is made inside a call and read outside of it has left it. Some
only seem to: a cast that changes nothing (`x.to(float32)` of a float32) is made inside, but is the
input, and whatever reads the input afterwards reads it there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

__all__ = ["ModuleCall", "Step", "adopted", "entering", "leaving"]

ModuleCall = tuple[str, int]
"""(the module's path, the number of the call)"""


@dataclass(frozen=True)
class Step:
    """One value of a graph, in the order in which values are made.

    `inputs` are the values that it reads, weights and constants left out. `calls` are the module
    calls that it stands in, outermost first. `passes_on`: its value is its first input's,
    unchanged. `data` is False for what is no activation: a shape, a number, an axis.
    """

    name: str
    inputs: tuple[str, ...]
    calls: tuple[ModuleCall, ...] = ()
    passes_on: bool = False
    data: bool = True


def leaving(steps: Sequence[Step], results: Collection[str]) -> dict[ModuleCall, tuple[str, ...]]:
    """The values that leave each call, the one made last, which is the likely output, first.

    `results` are the graph's own outputs. An empty tuple: nothing that the call made is used.
    """
    by_name = {step.name: step for step in steps}
    readers: dict[str, list[Step]] = {step.name: [] for step in steps}
    for step in steps:
        for name in step.inputs:
            if name in readers:
                readers[name].append(step)
    inside: dict[ModuleCall, list[Step]] = {}
    for step in steps:
        for call in step.calls:
            inside.setdefault(call, []).append(step)
    returned = set(results)
    found: dict[ModuleCall, tuple[str, ...]] = {}
    for call, members in inside.items():
        out = [
            step
            for step in members
            if step.data
            and (
                step.name in returned
                or any(call not in reader.calls for reader in readers[step.name])
            )
        ]
        made = [step for step in out if not _comes_from_outside(step, call, by_name)]
        if not made and all(step.passes_on or not step.data for step in members):
            made = out[-1:]  # a module that does nothing else: dropout in eval mode
        found[call] = tuple(step.name for step in reversed(made))
    return found


def entering(steps: Sequence[Step]) -> dict[ModuleCall, tuple[str, ...]]:
    """The values that each call reads and did not make, in the order in which it reads them."""
    by_name = {step.name: step for step in steps}
    found: dict[ModuleCall, dict[str, None]] = {}
    for step in steps:
        for call in step.calls:
            known = found.setdefault(call, {})
            for name in step.inputs:
                source = by_name.get(name)
                if source is None or (source.data and call not in source.calls):
                    known.setdefault(name)
    return {call: tuple(names) for call, names in found.items()}


def adopted(
    steps: Sequence[Step], orphans: Collection[str], results: Collection[str] = ()
) -> list[Step]:
    """The steps, where those that a quantiser put in have the calls that they stand in.

    Quantising and dequantising nodes are no module's: they bear no scope, and whatever is quantised
    in the middle of a block would seem to leave it. Such a step stands in the calls that the maker
    of its input and all its readers share; whoever reads the graph's own `results` is outside.
    """
    lone = set(orphans)
    readers: dict[str, list[Step]] = {}
    for step in steps:
        for name in step.inputs:
            readers.setdefault(name, []).append(step)
    ahead: dict[str, tuple[ModuleCall, ...]] = {}
    for step in reversed(steps):  # readers come later, so theirs are known
        if step.name in lone:
            found = [
                ahead[reader.name] if reader.name in lone else reader.calls
                for reader in readers.get(step.name, [])
            ]
            ahead[step.name] = () if step.name in results else _shared(found)
    calls: dict[str, tuple[ModuleCall, ...]] = {}
    result = []
    for step in steps:
        if step.name in lone:
            behind = [calls[name] for name in step.inputs if name in calls]
            both = [*behind, ahead[step.name]]
            step = replace(step, calls=_shared(both) if behind else ())
        calls[step.name] = step.calls
        result.append(step)
    return result


def _shared(many: Sequence[tuple[ModuleCall, ...]]) -> tuple[ModuleCall, ...]:
    """The calls, from the outermost inwards, that all of them stand in."""
    if not many:
        return ()
    depth = 0
    for level in zip(*many, strict=False):
        if any(call != level[0] for call in level):
            break
        depth += 1
    return many[0][:depth]


def _comes_from_outside(step: Step, call: ModuleCall, by_name: dict[str, Step]) -> bool:
    """Whether a value is, unchanged, one that the call was given."""
    while step.passes_on and step.inputs:
        source = by_name.get(step.inputs[0])
        if source is None or call not in source.calls:
            return True
        step = source
    return False
