"""What an eager model's layers return, by hooks: what programs are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tensortap.taps.leaves import flatten
from tensortap.taps.programs.base import HeardCall, Run

Heard = list[tuple[str, list[tuple[str, torch.Tensor]]]]


def eager_calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> tuple[Any, Heard]:
    """The output, and (layer, its leaves, copied) for every call as calls finish."""
    calls: Heard = []

    def hook(name: str) -> Any:
        def listen(_: nn.Module, __: Any, output: Any) -> None:
            leaves = flatten(output)
            calls.append((name, [(leaf, t.clone()) for leaf, t in leaves if t is not None]))

        return listen

    handles = [
        module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name
    ]
    with torch.no_grad():
        output = model(*args, **(kwargs or {}))
    for handle in handles:
        handle.remove()
    return output, calls


def run_all(program: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Run:
    """A run of a program with every tap it can have."""
    layers = [place.name for place in program.places if place.name and place.gone is None]
    with torch.no_grad():
        run: Run = program.tapped(layers, inputs=True, linears=list(program.linears()))(
            args, kwargs or {}
        )
    return run


def numbered(calls: Sequence[HeardCall]) -> dict[tuple[str, int], HeardCall]:
    """Calls by layer and number."""
    counts: dict[str, int] = {}
    found = {}
    for call in calls:
        number = counts.get(call.layer, 0)
        counts[call.layer] = number + 1
        found[call.layer, number] = call
    return found


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Bit for bit."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def compare_calls(program: Any, run: Run, eager: Heard) -> dict[str, list[str]]:
    """Every eager call as whole, partly (leaves unread by anyone are lost), gone or wrong.

    A call is wrong when a value was heard that the layer did not return, or when it was not heard
    though its place says that it has values.
    """
    heard = numbered(run.calls)
    gone = {place.name for place in program.places if place.gone is not None}
    found: dict[str, list[str]] = {"whole": [], "partly": [], "gone": [], "wrong": []}
    counts: dict[str, int] = {}
    for layer, leaves in eager:
        number = counts.get(layer, 0)
        counts[layer] = number + 1
        if layer in gone:
            found["gone"].append(layer)
            continue
        call = heard.pop((layer, number), None)
        values = [] if call is None else [value for _, value in call.outputs]
        known = [any(same(value, tensor) for _, tensor in leaves) for value in values]
        hit = [leaf for leaf, tensor in leaves if any(same(value, tensor) for value in values)]
        if not values or not all(known):
            found["wrong"].append(layer)
        else:
            found["whole" if len(hit) == len(leaves) else "partly"].append(layer)
    found["wrong"] += [layer for layer, _ in heard]
    return found
