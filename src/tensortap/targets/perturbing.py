"""`record --perturb`: the same run with its roundings moved, to see what rounding alone does.

Every innermost layer is given inputs of which a quarter are one step of their dtype larger or
smaller, at random: about what another order of the same sums would have handed it. Nothing of the
model is changed, and nothing is drawn from its own random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError
from ..taps.compiled import contains_compiled
from ..taps.patching import leaves_of, leaves_of_call, put, put_call
from ..taps.plain import is_plain
from .target import Batch, Target

__all__ = ["perturbed"]

_ONE_IN = 8  # elements go up by a step, and one in as many goes down


@contextmanager
def perturbed(target: Target) -> Iterator[Target]:
    """The target, whose layers are given moved inputs while this is open."""
    model, draw = target.model, _Draw()
    if not isinstance(model, nn.Module) or contains_compiled(model):
        yield replace(target, inputs=_moved_batches(target, draw))
        return

    def move(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = leaves_of_call(module, args, kwargs)
        return put_call(module, args, kwargs, {leaf: draw.moved(t) for leaf, t in given.items()})

    inner = [module for module in model.modules() if not any(module.children())]
    handles = [module.register_forward_pre_hook(move, with_kwargs=True) for module in inner]
    try:
        yield target
    finally:
        for handle in handles:
            handle.remove()


def _moved_batches(target: Target, draw: _Draw) -> list[Batch]:
    """The inputs of a model that lets nobody in between its layers."""
    batches = [
        Batch(
            tuple(_moved(item, draw) for item in batch.args),
            {name: _moved(item, draw) for name, item in batch.kwargs.items()},
        )
        for batch in target.batches
    ]
    given = [tensor for batch in target.batches for tensor in leaves_of(vars(batch)).values()]
    if not any(tensor.is_floating_point() for tensor in given):
        raise OptionError(
            "--perturb moves what the layers of an eager model are given. This model is compiled, "
            "so that its inputs alone can be moved, and none of them is floating point. Perturb "
            "the eager model, or record the same program once more on another device."
        )
    return batches


def _moved(value: Any, draw: _Draw) -> Any:
    return put(value, {leaf: draw.moved(tensor) for leaf, tensor in leaves_of(value).items()})


class _Draw:
    """Which elements move, and where to: the same in every run."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def moved(self, tensor: Tensor) -> Tensor:
        """The tensor with some of its elements one step further; what is not finite stays."""
        if not tensor.is_floating_point() or not is_plain(tensor) or tensor.itemsize < 2:
            return tensor
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = torch.Generator(tensor.device).manual_seed(0)
            self._generators[tensor.device] = generator
        with torch.no_grad():
            dice = torch.randint(
                _ONE_IN, tensor.shape, generator=generator, device=tensor.device, dtype=torch.int8
            )
            step = tensor * torch.finfo(tensor.dtype).eps
            step = torch.where(dice == 0, step, torch.where(dice == 1, -step, 0.0 * step))
            step = torch.where((tensor + step).isfinite(), step, torch.zeros_like(step))
        return tensor + step
