"""Where people train: one file a framework, each thin on top of `tap.watch` and `tap.Monitor`.

Nothing of a framework is imported before its name is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accelerate import AccelerateSink, TapTracker
    from .huggingface import TapTrainerCallback
    from .lightning import TapCallback
    from .plain import Loop, loop

_HOMES = {
    "AccelerateSink": "accelerate",
    "Loop": "plain",
    "TapCallback": "lightning",
    "TapTracker": "accelerate",
    "TapTrainerCallback": "huggingface",
    "loop": "plain",
}

__all__ = ["AccelerateSink", "Loop", "TapCallback", "TapTracker", "TapTrainerCallback", "loop"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
