"""Somebody who reads a document about recipes/quamba and types its commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from warm_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "quamba"


@dataclass(frozen=True)
class Ran:
    """What a command did: its ends, and what lay in the folder afterwards."""

    command: str
    code: int
    out: str
    err: str
    files: frozenset[str]
    arrays: dict[str, tuple[int, ...]]


class Reader:
    """Somebody who reads a document in a copy of the recipe's folder, and types."""

    def __init__(self, folder: Path, warm: WarmPython) -> None:
        self.folder = folder
        shutil.copytree(
            RECIPE, folder, ignore=shutil.ignore_patterns("__pycache__", *_ignored(RECIPE))
        )
        self.environment = {
            **os.environ,
            "PATH": f"{warm.path}:{os.environ['PATH']}",
            "TENSORTAP_TINY": "1",
            "PYTHONPATH": str(ROOT / "src"),
        }
        self.environment.pop("PYTHON", None)
        self.ran: dict[str, Ran] = {}

    def type(self, command: str) -> Ran:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        files = frozenset(
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        )
        arrays: dict[str, tuple[int, ...]] = {}
        for name in ("first_layer_io_all_modes.npz", "custom_output.npz"):
            if name in files:
                with np.load(self.folder / name) as held:
                    arrays.update({f"{name}:{key}": held[key].shape for key in held.files})
        for name in files:
            if name.endswith(".npy"):
                arrays[name] = np.load(self.folder / name, mmap_mode="r").shape
        ran = Ran(command, done.returncode, done.stdout, done.stderr, files, arrays)
        self.ran[command] = ran
        return ran

    def __getitem__(self, command: str) -> Ran:
        return self.ran[" ".join(command.split())]

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


def _ignored(folder: Path) -> list[str]:
    lines = (folder / ".gitignore").read_text().splitlines()
    return [line.rstrip("/") for line in lines if line and not line.startswith("#")]
