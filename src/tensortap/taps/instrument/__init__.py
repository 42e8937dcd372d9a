"""Models that hand out their layers beside their output, for compilers that let nobody in."""

from .wrapper import Instrumented, instrument

__all__ = ["Instrumented", "instrument"]
