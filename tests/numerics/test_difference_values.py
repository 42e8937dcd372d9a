"""Every metric on every backend against its definition, on the inputs that break naive code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from difference_definitions import (
    BACKENDS,
    COMPLEX,
    DTYPES,
    FLOATS,
    ISAS,
    WHOLE,
    Definition,
    check_all,
    difference_by,
    use,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_summary_values import HARD, from_bytes, noise

from tensortap.numerics.difference import difference
from tensortap.numerics.native import core
from tensortap.numerics.native_difference import suits_pair

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
backends = pytest.mark.parametrize("backend", BACKENDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
needs_core = pytest.mark.skipif(core is None, reason="the core is not built")


def bounded(tensor: torch.Tensor) -> torch.Tensor:
    """Without the values whose difference float64 cannot hold, which have a test of their own."""
    wide = {torch.float64: torch.float64, torch.complex128: torch.float64}.get(tensor.dtype)
    if wide is not None:
        flat = tensor.view(wide)
        flat[flat.abs().nan_to_num(0.0, 0.0) > 1e300] = 0.0
    return tensor


@needs_core
@pytest.mark.parametrize("isa", ISAS)
def test_the_core_is_what_is_tested(isa: str) -> None:
    """Not a core that is too old for this, with all of it left to the reference."""
    x = torch.ones(3)
    assert suits_pair(x, x) and use(isa).backend is not use("reference").backend
    assert difference_by(isa, x, x).identical


@dtypes
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.binary(max_size=240), other=st.binary(max_size=240), keep=st.integers(0, 255))
def test_any_bytes(dtype: torch.dtype, data: bytes, other: bytes, keep: int) -> None:
    """Two strings of bytes; where a bit of `keep` is set, the second has what the first has."""
    both = list(zip(data, other, strict=False))
    first = bytes(a for a, _ in both)
    second = bytes(a if keep >> (k % 8) & 1 else b for k, (a, b) in enumerate(both))
    check_all(bounded(from_bytes(first, dtype)), bounded(from_bytes(second, dtype)))


NUDGES = [0.0, 1e-12, 1e-6, 1e-3, 1.0, -2.0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    pairs=st.lists(
        st.tuples(st.sampled_from(HARD), st.sampled_from(HARD), st.sampled_from(NUDGES)),
        min_size=1,
        max_size=12,
    ),
    near=st.booleans(),
    repeat=st.sampled_from([1, 2, 7, 33]),
)
def test_hard_values(
    dtype: torch.dtype,
    pairs: list[tuple[float, float, float]],
    near: bool,
    repeat: int,
) -> None:
    left = [r for r, _, _ in pairs]
    right = [r * (1 + n) if near else c for r, c, n in pairs]
    one, two = (torch.tensor(v * repeat, dtype=torch.float64).to(dtype) for v in (left, right))
    check_all(bounded(one), bounded(two))


@pytest.mark.parametrize("first", DTYPES, ids=str)
def test_every_pair_of_dtypes(first: torch.dtype) -> None:
    one = bounded(noise(130, first, seed=1))
    for seed, second in enumerate(DTYPES, start=2):
        check_all(one, bounded(noise(130, second, seed=seed)))


@dtypes
def test_sizes_around_a_vector(dtype: torch.dtype) -> None:
    for n in (0, 1, 2, 7, 8, 9, 63, 64, 65):
        one, two = bounded(noise(n, dtype, seed=n)), bounded(noise(n, dtype, seed=n + 1))
        check_all(one, two)
        check_all(one, one.clone())


@backends
@dtypes
def test_a_tensor_against_itself(backend: str, dtype: torch.dtype) -> None:
    tensor = bounded(noise(3000, dtype, seed=5))
    found = difference_by(backend, tensor, tensor.clone())
    assert found.identical and found.device_good
    assert (found.mismatched, found.disagreeing) == (0, 0)
    if found.finite:
        zero = (found.mean, found.std, found.mae, found.max_abs, found.mse, found.rel, found.error)
        assert zero == (0.0,) * 7
        assert (found.cosine, found.cosine_distance) == (1.0, 0.0)
        assert found.correlation == pytest.approx(1.0, abs=1e-15)
        assert found.sqnr_db == math.inf
        assert found.percentiles == {50: 0.0, 90: 0.0, 95: 0.0, 99: 0.0}


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool], ids=str)
@pytest.mark.parametrize("at", [0, 517, 2999])
def test_one_bit_is_seen(dtype: torch.dtype, at: int) -> None:
    """Also where the values are equal in number: in the sign of a zero, in the bits of a NaN."""
    tensor = bounded(noise(3000, dtype, seed=6))
    other = tensor.clone()
    size = tensor.element_size()
    other.view(torch.uint8)[at * size] ^= 1
    assert not any(found.identical for found in check_all(tensor[: at + 1], other[: at + 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_zeros_of_both_signs_are_equal_but_not_identical(dtype: torch.dtype) -> None:
    one = torch.zeros(1000, dtype=dtype)
    for found in check_all(one, -one):
        assert (found.identical, found.max_abs, found.mismatched) == (False, 0.0, 0)
        assert found.device_good


@backends
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [0.1, -3.0, 0.0, 1.0])
def test_nothing_correlates_with_a_constant(backend: str, dtype: torch.dtype, value: float) -> None:
    for n in (1, 64, 4097):
        constant = torch.full((n,), value, dtype=torch.float64).to(dtype)
        other = (torch.arange(n, dtype=torch.float64) % 7 / 4).to(dtype)
        for one, two in ((constant, other), (other, constant), (constant, constant.clone())):
            found = difference_by(backend, one, two)
            assert math.isnan(found.correlation)
        assert (found.reference_std, found.candidate_std, found.std) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_constant_beside_numbers_far_below_its_last_bit(dtype: torch.dtype) -> None:
    """There d is constant too, and candidate = reference + d does not hold to the last bit."""
    x = 1e-30 * torch.randn(6001, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[:2000] = 0
    small, constant = x.to(dtype), torch.full((6001,), 0.25, dtype=dtype)
    check_all(small, constant)
    check_all(constant, small)
    last_bit = constant.clone()
    last_bit[4000] = torch.nextafter(last_bit[4000], torch.tensor(1.0, dtype=dtype))
    check_all(last_bit, last_bit.clone())


KINDS = {
    "rounded": lambda x, e: (x, x + 1e-3 * e),
    "equal but one": lambda x, e: (x, torch.where(torch.arange(x.numel()) == 1501, 9.0, x)),
    "far offset": lambda x, e: (1e6 + x, 1e6 + x + 1e-2 * e),
    "candidate offset": lambda x, e: (x, 1e6 + x),
    "constant shift": lambda x, e: (x, x + 0.25),
    "gain": lambda x, e: (x, 1.02 * x),
    "opposite": lambda x, e: (x, -x),
    "unrelated": lambda x, e: (x, e),
    "tiny candidate": lambda x, e: (x, 1e-12 * e),
    "tiny reference": lambda x, e: (1e-12 * e, x),
    "zero candidate": lambda x, e: (x, 0 * x),
    "zero reference": lambda x, e: (0 * x, x),
    "step": lambda x, e: (torch.where(x.cumsum(0) > 3, x, 2e4 + x), x),
    "outlier": lambda x, e: (x, torch.where(torch.arange(x.numel()) == 777, 3e4, x)),
    "masked": lambda x, e: (torch.where(x > 1, -math.inf, x), torch.where(x > 1, -math.inf, e)),
    "some nan": lambda x, e: (torch.where(x > 2, math.nan, x), torch.where(e > 2, math.nan, x)),
    "a grid": lambda x, e: ((2 * x).round(), (2 * e).round()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_activations(dtype: torch.dtype, kind: str) -> None:
    """Several blocks and a rest."""
    generator = torch.Generator().manual_seed(1)
    x, e = torch.randn(2, 2501, generator=generator, dtype=torch.float64)
    one, two = (side.to(dtype) for side in KINDS[kind](x, e))
    check_all(one, two)


@pytest.mark.parametrize("second", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
def test_blocks_of_two_dtypes(second: torch.dtype) -> None:
    x = 20 * torch.randn(2501, generator=torch.Generator().manual_seed(2))
    for first in (torch.float32, torch.float16, torch.float8_e5m2, torch.int64):
        check_all(x.to(first), x.to(second))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.int32, torch.uint8], ids=str)
def test_the_ends_of_integers(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    values = sorted({info.min, info.max, info.min + 1, info.max - 1, 0, 1, info.max // 2})
    one = torch.tensor([a for a in values for _ in values], dtype=dtype)
    two = torch.tensor([b for _ in values for b in values], dtype=dtype)
    for found in check_all(one, two):
        assert found.max_abs == float(info.max - info.min)
        assert found.mismatched == len(values) * (len(values) - 1)


def test_large_integers_one_apart() -> None:
    """In float64 they would be equal."""
    one = torch.full((100,), 2**62, dtype=torch.int64)
    for found in check_all(one, one + 1):
        assert (found.max_abs, found.mismatched, found.mean) == (1.0, 100, 1.0)
    signed, unsigned = torch.tensor([-1, 5]), torch.tensor([2**64 - 1, 5], dtype=torch.uint64)
    for found in check_all(signed, unsigned):
        assert found.max_abs == 2.0**64


@pytest.mark.parametrize("size", [1e200, 1e-200, 1e150, 1e-160, 1e-300, 1e300, 1e-310])
def test_sizes_at_the_ends_of_float64(size: float) -> None:
    generator = torch.Generator().manual_seed(3)
    x, e = torch.randn(2, 700, generator=generator, dtype=torch.float64)
    check_all(size * x, size * (x + 1e-3 * e))
    check_all(size * x, x)
    check_all(x, size * x)


@backends
def test_a_difference_beyond_float64(backend: str) -> None:
    one = torch.tensor([1.7e308, -1.7e308, 1.0], dtype=torch.float64)
    found = difference_by(backend, one, -one)
    assert (found.max_abs, found.max_abs_index, found.mae) == (math.inf, (0,), math.inf)
    assert abs(found.mean) < 1e300
    assert found.cosine == -1.0 and found.correlation == pytest.approx(-1.0)
    assert found.mismatched == 3


@pytest.mark.parametrize("apart", [1e-3, 1e-6, 1e-9, 1e-12])
def test_the_cosine_distance_keeps_its_digits(apart: float) -> None:
    """At 1e-12 apart, 1 - cosine is near 1e-24, far below what a number next to 1 can hold."""
    generator = torch.Generator().manual_seed(4)
    x, e = torch.randn(2, 2000, generator=generator, dtype=torch.float64)
    for found in check_all(x, x + apart * e):
        assert 0.1 * apart**2 < found.cosine_distance < apart**2


@backends
def test_the_cosine_of_millions_stays_a_cosine(backend: str) -> None:
    """torch's own, of almost equal float32, is above 1 at such a size."""
    size = 2_000_000 if backend == "reference" else 16_000_000
    x = torch.rand(size, generator=torch.Generator().manual_seed(5))
    found = difference_by(backend, x, x * 1.000001, percentiles=False)
    assert 1 - 1e-12 < found.cosine <= 1.0 and 0.0 <= found.cosine_distance < 1e-12
    assert found.cosine > 0 and found.correlation <= 1.0
    mse = float(((x * 1.000001).double() - x.double()).square().mean())
    assert found.mse == pytest.approx(mse, rel=1e-9)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_millions_with_an_offset(backend: str, dtype: torch.dtype) -> None:
    """Against numpy in long double: sums in float32 would be far off."""
    generator = torch.Generator().manual_seed(6)
    x, e = torch.randn(2, 1_200_000, generator=generator)
    one, two = (x + 1000).to(dtype), (x + 1000 + 0.01 * e).to(dtype)
    found = difference_by(backend, one, two)
    r, c = (side.double().numpy().astype(np.longdouble) for side in (one, two))
    d = c - r
    assert found.mean == pytest.approx(float(d.mean()), abs=1e-9 * float(abs(d).mean()))
    assert found.std == pytest.approx(float(d.std()), rel=1e-9)
    assert found.mse == pytest.approx(float((d * d).mean()), rel=1e-9)
    assert found.reference_std == pytest.approx(float(r.std()), rel=1e-9)
    centred = r - r.mean(), c - c.mean()
    cov = float((centred[0] * centred[1]).mean())
    assert found.correlation == pytest.approx(cov / float(r.std() * c.std()), rel=1e-9)
    expected = np.percentile(np.abs(d).astype(np.float64), [50, 90, 95, 99])
    assert found.percentiles == dict(zip((50, 90, 95, 99), expected.tolist(), strict=True))


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers_are_two_each(dtype: torch.dtype) -> None:
    x = torch.randn(40, 30, 4, generator=torch.Generator().manual_seed(7))
    one, two = (torch.view_as_complex(side.contiguous()) for side in (x[..., :2], x[..., 2:]))
    one, two = one.to(dtype), two.to(dtype)
    for found in check_all(one, two):
        assert found.count == 2400 and found.max_abs_index is not None
        assert len(found.max_abs_index) == 2
        assert abs((two - one)[found.max_abs_index]) >= found.max_abs * 0.999
    check_all(one.conj(), two)
    check_all(one, two.conj().resolve_conj())


