"""What is said when Triton is installed where it cannot work, or not all of it.

As without a C compiler, or on a GPU that is too small or unknown to it. Torch does the work then.
"""

from __future__ import annotations

import warnings

__all__ = ["warn_of"]


def warn_of(work: str, error: Exception, stacklevel: int) -> None:
    """Say that Triton could not do this work, and why, in a line."""
    cause: BaseException = error
    while cause.__cause__ is not None:  # Triton's own say no more than where
        cause = cause.__cause__
    why = " ".join(str(cause).split())[-200:]
    warnings.warn(
        f"Triton could not {work} ({type(cause).__name__}: {why}). "
        "Torch does it instead: the same numbers, more slowly.",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )
