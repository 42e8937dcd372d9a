"""Tensors from a CUDA device to disk, without waiting in the forward; skipped without a device."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from support import Net
from tensortap.recording import Manifest, Row, Writer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BUSY = 1_500_000_000  # cycles that the device sleeps: most of a second, so the host is far ahead
SPELLS = (BUSY, 4 * BUSY, 12 * BUSY)  # the longer ones for a host that is slow today
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """torch raises when the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def asleep_behind(act: Callable[[], Any], cycles: int) -> bool:
    """Whether the device still sleeps when something is done that was begun with it.

    Who waits for the device does so however long it sleeps; a host that is merely slow, because
    others want its processor too, is done before the end of a longer spell. So one of `SPELLS` is
    enough, if each begins as the first did.
    """
    torch.cuda.synchronize()
    awake = torch.cuda.Event()
    torch.cuda._sleep(cycles)
    awake.record()
    act()
    return not awake.query()


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return values.view(dtype).view(shape)


def add(writer: Writer, order: int, tensor: torch.Tensor, layer: str = "") -> None:
    writer.add(Row(layer or f"l{order}", "output", order=order, device="cuda:0"), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("histograms", [False, True])
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype, histograms) -> None:
    torch.manual_seed(0)
    shapes = [(), (0,), (1,), (3, 5), (2, 0, 4), (7, 11, 13), (300, 301)]
    tensors = [sample(dtype, shape) for shape in shapes]
    tensors.append(tensors[-1].t())
    writer = Writer(str(tmp_path / "r"), Manifest(), histograms=histograms)
    there = [tensor.cuda() for tensor in tensors]
    there[-1] = there[-2].t()
    for order, tensor in enumerate(there):
        add(writer, order, tensor)
    writer.close()
    assert writer.failure is None and not writer.manifest.notes
    run = tap.open(tmp_path / "r")
    for order, tensor in enumerate(tensors):
        back = run[f"l{order}"].output
        assert (back.dtype, back.shape) == (dtype, tensor.shape)
        assert raw(back) == raw(tensor)
        found, expected = run[f"l{order}"].records[0].summary, tap.summarize(tensor)
        counted = ("count", "nan", "posinf", "zeros", "subnormal", "saturated", "min", "max")
        for name in counted:
            assert getattr(found, name) == pytest.approx(getattr(expected, name), nan_ok=True), name
        assert (found.histogram is not None) == histograms


def test_views_are_stored_as_they_read(tmp_path) -> None:
    writer = Writer(str(tmp_path / "r"), Manifest())
    x = torch.randn(5, 6, dtype=torch.complex64, device="cuda")
    images = torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last)
    views = [x.t(), x.conj(), x.imag, x.conj().imag, x[1:, ::2], images, x[2, 3], x.expand(3, 5, 6)]
    for order, view in enumerate(views):
        add(writer, order, view)
    writer.close()
    run = tap.open(tmp_path / "r")
    for order, view in enumerate(views):
        assert torch.equal(run[f"l{order}"].output, view.resolve_conj().resolve_neg().cpu())


def test_a_forward_waits_for_nothing(tmp_path) -> None:
    net = Net(width=64, blocks=6).eval().cuda()
    ids = torch.randint(0, 16, (4, 256), device="cuda")
    kept: dict[str, torch.Tensor] = {}
    for name, module in net.named_modules():
        module.register_forward_hook(lambda m, a, out, n=name: kept.__setitem__(n, out.clone()))

    def forward() -> None:
        with no_waiting():
            net(ids)

    def recorded(cycles: int) -> bool:
        path = tmp_path / str(cycles)
        with torch.no_grad(), tap.record(net, path, layers="all", inputs=True) as rec:
            net(ids)
            rec.flush()  # kernels are compiled, memory is pinned
            rec.step()
            asleep = asleep_behind(forward, cycles)
        assert rec.failure is None
        run = tap.open(path)
        for name in run.layers:
            for record in run[name].port("output"):
                assert torch.equal(record.tensor(), kept[name].cpu()), name
        return asleep

    assert any(map(recorded, SPELLS)), "somebody waited until the device was done"


