"""tensortap: record, watch, compare and explain the tensors inside a neural network.

    import tensortap as tap

    with tap.record(model, "runs/fp32", layers="blocks", inputs=True) as rec:
        model(**batch)
        rec.step()
    run = tap.open("runs/fp32")
    run["model.layers.0"].output

The names below are loaded when they are first used, so that importing tensortap costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .errors import TapError
    from .numerics import Histogram, Summary, summarize
    from .recording import Finding, Layer, Limits, Record, Recording, check, open
    from .taps import Recorder, TapWarning, record
    from .targets import Target

_HOMES = {
    "Finding": "recording",
    "Histogram": "numerics",
    "Layer": "recording",
    "Limits": "recording",
    "Record": "recording",
    "Recorder": "taps",
    "Recording": "recording",
    "Summary": "numerics",
    "TapError": "errors",
    "TapWarning": "taps",
    "Target": "targets",
    "check": "recording",
    "open": "recording",
    "record": "taps",
    "summarize": "numerics",
}

__all__ = [
    "Finding",
    "Histogram",
    "Layer",
    "Limits",
    "Record",
    "Recorder",
    "Recording",
    "Summary",
    "TapError",
    "TapWarning",
    "Target",
    "check",
    "open",
    "record",
    "summarize",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tensortap' has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
