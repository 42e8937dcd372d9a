"""Who writes a recording, and whether that process still runs.

A manifest that says `recording` may be of a run that goes on, or of one whose process was killed,
or whose disk took no last word. So it says which process writes it: the host, the process's number
and when that process began, since numbers are given again. Only on the same host, and in the same
space of process numbers (a container has its own), can a reader tell.
"""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

__all__ = ["Life", "in_words", "life_of", "this_process"]

Life = Literal["alive", "dead", "unknown"]
_PROC = Path("/proc")
_CLOSE = 2.0  # seconds by which two readings of one start may differ: the clock is adjusted


def this_process() -> dict[str, Any]:
    """What a manifest says of its writer; `token` tells two writers of one process apart."""
    return {
        "host": platform.node(),
        "space": _space(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "token": secrets.token_hex(8),
    }


def life_of(writer: Mapping[str, Any] | None) -> Life:
    """Whether the process that a manifest names still runs, as far as it can be told from here."""
    pid = (writer or {}).get("pid")
    if not writer or not isinstance(pid, int):
        return "unknown"
    if writer.get("host") != platform.node() or writer.get("space") != _space():
        return "unknown"
    if not _runs(pid):
        return "dead"
    then, now = writer.get("started"), _started(pid)
    if then is None or now is None:
        return "unknown"
    return "alive" if abs(then - now) <= _CLOSE else "dead"


def in_words(writer: Mapping[str, Any] | None) -> str:
    """What to say of a recording that was not closed."""
    life = life_of(writer)
    who = f"process {(writer or {}).get('pid')}"
    if life == "alive":
        return f"The recording is still being written, by {who} of this machine. All finished"
    if life == "dead":
        return (
            f"The recording was not closed: {who}, which wrote it, has ended: it was killed, or "
            "the disk took no more. All finished"
        )
    host = (writer or {}).get("host")
    where = f" by {who} of {host}" if host else ""
    return (
        f"The recording was not closed: it is still being written{where}, or its process was "
        "killed. All finished"
    )


def _space() -> str | None:
    """The space that process numbers are of, and the boot of the machine; None elsewhere."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return None


def _runs(pid: int) -> bool:
    stat = _stat(pid)
    if stat is not None:
        return stat[0] not in ("Z", "X")  # one that waits for its parent writes no more
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is another user's
        return True
    return not _PROC.joinpath("self/stat").exists()


def _started(pid: int) -> float | None:
    """When a process began, in seconds since 1970; None where the system does not say."""
    stat = _stat(pid)
    if stat is None:
        return None
    ticks = float(stat[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on: the name before may hold anything."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 19 else None
