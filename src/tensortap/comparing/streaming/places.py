"""Where a recording may go that is made against others: not where one of them is."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import OptionError
from ..checks import Run

__all__ = ["check_place", "same_place"]


def check_place(path: str | os.PathLike[str], **others: Run | None) -> None:
    """Refuse to write over what is compared with; `others` are runs by their role."""
    for role, run in others.items():
        if run is None:
            continue
        there = os.fspath(run) if isinstance(run, str | os.PathLike) else run.path
        if same_place(there, os.fspath(path)):
            raise OptionError(
                f"The {role} {there} is where the new recording should go. Choose another folder "
                "for it."
            )


def same_place(one: str, other: str) -> bool:
    """Whether two paths or URLs are the same folder."""
    if "://" in one or "://" in other:
        return one.rstrip("/") == other.rstrip("/")
    return Path(one).resolve() == Path(other).resolve()
