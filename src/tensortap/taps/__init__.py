"""Taps: what listens inside a model, one file a runtime, and the recorder that drives them."""

from .base import Ports, Tap, TapFactory, register
from .choose import choose_tap
from .session import Recorder, TapWarning, record

__all__ = [
    "Ports",
    "Recorder",
    "Tap",
    "TapFactory",
    "TapWarning",
    "choose_tap",
    "record",
    "register",
]
