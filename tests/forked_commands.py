"""Runs commands of ours and scripts, each in a process of its own that is quick to start.

Importing torch takes most of a short command's time. This program imports it once, and what torch
and we would import on the way (its compiler, ONNX, matplotlib), and forks for each that is asked
for, before any of them has started a thread, so that it starts as fresh as from a shell.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_IMPORTED = (
    "safetensors.torch",
    "tensortap.cli.main",
    "torch._dynamo",
    "torch.onnx._internal.exporter._core",
    "onnxscript",
    "matplotlib.figure",
)


@dataclass(frozen=True)
class Ran:
    """What a process left."""

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
        return self._ask({"words": list(words), "folder": str(folder)})

    def python(self, code: str, *words: object, paths: Sequence[Path] = ()) -> Ran:
        """Be `python -c CODE WORDS`, with these folders before all others that modules are in."""
        return self._ask(
            {"code": code, "words": [str(w) for w in words], "paths": [str(p) for p in paths]}
        )

    def _ask(self, asked: dict[str, Any]) -> Ran:
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as kept:
            files = [Path(kept) / name for name in ("out", "err")]
            print(json.dumps({**asked, "files": [*map(str, files)]}), file=self._process.stdin)
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            return Ran(code, *(path.read_text(errors="replace") for path in files))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait() == 0


def serve(lines: Iterable[str]) -> None:
    """Fork for every line, and write the exit code. A child returns from here, and ends."""
    for name in _IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    threads = list(Path("/proc/self/task").glob("*"))
    assert len(threads) <= 1, "a fork of a process with threads can hang: import less"
    for line in lines:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for descriptor, path in enumerate(asked["files"], start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
            return _script(asked) if "code" in asked else _command(asked)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)  # nothing is left to be put away


def _script(asked: dict[str, Any]) -> None:
    """Be that script: what it raises, and what it leaves to the end of the interpreter, is as in
    any other."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["-c", *asked["words"]]
    sys.path[:1] = ["", *asked["paths"]]
    exec(compile(asked["code"], "<string>", "exec"), main.__dict__)


def _command(asked: dict[str, Any]) -> NoReturn:
    from tensortap.cli.main import main

    os.chdir(asked["folder"])
    sys.argv = ["tensortap", *asked["words"]]
    code: object = 0
    try:
        main(asked["words"])
    except SystemExit as left:
        code = left.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 70
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(sys.stdin)
