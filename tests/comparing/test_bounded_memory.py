"""Large recordings compare in bounded memory: tensors are read from the maps, piece by piece."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_RECORD = """
import sys, torch, tensortap as tap
from torch import nn

class Emit(nn.Module):
    def forward(self, noise):
        torch.manual_seed(0)
        x = torch.randn(2, 2048, 8192)
        x += noise * torch.randn(2, 2048, 1)
        return x.transpose(1, 2).contiguous() if sys.argv[3] == "turned" else x

model = nn.Sequential(Emit())
with tap.record(model, sys.argv[1], layers="leaves"):
    model(float(sys.argv[2]))
"""

_COMPARE = """
import sys, threading, time, tensortap as tap

def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024

small = sys.argv[3]
tap.compare(small, small)  # everything is loaded and warm
base, peak, done = anonymous(), [0], threading.Event()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous() - base)

thread = threading.Thread(target=watch)
thread.start()
result = tap.compare(sys.argv[1], sys.argv[2])
done.set()
thread.join()
(row,) = result.layers
assert row.difference is not None and row.difference.percentiles_exact
print(row.verdict, row.transform, peak[0], sep="|")
"""


def run(code: str, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_tensors_take_less_memory_than_they_hold(tmp_path: Path, recorded) -> None:
    import torch
    from torch import nn

    small = recorded(nn.Linear(2, 2), torch.ones(1, 2)).path
    run(_RECORD, tmp_path / "a", 0.0, "plain")
    for layout, transform in (("plain", ""), ("turned", "permute (0, 2, 1)")):
        run(_RECORD, tmp_path / layout, 1e-3, layout)
        verdict, found, peak = run(_COMPARE, tmp_path / "a", tmp_path / layout, small).split("|")
        assert verdict == "diverged"
        assert found == transform
        assert int(peak) < 256, f"{peak} MB for {layout}"  # what d alone would take in float64
