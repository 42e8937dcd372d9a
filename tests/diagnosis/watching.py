"""Where a bug shows first, found with plain hooks: the bench does not ask the library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["called", "first_wrong", "leaves"]

# Relative to the layer's output. Rounding stays far below this in float32, each bug far above.
LIMIT = 2e-5


def first_wrong(
    right: nn.Module, wrong: nn.Module, inputs: dict[str, Tensor], among: Sequence[str]
) -> str | None:
    """The first layer, in the order in which calls end, that returns something else."""
    expected, found = _calls(right, inputs, among), _calls(wrong, inputs, among)
    seen: dict[str, int] = {}
    for name, values in expected:
        index = seen.get(name, 0)
        seen[name] = index + 1
        others = [other for layer, other in found if layer == name]
        if index >= len(others):  # it is not called so often: it is missing
            continue
        if not _alike(values, others[index]):
            return name
    return None


def called(model: nn.Module, inputs: dict[str, Tensor]) -> list[str]:
    """The layers that are called; of others only the weights are read, if at all."""
    every = [name for name, _ in model.named_modules()]
    return list(dict.fromkeys(name for name, _ in _calls(model, inputs, every)))


def _calls(
    model: nn.Module, inputs: dict[str, Tensor], among: Sequence[str]
) -> list[tuple[str, list[Tensor]]]:
    calls: list[tuple[str, list[Tensor]]] = []

    def listen(name: str) -> Any:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            calls.append((name, [leaf.detach().clone() for leaf in leaves(result)]))

        return hook

    handles = [model.get_submodule(name).register_forward_hook(listen(name)) for name in among]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors in what a model returns, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)


def _alike(right: list[Tensor], wrong: list[Tensor]) -> bool:
    if len(right) != len(wrong):
        return False
    return all(_near(a, b) for a, b in zip(right, wrong, strict=True))


def _near(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    away, size = float((b - a).double().norm()), float(a.double().norm())
    return math.isfinite(away) and away <= LIMIT * size
