"""Does a GPU compare two recordings quicker than the CPU?

    python benchmarks/comparing_device.py [--layers N] [--megabytes M ...] [--device D] [--json F]

Two recordings of N layers of M MB in bfloat16, the second off by noise, in /dev/shm where there is
one, so that no disk is measured. "compare" is `tap.compare` in this process, the best of a few;
"floor" has a third run to read; "command line" is `tensortap compare` with all that a process needs
to start: torch, the device, the kernels. "4 threads" is what a small machine has beside its GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import tensortap as tap

WIDTH = 3072


def record(folder: Path, layers: int, megabytes: float, device: str) -> tuple[Path, Path, float]:
    """Two recordings, a floor beside them, and how many GB the two hold together."""
    rows = round(megabytes * 1e6 / 2 / WIDTH)
    base, noise = (torch.randn(rows, WIDTH, device=device) for _ in range(2))
    model = nn.ModuleList(nn.Identity() for _ in range(layers))
    for name, share in (("a", 0.0), ("b", 0.01), ("c", -0.01)):
        with tap.record(model, folder / name, layers="leaves"):
            for number, layer in enumerate(model):
                layer((base * (1 + number / 64) + share * noise).to(torch.bfloat16).cpu())
    return folder / "a", folder / "b", 4 * layers * rows * WIDTH / 1e9


def best(call: Callable[[], object], rounds: int = 3) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def command(left: Path, right: Path, *options: str) -> float:
    words = [sys.executable, "-m", "tensortap", "compare", str(left), str(right), *options]
    start = time.perf_counter()
    ran = subprocess.run(words, capture_output=True, text=True)
    if ran.returncode not in (0, 1):
        raise SystemExit(ran.stderr)
    return time.perf_counter() - start


def measure(layers: int, megabytes: float, device: str, rounds: int) -> dict[str, float]:
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as scratch:
        left, right, size = record(Path(scratch), layers, megabytes, device)
        found = {"layers": layers, "megabytes": megabytes, "gigabytes": size}
        tap.compare(left, right, device=device)  # starts the device, compiles the kernels
        found["device"] = best(lambda: tap.compare(left, right, device=device), rounds)
        found["cpu"] = best(lambda: tap.compare(left, right), rounds)
        threads = torch.get_num_threads()
        found["threads"] = threads
        torch.set_num_threads(min(4, threads))
        found["cpu_4"] = best(lambda: tap.compare(left, right), max(1, rounds - 1))
        torch.set_num_threads(threads)
        floor = left.parent / "c"
        found["floor_device"] = best(
            lambda: tap.compare(left, right, floor=floor, device=device), 2
        )
        found["floor_cpu"] = best(lambda: tap.compare(left, right, floor=floor), 2)
        found["command_device"] = command(left, right, "--device", device)
        found["command_cpu"] = command(left, right)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=62)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[12.6, 100.0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for megabytes in options.megabytes:
        found = measure(options.layers, megabytes, options.device, options.rounds)
        results.append(found)
        cpu, on = found["cpu"], found["device"]
        print(f"{options.layers} layers of {megabytes:g} MB, {found['gigabytes']:.1f} GB in all")
        print(f"  compare, {found['threads']} threads  {cpu:7.3f} s")
        print(f"  compare, 4 threads   {found['cpu_4']:7.3f} s")
        print(
            f"  compare, {options.device:<10}  {on:7.3f} s, {found['gigabytes'] / on:.1f} GB/s: "
            f"{cpu / on:.2f} times as quick, {found['cpu_4'] / on:.2f} of 4 threads"
        )
        print(
            f"  with a floor run     {found['floor_cpu']:7.3f} s, {options.device} "
            f"{found['floor_device']:.3f} s: {found['floor_cpu'] / found['floor_device']:.2f}"
        )
        print(
            f"  command line         {found['command_cpu']:7.2f} s, with --device "
            f"{found['command_device']:.2f} s"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
