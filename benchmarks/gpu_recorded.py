"""A recorder in its steady state, beside module trees with hooks of another kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpu_naive as naive
import tensortap as tap
from gpu_model import Forward, Shape, same_bits, twin
from gpu_parts import Cell, Setting, attempt

__all__ = ["SAME", "Recorded", "checked", "closed", "hooked", "in_columns"]

SAME = "Every variant's output has the plain model's bits; a row that had not would say so."


class Recorded:
    """A recorder in its steady state: opened once, one step a forward."""

    def __init__(self, setting: Setting, model: nn.Module, path: Path, **options: Any) -> None:
        self.path, self.started = path, 0.0
        self.until_written: list[float] = []
        self.calls = 0
        self.setting, self.model = setting, model
        self.recorder = tap.record(model, path, strict=True, **options).start()

    def forward(self, ids: Sequence[torch.Tensor]) -> Forward:
        return Forward(self.setting, self._call, ids, self.recorder.step)

    def _call(self, **inputs: Any) -> Any:
        self.calls += 1
        if not self.started:
            self.started = time.perf_counter()
        return self.model(**inputs)

    def settle(self) -> None:
        """Wait for the disk, which is not the forward's; note how long all of it took."""
        self.recorder.flush()
        self.until_written.append(time.perf_counter() - self.started)
        self.started = 0.0

    def close(self) -> None:
        """Close it, and make sure that it holds what was run."""
        layers = len(self.recorder.layers)
        self.recorder.close()
        if self.recorder.failure is not None:
            raise AssertionError(self.recorder.failure)
        found = len(tap.open(self.path).records)
        if found != layers * self.calls:
            raise AssertionError(
                f"{found} records of {layers} layers and {self.calls} calls are in {self.path}"
            )


def in_columns(columns: Sequence[Shape], cell: Callable[[Shape], Cell]) -> tuple[Cell, ...]:
    return tuple(cell(shape) for shape in columns)


def checked(
    plain: Forward, forwards: Mapping[str, Forward], lost: dict[str, str]
) -> dict[str, Forward]:
    """Those that run and give the plain model's bits."""
    kept = {}
    for name, forward in forwards.items():
        attempt(lambda forward=forward: same_bits(plain, forward), lost, name)
        if name not in lost:
            kept[name] = forward
    plain.setting.wait()
    return kept


def closed(recorded: Mapping[str, Recorded]) -> list[str]:
    said = []
    for name, own in recorded.items():
        wrong: dict[str, str] = {}
        attempt(own.close, wrong, name)
        said += [f"{name}: {text}" for text in wrong.values()]
    return said


def hooked(
    model: nn.Module,
    modules: Callable[[nn.Module], list[nn.Module]],
    make: Callable[[], naive.Hook],
) -> nn.Module:
    tree = twin(model)
    naive.hook_all(modules(tree), make)
    return tree
