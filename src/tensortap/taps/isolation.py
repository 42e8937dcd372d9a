"""Runs somebody's model and leaves it as it was.

Weights, buffers, attributes, hooks and mode of every module, and the random state: whatever a
forward pass or one of our hooks changes is put back, also when the run raises.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["kept_attributes", "random_devices", "unchanged"]

_Contents = list[tuple[Any, Any]]


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back what happens to a model and to the random state inside the block.

    Buffers are copied beforehand. Weights may fill the memory and are not: no forward pass writes
    to them, and none of ours does.
    """
    buffers = [(tensor, tensor.detach().clone()) for tensor in model.buffers()]
    numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=random_devices()), kept_attributes(model), torch.no_grad():
        try:
            yield
        finally:
            for tensor, copy in buffers:
                if not _equal(tensor, copy):
                    tensor.copy_(copy)
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])


@contextlib.contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Put back every module's attributes, hooks and weights; what tensors hold is not looked at."""
    before = [(module, *_snapshot(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            _restore(module, attributes, contents)


def random_devices() -> list[int]:
    """The GPUs that have a random state to keep."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return list(range(torch.cuda.device_count())) if used else []


def _equal(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    return tensor is copy or bool(torch.equal(tensor, copy))


def _snapshot(module: nn.Module) -> tuple[dict[str, Any], _Contents]:
    attributes = dict(vars(module))
    contents = [
        (value, value.copy())
        for value in attributes.values()
        if isinstance(value, dict | list | set)
    ]
    return attributes, contents


def _restore(module: nn.Module, attributes: dict[str, Any], contents: _Contents) -> None:
    vars(module).clear()
    vars(module).update(attributes)
    for value, copy in contents:
        if isinstance(value, list):
            value[:] = copy
        else:
            value.clear()
            value.update(copy)
