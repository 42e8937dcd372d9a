"""Makes a floor run: the target that a reference was recorded from, run once more.

In a coarser precision it shows what that precision costs; in the reference's own, with what every
layer is given moved by single roundings, what rounding alone does. It runs in a process of its own,
from the command that the reference's manifest holds: nothing of it is left in this one.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import TargetError
from ..recording.reader import Recording
from ..recording.reader import open as open_recording
from .modes.builtin import CASTS, is_builtin

__all__ = ["FloorRun", "floor_command", "make_floor"]

_PLACE = "runs/floor"  # in the commands that a user is told
_CHOICES = {  # what of a recording's options says what is heard, and not what is run
    "grads": ("--grads", None),
    "inputs": ("--inputs", None),
    "outputs": (None, "--no-outputs"),
    "histograms": ("--histograms", None),
    "early_stop": (None, "--no-early-stop"),
}


@dataclass(frozen=True)
class FloorRun:
    """A floor, and the command that made it; the command is empty where the user gave it."""

    recording: Recording
    command: str = ""

    @property
    def name(self) -> str:
        """What a reader is told it is."""
        return f"a run made for this (`{self.command}`)" if self.command else self.recording.path


def make_floor(reference: Recording, mode: str | None) -> FloorRun:
    """Run a reference's target once more, in a built-in mode, or perturbed where that is None.

    The recording lies in a temporary folder, for as long as somebody holds it.
    """
    words, own = _words(reference, mode), reference.manifest.mode or "fp32"
    if words is None:
        raise TargetError(
            f"{reference.path} does not say which target it was recorded from, as it was recorded "
            f"in Python, so no floor can be made of it. {_by_hand(mode)}"
        )
    if mode is not None and mode not in CASTS and not is_builtin(own):
        raise TargetError(
            f"{reference.path} is in the target's own mode '{own}', of which the built-in mode "
            f"{mode} cannot be made. {_by_hand(mode)}"
        )
    said = shlex.join(words)
    folder = tempfile.mkdtemp(prefix="tensortap-floor-")
    place = f"{folder}/run"
    command = [sys.executable, "-m", "tensortap", *words[1:], "-o", place]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise TargetError(
                f"The floor run could not be made. {_reason(ran.stderr)} Make it where the target "
                f"can be loaded, and give it as --floor {_PLACE}: {said} -o {_PLACE}"
            )
        recording = open_recording(place)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(recording, shutil.rmtree, folder, ignore_errors=True)
    return FloorRun(recording, said)


def floor_command(reference: Recording, mode: str | None) -> str:
    """The command that makes the floor; empty where the manifest names no target."""
    words = _words(reference, mode)
    return "" if words is None else f"{shlex.join(words)} -o {_PLACE}"


def _words(reference: Recording, mode: str | None) -> list[str] | None:
    """The command that recorded the reference, with what is to be different."""
    selection = reference.manifest.selection
    command, made_with = selection.get("command"), selection.get("made_with")
    if not command:
        return None
    words = shlex.split(command)
    if mode is None:
        words += [] if "--perturb" in words else ["--perturb"]
    elif mode in CASTS and not is_builtin(reference.manifest.mode or "fp32"):
        words = [*_without(words, "--dtype"), "--dtype", mode]  # in the target's own mode
    else:
        words = [*_without(_without(words, "--mode"), "--dtype"), "--mode", mode]
    return [*words, *_heard(made_with if isinstance(made_with, Mapping) else {})]


def _without(words: list[str], flag: str) -> list[str]:
    """The words but for an option and its value."""
    if flag not in words:
        return words
    at = words.index(flag)
    return [*words[:at], *words[at + 2 :]]


def _heard(made_with: Mapping[str, Any]) -> list[str]:
    """The options that choose what is recorded, as the reference has them."""
    words = [word for name in made_with.get("layers") or () for word in ("--layers", str(name))]
    for name, (given, left_out) in _CHOICES.items():
        flag = given if made_with.get(name, given is None) else left_out
        words += [] if flag is None else [flag]
    keep = made_with.get("keep")
    return [*words, *(["--keep", str(keep)] if keep not in (None, "tensors") else [])]


def _by_hand(mode: str | None) -> str:
    """How a floor is made of a model that only its owner can build."""
    if mode is None:
        return (
            "Put the model and its inputs into a function, as file.py:build, record the floor with "
            f"tensortap record file.py:build --perturb -o {_PLACE}, and give it as --floor "
            f"{_PLACE}; a repeat of the reference on another device will do too."
        )
    return (
        f"Record the reference's model in that precision with tap.record(model, {_PLACE!r}), or "
        f"with tensortap record file.py:build --mode {mode} -o {_PLACE}, and give it as --floor "
        f"{_PLACE}."
    )


def _reason(stderr: str) -> str:
    """What the command said last, as a sentence."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("error:")), "")
    text = said.removeprefix("error:").strip() or (lines[-1] if lines else "It said nothing.")
    return text if text.endswith(".") else f"{text}."
