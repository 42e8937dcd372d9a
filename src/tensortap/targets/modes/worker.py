"""The side of a process that records one mode: `--jobs`.

The question comes pickled through stdin, from the process that started us; the answer goes back a
JSON line at a time through what was stdout. What the target prints goes to stderr. Stdin stays
open as long as the other side lives: its end is ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Job", "MainFunction", "inside", "main"]

inside = False  # whether this process records one mode for another
_EVERY = 0.05


@dataclass(frozen=True)
class MainFunction:
    """A function of a script that was run itself, which no module's name leads to."""

    file: str
    name: str

    def find(self) -> Callable[..., Any]:
        spec = importlib.util.spec_from_file_location("__mp_main__", self.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.file} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        spec.loader.exec_module(module)
        found: Any = module
        for part in self.name.split("."):
            found = getattr(found, part)
        found.__module__ = "__main__"
        function: Callable[..., Any] = found
        return function


@dataclass(frozen=True)
class Job:
    """One mode to be recorded; `request` is pickled once more, for when the paths are set."""

    mode: str
    path: str
    threads: int
    folder: str
    arguments: tuple[str, ...]
    request: bytes
    start: bytes


def main() -> None:
    """Record the mode that stdin asks for; what escapes from here is a bug of ours."""
    global inside
    inside = True
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    size = int.from_bytes(_exactly(8), "big")
    job = pickle.loads(_exactly(size))
    threading.Thread(target=_end_with_parent, name="tensortap-parent", daemon=True).start()
    row = _record(job, channel)
    channel.write(json.dumps({"row": row}) + "\n")
    channel.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _record(job: Job, channel: Any) -> dict[str, Any]:
    import torch

    from .declared import mode_names
    from .record import record_one
    from .request import Request
    from .results import RecordedMode
    from .rows import problem_of
    from .surroundings import Surroundings

    os.chdir(job.folder)
    sys.argv = list(job.arguments)
    torch.set_num_threads(job.threads)
    last = 0.0

    def tell(batch: int, batches: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= _EVERY or batch in (0, batches):
            last = time.monotonic()
            channel.write(json.dumps({"batch": batch, "batches": batches}) + "\n")
            channel.flush()

    try:
        start: Surroundings = pickle.loads(job.start)
        request: Request = pickle.loads(job.request)
        target: Any = request.target
        if isinstance(target, MainFunction):
            request = replace(request, target=target.find())
        mode_names(request.target, [job.mode])  # imports, as it did there, before anything counts
    except BaseException as error:  # whatever a user's module does when it is imported
        problem = f"The target cannot be found again in a process of its own: {problem_of(error)}"
        return RecordedMode(job.mode, job.path, "failed", problem=problem).to_dict()
    try:
        return record_one(request, job.mode, job.path, start, tell).to_dict()
    except KeyboardInterrupt as error:  # not the user's: a Ctrl-C is heard by who started us
        return RecordedMode(job.mode, job.path, "failed", problem=problem_of(error)).to_dict()


def _exactly(size: int) -> bytes:
    """So many bytes from stdin, not one more: what follows is watched for its end."""
    found = b""
    while len(found) < size:
        more = os.read(0, size - len(found))
        if not more:
            os._exit(1)
        found += more
    return found


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
