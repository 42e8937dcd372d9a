"""Somebody who reads document 000 beside a copy of recipes/minimax_m2, and types its commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from warm_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "minimax_m2"
_TENSORTAP = """#!/usr/bin/env python3
from tensortap.cli.main import main
main()
"""


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


class Reader:
    """`minimax_m2_misc/` is the copy of the recipe's folder, and `/home/ubuntu/` lies there too."""

    def __init__(self, folder: Path, warm: WarmPython) -> None:
        self.folder = folder
        self.ran: dict[str, Ran] = {}
        ignored = shutil.ignore_patterns("__pycache__", "traced_model", "comparison_reports")
        shutil.copytree(RECIPE, folder, ignore=ignored)
        (folder / "neuronx-distributed-inference" / "examples").mkdir(parents=True)
        command = folder / "bin" / "tensortap"
        command.parent.mkdir()
        command.write_text(_TENSORTAP)
        command.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{command.parent}:{warm.path}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "TENSORTAP_TINY": "1",
            "MPLBACKEND": "Agg",
            "NO_COLOR": "1",
        }

    @property
    def compiled(self) -> Path:
        """The tree of the compiled model, which is there when this was asked for."""
        return self._tree("test_layers", "test_layer_by_layer.py")

    @property
    def gpu(self) -> Path:
        """The tree of the eager model."""
        return self._tree("gpu_reference", "test_layer_by_layer_gpu.py")

    def _tree(self, name: str, script: str) -> Path:
        tree = self.folder / "traced_model" / name / "full_model"
        if not (tree / "metadata.pt").exists():
            ran = self.type(f"python {script}")
            assert ran.code == 0, ran.err
        return tree

    def read(self, text: str) -> str:
        """The document's text with its two folders where they are here."""
        return text.replace("minimax_m2_misc/", f"{self.folder}/").replace(
            "/home/ubuntu/", f"{self.folder}/"
        )

    def type(self, text: str, environment: Mapping[str, str] | None = None) -> Ran:
        """A block of shell commands, in the recipe's folder; the first that fails ends it."""
        done = subprocess.run(
            ["bash", "-e", "-c", self.read(text)],
            cwd=self.folder,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=240,
        )
        self.ran[text] = Ran(done.returncode, done.stdout, done.stderr)
        return self.ran[text]

    def python(self, snippet: str) -> Ran:
        """A snippet of Python, in a process of its own."""
        return self.type(f"python <<'END OF SNIPPET'\n{self.read(snippet)}\nEND OF SNIPPET")

    def tensortap(self, words: str) -> Ran:
        """A command of ours."""
        return self.type(f"tensortap {words}")


def bare_python(words: list[str], folder: Path) -> Ran:
    """A real process, without the warm interpreter, and with nothing on its path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    return Ran(done.returncode, done.stdout, done.stderr)
