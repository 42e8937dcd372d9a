"""What somebody's model raises, as a sentence with its place."""

from __future__ import annotations

import re
import traceback

from ..errors import TargetError

__all__ = ["LEAVING", "model_failed"]

LEAVING = (Exception, SystemExit, GeneratorExit)  # all but the user's Ctrl-C and our own stops


def model_failed(error: BaseException, batch: int, *, kept: bool = False) -> TargetError:
    """The error to raise when a model raised in a batch; `kept`: half a recording is there."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return TargetError(
        f"The model failed in batch {batch}: {type(error).__name__}: {_reason(error)}{place}. "
        f"{'What was recorded until then is kept. ' if kept else ''}"
        "Set TENSORTAP_TRACEBACK=1 for the traceback."
    )


def _reason(error: BaseException) -> str:
    """The first line of what was raised; TorchScript puts a traceback of its own before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "TorchScript interpreter" in lines[0]:
        said = [line for line in lines if re.match(r"[\w.]*(Error|Exception): .", line)]
        if said:
            return said[-1].partition(": ")[2].rstrip(".")
    return lines[0] if lines else "no message"
