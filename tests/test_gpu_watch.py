"""Watching on a GPU: nobody waits for it, its memory does not grow, and the numbers are right."""

from __future__ import annotations

import copy
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(**options: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(**options).cuda()


def batches(count: int, width: int = 32) -> list[torch.Tensor]:
    made = torch.Generator(device="cuda").manual_seed(1)
    return [torch.randn(8, width, device="cuda", generator=made) for _ in range(count)]


def train(model: nn.Module, data: list[torch.Tensor], run: Any = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in data:
        optimizer.zero_grad()
        run = model if run is None else run
        run(batch).square().mean().backward()
        optimizer.step()


def truth(model: Stack, data: list[torch.Tensor]) -> dict[tuple[str, str, int], Any]:
    """Outputs and their gradients by hand, on a copy that is not watched."""
    model = copy.deepcopy(model)
    found: dict[tuple[str, str, int], Any] = {}
    step = [0]
    for index, block in enumerate(model.blocks):

        def hook(module: Any, args: Any, output: torch.Tensor, index: int = index) -> None:
            now = step[0]
            found[(f"blocks.{index}", "output", now)] = tap.summarize(output.detach().clone())

            def grad_hook(grad: torch.Tensor) -> None:
                found[(f"blocks.{index}", "grad_output", now)] = tap.summarize(grad.clone())

            output.register_hook(grad_hook)

        block.register_forward_hook(hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in data:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        step[0] += 1
    return found


def recorded(path: Path) -> dict[tuple[str, str, int], Any]:
    return {
        (record.layer, record.port, record.batch): record.summary
        for record in tap.open(path).records
        if record.port in ("output", "grad_output")
    }


@pytest.mark.parametrize("mode", ["eager", "compiled", "cuda graphs"])
def test_rows_are_those_of_the_tensors(tmp_path: Path, mode: str) -> None:
    model, data = stack(), batches(6)
    wanted = truth(model, data)
    with tap.watch(model, tmp_path / "w", every=1, updates=True) as watch:
        run = None
        if mode != "eager":
            how = "reduce-overhead" if mode == "cuda graphs" else None
            run = torch.compile(model, fullgraph=True, mode=how)
        train(model, data, run)
    assert watch.failure is None
    found = recorded(tmp_path / "w")
    assert found.keys() == wanted.keys()
    for key, summary in wanted.items():
        got = found[key]
        assert got.count == summary.count, key
        assert got.l2 == pytest.approx(summary.l2, rel=1e-3), key
        assert got.absmax == pytest.approx(summary.absmax, rel=1e-3, abs=1e-6), key
        assert got.std == pytest.approx(summary.std, rel=1e-3, abs=1e-6), key


def test_watching_changes_no_bit(tmp_path: Path) -> None:
    data = batches(4)
    plain, watched = stack(), stack()
    train(plain, data)
    with tap.watch(watched, tmp_path / "w", every=2, updates=True):
        train(watched, data)
    for left, right in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(left, right)


def test_nobody_waits_for_the_device(tmp_path: Path) -> None:
    model, data = stack(), batches(5)
    train(model, data)  # whatever torch does once
    with tap.watch(model, tmp_path / "w", every=1, updates=True) as watch:
        train(model, data)  # whatever we do once: kernels, rows
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(model, data)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert watch.failure is None
    assert max(batch for _, _, batch in recorded(tmp_path / "w")) == 9


def test_memory_does_not_grow(tmp_path: Path) -> None:
    model, data = stack(width=256), batches(1, 256)
    with tap.watch(model, tmp_path / "w", every=1, params=True, updates=True):
        train(model, data * 10)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        train(model, data * 100)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_the_first_bad_layer_is_named_at_its_step(tmp_path: Path) -> None:
    model, data = stack(), batches(8)
    data[5][0, 0] = float("inf")
    with (
        pytest.warns(tap.TapWarning, match=r"Step 5.*'blocks\.0'"),
        tap.watch(model, tmp_path / "w", every=100, ring=2) as watch,
    ):
        train(model, data)
        watch.flush()
    assert watch.alarms[0].batch == 5 and watch.alarms[0].layer == "blocks.0"
    assert {batch for _, _, batch in recorded(tmp_path / "w")} >= {3, 4, 5}


def test_a_rule_that_raises_does_so_before_the_weights_are_touched(tmp_path: Path) -> None:
    model, data = stack(), batches(4)
    data[2][0, 0] = float("nan")
    with (
        pytest.raises(tap.WatchAlarm, match="Step 2"),
        tap.watch(model, tmp_path / "w", rules={"nan": "raise"}),
    ):
        train(model, data)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("compiled", [False, True])
def test_what_it_costs(tmp_path: Path, compiled: bool, capsys: Any) -> None:
    """Prints ratios; a time is no test."""
    width, data = 1024, torch.randn(16, 512, 1024, device="cuda")
    options: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "again": None,
        "outputs": {"grads": False, "params": False},
        "outputs and gradients": {"params": False, "every": 10},
        "all, every 10": {"updates": True, "every": 10},
    }
    steps = {}
    for name, chosen in options.items():
        model = stack(blocks=12, width=width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if chosen is not None:
            tap.watch(model, tmp_path / name.replace(" ", "_"), **{"every": 1, **chosen})
        run = torch.compile(model, fullgraph=True) if compiled else model

        def step(run: Any = run, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(data).square().mean()
            loss.backward()
            optimizer.step()

        steps[name] = step
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(25):
        for name, step in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            if turn >= 5:
                times[name].append(time.perf_counter() - start)
    with capsys.disabled():
        base = times["plain"]
        for name, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
            print(f"\n{'compiled' if compiled else 'eager'} {name}: {ratio:.3f} of a step", end="")
