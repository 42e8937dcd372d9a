"""Remakes the pictures under docs/: `make pictures`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tests" / "reporting"))

import chromium  # noqa: E402


def tensortap(*words: str, cwd: Path | None = None) -> None:
    subprocess.run([sys.executable, "-m", "tensortap", *words], check=True, cwd=cwd)


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
        pages(Path(folder))


def pages(folder: Path) -> None:
    """The tops of a comparison's and of a blame's page, in the Chromium that the tests use."""
    executable = chromium.find()
    if executable is None:
        sys.exit("Pictures of pages need a browser: apt-get install chromium")
    for mode in ("fp32", "bug"):
        words = ("-o", f"runs/{mode}", "--mode", mode, "--layers", "all", "--inputs")
        tensortap("record", "tensortap.demo:build", *words, cwd=folder)
    differs("compare", "runs/fp32", "runs/bug", "--html", "report.html", cwd=folder)
    bug = ("runs/fp32", "tensortap.demo:build", "--mode", "bug")
    differs("blame", *bug, "--html", "blame.html", cwd=folder)
    with chromium.browser(executable) as browser:
        tab = browser.page()
        tab.look(1180, 860, dark=False)
        tab.open(folder / "report.html")
        tab.run("document.querySelector('th[data-column=error] button').click()")
        tab.settle()
        tab.picture(DOCS / "report.png", whole=False)
        tab.look(1180, 1080, dark=False)
        tab.open(folder / "blame.html")
        tab.picture(DOCS / "blame.png", whole=False)


def differs(*words: str, cwd: Path) -> None:
    """Exit 1 says that there is a difference, which is the point."""
    done = subprocess.run([sys.executable, "-m", "tensortap", *words], cwd=cwd)
    assert done.returncode == 1


if __name__ == "__main__":
    main()
