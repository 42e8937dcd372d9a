"""Summaries recorded on a CUDA device: right, safe from later writes, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.numerics import summarize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXACT = ("count", "nan", "posinf", "neginf", "zeros", "subnormal", "saturated", "min", "max")
LONG = 50_000_000  # cycles: some 25 ms in which the host runs far ahead


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Overwriting(nn.Module):
    """Writes over each layer's output as soon as the layer is done with it."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            x = y.tanh()
            self.write(y)
        return x


def _through_data(y: torch.Tensor) -> None:
    y.data.fill_(7.0)


def _in_place(y: torch.Tensor) -> None:
    y.mul_(0).add_(7.0)


@pytest.fixture
def stack() -> Stack:
    torch.manual_seed(0)
    return Stack().cuda().eval()


def _as_hooks_see_it(model: nn.Module, layers: list[str], *args: torch.Tensor) -> dict[str, Any]:
    """Summaries of clones, taken on the CPU."""
    seen: dict[str, Any] = {}
    modules = dict(model.named_modules())
    handles = [
        modules[name].register_forward_hook(
            lambda _, __, out, name=name: seen.__setitem__(name, out.detach().clone())
        )
        for name in layers
    ]
    with torch.no_grad():
        model(*args)
    for handle in handles:
        handle.remove()
    return {name: summarize(value.cpu()) for name, value in seen.items()}


def _agree(found: tap.Summary, expected: tap.Summary) -> None:
    for name in (
        "count",
        "nan",
        "posinf",
        "neginf",
        "zeros",
        "subnormal",
        "saturated",
        "min",
        "max",
    ):
        assert getattr(found, name) == getattr(expected, name), name
    scale = expected.absmax or 1.0
    for name in ("mean", "std", "rms"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-6 * scale), (
            name
        )
    assert found.l2 == pytest.approx(expected.l2, rel=1e-6)
    assert found.first == expected.first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_summaries_are_right_and_nobody_waits(
    tmp_path: Path, stack: Stack, dtype: torch.dtype
) -> None:
    stack.to(dtype)
    x = torch.randn(8, 32, 64, device="cuda", dtype=dtype)
    layers = [name for name, m in stack.named_modules() if isinstance(m, nn.Linear | Block)]
    expected = _as_hooks_see_it(stack, layers, x)
    plain = stack(x)
    with tap.record(stack, tmp_path / "run", layers=layers, keep="summary") as rec:
        with torch.no_grad():
            stack(x)  # the first call compiles kernels
            rec.step()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(3):
                out = stack(x)
                rec.step()
            torch.cuda.set_sync_debug_mode("default")
    assert rec.failure is None
    assert torch.equal(out, plain)
    run = tap.open(tmp_path / "run")
    assert len(run.records) == 4 * len(layers)
    assert run.layers == layers_in_order(stack, layers)
    for record in run.records:
        assert record.call == 0
        _agree(record.summary, expected[record.layer])


def layers_in_order(model: nn.Module, layers: list[str]) -> list[str]:
    """Children before their parents: the order in which calls finish."""
    order: list[str] = []
    handles = [
        module.register_forward_hook(lambda _, __, ___, name=name: order.append(name))
        for name, module in model.named_modules()
        if name in layers
    ]
    with torch.no_grad():
        model(torch.zeros(1, 1, 64, device="cuda", dtype=next(model.parameters()).dtype))
    for handle in handles:
        handle.remove()
    return order


@pytest.mark.parametrize("write", [_in_place, _through_data])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("keep", ["summary", "tensors", "sketch"])
def test_what_is_written_later_is_not_what_was_recorded(
    tmp_path: Path, write: Callable[[torch.Tensor], Any], inference: bool, keep: Any
) -> None:
    torch.manual_seed(0)
    model = Overwriting(write).cuda()
    x = torch.randn(64, 256, device="cuda")
    expected = _as_hooks_see_it(model, [f"layers.{i}" for i in range(6)], x)
    mode = torch.inference_mode if inference else torch.no_grad
    with tap.record(model, tmp_path / "run", layers="leaves", keep=keep) as rec, mode():
        model(x)
        rec.step()
        torch.cuda._sleep(LONG)
        model(x)
    run = tap.open(tmp_path / "run")
    assert len(run.records) == 12
    for record in run.records:
        _agree(record.summary, expected[record.layer])


def test_a_deferred_read_would_be_caught() -> None:
    """The check above can fail: a hook that keeps the tensor and reads it later."""
    torch.manual_seed(0)
    model = Overwriting(_in_place).cuda()
    x = torch.randn(64, 256, device="cuda")
    expected = _as_hooks_see_it(model, ["layers.0"], x)["layers.0"]
    kept: list[torch.Tensor] = []
    handle = model.layers[0].register_forward_hook(lambda _, __, out: kept.append(out.detach()))
    with torch.no_grad():
        model(x)
    handle.remove()
    with pytest.raises(AssertionError):
        _agree(summarize(kept[0].cpu()), expected)


