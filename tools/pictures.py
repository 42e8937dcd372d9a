"""Remakes the pictures under docs/: `make pictures`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def tensortap(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "tensortap", *words], check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        tensortap("record", "tensortap.demo:build", "-o", run, "--layers", "blocks")
        tensortap("plot", run, "blocks.3", "-o", str(DOCS / "layer.png"))
        modes = [f"{folder}/{mode}" for mode in ("fp32", "bf16", "bug")]
        for path in modes:
            mode = Path(path).name
            layers = ("--layers", "embedding", "--layers", "blocks", "--layers", "final_norm")
            tensortap("record", "tensortap.demo:build", "-o", path, "--mode", mode, *layers)
        picture = str(DOCS / "differences.png")
        tensortap("plot", *modes, "--layer", "blocks.4", "-o", picture)


if __name__ == "__main__":
    main()
