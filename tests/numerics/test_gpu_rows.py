"""Rows on a CUDA device, by torch and by Triton; skipped without one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from definitions import DTYPES, values_of
from definitions import assert_defines as assert_defines_within

from tensortap.numerics import device, summarize
from tensortap.numerics.device import (
    accumulate,
    accumulate_many,
    accumulate_on,
    empty_rows,
    fill_many,
    fill_on,
    lean,
    leave_on,
    parts_on,
    scratch_on,
    settle,
    warm,
)
from tensortap.numerics.summary import Summary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
]
Way = Callable[[torch.Tensor, torch.Tensor], None]
ways = pytest.mark.parametrize("way", [accumulate, accumulate_on])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
READ = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
WHOLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
read = pytest.mark.parametrize("dtype", READ, ids=str)
SIZES = (1, 2, 9, 11, 64, 1000, 4096, 8192, 16384, 30_001)


@pytest.fixture
def nobody_waits() -> Iterator[None]:
    """Anything that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def asked(row: torch.Tensor) -> Summary:
    torch.cuda.set_sync_debug_mode("default")
    return Summary.from_row(row.tolist())


def assert_defines(summary: Summary, tensor: torch.Tensor) -> None:
    assert_defines_within(summary, tensor, 1e-6)


def noise(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern: NaN, Inf, subnormal and saturated values among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (n * size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors]).view(tensors[0].dtype)


