"""Large recordings compare in bounded memory: tensors are read from the maps, piece by piece."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tap
from forked_commands import Commands

_COMPARE = """
import sys, threading, tensortap as tap

def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024

small, reference, candidate = sys.argv[1:]
tap.compare(small, small)  # everything is loaded and warm
base, peak, done = anonymous(), [0], threading.Event()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous() - base)

thread = threading.Thread(target=watch)
thread.start()
result = tap.compare(reference, candidate)
done.set()
thread.join()
(row,) = result.layers
assert row.difference is not None and row.difference.percentiles_exact
print(row.verdict, row.transform, peak[0], sep="|")
"""


class Emit(nn.Module):
    def __init__(self, noise: float, turned: bool) -> None:
        super().__init__()
        self.noise, self.turned = noise, turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.noise * torch.randn(*x.shape[:2], 1)
        return y.transpose(1, 2).contiguous() if self.turned else y


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_tensors_take_less_memory_than_they_hold(
    tmp_path: Path, recorded, forked: Commands
) -> None:
    small = recorded(nn.Linear(2, 2), torch.ones(1, 2)).path
    torch.manual_seed(0)
    x = torch.randn(2, 2048, 8192)
    runs = {"a": (0.0, False), "plain": (1e-3, False), "turned": (1e-3, True)}
    for name, how in runs.items():
        model = nn.Sequential(Emit(*how))
        with tap.record(model, tmp_path / name, layers="leaves"):
            model(x)
    for name, transform in (("plain", ""), ("turned", "permute (0, 2, 1)")):
        done = forked.python(_COMPARE, small, tmp_path / "a", tmp_path / name)
        assert done.code == 0, done.stderr
        verdict, found, peak = done.stdout.strip().split("|")
        assert verdict == "diverged"
        assert found == transform
        assert int(peak) < 256, f"{peak} MB for {name}"  # what d alone would take in float64
