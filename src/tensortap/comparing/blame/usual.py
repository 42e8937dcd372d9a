"""How large an error is usual in a candidate: what all its leaves make is no one's fault.

A quantised model errs in every layer, more than rounding explains. The layers that nothing stands
behind, as the head, or that all others stand behind, have large shares by their place alone. How
much each errs depends on the values that meet its grids: a few outliers leave few steps for all
others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from torch import nn

from ...selection.sites import is_leaf
from ...taps.grids import grids_of
from ..grids import Grids
from ..judge import AGAINST_ESTIMATE
from ..precision import estimated_floor
from .levels import contains
from .reference import Known
from .results import BlamedLayer
from .trace import Trace

__all__ = ["OwnGrids", "UsualError"]

_LEAST = 2
_SHARE = 0.25  # of the leaves with weights: with fewer that err, it is they that are wrong


class OwnGrids:
    """What the grids of a candidate's layers take from the reference's values; 0 without one."""

    def __init__(self, model: nn.Module, known: Known) -> None:
        grids = grids_of(model)
        self._grids = Grids({"grids": grids})
        self._known = known
        self.layers = [name for name in grids if name in known.names]
        self._found: dict[str, float] = {}

    def __call__(self, layer: str) -> float:
        """The relative error that a layer's grids make of its output."""
        if layer not in self._found:
            self._found[layer] = self._made(layer) if layer in self.layers else 0.0
        return self._found[layer]

    def inside(self, layer: str) -> float:
        """The largest of a layer and of those inside it."""
        return max((self(name) for name in self.layers if contains(layer, name)), default=0.0)

    def _made(self, layer: str) -> float:
        given, made = (self._known.at(layer, port, 0, 0).values() for port in ("input", "output"))
        operands = [self._grids.operand(layer, r) for r in given if r.dtype.startswith("float")]
        results = [self._grids.result(layer, r) for r in made if r.dtype.startswith("float")]
        return math.hypot(
            self._grids.weight(layer), max(operands, default=0.0), max(results, default=0.0)
        )


class UsualError:
    """What a layer may make because all others make it too, or as its own grids explain it.

    0 where neither does.
    """

    def __init__(
        self,
        trace: Trace,
        modules: Mapping[str, nn.Module],
        operations: Mapping[str, int],
        precisions: tuple[str | None, ...],
        grids: OwnGrids,
    ) -> None:
        self._operations = operations
        self._grids = grids
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
        own = max(self._grids.inside(row.layer), self._of_others(row.layer))
        return own * _growth(self._operations[row.layer]) / _growth(1)

    def _of_others(self, layer: str) -> float:
        others = [n for n in self._made if n != layer]
        erring = [
            self._made[n] for n in others if n in self._clear and math.isfinite(self._made[n])
        ]
        enough = len(erring) >= max(_LEAST, _SHARE * len(others))
        return median(erring) if enough else 0.0


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _growth(operations: int) -> float:
    """How errors grow with depth, as the estimate of the floor has it."""
    return 1 + math.sqrt(operations) / 2
