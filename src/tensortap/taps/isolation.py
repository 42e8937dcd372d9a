"""Runs somebody's model and leaves it as it was.

Weights, buffers, attributes, hooks and mode of every module, and the random state: whatever a
forward pass or one of our hooks changes is put back, also when the run raises.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["kept_attributes", "random_devices", "unchanged"]

_Contents = list[tuple[Any, Any]]
_MOST = 100_000  # objects that are looked at: some models hold a world
_DEEPEST = 12


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back what happens to a model and to the random state inside the block.

    Buffers are copied beforehand, and so is the state that modules keep in plain attributes:
    tensors, arrays, containers and objects, at any depth. Weights may fill the memory and are not
    copied: no forward pass writes to them, and none of ours does.
    """
    state = _State(model)
    numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=random_devices()), kept_attributes(model), torch.no_grad():
        try:
            yield
        finally:
            state.restore()
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])


class _State:
    """What modules keep besides their weights, and how it was."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._contents: _Contents = []
        self._objects: list[tuple[Any, dict[str, Any]]] = []
        self._seen = {id(parameter) for parameter in model.parameters()}
        for module in model.modules():
            self._seen.update((id(module), *(id(item) for item in module._modules.values())))
        for module in model.modules():
            for name, value in vars(module).items():
                if name not in ("_parameters", "_modules"):
                    self._look(value, 0)

    def _look(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > _DEEPEST or len(self._seen) > _MOST:
            return
        if isinstance(value, str | bytes | int | float | bool | type | nn.Module | None):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    self._tensors.append((value, value.detach().clone()))
        elif isinstance(value, np.ndarray):
            self._arrays.append((value, value.copy()))
        elif isinstance(value, dict | list | set | deque):
            self._contents.append((value, value.copy()))
            for item in list(value.values() if isinstance(value, dict) else value):
                self._look(item, depth + 1)
        elif isinstance(value, tuple | frozenset):
            for item in value:
                self._look(item, depth + 1)
        elif not callable(value) and isinstance(getattr(value, "__dict__", None), dict):
            self._objects.append((value, dict(vars(value))))
            for item in list(vars(value).values()):
                self._look(item, depth + 1)

    def restore(self) -> None:
        for tensor, copy in self._tensors:
            if not _equal(tensor, copy):
                with contextlib.suppress(RuntimeError):
                    tensor.copy_(copy)
        for array, copy in self._arrays:
            if array.flags.writeable:
                array[...] = copy
        for value, copy in self._contents:
            _refill(value, copy)
        for value, attributes in self._objects:
            with contextlib.suppress(AttributeError, TypeError):
                _refill(vars(value), attributes)


def _equal(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    try:
        return bool(torch.equal(tensor, copy))
    except (RuntimeError, NotImplementedError):  # sparse and other kinds
        return False


@contextlib.contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Put back every module's attributes, hooks and weights; what tensors hold is not looked at."""
    before = [(module, *_snapshot(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            vars(module).clear()
            vars(module).update(attributes)
            for value, copy in contents:
                _refill(value, copy)


def random_devices() -> list[int]:
    """The GPUs that have a random state to keep."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return list(range(torch.cuda.device_count())) if used else []


def _snapshot(module: nn.Module) -> tuple[dict[str, Any], _Contents]:
    attributes = dict(vars(module))
    contents = [
        (value, value.copy())
        for value in attributes.values()
        if isinstance(value, dict | list | set)
    ]
    return attributes, contents


def _refill(value: Any, copy: Any) -> None:
    """Make a container hold again what it held."""
    if isinstance(value, list):
        value[:] = copy
        return
    value.clear()
    if isinstance(value, deque):
        value.extend(copy)
    else:
        value.update(copy)
