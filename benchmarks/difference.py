"""How long the difference of two tensors takes, as a multiple of reading both once.

    PYTHONPATH=src python benchmarks/difference.py

"sums" is the difference without percentiles, "all" with them. `torch` is the straightforward way,
each metric by its formula on float32 and `np.percentile` where torch.quantile stops (16 M values);
`numpy` the same in numpy. Those are so slow that they get fewer rounds, against a read in the same
rounds.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch

from tensortap.numerics import difference
from tensortap.numerics.native import core, missing
from timing import Timings, interleave

PAIRS = ("float32,float32", "bfloat16,bfloat16", "float32,bfloat16", "float16,float16")
PERCENTS = (50, 90, 95, 99)


def by_torch(r: torch.Tensor, c: torch.Tensor) -> list[float]:
    r, c = r.float().flatten(), c.float().flatten()
    d = c - r
    distances = d.abs()
    mse = (d**2).mean()
    results = [
        d.mean(),
        d.std(),
        distances.mean(),
        distances.max(),
        distances.argmax(),
        mse,
        mse.sqrt(),
        mse / (r**2).mean(),
        distances.mean() / r.abs().mean(),
        (distances / (r.abs() + 1e-8)).max(),
        (distances / (r.abs() + 1e-8)).mean(),
        torch.nn.functional.cosine_similarity(r, c, dim=0),
        torch.corrcoef(torch.stack((r, c)))[0, 1],
        10 * torch.log10((r**2).mean() / mse),
        1 - 2 * (r @ c) / ((r @ r) + (c @ c)),
        (~torch.isclose(c, r)).sum(),
        torch.isfinite(r).sum(),
        torch.isfinite(c).sum(),
    ]
    percentiles = np.percentile(distances.numpy(), PERCENTS)
    return [float(value) for value in (*results, *percentiles)]


def by_numpy(r: np.ndarray, c: np.ndarray) -> list[float]:
    d = c - r
    distances = np.abs(d)
    mse = np.mean(d**2)
    results = [
        d.mean(),
        d.std(),
        distances.mean(),
        distances.max(),
        distances.argmax(),
        mse,
        np.sqrt(mse),
        mse / np.mean(r**2),
        distances.mean() / np.abs(r).mean(),
        (distances / (np.abs(r) + 1e-8)).max(),
        (distances / (np.abs(r) + 1e-8)).mean(),
        np.dot(r, c) / (np.linalg.norm(r) * np.linalg.norm(c)),
        np.corrcoef(r, c)[0, 1],
        10 * np.log10(np.mean(r**2) / mse),
        1 - 2 * np.dot(r, c) / (np.dot(r, r) + np.dot(c, c)),
        (~np.isclose(c, r)).sum(),
        np.isfinite(r).sum(),
        np.isfinite(c).sum(),
    ]
    return [float(value) for value in (*results, *np.percentile(distances, PERCENTS))]


def measure(megabytes: int, names: str, rounds: int, naive_rounds: int) -> str:
    assert core is not None
    first, second = (getattr(torch, name) for name in names.split(","))
    sizes = [torch.empty(0, dtype=dtype).element_size() for dtype in (first, second)]
    n = (megabytes << 20) // max(sizes)
    values = torch.randn(n)
    r, c = values.to(first), (values + 1e-2 * torch.randn(n)).to(second)
    del values

    def read() -> None:
        core.plain_read(r.data_ptr(), n * sizes[0])
        core.plain_read(c.data_ptr(), n * sizes[1])

    fast = {
        "read": read,
        "sums": lambda: difference(r, c, percentiles=False),
        "all": lambda: difference(r, c),
    }
    quick = interleave(fast, rounds=rounds, rest=0.002)
    cells = [f"{megabytes:>4} MB {names:<19}"]
    cells.append(f"{n * sum(sizes) / quick.median('read') / 1e9:6.1f}")
    cells += [_cell(quick, name, "read") for name in ("sums", "all")]
    if naive_rounds:
        naive = {"read": read, "all": fast["all"], "torch": lambda: by_torch(r, c)}
        if first == second == torch.float32:
            left, right = r.numpy(), c.numpy()
            naive["numpy"] = lambda: by_numpy(left, right)
        slow = interleave(naive, rounds=naive_rounds, warmup=1, rest=0.002)
        cells += [_cell(slow, name, "all") for name in ("torch", "numpy") if name in naive]
    return " | ".join(cells)


def _cell(timings: Timings, name: str, base: str) -> str:
    low, high = timings.spread(name, base)
    return f"{timings.ratio(name, base):7.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description="Difference speed against a plain read of both.")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--naive-rounds", type=int, default=3)
    parser.add_argument("--pairs", default=";".join(PAIRS))
    parser.add_argument("--megabytes", default="256")
    options = parser.parse_args()
    if core is None:
        sys.exit(f"There is nothing to measure: {missing}.")
    torch.manual_seed(0)
    print(f"isa {core.isa()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("the read in GB/s; sums and all as multiples of it; torch and numpy as multiples of all")
    print("size, dtypes                | read   | sums | all | torch / all | numpy / all")
    for names in options.pairs.split(";"):
        for megabytes in map(int, options.megabytes.split(",")):
            print(measure(megabytes, names, options.rounds, options.naive_rounds), flush=True)


if __name__ == "__main__":
    main()
