"""Where modes are recorded to: a folder each, side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...errors import OptionError, RecordingError, RecordingExistsError, TapError
from ...recording.schema import MANIFEST
from ...recording.store import LocalStore, open_store
from .declared import folder_name

__all__ = ["check_room", "left_from_before", "places_of", "whole"]

_COMPARISONS = "comparisons"  # what `compare` and `summary` write beside the modes


def places_of(folder: str, modes: Sequence[str], *, free: bool) -> dict[str, str]:
    """The folder of each mode; two modes in one, or a folder that is taken, is refused."""
    places: dict[str, str] = {}
    owners: dict[str, str] = {}
    for mode in modes:
        name = folder_name(mode)
        if name == _COMPARISONS:
            raise OptionError(
                f"The mode {mode!r} would lie in {folder}/{name}, where comparisons of modes go. "
                "Give it another name."
            )
        if name in owners:
            raise OptionError(
                f"The modes {owners[name]!r} and {mode!r} would both lie in {folder}/{name}. "
                "Record them into different folders."
            )
        owners[name] = mode
        places[mode] = f"{folder}{'' if folder.endswith('/') else '/'}{name}"
    if MANIFEST in open_store(folder).names():
        raise RecordingExistsError(
            f"{folder} is a recording itself, and modes lie side by side in a folder that is none. "
            "Choose another folder."
        )
    taken = [path for path in places.values() if MANIFEST in open_store(path).names()]
    if taken and free:
        one = len(taken) == 1
        raise RecordingExistsError(
            f"{', '.join(taken)} already {'holds a recording' if one else 'hold recordings'}. "
            "Go on with what is missing with --resume (resume=True in Python), replace "
            f"{'it' if one else 'them'} with --overwrite (overwrite=True), or choose another "
            "folder."
        )
    return places


def check_room(folder: str) -> None:
    """Refuse a folder that cannot be made, before models are built for it."""
    store = open_store(folder)
    if not isinstance(store, LocalStore):
        return
    there = next(path for path in (store.root, *store.root.parents) if path.exists())
    if not there.is_dir():
        raise RecordingError(
            f"Cannot create the folder {folder}: {there} is a file. Choose another place."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise RecordingError(
            f"Cannot write to {folder}: no permission in {there}. Choose another place."
        )


def whole(path: str) -> str:
    """A path that holds in whatever folder the process is later; a URL is one as it is."""
    store = open_store(path)
    return os.fspath(store.root) if isinstance(store, LocalStore) else path


def left_from_before(path: str) -> tuple[str, ...]:
    """A mode that failed before anything was written leaves an older recording where it was."""
    try:
        if MANIFEST not in open_store(path).names():
            return ()
    except (TapError, OSError):
        return ()
    return (f"What an earlier run recorded to {path} is still there.",)
