"""Replay and the ruler on a CUDA device; skipped without one."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensortap as tap
from tensortap.demo import BUG_LAYER, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def record(mode: str, device: str, path: Path) -> tap.Recording:
    target = build(mode=mode, seq_len=16, device=device)
    with tap.record(target.model, path, layers="all", inputs=True):
        target(target.batches[0])
    return tap.open(path)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "int8"])
def test_a_recording_of_the_cpu_is_replayed_on_the_gpu(mode: str, tmp_path: Path) -> None:
    run = record("fp32", "cpu", tmp_path / "run")
    target = build(mode=mode, seq_len=16, device="cuda")
    memory = [p.data_ptr() for p in target.model.parameters()]
    for layer in ("embedding", "blocks.4", "blocks.4.attention", "blocks.4.mlp.down", "head"):
        assert tap.replay(run, layer, target).same, layer
    assert memory == [p.data_ptr() for p in target.model.parameters()]


def test_a_script_runs_on_the_gpu(tmp_path: Path) -> None:
    run = record("fp32", "cuda", tmp_path / "run")
    found = tap.replay(run, BUG_LAYER, build(mode="bug", seq_len=16, device="cuda"))
    assert found.verdict == "diverged"
    script = found.to_script(tmp_path / "bug.py")[0]
    assert "DEVICE = 'cuda:0'" in script.read_text()
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "relative L2 error 0.02" in done.stdout
    block = tap.replay(run, "blocks.4", build(seq_len=16, device="cuda"))
    files = block.to_script(tmp_path / "block.py")  # the demo's classes are exported
    assert len(files) == 3
    done = subprocess.run([sys.executable, files[0]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_inside_a_model_on_the_gpu(tmp_path: Path) -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor, times: float) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * times

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Scaled(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, 3.0)

    model, x = Whole(), torch.randn(8, 64)
    with tap.record(model, tmp_path / "run", layers="all", inputs=True):
        model(x)
    state = torch.cuda.get_rng_state()
    found = tap.replay(tmp_path / "run", "layer", copy.deepcopy(model).cuda(), x.cuda())
    assert found.how == "inside"
    assert found.same
    assert torch.equal(state, torch.cuda.get_rng_state())


def test_a_truth_of_the_gpu(tmp_path: Path) -> None:
    runs = {mode: record(mode, "cuda", tmp_path / mode) for mode in ("fp64", "fp32", "bf16")}
    result = tap.compare(runs["bf16"], runs["fp32"], truth=runs["fp64"])
    assert "the reference may be the worse side" in result.sentence
    assert not result.warnings