def test_a_complex_and_a_real_tensor() -> None:
    one, two = torch.tensor([1 + 2j, 3 + 4j]), torch.tensor([1.0, 3.0])
    found = difference(one, two)
    assert (found.count, found.max_abs, found.max_abs_index) == (4, 4.0, (1,))
    assert found.mse == pytest.approx((4 + 16) / 4)


def test_known_numbers() -> None:
    inf, nan = math.inf, math.nan
    one = torch.tensor([3.0, -4.0, 0.0, nan, inf, -inf, nan, 1.0, inf])
    two = torch.tensor([3.0, -2.0, 1.0, nan, inf, inf, 1.0, nan, 1.0])
    for s in check_all(one, two):
        assert (s.count, s.finite, s.agreeing, s.disagreeing, s.mismatched) == (9, 3, 2, 4, 6)
        assert (s.mean, s.mae, s.max_abs) == (1.0, 1.0, 2.0)
        assert (s.max_abs_index, s.max_abs_pair) == ((1,), (-4.0, -2.0))
        assert s.mse == pytest.approx(5 / 3) and s.relative_mse == pytest.approx(5 / 25)
        assert s.error == pytest.approx(math.sqrt(0.2))
        assert s.relative_mae == pytest.approx(3 / 7)
        assert s.max_relative == pytest.approx(1e8) and s.cosine == pytest.approx(
            17 / (5 * 14**0.5)
        )
        assert s.sqnr_db == pytest.approx(10 * math.log10(5))
        assert s.rel == pytest.approx(1 - 2 * 17 / (25 + 14))
        assert s.percentiles == {50: 1.0, 90: 1.8, 95: 1.9, 99: 1.98}
        assert (s.rtol, s.atol, s.dtypes) == (1.3e-6, 1e-5, ("float32", "float32"))


