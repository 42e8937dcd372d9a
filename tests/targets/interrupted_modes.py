"""Records two modes in processes of their own, and is interrupted while one of them runs.

python interrupted_modes.py TARGET FOLDER      JSON comes out
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from tensortap.targets.modes.record import record_modes
from tensortap.targets.modes.results import ModesInterrupted

signal.signal(signal.SIGINT, signal.default_int_handler)
started: list[Any] = []
pressed: list[Any] = []


class Kept(subprocess.Popen):  # type: ignore[type-arg]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        started.append(self)


subprocess.Popen = Kept  # type: ignore[misc]


def press(step: Any) -> None:
    if step.mode == "slow" and step.state == "running" and not pressed:
        pressed.append(step)
        signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    try:
        record_modes(sys.argv[1], sys.argv[2], modes="slow,load", jobs=2, progress=press)
    except ModesInterrupted as caught:
        told = {"left": list(caught.left), "recorded": [row.mode for row in caught.recorded]}
        print(json.dumps({**told, "codes": [process.returncode for process in started]}))
