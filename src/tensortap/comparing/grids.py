"""What a quantised layer's grids let expect: from its scales, and from the values that met them.

The rounding of a weight is known when it is recorded. That of an operand depends on its values: on
a grid over the largest of them, a few outliers leave few steps for all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ..recording.reader import Record

__all__ = ["Grids"]

_ROUNDING = 1 / math.sqrt(12)


class Grids:
    """The quantised layers of one run, by name; `target` is what its manifest says of the model."""

    def __init__(self, target: Mapping[str, object]) -> None:
        found = target.get("grids")
        known = found if isinstance(found, Mapping) else {}
        self._layers = {str(name): dict(g) for name, g in known.items() if isinstance(g, Mapping)}

    def dtype(self, layer: str) -> str | None:
        """What the weight of a layer is worth: int8, fake int4; None where it is not quantised."""
        name = self._layers.get(layer, {}).get("dtype")
        return name if isinstance(name, str) else None

    def weight(self, layer: str) -> float:
        """The rounding of a layer's weight, relative to the weight."""
        return _number(self._layers.get(layer, {}).get("weight"))

    def operand(self, layer: str, record: Record) -> float:
        """The rounding of what a layer was given, relative to that, on the grid that it puts it on.

        The record may be the other run's, where that holds the same layer's input.
        """
        grid = self._layers.get(layer, {})
        size = record.summary.rms
        if not size > 0 or not math.isfinite(size):
            return 0.0
        if "step" in grid:
            return _ROUNDING * _number(grid["step"]) / size
        top = _number(grid.get("top"))
        if not top:
            return 0.0
        largest = record.summary.absmax
        if grid.get("over") == "token" and record.stored:
            largest = _largest_of_tokens(record.tensor())
        return _ROUNDING * largest / top / size

    def result(self, layer: str, record: Record) -> float:
        """The rounding of a layer's output, where that is put on a grid of static scale."""
        step, size = _number(self._layers.get(layer, {}).get("result")), record.summary.rms
        return _ROUNDING * step / size if size > 0 else 0.0


def _largest_of_tokens(values: torch.Tensor) -> float:
    """The root mean square of what is largest in each token."""
    if not values.numel() or not values.dim():
        return 0.0
    largest = values.abs().amax(-1).double()
    return float(largest[largest.isfinite()].square().mean().sqrt())


def _number(value: object) -> float:
    found = float(value) if isinstance(value, int | float) else 0.0
    return found if math.isfinite(found) else 0.0
