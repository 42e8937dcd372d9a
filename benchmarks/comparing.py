"""How long does it take to compare two recordings, and how much memory?

    python benchmarks/comparing.py [--layers N] [--megabytes M] [--rounds N]

Two recordings of N layers of M MB in float32, the second off by noise. "read" sums every byte of
both through the memory maps: what any comparison must cost. "documents" is their way: `torch.load`
of a file a layer on each side, then their formulas, with np.percentile. Everything lies in the page
cache. "memory" is the largest anonymous memory (not the maps, which the system may drop).
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

import tensortap as tap
from tensortap.numerics.native import core
from timing import interleave


class Emit(nn.Module):
    """A layer whose output is a fixed tensor, off by `noise`."""

    def __init__(self, seed: int, rows: int, noise: float) -> None:
        super().__init__()
        self.seed, self.rows, self.noise = seed, rows, noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.randn(self.rows, 1024, generator=generator)
        if self.noise:
            generator = torch.Generator().manual_seed(1000 + self.seed)
            values += self.noise * torch.randn(self.rows, 1024, generator=generator)
        return values


def record(path: Path, files: Path, layers: int, megabytes: int, noise: float) -> None:
    model = nn.ModuleList(Emit(k, megabytes * 256, noise) for k in range(layers))
    files.mkdir()
    with tap.record(model, path, layers="leaves"):
        for number, layer in enumerate(model):
            torch.save(layer(torch.zeros(1)), files / f"layer_{number}_output.pt")


def plain_read(paths: list[Path]) -> int:
    assert core is not None
    total = 0
    for path in paths:
        run = tap.open(path)
        for name in run.layers:
            tensor = run[name].output
            total |= core.plain_read(tensor.data_ptr(), tensor.numel() * 4)
    return total


def documents(left: Path, right: Path, layers: int) -> list[float]:
    found = []
    for number in range(layers):
        a = torch.load(left / f"layer_{number}_output.pt")
        b = torch.load(right / f"layer_{number}_output.pt")
        d = b - a
        x, y = a.flatten(), b.flatten()
        mse = (d**2).mean()
        relative = d.abs() / (a.abs() + 1e-8)
        found += [
            *(t.item() for t in (a.mean(), a.std(), a.min(), a.max())),
            *(t.item() for t in (b.mean(), b.std(), b.min(), b.max())),
            *(t.item() for t in (d.mean(), d.std(), d.abs().mean(), d.abs().max())),
            *(t.item() for t in (mse, mse.sqrt(), mse / (a**2).mean())),
            *(t.item() for t in (relative.max(), relative.mean())),
            torch.nn.functional.cosine_similarity(x, y, dim=0).item(),
            torch.corrcoef(torch.stack((x, y)))[0, 1].item(),
            *np.percentile(d.abs().numpy(), (50, 90, 95, 99)),
        ]
    return found


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def watched(peak: list[int]) -> Iterator[None]:
    """Append how far anonymous memory rose meanwhile."""
    base, stop, seen = anonymous(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.005):
            seen.append(anonymous() - base)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        peak.append(max(seen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name, noise in (("a", 0.0), ("b", 1e-3)):
            record(root / name, root / f"{name}_pt", options.layers, options.megabytes, noise)
        peak: list[int] = []
        start = time.perf_counter()
        with watched(peak):
            first = tap.compare(root / "a", root / "b")
        opening = time.perf_counter() - start
        variants = {
            "read": lambda: plain_read([root / "a", root / "b"]),
            "compare": lambda: tap.compare(root / "a", root / "b"),
        }
        quick = interleave(variants, rounds=options.rounds, warmup=1, rest=0.02)
        variants["documents"] = lambda: documents(root / "a_pt", root / "b_pt", options.layers)
        slow = interleave(variants, rounds=2, warmup=0)
    size = options.layers * options.megabytes
    low, high = quick.spread("compare", "read")
    print(f"two recordings of {options.layers} layers, {size} MB each: {first.counts}")
    print(
        f"compare, of a plain read of both   {quick.ratio('compare', 'read'):8.2f}"
        f"   ({low:.2f} to {high:.2f}); the first call took {opening:.2f} s"
    )
    print(f"documents, of compare              {slow.ratio('documents', 'compare'):8.1f}")
    print(f"memory beside the maps             {peak[0] / 2**20:8.0f} MB")


if __name__ == "__main__":
    main()
