"""Modes in processes of their own, some at a time: the side that starts them and hears of them.

Each has a pipe of its own, so that one that is killed holds up no other. A process is started anew
for every mode (fork would copy torch's threads halfway), and ends with us, however we end.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import OptionError
from .request import Request
from .results import RecordedMode
from .surroundings import Surroundings
from .worker import Job, MainFunction

__all__ = ["death", "record_in_workers", "threads_each"]

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tensortap.targets.modes.worker import main; main()"
)
_PATIENCE = 3.0  # seconds for a process to end when it is asked to
_LINGER = 10.0  # seconds for one that has answered: threads of the target may hold it up
_POLL = 0.2


@dataclass(frozen=True)
class _Worker:
    mode: str
    path: str
    process: subprocess.Popen[bytes]
    reader: threading.Thread
    began: float


def record_in_workers(
    request: Request,
    places: Mapping[str, str],
    start: Surroundings,
    *,
    jobs: int,
    tell: Callable[..., None],
    rows: dict[str, RecordedMode],
) -> None:
    """Record each mode in a process of its own, `jobs` at a time; fills `rows` as they end."""
    _check_places(places)
    parcel = _parcel(request)
    threads = threads_each(torch.get_num_threads(), min(jobs, len(places)))
    waiting = list(places.items())
    heard: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
    running: dict[str, _Worker] = {}
    answers: dict[str, RecordedMode] = {}
    answered: dict[str, float] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                mode, path = waiting.pop(0)
                tell(mode, "loading")
                job = Job(
                    mode,
                    path,
                    threads,
                    str(Path.cwd()),
                    tuple(sys.argv),
                    parcel,
                    pickle.dumps(start.elsewhere()),
                )
                running[mode] = _begin(job, heard)
            _hear(heard, answers, tell)
            for mode, worker in list(running.items()):
                if mode in answers:
                    since = answered.setdefault(mode, time.monotonic())
                    if time.monotonic() - since > _LINGER:
                        _end([worker])
                if worker.process.poll() is None:
                    continue
                worker.reader.join(_PATIENCE)  # what it said last may still be on its way
                _hear(heard, answers, tell, wait=False)
                _close(running.pop(mode))
                rows[mode] = _row(worker, answers.get(mode))
                tell(mode, rows[mode].status)
    finally:
        _end(list(running.values()))


def threads_each(threads: int, jobs: int) -> int:
    """The threads of torch that each of several processes gets."""
    return max(1, threads // max(1, jobs))


def death(code: int) -> str:
    """How a process ended that did not say so itself, as a sentence."""
    if code >= 0:
        return (
            f"Its process left with exit code {code} and did not say why: something called "
            "os._exit, or crashed."
        )
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "a signal"
    sentence = f"Its process was ended by {name} (signal {-code})."
    if name == "SIGKILL":
        return (
            f"{sentence} If nobody did that, the machine had run out of memory: fewer --jobs, "
            "fewer --layers or a smaller --budget need less."
        )
    if name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"):
        return f"{sentence} It crashed, in code that is not Python's."
    return sentence


def _row(worker: _Worker, answer: RecordedMode | None) -> RecordedMode:
    if answer is not None:
        return answer
    return RecordedMode(
        worker.mode,
        worker.path,
        "failed",
        problem=death(worker.process.returncode),
        seconds=time.monotonic() - worker.began,
    )


def _begin(job: Job, heard: queue.Queue[tuple[str, dict[str, Any]]]) -> _Worker:
    threads = str(job.threads)
    process = subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        start_new_session=True,  # Ctrl-C is ours to hear; we then end them
    )
    body = pickle.dumps(job)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # that it died is seen when it is waited for
        process.stdin.write(len(body).to_bytes(8, "big") + body)
        process.stdin.flush()
    reader = threading.Thread(
        target=_read, args=(job.mode, process, heard), name="tensortap-worker", daemon=True
    )
    reader.start()
    return _Worker(job.mode, job.path, process, reader, time.monotonic())


def _read(
    mode: str, process: subprocess.Popen[bytes], heard: queue.Queue[tuple[str, dict[str, Any]]]
) -> None:
    assert process.stdout is not None
    with contextlib.suppress(OSError, ValueError):  # closed under us, when all is ended
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # half a line of one that was killed
                heard.put((mode, json.loads(line)))


def _hear(
    heard: queue.Queue[tuple[str, dict[str, Any]]],
    answers: dict[str, RecordedMode],
    tell: Callable[..., None],
    *,
    wait: bool = True,
) -> None:
    """Take what was said so far; with `wait`, stay a moment for the first of it."""
    timeout = _POLL if wait else 0.0
    while True:
        try:
            mode, said = heard.get(timeout=timeout) if timeout else heard.get_nowait()
        except queue.Empty:
            return
        timeout = 0.0
        if "row" in said:
            answers[mode] = RecordedMode.from_dict(said["row"])
        else:
            tell(mode, "running", said.get("batch"), said.get("batches"))


def _end(workers: list[_Worker]) -> None:
    """End those that still run, and wait for them: nobody else will."""
    for worker in workers:
        worker.process.terminate()
    until = time.monotonic() + _PATIENCE
    for worker in workers:
        try:
            worker.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        _close(worker)


def _close(worker: _Worker) -> None:
    for pipe in (worker.process.stdin, worker.process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _parcel(request: Request) -> bytes:
    """The request for another process; a function goes by its name."""
    if not isinstance(request.target, str):
        request = replace(request, target=_by_name(request.target))
    try:
        return pickle.dumps(request)
    except Exception as error:  # pickle raises what it likes
        raise OptionError(
            f"With --jobs, every mode runs in a process of its own, and an option cannot be sent "
            f"there: {error}. Use jobs=1."
        ) from None


def _by_name(function: Callable[..., Any]) -> Any:
    """A function as another process finds it: by module and name."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    home = sys.modules.get(module) if isinstance(module, str) else None
    found: Any = home
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if home is None or found is not function:
        raise OptionError(
            f"With jobs over 1, every mode runs in a process of its own, which imports the target "
            f"by name, and {name or type(function).__name__!r} cannot be imported. Write it at the "
            "top level of a module, or use jobs=1."
        )
    if module != "__main__":
        return function
    file = getattr(home, "__file__", None)
    if not file or not Path(file).is_file():
        raise OptionError(
            f"With jobs over 1, every mode runs in a process of its own, which imports the target "
            f"by name, and {name!r} was typed into a session without a file. Write it into one, or "
            "use jobs=1."
        )
    return MainFunction(str(Path(file).resolve()), str(name))


def _check_places(places: Mapping[str, str]) -> None:
    here = [path for path in places.values() if path.startswith("memory:")]
    if here:
        raise OptionError(
            f"{here[0]} is the memory of this process, where another cannot write. Use --jobs 1, "
            "or a folder."
        )
