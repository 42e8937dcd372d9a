"""A folder of modes: which recordings lie in it, what each is called, and what is lacking."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ComparisonError, NotARecordingError, OptionError, RecordingError, TapError
from ..recording.reader import Recording
from ..recording.reader import open as open_recording
from ..recording.schema import MANIFEST, Manifest
from ..recording.store import open_store
from ..targets.modes.declared import folder_name

__all__ = ["COMPARISONS", "FoundMode", "ModeFolder", "holds_modes", "open_modes"]

COMPARISONS = "comparisons"  # beside the modes, and never one of them
_SEGMENT = re.compile(r"segment-.*\.safetensors")
_MANY = 12  # names in a sentence
_FLOATS = ("fp64", "fp32", "fp16", "bf16")


@dataclass(frozen=True)
class FoundMode:
    """One recording in the folder, or why it cannot be read.

    `mode` is what to call it: the mode that its manifest names, or the folder's name where that
    is not known or two folders hold the same mode.
    """

    folder: str
    mode: str
    path: str
    run: Recording | TapError


@dataclass(frozen=True)
class ModeFolder:
    """The modes in a folder, by the names of their folders."""

    url: str
    modes: tuple[FoundMode, ...]

    def find(self, name: str) -> FoundMode | None:
        """The mode of that name: of the folder, else of the recorded mode, else as it is filed."""
        for folder in (name, f"mode_{name}"):
            for found in self.modes:
                if found.folder == folder:
                    return found
        recorded = [found for found in self.modes if _mode(found.run) == name]
        if len(recorded) > 1:
            raise ComparisonError(
                f"{len(recorded)} recordings in {self.url} are of the mode {name!r}: "
                f"{', '.join(found.folder for found in recorded)}. Say which one by its folder, as "
                f"{recorded[0].folder}."
            )
        filed = [
            found for found in self.modes if name.strip(".") and found.folder == folder_name(name)
        ]
        return next(iter((*recorded, *filed)), None)

    def reference(self, name: str) -> FoundMode:
        """The mode to trust; a sentence that says how to record it where it is not there."""
        found = self.find(name)
        if found is None:
            raise ComparisonError(
                f"There is no recording of the reference mode {name!r} in {self.url}"
                f"{self._another()}, only: {self._names()}. Record it first: {self.command(name)}"
            )
        if isinstance(found.run, TapError):
            raise ComparisonError(f"The reference {name!r} cannot be read: {found.run}")
        return found

    def chosen(self, names: str | Sequence[str]) -> tuple[FoundMode, ...]:
        """Some of the modes, in the order in which they are asked for."""
        wanted = [names] if isinstance(names, str) else list(names)
        return tuple({(found := self.candidate(name)).folder: found for name in wanted}.values())

    def candidate(self, name: str) -> FoundMode:
        found = self.find(name)
        if found is not None:
            return found
        both = ""
        if holds_recording(name):
            both = (
                " To compare two recordings name both: tensortap compare "
                f"{self.url}/{self.modes[0].folder} {name}"
            )
        raise OptionError(f"There is no mode {name!r} in {self.url}, only: {self._names()}.{both}")

    def others(self, reference: FoundMode) -> tuple[FoundMode, ...]:
        """All but the reference; there must be one."""
        rest = tuple(found for found in self.modes if found is not reference)
        if not rest:
            raise ComparisonError(
                f"{self.url} holds the reference {reference.mode!r} alone: nothing to compare it "
                f"with. Record another mode first: {self.command(None)}"
            )
        return rest

    def command(self, mode: str | None) -> str:
        """How to record a mode as the ones that are there were recorded."""
        words = ["tensortap", "record", "TARGET"]
        for found in self.modes:
            if isinstance(found.run, Recording):
                words = _like(found.run.manifest) or words
                break
        name = "MODE" if mode is None else mode
        return shlex.join([*words, "--mode", name, "-o", f"{self.url}/{folder_name(name)}"])

    def _another(self) -> str:
        """How to trust a mode that is there: a float one, if there is one."""
        there = [found.mode for found in self.modes if isinstance(found.run, Recording)]
        if not there:
            return ""
        best = min(there, key=lambda mode: _FLOATS.index(mode) if mode in _FLOATS else len(_FLOATS))
        return f" (take another one with {shlex.join(['--reference', best])})"

    def _names(self) -> str:
        more = f", … ({len(self.modes)})" if len(self.modes) > _MANY else ""
        return ", ".join(found.mode for found in self.modes[:_MANY]) + more


def open_modes(folder: str | os.PathLike[str], *, partial: bool = False) -> ModeFolder:
    """The recordings in a folder; one that cannot be read is among them, with the reason."""
    store = open_store(folder)
    names = store.names()
    if _is_recording(names):
        raise NotARecordingError(
            f"{store.url} is itself a recording, of one mode. Name the folder that holds it and "
            "the recordings of the other modes."
        )
    runs: dict[str, Recording | TapError] = {}
    for name in names:
        inner = f"{store.url}/{name}"
        try:
            if name != COMPARISONS and _is_recording(open_store(inner).names()):
                runs[name] = open_recording(inner, partial=partial)
        except NotADirectoryError:
            continue
        except TapError as error:
            runs[name] = error
        except OSError as error:
            runs[name] = RecordingError(f"{inner} cannot be read: {error.strerror or error}.")
    if not runs:
        raise NotARecordingError(
            f"There is no recording in {store.url}: expected a folder of recordings, one a mode. "
            f"Record one first: tensortap record TARGET --mode fp32 -o {store.url}/fp32"
        )
    modes = [_mode(run) for run in runs.values()]
    return ModeFolder(
        store.url,
        tuple(
            FoundMode(
                folder,
                folder if mode is None or modes.count(mode) > 1 else mode,
                f"{store.url}/{folder}",
                run,
            )
            for (folder, run), mode in zip(runs.items(), modes, strict=True)
        ),
    )


def holds_modes(path: str | os.PathLike[str]) -> bool:
    """Whether this is no recording, but a folder with recordings in it."""
    store = open_store(path)
    names = store.names()
    if _is_recording(names):
        return False
    return any(holds_recording(f"{store.url}/{name}") for name in names if name != COMPARISONS)


def holds_recording(path: str) -> bool:
    """Whether a recording lies here, in whatever state."""
    try:
        return _is_recording(open_store(path).names())
    except (OSError, TapError):
        return False


def _is_recording(names: Sequence[str]) -> bool:
    return MANIFEST in names or any(_SEGMENT.match(name) for name in names)


def _mode(run: Recording | TapError) -> str | None:
    return run.manifest.mode if isinstance(run, Recording) else None


def _like(manifest: Manifest) -> list[str]:
    """The command that made a recording, without its mode and place; empty where none is known."""
    selection, spec = manifest.selection, manifest.target.get("spec")
    command = selection.get("command")
    words = shlex.split(command) if isinstance(command, str) else []
    if words[:2] != ["tensortap", "record"]:
        words = ["tensortap", "record", spec] if isinstance(spec, str) else []
    kept: list[str] = []
    skip = False
    for word in words:
        flag = word.split("=", 1)[0] in ("--mode", "--modes")
        if not skip and not flag:
            kept.append(word)
        skip = flag and "=" not in word
    if kept:
        layers = selection.get("layers")
        patterns = [layers] if isinstance(layers, str) else list(layers or ())
        if patterns != ["blocks"]:
            kept += [part for pattern in patterns for part in ("--layers", str(pattern))]
        kept += ["--inputs"] if "input" in (selection.get("ports") or ()) else []
    return kept
