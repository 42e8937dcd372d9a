"""Files whose names are like one that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["near_files"]


def near_files(path: Path, suffixes: Iterable[str] = ()) -> str:
    """A hint at files beside this one whose names are like its own."""
    try:
        names = sorted(item.name for item in path.parent.iterdir() if item.is_file())
    except OSError:
        return ""
    wanted = tuple(suffixes)
    names = [name for name in names if not wanted or name.lower().endswith(wanted)]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    shown = " or ".join(f"'{path.parent / name}'" for name in close)
    return f" Did you mean {shown}?" if close else ""
