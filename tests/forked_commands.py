"""Runs commands of ours one after the other, each in a process of its own that is quick to start.

Importing torch takes most of a short command's time. This program imports it once, and what torch
and we would import on the way (its compiler, ONNX, matplotlib), and forks for each command, before
any of them has started a thread, so a command starts as fresh as from a shell.

    python tests/forked_commands.py < {"folder": …, "words": […]}      a line each; JSON comes out
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_IMPORTED = (
    "safetensors.torch",
    "tensortap.cli.main",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.onnx._internal.exporter._core",
    "onnxscript",
    "matplotlib.figure",
)


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    stdout: str
    stderr: str


class Commands:
    """The interpreter that is forked, as long as it is open."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "NO_COLOR": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, words: Sequence[str], folder: Path) -> Ran:
        """Be `tensortap WORDS` in that folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"folder": str(folder), "words": list(words)}), file=self._process.stdin)
        self._process.stdin.flush()
        return Ran(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait() == 0


def serve(asked: Iterable[str]) -> None:
    """Run every command that is asked for, in order, and write what it left."""
    for name in _IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    threads = list(Path("/proc/self/task").glob("*"))
    assert len(threads) <= 1, "a fork of a process with threads can hang: import less"
    for line in asked:
        print(json.dumps(_run(**json.loads(line))), flush=True)
    os._exit(0)  # nothing is left to be put away


def _run(words: list[str], folder: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as kept:
        files = [Path(kept) / name for name in ("out", "err")]
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            os._exit(_become(words, files))
        _, status = os.waitpid(child, 0)
        out, err = (path.read_text(errors="replace") for path in files)
    return {"code": os.waitstatus_to_exitcode(status), "stdout": out, "stderr": err}


def _become(words: list[str], files: Sequence[Path]) -> int:
    """Be that command, as its process would be."""
    from tensortap.cli.main import main

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    sys.argv = ["tensortap", *words]
    code: object = 0
    try:
        main(words)
    except SystemExit as left:
        code = left.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 70
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    serve(sys.stdin)