@backends
def test_limits_can_be_given(backend: str) -> None:
    one, two = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.5, 2.5, 4.5])
    for rtol, atol, expected in ((0.0, 0.4, 3), (0.0, 0.5, 0), (0.2, 0.0, 2), (0.2, 0.2, 1)):
        found = difference_by(backend, one, two, rtol=rtol, atol=atol)
        assert (found.mismatched, found.rtol, found.atol) == (expected, rtol, atol)


@backends
@pytest.mark.parametrize("dtype", [d for d in FLOATS if d.itemsize > 1] + WHOLE[:2], ids=str)
def test_mismatches_are_those_of_torch_testing(backend: str, dtype: torch.dtype) -> None:
    """It has no tolerance for 8-bit floats."""
    x = 3 * torch.randn(4000, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    step = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float64: 1e-7}.get(dtype, 1e-6)
    one, two = x.to(dtype), (x * (1 + step * x.roll(1).abs()) + step).to(dtype)
    found = difference_by(backend, one, two)
    near = torch.isclose(two.double(), one.double(), rtol=found.rtol, atol=found.atol)
    assert found.mismatched == int((~near).sum()) > 0 or not dtype.is_floating_point
    try:
        torch.testing.assert_close(two, one)
        assert found.mismatched == 0
    except AssertionError as error:
        assert f"Mismatched elements: {found.mismatched} / 4000" in str(error)


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16])
@pytest.mark.parametrize("isa", ISAS)
def test_many_threads_change_no_bit(isa: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 700_001, generator=torch.Generator().manual_seed(9)) * 50
    one, two = x[0].to(dtype), (x[0] + 0.01 * x[1]).to(dtype)
    rows = []
    for threads in (1, 2, 3):
        with use(isa, threads):
            found = difference(one, two)
        rows.append((repr(found), repr(found.row), found.histogram))
    assert rows[0] == rows[1] == rows[2]


@needs_core
@dtypes
def test_memory_need_not_be_aligned(dtype: torch.dtype) -> None:
    """As in a mapped file: the same bytes, one further on, where torch itself may crash."""
    one, two = bounded(noise(1001, dtype, seed=8)), bounded(noise(1001, dtype, seed=9))
    shifted = []
    for tensor in (one, two):
        raw = bytearray(1) + bytearray(tensor.view(torch.uint8).numpy())
        shifted.append(torch.frombuffer(raw, dtype=dtype, offset=1))
    definition = Definition([(one, two)])
    for isa in ISAS:
        definition.check(difference_by(isa, shifted[0], shifted[1]))
