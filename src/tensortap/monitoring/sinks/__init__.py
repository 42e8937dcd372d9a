"""Sinks: where the numbers of a watch go while a model trains."""

from .base import FunctionSink, Sink, Sinks, register_sink, sink_names, sink_of, sinks_of
from .stdout import StdoutSink
from .tensorboard import TensorBoardSink
from .values import values_of
from .wandb import WandbSink

__all__ = [
    "FunctionSink",
    "Sink",
    "Sinks",
    "StdoutSink",
    "TensorBoardSink",
    "WandbSink",
    "register_sink",
    "sink_names",
    "sink_of",
    "sinks_of",
    "values_of",
]
