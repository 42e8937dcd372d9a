"""Errors by token and by channel, on every backend, against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from difference_definitions import BACKENDS, DTYPES, use
from hypothesis import given, settings
from hypothesis import strategies as st
from test_summary_values import noise

import tensortap.numerics.reference_difference as reference_difference
from tensortap.errors import OptionError
from tensortap.numerics.difference import difference
from tensortap.numerics.profile import COLUMNS, Profile, profile

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
backends = pytest.mark.parametrize("backend", BACKENDS)


def profile_by(backend: str, reference: torch.Tensor, candidate: torch.Tensor) -> Profile:
    with use(backend):
        found = profile(reference, candidate)
    assert found is not None
    return found


def assert_defines(found: Profile, reference: torch.Tensor, candidate: torch.Tensor) -> None:
    """By Python's sums over each row and column."""
    sides = []
    for side in (reference, candidate):
        side = side.detach().resolve_conj().resolve_neg()
        parts = torch.view_as_real(side) if side.is_complex() else side[..., None]
        sides.append(parts.to(torch.float64).reshape(-1, *parts.shape[-2:]).tolist())
    width = reference.shape[-1]
    tokens = [_cell() for _ in range(reference.numel() // width)]
    channels = [_cell() for _ in range(width)]
    for token, rows in enumerate(zip(*sides, strict=True)):
        for channel, cells in enumerate(zip(*rows, strict=True)):
            for r, c in zip(*cells, strict=True):
                _add(tokens[token], r, c)
                _add(channels[channel], r, c)
    assert found.shape == tuple(reference.shape[:-1])
    for table, cells in ((found.tokens, tokens), (found.channels, channels)):
        assert table.shape == (len(cells), 4) and table.dtype == np.float64
        expected = np.array([(math.fsum(d), math.fsum(r), top, bad) for d, r, (top, bad) in cells])
        np.testing.assert_allclose(table[:, :2], expected[:, :2], rtol=1e-9, atol=1e-300)
        np.testing.assert_array_equal(table[:, 2:], expected[:, 2:])


def _cell() -> tuple[list[float], list[float], list[float]]:
    return [], [], [0.0, 0.0]


def _add(cell: tuple[list[float], list[float], list[float]], r: float, c: float) -> None:
    squares, energy, rest = cell
    if math.isfinite(r) and math.isfinite(c):
        squares.append((c - r) ** 2)
        energy.append(r**2)
        rest[0] = max(rest[0], abs(c - r))
    elif not (r == c or (math.isnan(r) and math.isnan(c))):
        rest[1] += 1


def clean(tensor: torch.Tensor) -> torch.Tensor:
    """Without what overflows when squared."""
    if tensor.dtype in (torch.float64, torch.complex128):
        flat = tensor.view(torch.float64)
        flat[flat.abs().nan_to_num(0.0, 0.0) > 1e140] = 0.0
    return tensor


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    near=st.booleans(),
)
def test_any_bytes_in_any_shape(
    backend: str, dtype: torch.dtype, shape: list[int], seed: int, near: bool
) -> None:
    size = math.prod(shape)
    one = clean(noise(size, dtype, seed=seed))
    two = clean(noise(size, dtype, seed=seed + 1))
    if near:
        two[::2] = one[::2]
    one, two = one.view(shape), two.view(shape)
    if dtype in (torch.int64, torch.uint64):  # whose difference is exact, which a loop has not
        one, two = (side.view(torch.int64) >> 12 for side in (one, two))
    assert_defines(profile_by(backend, one, two), one, two)


@backends
@pytest.mark.parametrize("second", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(70, 300), (3, 2, 513), (1, 5000), (5000, 1), (7, 64, 16)])
def test_larger_tensors_of_two_dtypes(
    backend: str, second: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = 9 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    one, two = x, (x + 0.1 * x.roll(1)).to(second)
    assert_defines(profile_by(backend, one, two), one, two)


@backends
def test_views(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 7, 8, generator=torch.Generator().manual_seed(2))
    y = x + 0.1 * x.roll(1)
    for chunk in (1 << 20, 20, 1):
        monkeypatch.setattr(reference_difference, "CHUNK", chunk)
        for one, two in (
            (x.transpose(0, 2), y.transpose(0, 2)),
            (x[:, ::2, 1:], y[:, ::2, 1:]),
            (x[:, 3], y[:, 3].clone()),
            (x.permute(2, 0, 1), y.permute(2, 0, 1).contiguous()),
            (x[0, :, 0], y[0, :, 0]),
            (x[:, :1].expand(6, 5, 8), y[:, :5]),
        ):
            assert_defines(profile_by(backend, one, two), one, two)


@backends
def test_one_bad_token_and_one_bad_channel_stand_out(backend: str) -> None:
    reference = torch.ones(2, 50, 32)
    candidate = reference.clone()
    candidate[1, 20] += 1
    candidate[..., 7] += 0.5
    candidate[0, 3, 5] = math.nan
    found = profile_by(backend, reference, candidate)
    worst = int(found.tokens[:, 0].argmax())
    assert np.unravel_index(worst, found.shape) == (1, 20)
    assert int(found.channels[:, 2].argmax()) == int(found.channels[:, 0].argmax()) == 7
    assert found.channels[:, 3].nonzero()[0].tolist() == [5]
    assert found.tokens[:, 3].nonzero()[0].tolist() == [3]


@backends
def test_the_profile_adds_up_to_the_difference(backend: str) -> None:
    x = torch.randn(64, 100, generator=torch.Generator().manual_seed(3))
    y = x.bfloat16()
    found, whole = profile_by(backend, x, y), difference(x, y)
    for table in (found.tokens, found.channels):
        assert table[:, 0].sum() == pytest.approx(whole.row.d_l2**2, rel=1e-9)
        assert table[:, 1].sum() == pytest.approx(whole.row.ref_l2**2, rel=1e-9)
        assert table[:, 2].max() == whole.max_abs


def test_what_has_no_axes_or_elements_has_no_profile() -> None:
    assert profile(torch.tensor(1.0), torch.tensor(2.0)) is None
    assert profile(torch.ones(3, 0, 2), torch.ones(3, 0, 2)) is None
    assert profile(torch.ones(0), torch.ones(0)) is None
    single = profile(torch.ones(3), torch.zeros(3))
    assert single is not None and single.shape == () and single.tokens.tolist() == [[3, 3, 1, 0]]
    assert COLUMNS == ("d_squares", "reference_squares", "max_abs", "disagreeing")


def test_shapes_must_be_equal() -> None:
    with pytest.raises(OptionError, match=r"shape \(2,\), but the candidate \(3,\)"):
        profile(torch.ones(2), torch.ones(3))
