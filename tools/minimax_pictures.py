"""Remakes the pictures of docs/minimax-m2.md: `python tools/minimax_pictures.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TARGET = f"{ROOT / 'recipes' / 'minimax_m2' / 'target.py'}:build"
LAYERS = ("--layers", "embedding", "--layers", "blocks", "--layers", "final_norm")


def tensortap(*words: str) -> None:
    """A command of ours, on the model in its full (small) widths."""
    environment = {key: value for key, value in os.environ.items() if key != "TENSORTAP_TINY"}
    subprocess.run([sys.executable, "-m", "tensortap", *words], check=True, env=environment)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = [f"{folder}/{mode}" for mode in ("fp32", "bf16")]
        for run in runs:
            tensortap("record", TARGET, "-o", run, "--mode", Path(run).name, *LAYERS)
        picture = str(DOCS / "minimax-layer-30.png")
        tensortap("plot", runs[0], "model.layers.30", "-o", picture)
        picture = str(DOCS / "minimax-bf16.png")
        tensortap("plot", *runs, "--layer", "model.layers.30", "-o", picture)


if __name__ == "__main__":
    main()
