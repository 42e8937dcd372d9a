"""Targets: what is run. From what the user typed to a model, its inputs and a mode.

file.py:function            package.module:function            hf:DIR
model.pt, model.pt2, model.onnx, model.xml, model.taps.json: a compiled model's file
"""

from __future__ import annotations

from ..taps.plan import Plan, PlannedRow, shapes_without_running
from .load import load_target
from .target import Batch, Target, register_model_check

__all__ = [
    "Batch",
    "Plan",
    "PlannedRow",
    "Target",
    "load_target",
    "register_model_check",
    "shapes_without_running",
]
