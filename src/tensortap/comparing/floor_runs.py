"""Which floor run a comparison has: the one that the user gave, or one that is made for it.

With the word `auto` the reference's own target is run once more: as coarse as the candidate, or
with its roundings moved where both are as precise. A folder of that name is given as `./auto`.
"""

from __future__ import annotations

from ..recording.reader import Recording
from ..targets.floor_run import FloorRun, make_floor
from .checks import Run, opened
from .precision import floor_mode, precision_of

__all__ = ["floor_beside", "floor_notes", "floor_run", "given_floor", "is_made"]

_AUTO = "auto"


def floor_run(
    floor: Run | FloorRun | None,
    reference: Recording,
    precision: str | None,
    mode: str | None,
    partial: bool = False,
) -> FloorRun | None:
    """The floor that was given, or the one that `auto` asks for; None where none is wanted.

    `precision` and `mode` are the candidate's: a dtype, as `precision_of` finds it, and the name
    of its mode.
    """
    if floor is None or isinstance(floor, FloorRun):
        return floor
    if is_made(floor):
        return make_floor(reference, floor_mode(reference, precision, mode))
    return FloorRun(opened(floor, partial))


def floor_beside(
    floor: Run | FloorRun | None,
    reference: Recording,
    candidate: Recording,
    partial: bool = False,
) -> FloorRun | None:
    """The same for a candidate that was recorded."""
    return floor_run(floor, reference, precision_of(candidate), candidate.manifest.mode, partial)


def is_made(floor: Run | None) -> bool:
    """Whether the floor is to be made, and not one that is there."""
    return isinstance(floor, str) and floor == _AUTO


def given_floor(run: FloorRun | None) -> Recording | None:
    """The floor that the user gave: one that was made ran on the reference's own inputs."""
    return None if run is None or run.command else run.recording


def floor_notes(run: FloorRun | None) -> list[str]:
    """What was run for a floor that was asked for, and how to keep it."""
    if run is None or not run.command:
        return []
    return [
        f"The floor was made for this by `{run.command}`, and is not kept. To keep it, run that "
        "with -o DIR, and give --floor DIR."
    ]
