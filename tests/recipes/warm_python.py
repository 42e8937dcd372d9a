"""A `python3` that starts at once: torch and transformers are imported once, and forked.

Commands of documents are shell scripts that start `python3` again and again, and each start costs
seconds. With `WarmPython().path` in front of PATH they run as they are written: their `python3`
hands its words, folder, environment and open files to a server, which forks for it before torch
has started any thread.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
told = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(told).to_bytes(8, "big")], [0, 1, 2])
server.sendall(told)
sys.exit(int(server.makefile().read() or 70))
"""


class WarmPython:
    """The server, as long as it is open; `path` is the folder that holds its `python3`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="warm-"))  # a socket's path has to be short
        self.path = self._folder / "bin"
        self.path.mkdir()
        address = str(self._folder / "socket")
        for name in ("python3", "python"):
            client = self.path / name
            client.write_text(_CLIENT.format(python=sys.executable, address=address))
            client.chmod(0o755)
        self._server = subprocess.Popen(
            [sys.executable, __file__, address], stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n"

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()
        shutil.rmtree(self._folder)


def serve(address: str) -> None:
    """Be every python3 that asks, one after the other."""
    os.environ["MPLBACKEND"] = "Agg"
    with contextlib.suppress(ImportError):
        import matplotlib.pyplot  # noqa: F401
    import rich.console
    import safetensors.torch
    import torch
    import transformers
    from transformers import MambaForCausalLM, MiniMaxM2ForCausalLM

    import tensortap.cli.common
    import tensortap.comparing.modes
    import tensortap.recording.layouts
    import tensortap.reporting.comparisons
    import tensortap.taps.instrument.write
    import tensortap.targets.modes.record
    from tensortap.taps.programs.kinds import kinds

    kinds()  # imports the runtimes
    assert rich and safetensors and torch and transformers and tensortap
    assert MambaForCausalLM and MiniMaxM2ForCausalLM
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    gc.collect()
    gc.freeze()  # no child has to look through what they all have in common
    print("ready", flush=True)
    while True:
        asked, _ = listener.accept()
        size, files, _, _ = socket.recv_fds(asked, 8, 3)
        words, folder, environment = json.loads(_received(asked, int.from_bytes(size, "big")))
        child = os.fork()
        if child == 0:
            os._exit(_become(words, folder, environment, files))
        for file in files:
            os.close(file)
        _, status = os.waitpid(child, 0)
        asked.sendall(str(os.waitstatus_to_exitcode(status) & 255).encode())
        asked.close()


def _received(asked: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += asked.recv(size - len(data))
    return data


def _become(words: list[str], folder: str, environment: dict[str, str], files: list[int]) -> int:
    """Be `python3 WORDS` as its process would be."""
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words or [""]
    sys.path[0] = str(Path(words[0]).resolve().parent) if words else ""
    code: object = 0
    try:
        if words:
            runpy.run_path(words[0], run_name="__main__")
        else:  # python <<EOF
            exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})
    except SystemExit as left:
        code = left.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 70
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    serve(sys.argv[1])
