"""Triton's kernels for differences, in its interpreter, against the definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from difference_definitions import GPU, Definition, difference_by, difference_of_by, use
from hypothesis import given, settings
from hypothesis import strategies as st
from test_difference_percentiles import SHAPES, expected
from test_difference_values import KINDS, NUDGES
from test_profile import assert_defines
from test_summary_values import HARD, from_bytes, noise

import tensortap.numerics.backend as backend
from tensortap.errors import OptionError
from tensortap.numerics.difference import Difference, difference
from tensortap.numerics.profile import profile

triton = pytest.importorskip("triton")
triton_percentiles = pytest.importorskip("tensortap.numerics.triton_percentiles")
triton_difference = pytest.importorskip("tensortap.numerics.triton_difference")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there, the kernels run on the device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of NaN and overflow
]
READ = list(triton_difference.KINDS)
FLOATS = [d for d in READ if d.is_floating_point]
read = pytest.mark.parametrize("dtype", READ, ids=str)


def check(one: torch.Tensor, two: torch.Tensor, **options: float) -> Difference:
    found = difference_by("triton", one, two, **options)
    Definition([(one, two)], share=GPU, **options).check(found)
    return found


@read
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.binary(max_size=99), other=st.binary(max_size=99), keep=st.integers(0, 255))
def test_any_bytes(dtype: torch.dtype, data: bytes, other: bytes, keep: int) -> None:
    """Two strings of bytes; where a bit of `keep` is set, the second has what the first has."""
    both = list(zip(data, other, strict=False))
    first = bytes(a for a, _ in both)
    second = bytes(a if keep >> (k % 8) & 1 else b for k, (a, b) in enumerate(both))
    check(from_bytes(first, dtype), from_bytes(second, dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    pairs=st.lists(
        st.tuples(st.sampled_from(HARD), st.sampled_from(HARD), st.sampled_from(NUDGES)),
        min_size=1,
        max_size=12,
    ),
    near=st.booleans(),
    repeat=st.sampled_from([1, 2, 33]),
)
def test_hard_values(
    dtype: torch.dtype, pairs: list[tuple[float, float, float]], near: bool, repeat: int
) -> None:
    left = [r for r, _, _ in pairs]
    right = [r * (1 + n) if near else c for r, c, n in pairs]
    check(*(torch.tensor(v * repeat, dtype=torch.float64).to(dtype) for v in (left, right)))


@pytest.mark.parametrize("first", READ, ids=str)
def test_pairs_of_dtypes(first: torch.dtype) -> None:
    """Each with some others, before it and behind; bit patterns, and numbers that need no care."""
    x = 9 * torch.randn(2, 70, generator=torch.Generator().manual_seed(1))
    for further in (1, 4, 7):
        second = READ[(READ.index(first) + further) % len(READ)]
        if further == 4:
            check(x[0].to(first), (x[0] + 0.1 * x[1]).to(second))
        else:
            check(noise(70, first, seed=1), noise(70, second, seed=further))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_sizes_around_tiles(dtype: torch.dtype) -> None:
    """Where spans end and begin: a tile and a half, a span and one more, an odd last element."""
    step = triton_difference.INTERPRETED.lanes * 128 // (8 * dtype.itemsize)
    for n in (0, step - 1, 2 * step + 1, 8 * step + 3):
        x = 9 * torch.randn(2, n, generator=torch.Generator().manual_seed(n))
        check(x[0].to(dtype), (x[0] + 0.1 * x[1]).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_activations(kind: str) -> None:
    x, e = torch.randn(2, 801, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dtype = torch.bfloat16 if len(kind) % 2 else torch.float32
    check(*(side.to(dtype) for side in KINDS[kind](x, e)))


@pytest.mark.parametrize("scale", [1e-40, 1e-22, 1e-15, 1e15, 1e22, 3e37])
def test_squares_that_float32_cannot_hold(scale: float) -> None:
    x, e = torch.randn(2, 600, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    check((scale * x).bfloat16(), (scale * (x + 0.01 * e)).bfloat16())
    one = x.float()
    one[400] *= scale
    check(one, x.float())


def test_a_constant_keeps_no_spread() -> None:
    for value in (0.1, 0.0):
        constant = torch.full((700,), value)
        other = torch.arange(700) % 7 / 4
        for one, two in ((constant, other), (other, constant), (constant, constant.clone())):
            found = difference_by("triton", one, two)
            assert math.isnan(found.correlation)
        assert (found.reference_std, found.candidate_std, found.std) == (0.0, 0.0, 0.0)
        assert found.identical


@pytest.mark.parametrize(("rtol", "atol"), [(0.0, 0.0), (1e-2, 0.0), (0.0, 0.25), (1e35, 1.0)])
def test_tolerances_on_the_edge(rtol: float, atol: float) -> None:
    """On a grid, so that many differences are the limit itself."""
    x = torch.randint(-8, 9, (2, 600), generator=torch.Generator().manual_seed(3)) / 8
    check(x[0].bfloat16(), x[1].bfloat16(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("at", [0, 517])
def test_one_bit_is_seen(at: int) -> None:
    """In a word of two, in the sign of a zero, in the bits of a NaN."""
    for dtype in (torch.bfloat16, torch.float32):
        tensor = torch.zeros(520, dtype=dtype)
        other = tensor.clone()
        other.view(torch.uint8)[(at + 1) * dtype.itemsize - 1] ^= 0x80
        assert not check(tensor, other).identical
        assert check(tensor, tensor.clone()).identical
        tensor[at] = math.nan
        assert check(tensor, tensor.clone()).identical


def test_the_first_of_the_largest() -> None:
    """In one span and in several; and of distances that only float64 tells apart."""
    one = torch.zeros(1500)
    two = one.clone()
    two[[300, 310, 1400]] = 5.0
    two[310] = -5.0
    assert check(one, two).max_abs_index == (300,)
    two[[20, 1300]] = 2.0**24
    one[1300] = -0.5  # which float32 rounds away
    assert check(one, two).max_abs_index == (1300,)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(SHAPES)),
    seed=st.integers(0, 99),
    narrow=st.booleans(),
    size=st.integers(1000, 1300),
)
def test_brackets_hold_the_percentiles(name: str, seed: int, narrow: bool, size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    one, two = (side.bfloat16() if narrow else side for side in SHAPES[name](x))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_percentiles, "ALL", 400)
        patch.setattr(triton_percentiles, "STRIDE", 4)
        found = difference_by("triton", one, two)
        assert found.percentiles == expected(one, two) and found.percentiles_exact
        assert found.histogram is not None
        assert abs(found.histogram.total - found.finite) < found.finite / 10 + 50


def test_brackets_that_miss_and_samples_that_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1250, generator=torch.Generator().manual_seed(5))
    parts = [x[:600], 1e3 * x[600:1240], 1e-6 * x[1240:], x[:0]]
    stream = [(torch.zeros_like(part), part) for part in parts]
    wanted = expected(torch.zeros(1250), torch.cat(parts))
    assert difference_of_by("triton", stream).percentiles == wanted
    monkeypatch.setattr(triton_percentiles, "_SAMPLES", 500)
    assert difference_of_by("triton", stream).percentiles == wanted
    monkeypatch.setattr(triton_percentiles, "_SIGMAS", -5.0)
    assert difference_of_by("triton", stream).percentiles == wanted


def test_views_scalars_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_difference, "_COPY_LIMIT", 100)
    x = torch.randn(6, 7, 8, generator=torch.Generator().manual_seed(2))
    y = x + 0.1 * x.roll(1)
    for one, two in (
        (x.transpose(0, 2), y.transpose(0, 2)),
        (x[:, ::2, 1:], y[:, ::2, 1:]),
        (x.bfloat16().view(-1)[1:], y.bfloat16().view(-1)[1:]),
        (x[0, 0, 0], y[0, 0, 0]),
    ):
        found = check(one, two)
        assert found.max_abs_index == difference_by("reference", one, two).max_abs_index
    monkeypatch.setattr(triton_difference, "_PENDING", 2)
    pairs = [(x[k], y[k].bfloat16()) for k in range(6)] + [(x[:0], y[:0])]
    found = difference_of_by("triton", pairs)
    Definition(pairs, share=GPU).check(found)
    assert found.max_abs_index == difference_of_by("reference", pairs).max_abs_index
    assert difference_of_by("triton", pairs).row == found.row  # the same bits


@pytest.mark.parametrize("second", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_profiles(second: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = 9 * torch.randn(3, 20, 13, generator=torch.Generator().manual_seed(1))
    x[1, 2, 3], x[2, 0, 0] = math.nan, math.inf
    y = (x.nan_to_num(0.0, 0.0) + 0.1).to(second)
    for limit in (1 << 20, 50):
        monkeypatch.setattr(triton_difference, "_COPY_LIMIT", limit)
        for one, two in ((x, y), (x.transpose(0, 1), y.transpose(0, 1)), (x[0, 0], y[0, 0])):
            with use("triton"):
                found = profile(one, two)
            assert found is not None
            assert_defines(found, one, two)


def test_who_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)
    usual = "native" if "native" in backend.BACKENDS else "reference"
    for asked, on_cpu in (("", usual), ("triton", "reference"), ("reference", "reference")):
        monkeypatch.setenv("TENSORTAP_BACKEND", asked)
        backend._forced.cache_clear()
        assert backend.pick(x).name == backend.pick_pair(x, x).name == on_cpu
        assert backend.describe()["backend"] == on_cpu
    monkeypatch.setenv("TENSORTAP_BACKEND", "triton")
    monkeypatch.delitem(backend.BACKENDS, "triton")
    backend._forced.cache_clear()
    with pytest.raises(OptionError, match=r"triton backend, but Triton is not installed"):
        backend.pick(x)
    monkeypatch.undo()
    backend._forced.cache_clear()


def test_kernels_that_cannot_run_are_said_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no C compiler\nat all")

    monkeypatch.setattr(triton_difference, "launch", fails)
    monkeypatch.setattr(backend, "_FAILED", [])
    x = torch.randn(50, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(backend, "pick_pair", lambda r, c: backend.BACKENDS["triton"])
    with pytest.warns(RuntimeWarning, match=r"RuntimeError: no C compiler at all\)\. Torch"):
        found = backend.BACKENDS["triton"].difference_row(
            lambda: iter([(x, x + 1)]), percentiles=True, rtol=None, atol=None
        )
    assert found[0] == difference_by("reference", x, x + 1).row
    assert backend._FAILED


def out_of_resources(*_: object) -> None:
    try:
        raise MemoryError("shared memory:\nRequired 300000, limit 101376")
    except MemoryError as error:
        raise RuntimeError("at 22:4") from error


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may fail, and who picks them knows no more than that."""
    monkeypatch.setattr(backend, "_FAILED", [])
    names = {False: "triton", True: "reference"}
    picked = lambda r, c: backend.BACKENDS[names[bool(backend._FAILED)]]  # noqa: E731
    monkeypatch.setattr(backend, "pick_pair", picked)


