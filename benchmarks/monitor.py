"""What watching costs while a model trains: `python benchmarks/monitor.py` (`make bench-monitor`).

Real steps (forward, backward, AdamW) of a 12-layer GPT. Every variant trains its own copy from the
same seed on the same data: plain, with `tap.watch`, and with what others offer (wandb.watch,
TensorBoard histograms, torchlens.watch, hooks with `.item()`), eager and compiled. One run,
interleaved, medians of the ratios within rounds; an A/A row shows the noise. At the end every
copy's parameters must be the plain one's, bit for bit; compiled ones are close, since
another graph may be fused in another way, and the table says which.

What is kept differs, so the table says how many numbers a step leaves behind: not a ranking of
equal work.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import tensortap as tap
from monitor_peers import PEERS, Peer, Wandb
from tensortap.numerics.summary import COLUMNS
from timing import Timings, interleave
from training_model import Size, Training, batches, build

CYCLE = 10  # the sparse cadence: timed over whole cycles, or its cost would fall between timings
ALL = {"outputs": True, "grads": True, "params": True, "updates": True}
WATCHES: dict[str, dict[str, Any]] = {
    "outputs": {"every": 1, "grads": False, "params": False},
    "outputs, grads": {"every": 1, "params": False},
    "outputs, grads, params, updates": {"every": 1, **ALL},
    f"the same, every={CYCLE}": {"every": CYCLE, **ALL},
}
SPARSE = f"tap.watch the same, every={CYCLE}"


class Watched(Training):
    """A training with tap.watch: the watch comes before torch.compile."""

    def __init__(self, name: str, size: Size, folder: Path, compiled: bool, **options: Any) -> None:
        model = build(size, name)
        self.watcher = tap.watch(
            model, folder / name, **{"layers": "blocks", "updates": False, **options}
        )
        super().__init__(model, batches(size), compiled)
        self.kept = 0.0

    def close(self) -> None:
        self.watcher.close()
        if self.watcher.failure is not None:
            raise SystemExit(f"The watch failed: {self.watcher.failure}")
        records = sum(len(layer.records) for layer in tap.open(self.watcher.path).values())
        self.kept = records * len(COLUMNS) / self.steps


def variants(size: Size, folder: Path, compiled: bool, peers: bool) -> dict[str, Training]:
    """Every variant by its row's name. Of compiled ones there are ours alone: see `left_out`."""
    found: dict[str, Training] = {
        name: Training(build(size, f"{name}_{compiled}".replace(" ", "_")), batches(size), compiled)
        for name in ("plain", "plain again")
    }
    for number, (name, options) in enumerate(WATCHES.items()):
        own = f"watch_{number}_{compiled}"
        found[f"tap.watch {name}"] = Watched(own, size, folder, compiled, **options)
    if peers and not compiled:
        for number, (name, (package, peer)) in enumerate(PEERS.items()):
            if not package or importlib.util.find_spec(package) is not None:
                found[name] = peer(f"peer_{number}", size, folder)
    return found


def left_out() -> list[str]:
    lines = [
        f"{name}: {package} is not installed"
        for name, (package, _) in PEERS.items()
        if package and importlib.util.find_spec(package) is None
    ]
    return [
        *lines,
        "peers compiled: what hooks the forward calls .item() or numpy, which fullgraph=True "
        "refuses; what reads gradients afterwards costs the same milliseconds as in eager",
    ]


def same_parameters(own: Training, plain: Training) -> str:
    """Watching changes nothing, or the benchmark fails."""
    if own.steps != plain.steps:
        raise AssertionError(f"{own.steps} steps against {plain.steps}: not comparable.")
    if own.digest() == plain.digest():
        return "identical"
    pairs = zip(own.model.parameters(), plain.model.parameters(), strict=True)
    # Compiled kernels, and atomics on CUDA, differ between two plain copies already.
    may_differ = own.compiled or own.losses[0].is_cuda
    if may_differ and all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs):
        return "close"
    raise AssertionError(f"After {own.steps} steps the parameters differ from the plain ones.")


def numbers(timings: Timings, name: str) -> list[float]:
    return [timings.ratio(name, "plain"), *timings.spread(name, "plain")]


