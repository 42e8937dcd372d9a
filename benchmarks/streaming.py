"""What comparing while running costs: `python benchmarks/streaming.py`.

The 12-layer model of benchmarks/recording.py, every module heard, one batch: a recording against
another that agrees, that differs in the second half, and that is stopped at the first divergence;
beside a recording in full, one of sketches, and the plain forward. Opening and closing are part of
every timing, since a stream opens a reference too. One run, interleaved, medians of ratios. Then
the bytes on disk of each.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tensortap as tap
from recording import Model
from timing import interleave


def measure(layers: int, width: int, heads: int, length: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model(layers, width, heads).eval()
    broken = copy.deepcopy(model)
    broken.blocks[layers // 2].down.weight.data.mul_(1.02)
    ids = torch.randint(0, 1000, (1, length))
    folder = Path(tempfile.mkdtemp(prefix="tensortap-bench-"))
    options: dict[str, Any] = {"layers": "all", "overwrite": True}
    with tap.record(model, folder / "reference", **options):
        model(ids)
    tallies: dict[str, tap.Recorder] = {}

    def recording(name: str, run: Any, **more: Any) -> Callable[[], None]:
        def go() -> None:
            with tap.record(run, folder / name, **options, **more) as recorder:
                run(ids)
            assert recorder.failure is None
            tallies[name] = recorder

        return go

    against = {"against": folder / "reference"}
    variants: dict[str, Callable[[], object]] = {
        "plain": lambda: model(ids),
        "plain again": lambda: model(ids),
        "in full": recording("in full", broken),
        "sketch": recording("sketch", broken, keep="sketch"),
        "against, agrees": recording("against, agrees", model, **against),
        "against, inputs too": recording("against, inputs too", model, inputs=True, **against),
        "against, half differs": recording("against, half differs", broken, **against),
        "against, stopped": recording("against, stopped", broken, stop=True, **against),
        "afterwards": lambda: tap.compare(folder / "reference", folder / "in full"),
    }
    with torch.inference_mode():
        timings = interleave(variants, rounds=rounds, warmup=1, rest=0.3)
    names = [name for name in variants if name != "plain"]
    result = {
        "layers": layers,
        "hidden": width,
        "length": length,
        "plain_ms": timings.median("plain") * 1e3,
        "ratios": {
            name: [timings.ratio(name, "plain"), *timings.spread(name, "plain")] for name in names
        },
        "of_in_full": {
            name: timings.ratio(name, "in full") for name in names if name.startswith("against")
        },
        "nbytes": {name: tap.open(folder / name).nbytes for name in tallies},
        "records": {name: len(tap.open(folder / name).records) for name in tallies},
    }
    shutil.rmtree(folder)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for size in [(12, 768, 12, 128), (12, 768, 12, 1024)]:
        result = measure(*size, options.rounds)
        if options.json:
            print(json.dumps(result))
            continue
        layers, width, _, length = size
        print(
            f"\n{layers} layers, hidden {width}, {length} tokens, one batch: plain forward "
            f"{result['plain_ms']:.0f} ms"
        )
        for name, (ratio, low, high) in result["ratios"].items():
            full = result["of_in_full"].get(name)
            beside = f"   {full:.2f} of a recording in full" if full is not None else ""
            print(f"  {name:24s} {ratio:6.2f}   (quartiles {low:.2f} to {high:.2f}){beside}")
        for name, nbytes in result["nbytes"].items():
            records = result["records"][name]
            print(f"  {name:24s} {nbytes / 1e6:9.3f} MB on disk, {records} records")


if __name__ == "__main__":
    main()
