"""The first tensor inside a layer that is wrong, though the layer was given what is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...recording.schema import Port
from ...taps.patching import leaves_of, leaves_of_call, match_leaves
from .explaining import Wrong
from .stage import Stage, measured

__all__ = ["FirstWrong"]


class FirstWrong:
    """Watches layers in a run, and keeps the first tensor whose error is above a limit."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.found: Wrong | None = None

    def enter(
        self, stage: Stage, layer: str, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        module = stage.modules[layer]
        own = leaves_of_call(module, args, kwargs)
        records = stage.known.at(layer, "input", stage.batch, call)
        names = match_leaves(module, own, records)
        self._look(stage, layer, call, "input", {names[leaf]: own[leaf] for leaf in names})

    def leave(self, stage: Stage, layer: str, call: int, output: Any) -> None:
        self._look(stage, layer, call, "output", leaves_of(output))

    def _look(
        self, stage: Stage, layer: str, call: int, port: Port, leaves: Mapping[str, torch.Tensor]
    ) -> None:
        if self.found is not None:
            return
        records = stage.known.at(layer, port, stage.batch, call)
        for leaf, tensor in leaves.items():
            record = records.get(leaf)
            if record is None or not tensor.is_floating_point():
                continue
            reshaped = record.shape != tuple(tensor.shape)
            if reshaped or not measured(record.tensor(), tensor).error <= self.limit:
                copied = tensor.detach().to("cpu").clone()
                self.found = Wrong(layer, stage.batch, call, record, copied)
                return