def measure(
    size: Size, folder: Path, rounds: int, cycles: int, compiled: bool, peers: bool
) -> dict[str, Any]:
    """Rows of one half of the table, eager or compiled, by name."""
    runs = variants(size, folder, compiled, peers)
    timings = interleave(runs, rounds=rounds, warmup=2, rest=0.1)
    same = {name: same_parameters(run, runs["plain"]) for name, run in runs.items()}
    long = {name: runs[name] for name in ("plain", SPARSE)}
    sparse = interleave(long, rounds=cycles, warmup=0, rest=0.1, repeat=CYCLE)
    same[SPARSE] = same_parameters(runs[SPARSE], runs["plain"])
    for run in runs.values():
        if isinstance(run, Watched | Peer):
            run.close()
    rows = {
        name: {
            "ratio": numbers(sparse if name == SPARSE else timings, name),
            "kept": round(getattr(run, "kept", 0.0)),
            "parameters": same[name],
        }
        for name, run in runs.items()
        if name != "plain"
    }
    plain = runs["plain"]
    return {
        "plain_ms": timings.median("plain") * 1e3,
        "loss": [float(plain.losses[0]), float(plain.losses[-1])],
        "rows": rows,
    }


def lines(half: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows as text: name, ratio with quartiles, numbers kept a step, parameters."""
    found = []
    for name, row in half["rows"].items():
        ratio, low, high = row["ratio"]
        kept = f"{row['kept']:,}" if row["kept"] else ""
        shown = "A/A" if name == "plain again" else name
        found.append((shown, f"{ratio:.3f} ({low:.3f}–{high:.3f})", kept, row["parameters"]))
    return found


def markdown(kind: str, half: Mapping[str, Any]) -> str:
    """One of the two tables of docs/benchmarks.md."""
    title = f"{kind}, plain step {half['plain_ms']:.0f} ms"
    text = [
        f"| {title} | step / plain step | numbers kept a step | parameters afterwards |",
        "|---|---|---|---|",
    ]
    for name, ratio, kept, same in lines(half):
        bold = re.sub(r"^(\S+)", r"**\1**", ratio) if name.startswith("tap.watch") else ratio
        text.append(f"| {name} | {bold} | {kept} | {same} |")
    return "\n".join([*text, ""])


def plain_text(kind: str, half: Mapping[str, Any]) -> str:
    text = [f"\n{kind}: plain step {half['plain_ms']:.0f} ms"]
    for name, ratio, kept, same in lines(half):
        numbers = f"{kept} numbers a step" if kept else ""
        text.append(f"  {name:44s} {ratio:22s} {numbers:>23s}  parameters {same}")
    return "\n".join(text)


def size_for(device: str, quick: bool) -> Size:
    if quick:
        return Size(width=64, heads=2, batch=2, length=32, device=device)
    if device == "cpu":
        return Size()
    return Size(width=1024, heads=16, batch=8, length=512, device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few rounds")
    parser.add_argument("--device", default="cpu", help="cuda: a larger model on the GPU")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/benchmarks.md")
    parser.add_argument("--without", action="append", default=[], choices=["peers", "compiled"])
    options = parser.parse_args()
    size = size_for(options.device, options.quick)
    rounds, cycles = (3, 2) if options.quick else (options.rounds, 4)
    folder = Path(tempfile.mkdtemp(prefix="tensortap-bench-"))
    where = f"{torch.get_num_threads()} threads" if size.device == "cpu" else size.device
    result: dict[str, Any] = {"size": asdict(size), "where": where}
    peers = "peers" not in options.without
    if not (options.json or options.markdown):
        print(
            f"{size.layers} layers, hidden {size.width}, {size.batch} x {size.length} tokens, "
            f"AdamW, {where}"
        )
    try:
        for kind in ("eager", "compiled"):
            if kind in options.without:
                continue
            print(f"{kind} …", file=sys.stderr, flush=True)
            half = measure(size, folder, rounds, cycles, kind == "compiled", peers)
            Wandb.finish()
            result[kind] = half
            if not options.json:
                print((markdown if options.markdown else plain_text)(kind, half), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result["left_out"] = left_out() if peers else []
    if options.json:
        print(json.dumps(result))
    elif not options.markdown:
        for line in result["left_out"]:
            print(f"left out: {line}")


if __name__ == "__main__":
    main()
