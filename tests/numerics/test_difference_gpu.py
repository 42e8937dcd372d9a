"""Differences on a CUDA device; skipped without one."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from difference_definitions import DTYPES, GPU, Definition
from test_difference_percentiles import SHAPES, expected
from test_difference_values import KINDS, bounded
from test_summary_values import noise
from torch.utils._python_dispatch import TorchDispatchMode

import tensortap.numerics.triton_percentiles as triton_percentiles
from tensortap.numerics.backend import REFERENCE, pick, pick_pair
from tensortap.numerics.difference import difference, difference_of
from tensortap.numerics.profile import profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
]
READ = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.int32,
]
read = pytest.mark.parametrize("dtype", READ, ids=str)


def check(one: torch.Tensor, two: torch.Tensor, **options: float) -> None:
    """Both tensors are on the CPU; their copies on the device have the same difference."""
    left, right = one.cuda(), two.cuda()
    assert pick_pair(left, right).name == "triton"
    Definition([(one, two)], share=GPU, **options).check(difference(left, right, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_device_changes_no_number(dtype: torch.dtype) -> None:
    """On the device, from either side of it, and against itself."""
    one, two = bounded(noise(2000, dtype, seed=1)), bounded(noise(2000, dtype, seed=2))
    both, same = (Definition([(one, other)], share=GPU) for other in (two, one))
    for left, right in ((one.cuda(), two.cuda()), (one, two.cuda()), (one.cuda(), two)):
        kernels = left.is_cuda and right.is_cuda and dtype in READ
        assert pick_pair(left, right).name == ("triton" if kernels else "reference")
        both.check(difference(left, right))
    same.check(difference(one.cuda(), one))
    same.check(difference(one.cuda(), one.cuda()))


@read
def test_pairs_of_dtypes(dtype: torch.dtype) -> None:
    """With some of the others, since each is a kernel to compile; the interpreter has them all."""
    one = noise(300, dtype, seed=1)
    for further in (1, 4):
        second = READ[(READ.index(dtype) + further) % len(READ)]
        check(one, noise(300, second, seed=further))


@read
def test_sizes_around_tiles(dtype: torch.dtype) -> None:
    """Every bit pattern, and numbers that need no care."""
    for n in (1, 2, 7, 8, 9, 511, 512, 4095, 4096, 4097, 8192, 16_385):
        check(noise(n, dtype, seed=n), noise(n, dtype, seed=n + 1))
        x = 9 * torch.randn(2, n, generator=torch.Generator().manual_seed(n))
        check(x[0].to(dtype), (x[0] + 0.1 * x[1]).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_blocks_of_activations(dtype: torch.dtype, kind: str) -> None:
    x, e = torch.randn(2, 17_001, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    check(*(side.to(dtype) for side in KINDS[kind](x, e)))


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-15, 1e15, 1e30, 3e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_squares_that_float32_cannot_hold(dtype: torch.dtype, scale: float) -> None:
    x, e = torch.randn(2, 9001, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    check((scale * x).to(dtype), (scale * (x + 0.01 * e)).to(dtype))
    one = x.to(dtype)
    one[4000] *= scale
    check(one, x.to(dtype))


@pytest.mark.parametrize(("rtol", "atol"), [(0.0, 0.0), (1e-2, 0.0), (0.0, 0.25), (1e35, 1.0)])
def test_tolerances_on_the_edge(rtol: float, atol: float) -> None:
    """On a grid, so that many differences are the limit itself."""
    x = torch.randint(-8, 9, (2, 9001), generator=torch.Generator().manual_seed(3)) / 8
    check(x[0], x[1], rtol=rtol, atol=atol)
    check(x[0].bfloat16(), x[1].bfloat16(), rtol=rtol, atol=atol)


def test_views_scalars_and_nothing() -> None:
    x = torch.randn(30, 40, 50, generator=torch.Generator().manual_seed(4))
    y = x + 0.1 * x.roll(1)
    views = (
        (x.transpose(0, 2), y.transpose(0, 2)),
        (x.permute(2, 0, 1), y.permute(2, 0, 1).contiguous()),
        (x[:, ::2, 1:], y[:, ::2, 1:]),
        (x.view(-1)[1:], y.view(-1)[1:]),
        (x.bfloat16().view(-1)[3:], y.bfloat16().view(-1)[1:-2]),
        (x[:, :1].expand(30, 5, 50), y[:, :5]),
        (x[0, 0, 0], y[0, 0, 0]),
        (x[:0], y[:0]),
    )
    for one, two in views:
        found = difference(_on_device(one), _on_device(two))
        definition = Definition([(one, two)], share=GPU)
        definition.check(found)
        if definition.finite:
            assert found.max_abs_index == difference(one, two).max_abs_index


def _on_device(view: torch.Tensor) -> torch.Tensor:
    """The same view of a copy of all that lies behind it."""
    whole = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).cuda()
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_percentiles_of_many(
    shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than are kept: by brackets, which for these never miss."""
    monkeypatch.setattr(triton_percentiles, "_by_bits", None)
    x = torch.randn(6_300_001, generator=torch.Generator().manual_seed(1))
    one, two = (side.to(dtype) for side in SHAPES[shape](x))
    found = difference(one.cuda(), two.cuda())
    assert found.percentiles == expected(one, two) and found.percentiles_exact
    assert found.histogram is not None and found.histogram.total >= 1 << 18
    parts = (side.split(2_500_000) for side in (one, two))
    stream = [(a.cuda(), b.cuda()) for a, b in zip(*parts, strict=True)]
    assert difference_of(stream).percentiles == found.percentiles


