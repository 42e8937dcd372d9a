"""tensortap: record, watch, compare and explain the tensors inside a neural network.

    import tensortap as tap

    with tap.record(model, "runs/fp32", layers="blocks", inputs=True) as rec:
        model(**batch)
        rec.step()
    run = tap.open("runs/fp32")
    run["model.layers.0"].output
    result = tap.compare("runs/fp32", "runs/int8")
    result.first_divergence
    with tap.watch(model, "runs/train"):
        ...  # any training loop

The names below are loaded when they are first used, so that importing tensortap costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import testing
    from .comparing import (
        Comparison,
        LayerComparison,
        Modes,
        Part,
        compare_modes,
        register_metric,
    )
    from .comparing.blame import Blame, BlamedLayer, blame
    from .comparing.causes import Cause
    from .comparing.compare import compare
    from .comparing.replay import Replay, replay
    from .comparing.streaming import Window, find_window
    from .comparing.weights import compare_weights
    from .errors import TapError, WatchAlarm
    from .monitoring.monitor import Monitor
    from .monitoring.rules import Alarm, Rule
    from .monitoring.trainer import MonitoredTrainer
    from .monitoring.watch import Watcher, watch
    from .numerics import Difference, Histogram, Summary, summarize
    from .numerics.difference import difference
    from .recording import Finding, Layer, Limits, Record, Recording, check, open
    from .taps import Recorder, TapWarning, record
    from .taps.instrument import Instrumented, instrument
    from .targets import Target
    from .targets.modes.builtin import in_mode
    from .targets.modes.record import record_modes
    from .targets.modes.results import RecordedMode, RecordedModes

_HOMES = {
    "Alarm": "monitoring.rules",
    "Blame": "comparing.blame",
    "BlamedLayer": "comparing.blame",
    "Cause": "comparing.causes",
    "Comparison": "comparing",
    "Difference": "numerics",
    "Finding": "recording",
    "Histogram": "numerics",
    "Instrumented": "taps.instrument",
    "Layer": "recording",
    "LayerComparison": "comparing",
    "Limits": "recording",
    "Modes": "comparing",
    "Monitor": "monitoring.monitor",
    "MonitoredTrainer": "monitoring.trainer",
    "Part": "comparing",
    "Record": "recording",
    "RecordedMode": "targets.modes.results",
    "RecordedModes": "targets.modes.results",
    "Recorder": "taps",
    "Recording": "recording",
    "Replay": "comparing.replay",
    "Rule": "monitoring.rules",
    "Summary": "numerics",
    "TapError": "errors",
    "TapWarning": "taps",
    "Target": "targets",
    "WatchAlarm": "errors",
    "Watcher": "monitoring.watch",
    "Window": "comparing.streaming",
    "blame": "comparing.blame",
    "check": "recording",
    "compare": "comparing",
    "compare_modes": "comparing",
    "compare_weights": "comparing.weights",
    "difference": "numerics",
    "find_window": "comparing.streaming",
    "in_mode": "targets.modes.builtin",
    "instrument": "taps.instrument",
    "open": "recording",
    "record": "taps",
    "record_modes": "targets.modes.record",
    "register_metric": "comparing",
    "replay": "comparing.replay",
    "summarize": "numerics",
    "testing": "testing",
    "watch": "monitoring.watch",
}

__all__ = [
    "Alarm",
    "Blame",
    "BlamedLayer",
    "Cause",
    "Comparison",
    "Difference",
    "Finding",
    "Histogram",
    "Instrumented",
    "Layer",
    "LayerComparison",
    "Limits",
    "Modes",
    "Monitor",
    "MonitoredTrainer",
    "Part",
    "Record",
    "RecordedMode",
    "RecordedModes",
    "Recorder",
    "Recording",
    "Replay",
    "Rule",
    "Summary",
    "TapError",
    "TapWarning",
    "Target",
    "WatchAlarm",
    "Watcher",
    "Window",
    "blame",
    "check",
    "compare",
    "compare_modes",
    "compare_weights",
    "difference",
    "find_window",
    "in_mode",
    "instrument",
    "open",
    "record",
    "record_modes",
    "register_metric",
    "replay",
    "summarize",
    "testing",
    "watch",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tensortap' has no attribute {name!r}")
    module = import_module(f".{home}", __name__)
    value = module if home == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
