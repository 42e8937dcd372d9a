"""The summary kernels in Triton's interpreter, against exact arithmetic.

On a machine with a GPU they run there (test_gpu_rows.py). Lanes are few here, so that chunks and
groups of programs are small, and inputs reach beyond them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from definitions import assert_defines
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.numerics import summarize
from tensortap.numerics.device import empty_rows
from tensortap.numerics.summary import WIDTH, Summary

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the kernels run on the device itself", allow_module_level=True)

from tensortap.numerics import triton_summary
from tensortap.numerics.triton_formats import FORMATS
from tensortap.numerics.triton_kernels import GROUP
from tensortap.numerics.triton_launch import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET was not set in time"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:numpy"),
]
BOUND = 1e-6
FLOATS = [d for d in FORMATS if d.is_floating_point]
dtypes = pytest.mark.parametrize("dtype", list(FORMATS), ids=str)


@pytest.fixture(autouse=True)
def few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_summary, "_LANES", 4)


def chunk(dtype: torch.dtype) -> int:
    return 4 * FORMATS[dtype].steps * FORMATS[dtype].each


def filled(tensor: torch.Tensor) -> Summary:
    row = torch.full((WIDTH,), 7.0, dtype=torch.float64)
    assert triton_summary.accumulate(tensor, row, False)
    return Summary.from_row(row.tolist())


def merged(*tensors: torch.Tensor) -> Summary:
    row = empty_rows(1, "cpu")[0]
    for tensor in tensors:
        assert triton_summary.accumulate(tensor, row)
    return Summary.from_row(row.tolist())


def from_bytes(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    data = data[: len(data) // size * size]
    raw = torch.tensor(list(data), dtype=torch.uint8)
    return (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)


@dtypes
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.binary(min_size=8, max_size=700))
def test_any_bytes(dtype: torch.dtype, data: bytes) -> None:
    """NaN of every kind, infinities, subnormal and saturated values among them."""
    tensor = from_bytes(data, dtype)
    assert_defines(filled(tensor), tensor, BOUND)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    offset=st.sampled_from([0.0, 1.0, -300.0, 1e4, 1e6, 1e30]),
    spread=st.sampled_from([0.0, 1e-41, 1e-25, 1e-6, 1.0, 1e5, 1e37]),
    odd=st.sampled_from([0.0, 3e4, -65504.0, math.inf, math.nan, 1e-40, 3e38]),
    place=st.sampled_from([0, 1, 3, 8, 100, -1]),
    n=st.sampled_from([101, 128, 200, 257, 300]),
)
def test_hard_inputs(
    dtype: torch.dtype, offset: float, spread: float, odd: float, place: int, n: int
) -> None:
    """Offsets, spreads out of range, one value unlike the rest, in the first lane or the last."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x = offset + spread * x
    x[place] = odd
    tensor = x.to(dtype)
    assert_defines(filled(tensor), tensor, BOUND)