def test_a_bracket_that_misses_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_percentiles, "_SIGMAS", -1.0)
    x = torch.randn(3_300_001, generator=torch.Generator().manual_seed(1))
    assert difference(0 * x.cuda(), x.cuda()).percentiles == expected(0 * x, x)


class Counted(TorchDispatchMode):
    """How many numbers came over."""

    copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if "_to_copy" in str(func) and args[0].is_cuda and not result.is_cuda:
            Counted.copied += result.nbytes
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nobody_waits_and_nothing_large_moves(dtype: torch.dtype) -> None:
    size = 1 << 25
    one = torch.randn(size, device="cuda").to(dtype)
    two = one + torch.randn(size, device="cuda").to(dtype) / 64
    first = difference(one, two, percentiles=False)
    difference(one, two)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said, Counted():
            warnings.simplefilter("always")
            again = difference(one, two, percentiles=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing" in str(w.message) for w in said) <= 1
    assert Counted.copied < 1 << 20
    assert torch.cuda.max_memory_allocated() - held < 1 << 20
    assert again.row == first.row  # to the last bit
    with Counted():
        whole = difference(one, two)
    assert Counted.copied < 2 << 20 and whole.row == first.row
    assert torch.cuda.max_memory_allocated() - held < 1 << 28
    assert torch.cuda.memory_allocated() == held


def test_any_stream_and_what_is_written_later() -> None:
    """The values are those when the difference was asked for, on the stream that asks."""
    x = torch.randn(1 << 22, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        y = x + 1
        found = difference(x, y, percentiles=False)
        y.zero_()
    assert found.mae == pytest.approx(1, rel=1e-6)


def test_single_tensors() -> None:
    x = torch.randn(1000, 77, device="cuda").bfloat16()
    assert pick(x).name == "triton"
    row, none = pick(x).summarize_row(x, False)
    expected_row, _ = REFERENCE.summarize_row(x, False)
    assert none is None and row == pytest.approx(expected_row, rel=1e-6, abs=1e-6, nan_ok=True)
    assert pick(x).summarize_row(x, True)[1] == REFERENCE.summarize_row(x, True)[1]


def test_profiles_and_streams() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 30, 20, generator=generator)
    y = (x + 0.01 * torch.randn(40, 30, 20, generator=generator)).bfloat16()
    y[3, 4, 5] = math.nan
    x[7, 7, 7] = y[7, 7, 7] = math.inf
    for shape in ((40, 30, 20), (1, 24_000), (24_000, 1), (3, 8000), (8, 3000)):
        one, two = x.view(shape), y.view(shape)
        found, expected = profile(one.cuda(), two.cuda()), profile(one, two)
        assert found is not None and expected is not None
        assert found.tokens == pytest.approx(expected.tokens, rel=1e-6)
        assert found.channels == pytest.approx(expected.channels, rel=1e-6)
    stream = [(x[:7], y[:7]), (x[7:].cuda(), y[7:].cuda())]
    whole, parts = difference(x, y), difference_of(stream)
    assert parts.percentiles == whole.percentiles
    assert parts.mse == pytest.approx(whole.mse, rel=1e-6)
    on_device = difference_of([(a.cuda(), b.cuda()) for a, b in zip(x, y, strict=True)])
    assert on_device.percentiles == whole.percentiles
    assert on_device.max_abs_index == difference_of(list(zip(x, y, strict=True))).max_abs_index
    assert on_device.cosine_distance == pytest.approx(whole.cosine_distance, rel=1e-6)
