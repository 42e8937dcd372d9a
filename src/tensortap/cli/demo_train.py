"""`tensortap demo --train`: the built-in model trains for a moment, and is watched."""

from __future__ import annotations

import time
import warnings

from ..errors import OptionError, RecordingExistsError
from .common import open_recording, print_json, print_notes, say

_DEFAULT = "runs/train"


def demo_train(
    output: str | None, steps: int, break_at: int | None, overwrite: bool, json: bool
) -> None:
    """Train, watch, and say what can be looked at."""
    from ..demo_training import train
    from ..recording.schema import MANIFEST
    from ..recording.store import open_store
    from ..reporting.progress import progress
    from ..taps.session import TapWarning

    path = output or _DEFAULT
    if steps < 1:
        raise OptionError(f"--steps is {steps}, expected a whole number from 1.")
    if break_at is not None and not 0 <= break_at < steps:
        raise OptionError(f"--break-at is {break_at}, expected a step from 0 to {steps - 1}.")
    if MANIFEST in open_store(path).names() and not overwrite:
        raise RecordingExistsError(
            f"{path} already holds a recording. Choose another folder with -o DIR, or replace it "
            "with --overwrite."
        )
    start = time.monotonic()
    with progress("Training") as advance, warnings.catch_warnings():
        warnings.simplefilter("ignore", TapWarning)  # alarms are said below
        watching = train(path, steps, break_at=break_at, progress=advance, overwrite=overwrite)
    seconds = time.monotonic() - start
    recording = open_recording(path)
    losses = [record.summary.mean for record in recording["loss"].records]
    if json:
        print_json(
            {
                "path": path,
                "seconds": seconds,
                "steps": steps,
                "loss": {"first": losses[0], "last": losses[-1]},
                "alarms": [alarm.to_dict() for alarm in watching.alarms],
            }
        )
    else:
        _print(path, steps, seconds, losses, [alarm.text for alarm in watching.alarms])
    print_notes(watching.notes)


def _print(path: str, steps: int, seconds: float, losses: list[float], alarms: list[str]) -> None:
    from ..reporting.console import stdout

    console = stdout()
    console.print(
        f"Trained the built-in model for {steps} steps while it was watched, {seconds:.1f} s: "
        f"loss {losses[0]:.3g} -> {losses[-1]:.3g}.",
        highlight=False,
    )
    for text in alarms:
        console.print(text, style="bold red", highlight=False)
    say("\nTry next (and while it trains: tensortap show --follow RUN):")
    for line in (
        f"tensortap show {path}",
        f"tensortap check {path}",
        f"tensortap plot {path} -o training.png",
    ):
        say(f"  {line}")
