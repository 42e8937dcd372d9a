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
        training(f"{folder}/runs/train")
        picture = str(DOCS / "training.png")
        tensortap("plot", "runs/train", "-o", picture, cwd=Path(folder))
        pages(Path(folder))


def training(path: str) -> None:
    """A small transformer learns to say a sequence backwards, and is watched."""
    import torch
    from torch import nn

    import tensortap as tap

    torch.manual_seed(0)
    layer = {"dim_feedforward": 64, "batch_first": True, "dropout": 0.0, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(32, 4, **layer) for _ in range(8)]
    model = nn.Sequential()
    model.embedding, model.blocks = nn.Embedding(16, 32), nn.Sequential(*blocks)
    model.head = nn.Linear(32, 16)
    places = nn.Parameter(torch.randn(8, 32) * 0.5)
    model.embedding.register_parameter("places", places)
    model.embedding.register_forward_hook(lambda module, given, out: out + places)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chosen = {"layers": "blocks.{0-7}", "params": "blocks.*"}
    with tap.watch(model, path, every=2, updates=True, **chosen) as watch:
        for step in range(300):
            watch.epoch(step // 100)
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * min(1.0, (step + 1) / 30)
            tokens = torch.randint(16, (32, 8))
            guess = model(tokens)
            loss = nn.functional.cross_entropy(guess.flatten(0, 1), tokens.flip(1).flatten())
            loss.backward()
            watch.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


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
