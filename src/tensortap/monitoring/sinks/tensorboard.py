"""Numbers into TensorBoard event files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ...errors import MissingExtraError

__all__ = ["TensorBoardSink"]


class TensorBoardSink:
    """Scalars to a log folder, or to a `SummaryWriter` that is in use already.

    All numbers of a step are one event: a call of `add_scalar` for each would take the interpreter
    from the training thread for many milliseconds. A writer that was handed in is flushed on
    close, not closed.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | Any = "runs/tensorboard") -> None:
        self.own = isinstance(log_dir, (str, os.PathLike))
        self.writer: Any = _writer(os.fspath(log_dir)) if self.own else log_dir

    def log(self, values: Mapping[str, float], step: int) -> None:
        files = getattr(self.writer, "file_writer", None)
        if files is None or not hasattr(files, "add_summary"):  # tensorboardX, or closed
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
            return
        summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        numbers = [summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        files.add_summary(summary(value=numbers), step)

    def close(self) -> None:
        if self.own:
            self.writer.close()
        else:
            self.writer.flush()


def _writer(log_dir: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("tensorboard", "tensorboard", "The TensorBoard sink") from error
    return SummaryWriter(log_dir)