def test_inputs_and_nested_outputs_come_by_the_table_too(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return x * 2, {"more": x[:, ::2] + 1}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.pair(x)
            return first.sum() + second["more"].sum()

    model, x = Outer().cuda(), torch.randn(16, 64, device="cuda")
    with tap.record(model, tmp_path / "run", layers="pair", inputs=True, keep="summary") as rec:
        model(x)
        rec.step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        model(x)
        torch.cuda.set_sync_debug_mode("default")
    assert rec.failure is None
    records = [r for r in tap.open(tmp_path / "run").records if r.batch == 1]
    found = {(r.port, r.leaf): r.summary for r in records}
    (given,) = [summary for (port, _), summary in found.items() if port == "input"]
    _agree(given, summarize(x.cpu()))
    _agree(found["output", "[0]"], summarize((x * 2).cpu()))
    _agree(found["output", "[1]['more']"], summarize((x[:, ::2] + 1).cpu()))


def test_more_rows_than_the_table_holds(tmp_path: Path, stack: Stack) -> None:
    x = torch.randn(2, 4, 64, device="cuda")
    with tap.record(stack, tmp_path / "run", layers="type:Linear", keep="summary") as rec:
        with torch.no_grad():
            for i in range(200):
                stack(x + i)
                rec.step()
    run = tap.open(tmp_path / "run")
    assert len(run.records) == 200 * 8
    assert sorted({r.batch for r in run.records}) == list(range(200))
    at = {r.batch: r.summary.mean for r in run.records if r.layer == "layers.0.up"}
    with torch.no_grad():
        for i in (0, 100, 199):
            expected = stack.layers[0].up(stack.layers[0].norm(x + i)).mean().item()
            assert at[i] == pytest.approx(expected, abs=1e-5)


def test_shapes_and_streams_may_change(tmp_path: Path, stack: Stack) -> None:
    sizes = (4, 9, 4, 1, 9)
    given = [torch.randn(2, n, 64, device="cuda") for n in sizes]
    side = torch.cuda.Stream()
    with tap.record(stack, tmp_path / "run", layers="blocks", keep="summary") as rec:
        with torch.no_grad():
            for i, x in enumerate(given):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side if i % 2 else torch.cuda.current_stream()):
                    stack(x)
                rec.step()
    torch.cuda.synchronize()
    run = tap.open(tmp_path / "run")
    for i, x in enumerate(given):
        expected = _as_hooks_see_it(stack, ["layers.0", "layers.3"], x)
        for record in run.records:
            if record.batch == i and record.layer in expected:
                assert record.shape == tuple(x.shape)
                _agree(record.summary, expected[record.layer])


def test_everything_is_on_disk_after_a_flush(tmp_path: Path, stack: Stack) -> None:
    x = torch.randn(2, 4, 64, device="cuda")
    with tap.record(stack, tmp_path / "run", layers="blocks", keep="summary") as rec:
        with torch.no_grad():
            stack(x)
        rec.flush()
        assert len(tap.open(tmp_path / "run", partial=True).records) == 4


def test_the_inputs_are_known_without_waiting(tmp_path: Path, stack: Stack) -> None:
    x = torch.randn(2, 4, 64)
    with tap.record(stack, tmp_path / "gpu", layers="blocks", keep="summary"):
        stack(x.cuda())
    cpu = Stack().eval()
    with tap.record(cpu, tmp_path / "cpu", layers="blocks", keep="summary"):
        cpu(x)
    ours = tap.open(tmp_path / "gpu").manifest.inputs
    assert ours["digest"] == tap.open(tmp_path / "cpu").manifest.inputs["digest"]
    assert ours["digest"] is not None


@pytest.mark.parametrize("keep", ["summary", "sketch", "tensors"])
def test_a_default_device_changes_nothing(tmp_path: Path, stack: Stack, keep: Any) -> None:
    x = torch.randn(2, 4, 64, device="cuda")
    expected = _as_hooks_see_it(stack, ["layers.0", "layers.3"], x)
    torch.set_default_device("cuda")
    try:
        with tap.record(stack, tmp_path / "run", layers="blocks", keep=keep) as rec:
            with torch.no_grad():
                stack(x)
    finally:
        torch.set_default_device(None)
    assert rec.failure is None
    run = tap.open(tmp_path / "run")
    assert len(run.records) == 4
    for name, summary in expected.items():
        _agree(run[name].summary, summary)


def test_threads_with_shapes_of_their_own(tmp_path: Path, stack: Stack) -> None:
    import threading

    given = [torch.randn(2, n, 64, device="cuda") for n in (3, 17, 40)]
    expected = [_as_hooks_see_it(stack, ["layers.0"], x)["layers.0"] for x in given]
    with tap.record(stack, tmp_path / "run", layers="layers.0", keep="summary") as rec:

        def work(x: torch.Tensor) -> None:
            with torch.no_grad():
                for _ in range(50):
                    stack(x)

        threads = [threading.Thread(target=work, args=(x,)) for x in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert rec.failure is None
    records = tap.open(tmp_path / "run").records
    assert sorted(record.call for record in records) == list(range(150))
    for record in records:
        _agree(record.summary, expected[[3, 17, 40].index(record.shape[1])])
