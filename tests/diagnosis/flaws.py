"""A kind of bug, and the ways in which the bugs of one model are planted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from architecture import Architecture
from planting import Call, Spoil, after, around
from torch import Tensor, nn

__all__ = [
    "DEPTHS",
    "Bug",
    "Plant",
    "calling",
    "constant",
    "generator",
    "hints",
    "in_config",
    "one",
    "swapped",
    "with_global",
]

# Of the blocks; a bug outside of them is before or behind all.
DEPTHS = {"early": 0, "middle": 2, "late": 3}
CORE = ("demo", "llama", "bert", "mamba")

# Plants the bug in the given layer of the model; the last two name the architecture and the block.
Plant = Callable[[nn.Module, nn.Module, Architecture, int], None]


@dataclass(frozen=True)
class Bug:
    """A kind of bug.

    `role` is the layer in which it sits. Where that layer holds others, or is not called as a
    layer in this version of transformers, the bug shows first in `shows`; "?" is the layer that is
    first heard to return something else. `hints` are the kinds of cause that are right; None where
    no simple hypothesis can be asked to fit, which is so too in the models that `asked`, where
    given, does not name. In the models that `also` names it is planted in the middle alone.
    """

    kind: str
    role: str
    plant: Plant
    hints: frozenset[str] | None
    shows: str = ""
    models: tuple[str, ...] = CORE
    asked: tuple[str, ...] = ()
    depths: tuple[str, ...] = tuple(DEPTHS)
    also: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Callable[[str], Bug], tuple[str]]:
        """By name, so that cases can be handed to other processes."""
        from bugs import named

        return named, (self.kind,)


def hints(*kinds: str) -> frozenset[str]:
    return frozenset(kinds)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def one(
    model: str,
    kind: str,
    layer: str,
    change: Callable[[Any], object],
    *causes: str,
    shows: str = "?",
) -> Bug:
    """A bug of one model, in the layer (or the role) that is named; `change` does it there.

    `causes` are the kinds of hint that are right; without any, none is asked for.
    """

    def plant(found: nn.Module, at: nn.Module, architecture: Architecture, block: int) -> None:
        change(at)

    return Bug(
        f"{kind} ({model})",
        layer,
        plant,
        hints(*causes) if causes else None,
        shows,
        (model,),
        (model,),
        ("middle",),
    )


# What is changed.


def constant(**values: object) -> Callable[[Any], None]:
    """Numbers and switches that the forward of this layer reads."""

    def change(layer: Any) -> None:
        for name, value in values.items():
            assert hasattr(layer, name), f"{type(layer).__name__} does not read {name}"
            setattr(layer, name, value)

    return change


def in_config(**values: object) -> Callable[[Any], None]:
    """Settings that the forward of this layer reads from the configuration."""
    return lambda layer: constant(**values)(layer.config)


def calling(change: Callable[[dict[str, Any]], object]) -> Callable[[nn.Module], None]:
    """Change what a layer's forward works with: the arguments by name."""

    def plant(layer: nn.Module) -> None:
        def wrap(inner: Call) -> Call:
            def call(*args: Any, **kwargs: Any) -> Any:
                change(kwargs)
                return inner(*args, **kwargs)

            return call

        around(layer, wrap)

    return plant


def with_global(name: str, other: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A function that this layer's module calls by name is another while the layer runs."""

    def plant(layer: nn.Module) -> None:
        module = sys.modules[type(layer).__module__]

        def wrap(inner: Call) -> Call:
            def call(*args: Any, **kwargs: Any) -> Any:
                held = getattr(module, name)
                setattr(module, name, other(held))
                try:
                    return inner(*args, **kwargs)
                finally:
                    setattr(module, name, held)

            return call

        around(layer, wrap)

    return plant


def spoiled(spoil: Spoil) -> Callable[[nn.Module], None]:
    return lambda layer: after(layer, spoil)


def swapped(weight: Tensor, first: slice, second: slice, dim: int = 0) -> None:
    """Two parts of equal size change places."""
    a, b = (weight.movedim(dim, 0)[part] for part in (first, second))
    held = a.clone()
    a.copy_(b)
    b.copy_(held)
