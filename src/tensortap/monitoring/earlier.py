"""An output folder that was used before: what an earlier run left there is put aside.

Whoever runs a training script again expects its files under the same names, and may still want the
old ones: so an earlier run moves, whole, into `earlier-1`, `earlier-2`, … inside the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from ..errors import RecordingError, RecordingExistsError
from ..recording.kinds import parse
from ..recording.schema import LARGEST_MANIFEST, MANIFEST
from ..regular_files import read_regular
from .saving import is_recording_file

__all__ = ["Claim", "make_room"]

_OURS = re.compile(
    r"(single_.+_epoch\d+_batch\d+|epoch_.+_epoch\d+)(_part\d+)?(_rank\d+)?(\.[^/]*)?\.(pt|npy|json)"
)


class Claim:
    """While it is held, no other process writes to this folder."""

    def __init__(self, folder: Path) -> None:
        self._fd = -1
        try:
            import fcntl

            self._fd = os.open(folder, os.O_RDONLY)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise RecordingExistsError(
                f"Another process is recording to {folder} now. Give this run its own output_dir."
            ) from None
        except (ImportError, OSError):  # a file system without locks
            self.release()

    def release(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError, ImportError):
                import fcntl

                fcntl.flock(self._fd, fcntl.LOCK_UN)  # also for children that inherited it
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def make_room(folder: Path, *, overwrite: bool) -> str | None:
    """Put an earlier run of a monitor aside, or take it away; a sentence that says so."""
    try:
        if not (folder / MANIFEST).exists():
            return None
        selection = _selection(folder)
        if "monitor" not in selection:
            raise RecordingExistsError(
                f"{folder} holds a recording that no Monitor made. Choose another output_dir."
            )
        files = _files(folder, selection)
        if len(files) == 1:  # the manifest alone: nothing was recorded
            (folder / MANIFEST).unlink()
            return None
        if overwrite:
            for name in files:
                (folder / name).unlink(missing_ok=True)
            return None
        aside = _aside(folder)
        for name in files:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).rename(aside / name)
    except OSError as error:
        raise RecordingError(
            f"Cannot put the earlier run in {folder} aside: {error.strerror or error}. Choose "
            "another output_dir."
        ) from None
    return (
        f"{folder} holds an earlier run: it was moved to {aside}. Give each run its own "
        "output_dir, or say overwrite=True to replace it."
    )


def _selection(folder: Path) -> dict[str, Any]:
    try:
        text = read_regular(folder / MANIFEST, LARGEST_MANIFEST)
        found = parse(text).get("selection", {})
    except (ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def _files(folder: Path, selection: dict[str, Any]) -> list[str]:
    """The files of a run, the manifest first: those of the recording, ours, and what it lists."""
    found = [
        path.name
        for path in sorted(folder.iterdir())
        if path.is_file() and (is_recording_file(path.name) or _OURS.fullmatch(path.name))
    ]
    listed = selection.get("files", [])
    for name in listed if isinstance(listed, list) else []:
        inside = isinstance(name, str) and not Path(name).is_absolute()
        if inside and ".." not in Path(name).parts and (folder / name).is_file():
            found.append(name)
    return sorted(dict.fromkeys(found), key=lambda name: name != MANIFEST)


def _aside(folder: Path) -> Path:
    number = 1
    while True:
        aside = folder / f"earlier-{number}"
        try:
            aside.mkdir()
        except FileExistsError:
            number += 1
        else:
            return aside