def test_the_test_above_would_catch_a_hook_that_waits() -> None:
    net = Net(width=64).eval().cuda()
    ids = torch.randint(0, 16, (4, 256), device="cuda")
    net.head.register_forward_hook(lambda m, a, out: out.cpu() and None)
    with torch.no_grad(), no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        net(ids)


def test_a_wait_is_told_from_a_slow_host() -> None:
    short = BUSY // 50
    assert not any(asleep_behind(torch.cuda.synchronize, n) for n in (short, 2 * short))
    assert any(asleep_behind(lambda: time.sleep(0.1), n) for n in (short, *SPELLS))


def test_one_layers_output_and_the_nexts_input_are_stored_once(tmp_path) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).cuda()
    x = torch.randn(16, 64, device="cuda")
    with torch.no_grad(), tap.record(model, tmp_path / "r", layers="leaves", inputs=True) as rec:
        rec.run(x)
    assert rec.failure is None
    run = tap.open(tmp_path / "r")
    assert len(run.records) == 16
    assert len({record.tensor_id for record in run.records}) == 9
    for i in range(7):
        assert torch.equal(run[str(i)].output, run[str(i + 1)].port("input")[0].tensor())


# In-place safety: the values are those at the hook, whatever is written behind it.


class Overwriting(nn.Module):
    """Each layer's output is overwritten right behind it, while the next goes on with a copy."""

    def __init__(self, spoil: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(12)])
        self.spoil = spoil

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            x = y.clone()
            self.spoil(y)
        return x


SPOILERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda y: y.mul_(0),
    "data": lambda y: y.data.fill_(7),
    "out": lambda y: torch.neg(y.detach(), out=y.detach()),
}


@contextmanager
def mode(name: str) -> Iterator[None]:
    with torch.inference_mode(name == "inference"), torch.set_grad_enabled(name == "grad"):
        yield