def activations(n: int) -> dict[str, torch.Tensor]:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    place = torch.arange(n)
    return {
        "normal": x,
        "relu": x.relu(),
        "constant": torch.full_like(x, 0.1),
        "far offset": 1e6 + x,
        "step": torch.where(place < n // 2, x, 2e4 + x),
        "outlier first": torch.where(place == 0, 3e4, x),
        "outlier": torch.where(place == n - 1, -3e4, x),
        "huge": x * 1e38,
        "small": x * 1e-41,
        "masked": torch.where(x > 0, -math.inf, 1e4 + x),
        "one nan": torch.where(place == n // 3, math.nan, x),
        "all nan": torch.full_like(x, math.nan),
    }


@ways
@dtypes
def test_every_bit_pattern(way: Way, dtype: torch.dtype, nobody_waits: None) -> None:
    here = [noise(n, dtype, seed=n) for n in SIZES]
    there = [t.to("cuda", non_blocking=True) for t in map(torch.Tensor.pin_memory, here)]
    rows = empty_rows(len(here) + 1, "cuda")
    for tensor, row in zip(there, rows, strict=False):
        way(tensor, row)
        way(tensor, rows[-1])
    torch.cuda.set_sync_debug_mode("default")
    for tensor, row in zip(here, rows.cpu(), strict=False):
        assert_defines(asked(row), tensor)
    assert_defines(asked(rows[-1]), joined(here))


@read
@pytest.mark.parametrize("n", [777, 40_000, 1_000_003])
def test_activations(dtype: torch.dtype, n: int) -> None:
    """Against the exact definition where that is quick, and the reference on the CPU beyond."""
    for kind, values in activations(n).items():
        tensor = values.to(dtype)
        row = empty_rows(1, "cuda")[0]
        accumulate_on(tensor.cuda(), row)
        found = asked(row)
        if n < 50_000:
            assert_defines(found, tensor)
            continue
        expected = summarize(tensor)
        size = expected.absmax
        for name in ("count", "nan", "posinf", "neginf", "zeros", "subnormal", "saturated"):
            assert getattr(found, name) == getattr(expected, name), (kind, name)
        for name in ("min", "max", "absmax", "l2", "std"):
            close = pytest.approx(getattr(expected, name), rel=1e-6, abs=1e-15 * size, nan_ok=True)
            assert getattr(found, name) == close, (kind, name)
        rms = expected.rms
        assert found.mean == pytest.approx(expected.mean, abs=1e-6 * rms, nan_ok=True), kind


def test_the_kernel_reads_what_it_says_it_reads() -> None:
    """Else the tests above would say nothing of it."""
    kernels = device._triton()
    assert kernels is not None
    row = empty_rows(1, "cuda")[0]
    x = torch.randn(6, 40, 50, device="cuda")
    for tensor in (
        *(x.to(d) for d in READ + WHOLE),
        x.transpose(0, 2),
        x[2:4],
        x.flatten()[1:],
        x[0, 0, 0],
    ):
        assert kernels.accumulate(tensor, row)
    assert kernels.accumulate(torch.view_as_complex(x.view(-1, 2)), row)
    for tensor in (x.double(), x[:, ::2], x[:, :1].expand(6, 9, 50)):
        assert not kernels.accumulate(tensor, row)
    assert row[0].item() == 12_000 * (len(READ + WHOLE) + 2) + 4000 + 11_999 + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_views(dtype: torch.dtype, nobody_waits: None) -> None:
    x = torch.randn(6, 40, 50, device="cuda").to(dtype)
    views = [x[3], x[:, 3:], x.transpose(0, 2), x[:, ::3, 1::7], x.flatten()[1:], x.flatten()[7:9]]
    views += [
        x[0, 0, 0],
        x[:0],
        x.view(2, 3, 40, 50).permute(0, 3, 1, 2),
        x[:, :1].expand(6, 9, 50),
    ]
    rows = empty_rows(len(views), "cuda")
    for view, row in zip(views, rows, strict=True):
        accumulate_on(view, row)
    for view, row in zip(views, rows, strict=True):
        assert_defines(asked(row), view.cpu())


def test_a_tensor_beyond_32_bits_of_index() -> None:
    n = (1 << 31) + 12_345
    x = torch.ones(n, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3.0
    x[7] = math.nan
    row = empty_rows(1, "cuda")[0]
    accumulate_on(x, row)
    found = asked(row)
    assert (found.count, found.nan, found.max, found.min) == (n, 1, 3.0, 1.0)
    assert found.l2 == pytest.approx(math.sqrt(n - 2 + 9), rel=1e-9)
    assert found.mean == pytest.approx(1 + 2 / (n - 1), rel=1e-12)


def test_parameters_and_gradients_in_one_launch(nobody_waits: None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(), (1,), (7,), (64,), (768,), (300, 70), (1000, 1000), (5, 3, 2), (0, 4)] * 4
    tensors = [
        (torch.randn(shape, device="cuda", generator=generator) * 100).to(dtype)
        for shape, dtype in zip(
            shapes, [torch.float32, torch.bfloat16, torch.float16] * 12, strict=True
        )
    ]
    tensors[5] = tensors[5].t()
    tensors[6].view(-1)[123_456].fill_(math.inf)
    tensors[10] = tensors[10].double()
    rows, alone = empty_rows(len(tensors), "cuda"), empty_rows(len(tensors), "cuda")
    for _ in range(3):
        accumulate_many(tensors, rows)
        for tensor, row in zip(tensors, alone, strict=True):
            accumulate_on(tensor, row)
    torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(rows, alone, rtol=1e-6, atol=1e-6, equal_nan=True)
    for tensor, row in zip(tensors, rows, strict=True):
        if tensor.numel() < 10_000:
            assert_defines(asked(row), torch.cat([tensor.reshape(-1)] * 3).cpu())
    assert asked(rows[6]).posinf == 3


@ways
def test_inside_a_graph(way: Way) -> None:
    x = torch.randn(100_000, device="cuda", dtype=torch.bfloat16)
    rows = empty_rows(2, "cuda")
    way(x, rows[0])  # compiles what may not be compiled while capturing
    device.reset(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way(x, rows[0])
        way(x[:777], rows[1])
        accumulate_many([x, x[:777]], rows)
    assert rows[:, 0].tolist() == [0, 0]
    parts: list[torch.Tensor] = []
    for scale in (1.0, 100.0, 0.0):
        x.copy_(torch.randn(100_000) * scale)
        parts.append(x.cpu())
        graph.replay()
    found = asked(rows[1])
    assert_defines(found, torch.cat([p for part in parts for p in (part[:777], part[:777])]))
    whole = summarize(torch.cat([p for part in parts for p in (part, part)]))
    assert asked(rows[0]).to_row() == pytest.approx(whole.to_row(), rel=1e-6, abs=1e-7)


def test_a_graph_captured_before_anything_was_compiled() -> None:
    kernels = device._triton()
    assert kernels is not None
    compiled = dict(kernels._KERNELS)
    kernels._KERNELS.clear()
    x, row = torch.arange(1000.0, device="cuda"), empty_rows(1, "cuda")[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulate_on(x, row)
    kernels._KERNELS.update(compiled)
    graph.replay()
    assert_defines(asked(row), x.cpu())


def test_where_triton_fails_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = device._triton()
    assert kernels is not None
    monkeypatch.setattr(kernels, "_KERNELS", {})
    monkeypatch.setattr(kernels, "_BROKEN", [])
    monkeypatch.setattr(kernels, "_LANES", 1000)  # no power of two: Triton refuses it
    x = torch.randn(5000, device="cuda")
    rows = empty_rows(3, "cuda")
    with pytest.warns(RuntimeWarning, match="Torch does it instead"):
        accumulate_many([x, x.half()], rows[:2])
    accumulate_on(x, rows[2])  # said once
    assert_defines(asked(rows[0]), x.cpu())
    assert_defines(asked(rows[1]), x.half().cpu())
    assert_defines(asked(rows[2]), x.cpu())


def test_streams_and_graphs_side_by_side() -> None:
    """Each of them has its own partials: nothing leaks from one into another."""
    x = torch.randn(3_000_000, device="cuda")
    inputs = [x + i for i in range(6)]
    rows = empty_rows(7, "cuda")
    graph = torch.cuda.CUDAGraph()
    accumulate_on(x, rows[6])
    device.reset(rows)
    with torch.cuda.graph(graph):
        accumulate_on(x, rows[6])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(40):
        for stream, tensor, row in zip(streams, inputs, rows, strict=False):
            with torch.cuda.stream(stream):
                accumulate_on(tensor, row)
        graph.replay()
    torch.cuda.synchronize()
    expected = summarize(x.cpu())
    for i, row in enumerate(rows[:6]):
        found = asked(row)
        assert found.count == 40 * 3_000_000
        assert found.std == pytest.approx(expected.std, rel=1e-6)
        assert found.mean == pytest.approx(expected.mean + i, abs=1e-6)
        assert found.first == tuple(inputs[i][:10].tolist())
    found = asked(rows[6])
    assert (found.count, found.mean) == (40 * 3_000_000, pytest.approx(expected.mean, abs=1e-6))


def test_the_same_bits_every_time() -> None:
    """Whoever finishes last reduces in the same order."""
    x = (torch.randn(2_000_000, device="cuda") * 7 + 100).bfloat16()
    rows = empty_rows(500, "cuda")
    for row in rows:
        accumulate_on(x, row)
    assert torch.equal(rows, rows[:1].expand_as(rows))
    assert_close_to(rows[0], x)


def assert_close_to(row: torch.Tensor, x: torch.Tensor) -> None:
    assert asked(row).to_row() == pytest.approx(summarize(x.cpu()).to_row(), rel=1e-6)


def test_in_a_backward_pass_and_under_a_seed() -> None:
    x = torch.randn(1000, device="cuda", requires_grad=True)
    row = empty_rows(1, "cuda")[0]
    state = torch.cuda.get_rng_state()
    y = x * 3
    y.register_hook(lambda grad: accumulate_on(grad, row))
    version = y._version
    accumulate_on(y, row)
    y.sum().backward()
    assert torch.equal(torch.cuda.get_rng_state(), state) and y._version == version
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert_defines(asked(row), torch.cat([y.detach(), torch.ones_like(y)]).cpu())
    assert values_of(row[-10:]) == y[:10].tolist()


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.int64)


@pytest.mark.parametrize("dtype", READ + WHOLE, ids=str)
def test_one_way_or_another_the_bits_are_the_same(dtype: torch.dtype) -> None:
    """Filled, merged into an empty row, bound beforehand, with a scratch of its own; and again."""
    stream = torch.cuda.current_stream().cuda_stream
    for n in (1, 5, 8192, 8193, 300_001):
        x = noise(n, dtype, seed=n).cuda()
        bound = lean(x, stream)
        assert bound is not None
        rows, parts = empty_rows(8, "cuda"), parts_on("cuda", 4 * bound.room)
        rows[1:] = 7.0
        rows[0, :7] = 0.0
        scratch = scratch_on("cuda")
        accumulate_on(x, rows[0])
        fill_on(x, rows[1])
        for i, row in enumerate(rows[2:6]):
            bound.launch(parts.data_ptr() + i * bound.room, x.data_ptr(), row.data_ptr())
        settle(rows[2:6])
        fill_on(x, rows[6], scratch)
        fill_on(x.clone(), rows[7], scratch)
        assert torch.equal(bits(rows[1:]), bits(rows[1:2].expand(7, -1)))
        assert asked(rows[0]) == asked(rows[1]) or bool(rows[0].isnan().any())
        if n < 10_000:
            assert_defines(asked(rows[2]), x.cpu())


def test_a_bound_launch_takes_any_tensor_of_the_kind(nobody_waits: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    x = [torch.randn(40, 50, device="cuda") + i for i in range(5)]
    bound = lean(x[0], torch.cuda.current_stream().cuda_stream)
    assert bound is not None
    rows, parts = empty_rows(6, "cuda"), parts_on("cuda", 5 * bound.room)
    rows[5] = 3.0
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for i, (tensor, row) in enumerate(zip(x, rows, strict=False)):
        bound.launch(parts.data_ptr() + i * bound.room, tensor.data_ptr(), row.data_ptr())
        tensor.zero_()  # the stream's own order: what was there is what counts
    settle(rows[1:])  # some of them, and rows that were not left behind stay as they are
    settle(rows)
    torch.cuda.set_sync_debug_mode("default")
    assert (rows[5] == 3).all()
    for i, row in enumerate(rows[:5]):
        assert asked(row).mean == pytest.approx(i, abs=0.1) and asked(row).count == 2000
    assert lean(x[0].double(), 0) is None and lean(x[0].t(), 0) is None
    assert lean(x[0].cpu(), 0) is None


def test_on_another_stream() -> None:
    x = torch.randn(500_000, device="cuda", dtype=torch.bfloat16)
    rows = empty_rows(2, "cuda")
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    bound = lean(x, other.cuda_stream)
    assert bound is not None
    parts = parts_on("cuda", bound.room)
    bound.launch(parts.data_ptr(), x.data_ptr(), rows[0].data_ptr())
    with torch.cuda.stream(other):
        settle(rows[:1])
    other.synchronize()
    fill_on(x, rows[1])
    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_rows_by_halves_have_the_same_bits(dtype: torch.dtype) -> None:
    for size in (1, 8, 5000, 393_216, 6_291_456, 16_777_216, 50_331_648):
        x = torch.randn(size, device="cuda").mul(30).to(dtype)
        if dtype is not torch.int8 and size > 5:
            x[size // 2], x[5] = float("nan"), float("inf")
        rows = torch.full((2, 2, 23), 7.0, device="cuda", dtype=torch.float64)
        parts = parts_on("cuda", 1 << 20)
        fill_on(x, rows[0, 0])
        assert 0 < leave_on(x, rows[1, 0], parts) <= parts.nbytes
        x.zero_()
        settle(rows[1])
        assert torch.equal(rows[0].nan_to_num(-5.5), rows[1].nan_to_num(-5.5)), size
    assert leave_on(x, rows[1, 0], parts[:2]) == 0
    assert leave_on(x[1:], rows[1, 0], parts) == 0  # not at a multiple of 16


def test_many_are_filled(nobody_waits: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    tensors = [torch.randn(n, device="cuda") for n in (0, 1, 77, 5000, 100_000, 2_000_000)]
    tensors += [t.bfloat16() for t in tensors] + [
        tensors[4].view(100, 1000).t(),
        tensors[3].double(),
    ]
    rows, alone = torch.full((2, len(tensors), 23), 3.0, device="cuda", dtype=torch.float64)
    fill_many(tensors, rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    rows.fill_(9.0)
    fill_many(tensors, rows)
    for tensor, row in zip(tensors, alone, strict=True):
        fill_on(tensor, row)
    torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(rows, alone, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_graph_fills_its_rows_anew() -> None:
    assert warm(torch.float16, "cuda")
    x = torch.zeros(70_001, device="cuda", dtype=torch.float16)
    rows, scratch = empty_rows(2, "cuda"), scratch_on("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_on(x, rows[0], scratch)
        fill_on(x[1:], rows[1], scratch)
    for i in range(3):
        x.fill_(i)
        graph.replay()
        assert (asked(rows[0]).mean, asked(rows[1]).count) == (i, 70_000)


def test_halves_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device without the instructions for two at once."""
    kernels = device._triton()
    assert kernels is not None
    monkeypatch.setattr(kernels, "_KERNELS", {})
    monkeypatch.setattr(kernels, "_packed", lambda index, form: False)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        x = noise(30_001, dtype, seed=3).cuda()
        row = empty_rows(1, "cuda")[0]
        fill_on(x, row)
        assert_defines(asked(row), x.cpu())


def microseconds(call: Callable[[], object], repeat: int = 50) -> tuple[float, float]:
    """On the device, by events; on the host, until the call returns."""
    for _ in range(5):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    began = time.perf_counter()
    for _ in range(repeat):
        call()
    host = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / repeat, host * 1e6 / repeat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_timings_are_printed(dtype: torch.dtype) -> None:
    """Read with -s; nothing is asserted of the time itself."""
    row = empty_rows(1, "cuda")[0]
    for n in (1 << 12, 1 << 20, 1 << 24, 1 << 30):
        x = torch.randn(n, device="cuda", dtype=torch.bfloat16).to(dtype)
        ours, host = microseconds(lambda x=x: accumulate_on(x, row))
        plain, plain_host = microseconds(
            lambda x=x: x.sum() if x.element_size() > 1 else x.view(torch.uint8).sum()
        )
        rate = n * x.element_size() / ours / 1e3
        print(
            f"{dtype} {n:>10}: {ours:9.1f} us ({rate:6.0f} GB/s, host {host:5.1f} us), "
            f"torch.sum {plain:9.1f} us (host {plain_host:5.1f}), x{ours / plain:.2f}"
        )
        assert math.isfinite(asked(row).mean)


def test_timings_of_many_are_printed() -> None:
    sizes = [
        768,
        768,
        768 * 2304,
        2304,
        768 * 768,
        768,
        768 * 3072,
        3072,
        768 * 3072,
        768,
        768,
        768,
    ]
    tensors = [torch.randn(n, device="cuda") for n in sizes * 12]
    rows = empty_rows(len(tensors), "cuda")
    ours, host = microseconds(lambda: accumulate_many(tensors, rows))
    norms, norms_host = microseconds(lambda: torch._foreach_norm(tensors))
    print(
        f"{len(tensors)} tensors, {sum(sizes) * 12 / 1e6:.0f} M float32: {ours:.1f} us "
        f"(host {host:.1f}), torch._foreach_norm {norms:.1f} us (host {norms_host:.1f})"
    )
    assert bool((rows[:, 0] > 0).all())