@pytest.mark.parametrize("name", ["sample", "values", "histogram"])
def test_nor_does_one_that_cannot_be_compiled_for_percentiles_end_a_comparison(
    monkeypatch: pytest.MonkeyPatch, failing: None, name: str
) -> None:
    monkeypatch.setattr(triton_percentiles.Distances, name, out_of_resources)
    x = torch.randn(50, generator=torch.Generator().manual_seed(1))
    why = r"\(MemoryError: shared memory: Required 300000, limit 101376\)\. Torch does it instead"
    with pytest.warns(RuntimeWarning, match=why) as said:
        found = [difference(x, x + 1) for _ in range(2)]
    assert len(said) == 1 and len(backend._FAILED) == 1
    expected = difference_by("reference", x, x + 1)
    assert all((one.row, one.p99) == (expected.row, expected.p99) for one in found)


def test_nor_one_for_profiles(monkeypatch: pytest.MonkeyPatch, failing: None) -> None:
    monkeypatch.setattr(triton_difference, "profile_on", out_of_resources)
    x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1))
    with pytest.warns(RuntimeWarning, match="Torch does it instead"):
        assert_defines(profile(x, x + 1), x, x + 1)


def test_what_the_pairs_or_the_memory_fail_with_is_no_kernels(
    monkeypatch: pytest.MonkeyPatch, failing: None
) -> None:
    x, by = torch.ones(9), backend.BACKENDS["triton"]

    def pairs():
        yield x, x
        raise RuntimeError("segment 3 cannot be read")

    with pytest.raises(RuntimeError, match="segment 3"):
        by.difference_row(pairs, percentiles=True, rtol=None, atol=None)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(triton_percentiles.Distances, "sample", full)
    monkeypatch.setattr(triton_difference, "profile_on", full)
    with pytest.raises(torch.OutOfMemoryError):
        by.difference_row(lambda: iter([(x, x)]), percentiles=True, rtol=None, atol=None)
    with pytest.raises(torch.OutOfMemoryError):
        by.profile_rows(x[None], x[None])
    assert not backend._FAILED


def test_what_the_kernels_read() -> None:
    assert all(triton_difference.readable(torch.empty(0, dtype=d)) for d in READ)
    for dtype in (torch.float64, torch.int64, torch.complex64):
        assert not triton_difference.readable(torch.empty(0, dtype=dtype))
    assert not triton_difference.suits_pair(torch.ones(2), torch.ones(2))  # not on a device
    assert all(np.log2(most).is_integer() for most in triton_difference._MOST)
