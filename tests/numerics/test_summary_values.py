"""Every backend against the definition, on the inputs that break naive code."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
import torch
from definitions import (
    BACKENDS,
    DTYPES,
    FLOATS,
    INTEGERS,
    NativeAt,
    assert_defines,
    expected_moments,
    summary_by,
    values_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.numerics.histogram import BUCKETS, Histogram
from tensortap.numerics.native import CODES, core
from tensortap.numerics.summary import WIDTH, Summary

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
backends = pytest.mark.parametrize("backend", BACKENDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ISAS = range(len(core.isas())) if core is not None else range(0)
needs_core = pytest.mark.skipif(core is None, reason="the core is not built")


def size_of(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def from_bytes(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    whole = len(data) // size_of(dtype) * size_of(dtype)
    if dtype == torch.bool:
        data = bytes(b & 1 for b in data)
    if not whole:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data[:whole]), dtype=torch.uint8).view(dtype)


def noise(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit pattern of the format: NaN, Inf, subnormal and saturated values among them."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (n * size_of(dtype),), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


@backends
@dtypes
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.binary(max_size=300))
def test_any_bytes(backend: str, dtype: torch.dtype, data: bytes) -> None:
    tensor = from_bytes(data, dtype)
    assert_defines(summary_by(backend, tensor), tensor)


HARD = [
    *(0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 0.1, 1e6, 1e6 + 0.0625, -3e38),
    *(65504.0, -65504.0, 448.0, 57344.0, 6e-8, 1e-39, 1e-45, 5e-324, 1e300, -1e300, 1e-300),
    *(1.7976931348623157e308, 3.4028234663852886e38, 3.3895313892515355e38, 2.0**-14, 2.0**-126),
]


@backends
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    values=st.lists(st.sampled_from(HARD), min_size=1, max_size=12),
    repeat=st.sampled_from([1, 2, 7, 33]),
)
def test_hard_values(backend: str, dtype: torch.dtype, values: list[float], repeat: int) -> None:
    tensor = torch.tensor(values * repeat, dtype=torch.float64).to(dtype)
    assert_defines(summary_by(backend, tensor), tensor)


@backends
@dtypes
def test_sizes_around_a_vector(backend: str, dtype: torch.dtype) -> None:
    for n in (0, 1, 9, 10, 11, 63, 64, 65, 129):
        tensor = noise(n, dtype, seed=n)
        assert_defines(summary_by(backend, tensor), tensor)


@backends
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [0.1, -3.0, 0.0, 1.0])
def test_a_constant_has_no_spread(backend: str, dtype: torch.dtype, value: float) -> None:
    for n in (1, 64, 4097, 70_000):
        tensor = torch.full((n,), value, dtype=torch.float64).to(dtype)
        summary = summary_by(backend, tensor, histogram=False)
        constant = float(tensor[0].to(torch.float64))
        assert (summary.mean, summary.std) == (constant, 0.0)
        assert summary.min == summary.max == constant


KINDS = {
    "normal": lambda x: x,
    "relu": lambda x: x.relu(),
    "negative": lambda x: -x.abs(),
    "positive": lambda x: x.abs() + 1e-6,
    "offset": lambda x: 1e3 + x,
    "far offset": lambda x: 1e6 + x,
    "step": lambda x: torch.where(torch.arange(x.numel()) < x.numel() // 2, x, 2e4 + x),
    "outlier": lambda x: torch.where(torch.arange(x.numel()) == 777, 3e4, x),
    "small": lambda x: x * 1e-6,
    "masked": lambda x: torch.where(x > 1, -math.inf, x),
    "some nan": lambda x: torch.where(x > 3, math.nan, x),
}


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_activations(backend: str, dtype: torch.dtype, kind: str) -> None:
    """Several blocks and a rest, of the shapes that decide between the core's paths."""
    x = torch.randn(9001, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensor = KINDS[kind](x).to(dtype)
    assert_defines(summary_by(backend, tensor), tensor)


@backends
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_blocks_of_noise(backend: str, dtype: torch.dtype) -> None:
    tensor = noise(9001, dtype, seed=2)
    assert_defines(summary_by(backend, tensor), tensor)


@backends
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_blocks_of_integers(backend: str, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    tensor = noise(5000, dtype, seed=3)
    view = tensor.view(getattr(torch, f"int{info.bits}"))
    view[::7] = 0
    view[::11] = -1 if info.min == 0 else info.max  # the maximum, as signed bits
    view[::13] = 0 if info.min == 0 else info.min
    assert_defines(summary_by(backend, tensor), tensor)


@backends
def test_half_precision_values_one_by_one(backend: str) -> None:
    """All 65,536 patterns of both 16-bit floats, each in a block of its like."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        for part in patterns.view(dtype).split(4096):
            assert_defines(summary_by(backend, part), part)


@backends
@pytest.mark.parametrize(
    "values",
    [
        [1.7e308, 1.7e308, 1.6e308],
        [1.7e308, -1.7e308, 1e300],
        [1e-300, 2e-300, -4e-300],
        [5e-324, 0.0, 1e-323],
        [1e-320, 1e-318],
        [1e200, 1.0],
        [1e160] * 5 + [-1e160],
    ],
)
@pytest.mark.parametrize("repeat", [1, 700])
def test_extremes_of_float64(backend: str, values: list[float], repeat: int) -> None:
    tensor = torch.tensor(values * repeat, dtype=torch.float64)
    assert_defines(summary_by(backend, tensor), tensor)


@backends
def test_known_numbers(backend: str) -> None:
    s = summary_by(backend, torch.tensor([3.0, -4.0, 0.0, math.nan, math.inf, -math.inf]))
    assert (s.count, s.nan, s.posinf, s.neginf, s.zeros, s.finite) == (6, 1, 1, 1, 1, 3)
    assert s.mean == pytest.approx(-1 / 3, rel=1e-14)
    assert s.std == pytest.approx(math.sqrt(25 / 3 - 1 / 9), rel=1e-14)
    assert (s.min, s.max, s.absmax, s.l2) == (-4.0, 3.0, 4.0, 5.0)
    assert s.rms == pytest.approx(5 / math.sqrt(3))
    assert s.has_nan and s.has_inf


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16])
def test_many_threads_change_no_bit(dtype: torch.dtype) -> None:
    x = torch.randn(700_001, generator=torch.Generator().manual_seed(4)) * 50
    tensor = x.to(dtype)
    for isa in ISAS:
        one, *more = (NativeAt(isa, threads).summarize_row(tensor, True) for threads in (1, 2, 3))
        assert [one, one] == more


@needs_core
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_many_threads_change_no_bit_of_bytes(dtype: torch.dtype) -> None:
    tensor = noise(3_000_001, dtype, seed=5)
    rows = [NativeAt(0, threads).summarize_row(tensor, True) for threads in (1, 2)]
    assert repr(rows[0][0]) == repr(rows[1][0]) and rows[0][1] == rows[1][1]


@needs_core
def test_the_paths_agree_on_a_large_tensor() -> None:
    """Sums of millions of values stay within the bound, which float32 accumulation would not."""
    x = torch.randn(3_000_000, generator=torch.Generator().manual_seed(6)) + 30
    exact = x.to(torch.float64)
    mean = math.fsum(exact.tolist()) / x.numel()
    square = math.fsum(((exact - mean) ** 2).tolist())
    for backend in BACKENDS:
        summary = summary_by(backend, x, histogram=False)
        assert summary.mean == pytest.approx(mean, rel=1e-12)
        assert summary.std == pytest.approx(math.sqrt(square / x.numel()), rel=1e-11)


@needs_core
@dtypes
def test_memory_need_not_be_aligned(dtype: torch.dtype) -> None:
    """As in a mapped file: the same bytes, one further on."""
    tensor = noise(5001, dtype, seed=8)
    raw = torch.cat([torch.zeros(1, dtype=torch.uint8), tensor.view(torch.uint8)])
    code, parts = CODES[dtype]
    for isa in ISAS:
        row = array("d", bytes(8 * WIDTH))
        counts = np.zeros(BUCKETS, dtype=np.int64)
        core.summarize(
            *(raw.data_ptr() + 1, tensor.numel() * parts, code),
            *(row.buffer_info()[0], counts.ctypes.data, 1, isa),
        )
        assert_defines(Summary.from_row(row, Histogram(counts)), tensor)


@needs_core
def test_flushing_denormals_does_not_hide_them() -> None:
    tensor = torch.tensor([1e-39, 1.0, 0.0] * 50)
    assert torch.set_flush_denormal(True)
    try:
        rows = [Summary.from_row(*NativeAt(i).summarize_row(tensor, False)) for i in ISAS]
    finally:
        torch.set_flush_denormal(False)
    assert [(s.subnormal, s.zeros) for s in rows] == [(50, 50)] * len(ISAS)


def random_parts(draw: st.DrawFn, n: int) -> list[tuple[int, int]]:
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
    return list(zip([0, *cuts], [*cuts, n], strict=True))


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[float], list[tuple[int, int]], list[int]]:
    values = draw(
        st.lists(
            st.one_of(st.sampled_from(HARD), st.floats(width=64), st.floats(-10, 10)), max_size=60
        )
    )
    parts = random_parts(draw, len(values))
    order = draw(st.permutations(range(len(parts))))
    return values, parts, list(order)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(partition=partitions(), tree=st.randoms(use_true_random=False))
def test_merging_parts_in_any_order_is_the_whole(
    partition: tuple[list[float], list[tuple[int, int]], list[int]], tree: object
) -> None:
    values, parts, order = partition
    pool = [
        summary_by("reference", torch.tensor(values[a:b], dtype=torch.float64))
        for a, b in (parts[k] for k in order)
    ]
    while len(pool) > 1:
        k = tree.randrange(len(pool) - 1)  # type: ignore[attr-defined]
        pool[k : k + 2] = [pool[k].merge(pool[k + 1])]
    shuffled = [v for k in order for v in values[parts[k][0] : parts[k][1]]]
    assert_defines(pool[0], torch.tensor(shuffled, dtype=torch.float64))


def test_merging_a_thousand_pieces_keeps_the_bound() -> None:
    x = 1e6 + torch.randn(50_000, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    total = summary_by("reference", x[:0])
    for piece in x.split(50):
        total = total.merge(summary_by("reference", piece))
    expected = expected_moments(values_of(x))
    assert total.std == pytest.approx(expected.std, rel=1e-9)
    assert total.mean == pytest.approx(expected.mean, rel=1e-9)


def test_rows_and_dictionaries_round_trip() -> None:
    summary = summary_by("reference", torch.tensor([1.0, math.nan, -math.inf]))
    again = Summary.from_row(summary.to_row(), summary.histogram)
    assert repr(again) == repr(summary)
    plain = summary.to_dict()
    assert plain["first"] == [1.0, None, "-inf"] and plain["rms"] == 1.0
    empty = summary_by("reference", torch.empty(0), histogram=False).to_dict()
    assert empty["mean"] is None and empty["l2"] == 0.0 and "histogram" not in empty
