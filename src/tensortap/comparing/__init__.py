"""Two recordings side by side: align the layers, judge each, say where they part.

`compare` is the door. `align` and `sites` decide what is compared with what, `measure` takes the
numbers, `judge` says what they mean, `results` holds the answer.
"""

from __future__ import annotations

from ..numerics import Difference, difference
from .compare import compare
from .metrics import register_metric
from .modes import ModeRow, Modes, compare_modes
from .results import Comparison, EnvironmentDifference, LayerComparison, Part

__all__ = [
    "Comparison",
    "Difference",
    "EnvironmentDifference",
    "LayerComparison",
    "ModeRow",
    "Modes",
    "Part",
    "compare",
    "compare_modes",
    "difference",
    "register_metric",
]
