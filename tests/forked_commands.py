"""Runs commands of ours one after the other, each in a process of its own that is quick to start.

Importing torch takes most of a short command's time. This program imports it once and forks for
each command, before torch has started any thread, so a command starts as fresh as from a shell.

    python tests/forked_commands.py < [[word, …], …]      JSON comes out
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_all(commands: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The exit code and what was printed of each command, in order."""
    import safetensors.torch
    import torch

    import tensortap.cli.main

    assert torch and safetensors and tensortap  # imported for those that come
    return [_run(list(words)) for words in commands]


def _run(words: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("out", "err")]
        child = os.fork()
        if child == 0:
            os._exit(_become(words, files))
        _, status = os.waitpid(child, 0)
        out, err = (path.read_text(errors="replace") for path in files)
    return {"code": os.waitstatus_to_exitcode(status), "stdout": out, "stderr": err}


def _become(words: list[str], files: Sequence[Path]) -> int:
    """Be that command, as its process would be."""
    from tensortap.cli.main import main

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
    sys.stdout.write(json.dumps(run_all(json.load(sys.stdin))))
