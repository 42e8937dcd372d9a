"""How large an error is usual in a candidate: what all its leaves make is no one's fault.

A quantised model errs in every layer, more than rounding explains. The layers that nothing stands
behind, as the head, or that all others stand behind, have large shares by their place alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from torch import nn

from ...selection.sites import is_leaf
from ..judge import AGAINST_ESTIMATE
from ..precision import estimated_floor
from .results import BlamedLayer
from .trace import Trace

__all__ = ["UsualError"]

_LEAST = 2
_SHARE = 0.25  # of the leaves with weights: with fewer that err, it is they that are wrong


class UsualError:
    """What a layer may make because all others make it too; 0 where they do not."""

    def __init__(
        self,
        trace: Trace,
        modules: Mapping[str, nn.Module],
        operations: Mapping[str, int],
        precisions: tuple[str | None, ...],
    ) -> None:
        self._operations = operations
        self._made: dict[str, float] = {}
        self._clear: set[str] = set()
        for name, module in modules.items():
            made = trace.made_alone(name)
            if math.isnan(made) or not is_leaf(module) or not _has_weights(module):
                continue
            self._made[name] = made
            dtypes = trace.outputs[name].dtypes
            offset = trace.inputs[name].offset
            if made > AGAINST_ESTIMATE * estimated_floor(dtypes, precisions, 1, offset):
                self._clear.add(name)

    def __call__(self, row: BlamedLayer) -> float:
        others = [n for n in self._made if n != row.layer]
        erring = [
            self._made[n] for n in others if n in self._clear and math.isfinite(self._made[n])
        ]
        if len(erring) < max(_LEAST, _SHARE * len(others)):
            return 0.0
        return median(erring) * _growth(self._operations[row.layer]) / _growth(1)


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _growth(operations: int) -> float:
    """How errors grow with depth, as the estimate of the floor has it."""
    return 1 + math.sqrt(operations) / 2
