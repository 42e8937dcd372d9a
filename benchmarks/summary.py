"""How fast is a summary? Against a plain read of the same bytes, and against torch's own ways.

    python benchmarks/summary.py [--rounds N] [--naive-rounds N] [--dtypes float32,bfloat16]

"read" is the core's OR-reduction at full speed: what any pass over the bytes must cost. "six" are
the six statistics of the documents (mean, std, min, max, any NaN, any Inf), "ten" what a summary
holds without its counts of subnormal and saturated values. They are so slow that they get fewer
rounds, against a read in the same rounds.
"""

from __future__ import annotations

import argparse
import sys
from array import array

import numpy as np
import torch

from tensortap.numerics.histogram import BUCKETS
from tensortap.numerics.native import core, missing, summarize_into
from tensortap.numerics.summary import WIDTH
from timing import interleave

MEGABYTES = (1, 16, 256)


def six(x: torch.Tensor) -> list[float]:
    return [
        x.mean().item(),
        x.std().item(),
        x.min().item(),
        x.max().item(),
        torch.isnan(x).any().item(),
        torch.isinf(x).any().item(),
    ]


def ten(x: torch.Tensor) -> list[float]:
    return [
        x.mean().item(),
        x.std().item(),
        x.min().item(),
        x.max().item(),
        x.abs().max().item(),
        x.norm().item(),
        torch.isnan(x).sum().item(),
        torch.isinf(x).sum().item(),
        (x == 0).sum().item(),
        *x.flatten()[:10].tolist(),
    ]


def measure(megabytes: int, dtype: torch.dtype, rounds: int, naive_rounds: int) -> str:
    assert core is not None
    nbytes = megabytes << 20
    x = torch.randn(nbytes // torch.empty(0, dtype=dtype).element_size()).to(dtype)
    row = array("d", bytes(8 * WIDTH))
    counts = np.zeros(BUCKETS, dtype=np.int64)
    out, hist, ptr = row.buffer_info()[0], counts.ctypes.data, x.data_ptr()
    fast = {
        "read": lambda: core.plain_read(ptr, nbytes),
        "summary": lambda: summarize_into(x, out),
        "histogram": lambda: summarize_into(x, out, hist),
    }
    naive = {"read": fast["read"], "six": lambda: six(x), "ten": lambda: ten(x)}
    quick = interleave(fast, rounds=rounds, rest=0.002, repeat=max(1, 32 // megabytes))
    slow = interleave(naive, rounds=naive_rounds, warmup=1, rest=0.002)
    cells = [f"{megabytes:>4} MB {str(dtype).removeprefix('torch.'):<9}"]
    for name, timings in [
        ("read", quick),
        ("summary", quick),
        ("histogram", quick),
        ("six", slow),
        ("ten", slow),
    ]:
        speed = nbytes / timings.median(name) / 1e9
        if name == "read":
            cells.append(f"{speed:8.2f}       ")
            continue
        low, high = timings.spread(name, "read")
        ratio = timings.ratio(name, "read")
        cells.append(f"{speed:8.2f} {ratio:7.2f} ({low:.2f}-{high:.2f})")
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="Summary speed against a plain read.")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--naive-rounds", type=int, default=3)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--megabytes", default=",".join(map(str, MEGABYTES)))
    options = parser.parse_args()
    if core is None:
        sys.exit(f"There is nothing to measure: {missing}.")
    torch.manual_seed(0)
    print(f"isa {core.isa()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("GB/s, and time as a multiple of the plain read in the same rounds (quartiles)")
    print(
        "size, dtype       |    read         | summary | with histogram | six, torch | ten, torch"
    )
    for name in options.dtypes.split(","):
        for megabytes in map(int, options.megabytes.split(",")):
            dtype = getattr(torch, name)
            print(measure(megabytes, dtype, options.rounds, options.naive_rounds), flush=True)


if __name__ == "__main__":
    main()
