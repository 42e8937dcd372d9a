"""How the end of training and a warning's place are told, the same everywhere."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

import torch

__all__ = ["failure_of", "outside"]


def failure_of(error: BaseException | None, by: str = "training raised") -> str | None:
    """An exception as the manifest says it; to leave by `sys.exit(0)` is no failure."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    text = f": {error}" if str(error) else ""
    return f"{by} {type(error).__name__}{text}"


def outside() -> int:
    """For `warnings.warn`, the stacklevel of the first line that is neither ours nor torch's."""
    ours, torchs = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    passed = (ours, torchs, contextlib.__file__, threading.__file__)
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(passed):
        frame, level = frame.f_back, level + 1
    return level
