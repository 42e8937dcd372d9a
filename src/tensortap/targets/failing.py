"""What somebody's model raises, as a sentence with its place."""

from __future__ import annotations

import traceback

from ..errors import TargetError

__all__ = ["model_failed"]


def model_failed(error: Exception, batch: int, *, kept: bool = False) -> TargetError:
    """The error to raise when a model raised in a batch; `kept`: half a recording is there."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return TargetError(
        f"The model failed in batch {batch}: {type(error).__name__}: "
        f"{lines[0] if lines else 'no message'}{place}. "
        f"{'What was recorded until then is kept. ' if kept else ''}"
        "Set TENSORTAP_TRACEBACK=1 for the traceback."
    )
