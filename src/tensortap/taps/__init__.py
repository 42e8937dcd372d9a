"""Taps: what listens inside a model, one file a runtime, and the recorder that drives them."""

from .base import Ports, Tap, TapFactory, find_tap, register
from .session import Recorder, TapWarning, record

__all__ = [
    "Ports",
    "Recorder",
    "Tap",
    "TapFactory",
    "TapWarning",
    "find_tap",
    "record",
    "register",
]