@dtypes
def test_sizes_around_chunks(dtype: torch.dtype) -> None:
    n = chunk(dtype)
    for size in (1, 2, n - 1, n, n + 1, 2 * n + 3):
        tensor = (torch.arange(size) % 7 * 3 - 5).to(dtype)
        assert_defines(filled(tensor), tensor, BOUND)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda x: x.relu(),
    "constant": lambda x: torch.full_like(x, 0.1),
    "constant but one": lambda x: torch.where(torch.arange(len(x)) == 5, 257.0, 256.0),
    "first of each lane is far off": lambda x: torch.where(torch.arange(len(x)) < 32, 3e4 + x, x),
    "first of each chunk is far off": lambda x: torch.where(
        torch.arange(len(x)) % 64 < 16, 1.37e7, 0.7 * torch.ones_like(x)
    ),
    "step": lambda x: torch.where(torch.arange(len(x)) < len(x) // 2, x, 2e4 + x),
    "squares overflow": lambda x: x * 1e30,
    "squares underflow": lambda x: x * 1e-30,
    "subnormal": lambda x: x * 1e-39,
    "masked": lambda x: torch.where(x > 0, -math.inf, x),
    "all nan": lambda x: torch.full_like(x, math.nan),
    "saturated": lambda x: x.clamp(-1, 1).div(0.9).round() * 3.3895313892515355e38,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_activations(dtype: torch.dtype, kind: str) -> None:
    x = torch.randn(601, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensor = KINDS[kind](x).to(dtype)
    assert_defines(filled(tensor), tensor, BOUND)


def test_groups_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """More programs than one group has: partials of partials."""
    monkeypatch.setattr(triton_summary, "_LANES", 1)
    monkeypatch.setattr(triton_summary, "_most_programs", lambda index: 8 * GROUP)
    monkeypatch.setattr(triton_summary, "WIDE", 8 * GROUP)
    monkeypatch.setattr(triton_summary, "_SCRATCH", {})
    x = torch.randn((2 * GROUP + 2) * 16 + 5).mul(3).add(100)
    x[:40], x[-1] = 0.0, math.nan
    assert triton_summary._shares(-1, FORMATS[x.dtype], len(x))[0] > 2 * GROUP
    assert_defines(filled(x), x, BOUND)
    rows = torch.full((3, WIDTH), 5.0, dtype=torch.float64)
    tensors = [x[:9].clone(), x, x[:50].clone()]
    assert triton_summary.accumulate_many(tensors, rows, False) == []
    for tensor, row in zip(tensors, rows, strict=True):
        assert_defines(Summary.from_row(row.tolist()), tensor, BOUND)


@pytest.mark.parametrize("most", [1, 4, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_row_by_halves_has_the_same_bits(
    dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partials now and the row later, as one launch would have it; what is written meanwhile to
    the tensor changes nothing."""
    monkeypatch.setattr(triton_summary, "_most_programs", lambda index: most)
    monkeypatch.setattr(triton_summary, "_SCRATCH", {})
    sizes = [1, 9, 7 * chunk(dtype), (70 if most == 20 else 3) * chunk(dtype) + 3]
    if most == 20:
        assert triton_summary._shares(-1, FORMATS[dtype], sizes[-1])[0] > GROUP  # groups of them
    for size in sizes:
        x = torch.randn(size).mul(30).to(dtype)
        if dtype.is_floating_point and size > 5:
            x[size // 2], x[5] = float("nan"), float("-inf")
        whole = torch.zeros(1, WIDTH, dtype=torch.float64)
        rows = torch.full((3, WIDTH), 7.0, dtype=torch.float64)
        assert triton_summary.accumulate(x, whole[0], False)
        parts = torch.full((1024,), float("nan"), dtype=torch.float64)
        room = triton_summary.leave(x, rows[1], parts)
        assert 0 < room <= parts.nbytes
        assert rows[1, 0] == -size
        assert parts[room // 8 :].isnan().all()
        x.zero_()
        triton_summary.settle(rows)
        assert torch.equal(rows[1].nan_to_num(-5.5), whole[0].nan_to_num(-5.5))
        assert (rows[0] == 7).all() and (rows[2] == 7).all()
        triton_summary.settle(rows)  # there is nothing left to do
        assert torch.equal(rows[1].nan_to_num(-5.5), whole[0].nan_to_num(-5.5))


def test_what_cannot_be_left_behind_is_not() -> None:
    row, parts = empty_rows(1, "cpu")[0], torch.zeros(64, dtype=torch.float64)
    x = torch.randn(64)
    assert triton_summary.leave(x[1:33], row, parts) == 0  # not at a multiple of 16
    assert triton_summary.leave(x.view(8, 8).t(), row, parts) == 0
    assert triton_summary.leave(x.double(), row, parts) == 0
    assert triton_summary.leave(x[:0], row, parts) == 0
    assert triton_summary.leave(x, row, parts[:8]) == 0
    assert triton_summary.leave(x, row, parts) > 0


def test_counts_beyond_what_a_half_holds() -> None:
    x = torch.zeros(40 * chunk(torch.bfloat16), dtype=torch.bfloat16)
    x[-5:] = 2.0
    assert_defines(filled(x), x, BOUND)


@dtypes
def test_merging_is_filling_and_more(dtype: torch.dtype) -> None:
    one = (torch.arange(300) % 90 - 20).to(dtype)
    two = (torch.arange(70) % 11).to(dtype)
    assert merged(one) == filled(one)
    both = torch.cat([t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (one, two)])
    assert_defines(merged(one, two), both.view(dtype), BOUND)
    few = two[:3]
    assert merged(few, few).first == tuple(float(v) for v in [*few.tolist(), *few.tolist()])


def test_views_and_what_is_left_to_torch() -> None:
    x = torch.randn(6, 10, 5)
    for view in (x.transpose(0, 2), x[2:4], x.flatten()[1:], x[0, 0, 0], x.permute(2, 0, 1)):
        assert_defines(filled(view), view, BOUND)
    pairs = torch.view_as_complex(x[..., :4].contiguous().view(-1, 2))
    assert_defines(filled(pairs), pairs, BOUND)
    row = empty_rows(1, "cpu")[0]
    before = row.clone()
    for other in (x[:, ::2], x[:, :1].expand(6, 9, 5), x.double(), pairs.conj(), torch.empty(0)):
        assert not triton_summary.accumulate(other, row, False)
    assert torch.equal(row.isnan(), before.isnan())


def test_many_tensors_share_a_launch() -> None:
    tensors = [
        torch.randn(3, 4),
        torch.empty(0),
        torch.arange(5),
        torch.randn(6, 6).t(),
        torch.tensor(2.0),
        torch.randn(700),
        torch.randn(40).bfloat16(),
    ]
    rows = torch.full((len(tensors), WIDTH), 3.0, dtype=torch.float64)
    assert triton_summary.accumulate_many(tensors, rows, False) == [1, 3]
    for i in (0, 2, 4, 5, 6):
        assert_defines(Summary.from_row(rows[i].tolist()), tensors[i], BOUND)
    assert triton_summary.accumulate_many(tensors, rows) == [3]
    assert Summary.from_row(rows[5].tolist()).count == 1400
    assert rows[1].tolist() == [3.0] * WIDTH


def test_the_same_as_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many lanes as on a device, more than a chunk."""
    monkeypatch.setattr(triton_summary, "_LANES", 128)
    x = (torch.randn(30_001, generator=torch.Generator().manual_seed(2)) * 2 + 9).bfloat16()
    found, expected = filled(x), summarize(x)
    for name in ("count", "zeros", "min", "max", "absmax", "first"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.mean == pytest.approx(expected.mean, rel=1e-8)
    assert found.std == pytest.approx(expected.std, rel=1e-7)
    assert found.l2 == pytest.approx(expected.l2, rel=1e-7)


def test_two_threads_that_meet_a_stream_share_its_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is bound into launches: one that is dropped would be written to all the same."""
    both, make = threading.Barrier(2, timeout=20), triton_summary._own_scratch

    def made(*args: int) -> triton_summary.Scratch:
        both.wait()
        return make(*args)

    monkeypatch.setattr(triton_summary, "_SCRATCH", {})
    monkeypatch.setattr(triton_summary, "_own_scratch", made)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: triton_summary._scratch(-1), range(2))
    assert one is two


def test_under_another_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_summary, "_KERNELS", {})
    monkeypatch.setattr(triton_summary, "_SCRATCH", {})
    monkeypatch.setattr(triton_summary, "_WIDE_SCRATCH", {})
    x, rows = torch.randn(40), torch.zeros(1, WIDTH, dtype=torch.float64)
    with torch.device("meta"):
        assert triton_summary.accumulate(x, rows[0], False)
        assert_defines(Summary.from_row(rows[0].tolist()), x, BOUND)
        assert triton_summary.accumulate_many([x], rows, False) == []
    assert_defines(Summary.from_row(rows[0].tolist()), x, BOUND)


def test_compiling_beforehand() -> None:
    assert triton_summary.warm(torch.complex64, torch.device("cpu"))
    assert not triton_summary.warm(torch.float64, torch.device("cpu"))