def at_the_hook(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """What a hook sees that waits for the device and copies."""
    seen: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda m, a, out: seen.append(out.detach().cpu().clone()))
        for layer in model.layers
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize("where", ["no_grad", "inference", "grad"])
def test_what_is_overwritten_behind_the_hook_is_recorded_as_it_was(
    tmp_path, spoiler, where
) -> None:
    torch.manual_seed(0)
    model = Overwriting(SPOILERS[spoiler]).cuda().requires_grad_(False)
    x = torch.randn(64, 256, device="cuda")
    with mode(where):
        expected = at_the_hook(model, x)
        with tap.record(model, tmp_path / "r", layers="layers.*", budget=8 << 20) as rec:
            model(x)
            for _ in range(20):  # more than the pool holds: regions are used again
                rec.step()
                torch.cuda._sleep(BUSY // 100)
                with no_waiting():
                    model(x)
    assert rec.failure is None
    run = tap.open(tmp_path / "r")
    for i, value in enumerate(expected):
        records = run[f"layers.{i}"].records
        assert len(records) == 21
        for record in records:
            assert torch.equal(record.tensor(), value)
            assert record.summary.mean == pytest.approx(float(value.double().mean()), abs=1e-6)


@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize("reader", ["at the end", "on a side stream"])
def test_the_test_above_would_catch_a_deferred_reader(spoiler, reader) -> None:
    torch.manual_seed(0)
    model = Overwriting(SPOILERS[spoiler]).cuda().requires_grad_(False)
    x = torch.randn(64, 256, device="cuda")
    expected = at_the_hook(model, x)
    side = torch.cuda.Stream()
    seen: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []

    def later(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        kept.append(out)
        if reader == "on a side stream":
            with torch.cuda.stream(side):
                host = torch.empty(out.shape, pin_memory=True)
                seen.append(host.copy_(out, non_blocking=True))

    for layer in model.layers:
        layer.register_forward_hook(later)
    for cycles in SPELLS:
        seen.clear()
        kept.clear()
        torch.cuda._sleep(cycles)
        model(x)
        torch.cuda.synchronize()
        late = [tensor.cpu() for tensor in kept] if reader == "at the end" else seen
        right = [torch.equal(a, b) for a, b in zip(late, expected, strict=True)]
        if not any(right):  # else the host was too slow for a side stream to be early
            break
    assert not any(right), "a reader that comes late was right: the check shows nothing"


def test_streams_at_once_each_keep_their_own_values(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).cuda()
    streams = [torch.cuda.Stream() for _ in range(3)]
    xs = [torch.randn(512, 256, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    with torch.no_grad():
        expected = [[layer.cpu() for layer in outputs(model, x)] for x in xs]
        with tap.record(model, tmp_path / "r", layers="leaves", budget=16 << 20) as rec:
            for _ in range(5):
                for stream, x in zip(streams, xs, strict=True):
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(BUSY // 200)
                        model(x)
                    rec.step()
    assert rec.failure is None
    run = tap.open(tmp_path / "r")
    for i in range(6):
        for step, record in enumerate(run[str(i)].records):
            assert torch.equal(record.tensor(), expected[step % 3][i]), (i, step)


def outputs(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for layer in model:
        x = layer(x)
        found.append(x.clone())
    return found


def test_what_a_model_computes_and_how_it_trains_is_as_without_us(tmp_path) -> None:
    torch.manual_seed(0)
    net = Net(width=64).train().cuda()
    ids = torch.arange(12, device="cuda").view(2, 6)

    def step() -> list[torch.Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        out = net(ids)
        out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in net.parameters())]

    plain = step()
    with tap.record(net, tmp_path / "r", layers="all", inputs=True, grads=True) as rec:
        during = step()
    assert rec.failure is None
    assert all(torch.equal(a, b) for a, b in zip(plain, during, strict=True))
    run = tap.open(tmp_path / "r")
    assert len(run["head"].port("grad_output")) == 1


# Bounds.


def test_the_device_holds_no_more_than_the_pool_and_gives_it_back(tmp_path) -> None:
    budget = 64 << 20
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    x = torch.randn(1024, 1024, device="cuda")
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(x)
        plain, before = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        with tap.record(model, tmp_path / "r", layers="leaves", budget=budget) as rec:
            for _ in range(50):
                model(x)
                rec.step()
                assert rec._writer._arena.owned <= budget // 2
            kernels = 32 << 20  # room of Triton's for partial sums, kept once a process
            assert torch.cuda.max_memory_allocated() - plain <= budget // 4 + kernels
    assert rec.failure is None
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= kernels
    run = tap.open(tmp_path / "r")
    assert sum(record.nbytes for record in run.records) >= 20 * budget
    assert len({record.tensor_id for record in run.records}) == 8


def test_a_slow_disk_holds_the_model_up_and_nothing_is_lost(tmp_path, monkeypatch) -> None:
    from tensortap.recording.output import SegmentOutput

    written = SegmentOutput._write

    def slowly(self, fd, offset, data) -> None:
        time.sleep(len(data) / 100e6)
        written(self, fd, offset, data)

    monkeypatch.setattr(SegmentOutput, "_write", slowly)
    budget = 16 << 20
    writer = Writer(str(tmp_path / "r"), Manifest(), budget=budget)
    before = torch.cuda.memory_allocated()
    x = torch.zeros(1 << 18, device="cuda")
    for order in range(100):
        x.fill_(order)
        add(writer, order, x, "l")
        assert writer._arena.owned <= budget // 2
        assert torch.cuda.memory_allocated() - before <= budget // 4 + (32 << 20)
    writer.close()
    assert writer.failure is None
    records = tap.open(tmp_path / "r").records
    assert [float(record.tensor()[-1]) for record in records] == list(range(100))


def test_a_tensor_larger_than_the_pool_is_brought_over_in_pieces(tmp_path) -> None:
    writer = Writer(str(tmp_path / "r"), Manifest(), budget=16 << 20)
    x = torch.randn(64, 1 << 18, device="cuda")
    small = torch.randn(100, device="cuda")
    for order, tensor in enumerate([small, x, small, x.t()]):
        add(writer, order, tensor)
    writer.close()
    assert writer.failure is None
    run = tap.open(tmp_path / "r")
    for order, tensor in enumerate([small, x, small, x.t()]):
        assert torch.equal(run[f"l{order}"].output, tensor.cpu())


def test_the_host_waits_for_room_and_for_nothing_else(tmp_path) -> None:
    """With room for everything, taking is quick although the device is busy."""
    x = torch.randn(1 << 18, device="cuda")
    xs = [x + order for order in range(100)]

    def taken(cycles: int) -> bool:
        path = tmp_path / str(cycles)
        writer = Writer(str(path), Manifest(), budget=1 << 30)
        orders = itertools.count()

        def take() -> None:
            for tensor in xs:
                add(writer, next(orders), tensor)

        asleep_behind(take, BUSY)  # memory is taken and pinned, for which CUDA may wait
        writer.flush()
        asleep = asleep_behind(take, cycles)
        writer.close()
        assert writer.failure is None
        assert len({r.tensor_id for r in tap.open(path).records}) == 100
        return asleep

    assert any(map(taken, SPELLS)), "somebody waited until the device was done"


# What may go wrong.


def test_a_graph_is_captured_while_the_writer_is_busy(tmp_path) -> None:
    writer = Writer(str(tmp_path / "r"), Manifest(), seal_after=0.2)
    x = torch.ones(1 << 20, device="cuda")
    add(writer, 0, x)  # waits in its region: the idle writer fetches it during the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        assert writer.take(y) == -1
        time.sleep(1.0)
        z = y + 1
    assert list((tmp_path / "r").glob("segment-*")), "the writer was not busy meanwhile"
    x.fill_(5)
    graph.replay()
    add(writer, 1, z)
    writer.close()
    assert writer.failure is None
    run = tap.open(tmp_path / "r")
    assert bool((run["l0"].output == 1).all()) and bool((run["l1"].output == 11).all())


def test_a_forked_child_records_nothing_and_ends(tmp_path) -> None:
    writer = Writer(str(tmp_path / "r"), Manifest())
    x = torch.ones(1000, device="cuda")
    add(writer, 0, x)
    child = os.fork()
    if not child:
        os._exit(0 if writer.take(x) == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    add(writer, 1, x + 1)
    writer.close()
    assert tap.open(tmp_path / "r").layers == ["l0", "l1"]


def python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        capture_output=True,
        text=True,
        timeout=80,
    )


def test_the_interpreters_end_keeps_copies_that_are_on_their_way(tmp_path) -> None:
    code = """
        import sys, torch, tensortap as tap
        model = torch.nn.Sequential(*[torch.nn.Identity() for _ in range(4)])
        rec = tap.record(model, sys.argv[1], layers="leaves").start()
        x = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
        torch.cuda._sleep(1_000_000_000)
        model(x)
    """
    done = python(code, tmp_path / "r")
    assert done.returncode == 0, done.stderr
    run = tap.open(tmp_path / "r")
    assert run.layers == ["0", "1", "2", "3"]
    assert torch.equal(run["3"].output, torch.arange(1 << 20, dtype=torch.float32))


@pytest.mark.parametrize("keep", ["tensors", "summary"])
@pytest.mark.parametrize("count", [1, 1 << 18])  # the ids of a large input come by pinned memory
def test_a_device_error_is_said_and_nobody_hangs(tmp_path, keep: str, count: int) -> None:
    code = f"""
        import sys, warnings, torch, tensortap as tap
        model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Embedding(4, 8).cuda())
        rec = tap.record(model, sys.argv[1], layers="leaves", keep="{keep}").start()
        model(torch.tensor([1, 2] * {count}, device="cuda"))
        rec.flush()
        try:
            model(torch.tensor([1, 99] * {count}, device="cuda"))  # a device-side assert
            torch.cuda.synchronize()
        except Exception as error:
            print("the model's own error:", type(error).__name__)
        warnings.simplefilter("ignore")
        rec.close()
        print("failure:", str(rec.failure).splitlines()[0])
    """
    done = python(code, tmp_path / "r")
    assert "the model's own error" in done.stdout, done.stderr[-3000:]
    assert "failure: " in done.stdout and "CUDA error" in done.stdout, done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
    run = tap.open(tmp_path / "r", partial=True)
    assert run.status == "failed" and run["0"].records[0].summary.first[:2] == (1, 2)
    assert keep == "summary" or run["0"].records[0].tensor().tolist() == [1, 2] * count


def test_threads_record_their_own_streams(tmp_path) -> None:
    writer = Writer(str(tmp_path / "r"), Manifest(), budget=32 << 20)

    def take(start: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for order in range(start, start + 50):
                add(writer, order, torch.full((20_000,), float(order), device="cuda"), "l")

    threads = [threading.Thread(target=take, args=(50 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert writer.failure is None
    records = tap.open(tmp_path / "r").records
    assert [float(record.tensor()[0]) for record in records] == list(range(200))
