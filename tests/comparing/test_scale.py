"""No answer depends on the unit: both runs times a power of two give the same verdicts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tensortap as tap
from tensortap.comparing.causes.formulas import _slope
from tensortap.comparing.summaries import judge_summaries

# As far as every value stays a normal number: an absolute tolerance of any size shows.
_REACH = {
    torch.float16: (-6, 10),
    torch.bfloat16: (-110, 115),
    torch.float32: (-110, 115),
    torch.float64: (-400, 400),
}
SCALES = st.sampled_from(list(_REACH)).flatmap(
    lambda dtype: st.tuples(st.just(dtype), st.integers(*_REACH[dtype]))
)


def values(seed: int, dtype: torch.dtype) -> Tensor:
    """Rows and channels of different sizes, all of them normal numbers in `dtype` when scaled."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 7, 12, generator=generator)
    sizes = torch.logspace(-1, 0.5, 12)
    x = x.sign() * x.abs().clamp(0.05, 4) * sizes
    return x.to(dtype)


def scales(factor: float, *sides: Tensor) -> bool:
    """Whether the product is exact: a value that becomes subnormal or overflows is another one."""
    return all(torch.equal(side * factor / factor, side) for side in sides)


def spoilt(x: Tensor, kind: str, size: float) -> Tensor:
    made = x.clone()
    if kind == "gain":
        return made * (1 + size)
    if kind == "token":
        made[0, 3] *= 1 + size
    elif kind == "channel":
        made[..., 5] *= 1 + size
    elif kind == "noise":
        made += (
            size
            * made.std()
            * torch.randn(made.shape, generator=torch.Generator().manual_seed(9)).to(made)
        )
    elif kind == "reversed":
        made = made.flip(-1)
    return made


class Scaled(nn.Module):
    """Returns a stored tensor: the input is left aside."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.value.clone()


def record(value: Tensor, path: Path, keep: str) -> tap.Recording:
    model = nn.Sequential(Scaled(value))
    with tap.record(model, path, layers="all", keep=keep, overwrite=True):
        model(torch.ones(1))
    return tap.open(path)


KINDS = st.sampled_from(["gain", "token", "channel", "noise", "reversed", "same"])


@given(st.integers(0, 50), SCALES, KINDS, st.floats(1e-7, 0.5))
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@pytest.mark.parametrize("keep", ["tensors", "summary"])
def test_verdicts_do_not_change(
    tmp_path: Path,
    keep: str,
    seed: int,
    scale: tuple[torch.dtype, int],
    kind: str,
    size: float,
) -> None:
    dtype, power = scale
    reference = values(seed, dtype)
    candidate = spoilt(reference, kind, size)
    assume(scales(2.0**power, reference, candidate))
    said = []
    for factor in (1.0, 2.0**power):
        both = [
            record(side * factor, tmp_path / name, keep)
            for side, name in ((reference, "a"), (candidate, "b"))
        ]
        result = tap.compare(*both)
        said.append([(row.layer, row.verdict, row.hints) for row in result.layers])
    assert said[0] == said[1]


@given(st.integers(0, 50), SCALES, KINDS, st.floats(1e-7, 0.5))
@settings(max_examples=80, deadline=None)
def test_summaries_and_differences_scale(
    seed: int, scale: tuple[torch.dtype, int], kind: str, size: float
) -> None:
    dtype, power = scale
    reference = values(seed, dtype)
    candidate = spoilt(reference, kind, size)
    factor = 2.0**power
    assume(scales(factor, reference, candidate))
    plain = tap.difference(reference, candidate)
    scaled = tap.difference(reference * factor, candidate * factor)
    assert scaled.identical == plain.identical
    for name in ("error", "cosine", "correlation", "sqnr_db", "rel"):
        assert math.isclose(
            getattr(plain, name), getattr(scaled, name), rel_tol=1e-6, abs_tol=1e-12
        ) or (math.isnan(getattr(plain, name)) and math.isnan(getattr(scaled, name)))
    for name in ("rmse", "mae", "max_abs"):
        assert math.isclose(factor * getattr(plain, name), getattr(scaled, name), rel_tol=1e-6)
    left, right = (tap.summarize(side) for side in (reference, candidate))
    small, other = (tap.summarize(side * factor) for side in (reference, candidate))
    assert np.isclose(small.rms, factor * left.rms, rtol=1e-9)
    assert np.isclose(small.mean, factor * left.mean, rtol=1e-6, atol=1e-9 * small.rms)
    for limit in (1e-6, 1e-3, 0.1):
        assert judge_summaries(left, right, limit)[0] == judge_summaries(small, other, limit)[0]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 2.0**-17), (torch.bfloat16, 2.0**-128), (torch.float8_e4m3fn, 2.0**-8)],
)
def test_subnormal_numbers_may_be_off_by_their_steps(
    tmp_path: Path, dtype: torch.dtype, size: float
) -> None:
    """The same values in float32 and in a dtype in which most of them are subnormal."""
    exact = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) * size
    rounded, other = exact.to(dtype), exact.flip(-1).to(dtype)
    reference = record(exact, tmp_path / "exact", "tensors")
    for candidate, verdict in ((rounded, "within"), (other, "diverged")):
        result = tap.compare(reference, record(candidate, tmp_path / verdict, "tensors"))
        assert {row.verdict for row in result.layers} == {verdict}
    tap.testing.assert_matches(exact, rounded)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        tap.testing.assert_matches(exact, other)


def test_small_values_where_the_reference_is_zero_are_said(tmp_path: Path) -> None:
    zero = record(torch.zeros(4, 8), tmp_path / "zero", "tensors")
    small = record(torch.full((4, 8), 1e-30), tmp_path / "small", "tensors")
    row = tap.compare(zero, small).layers[0]
    assert row.verdict == "diverged"
    assert row.why == "the reference is zero everywhere, the candidate has values up to 1e-30"


@pytest.mark.parametrize("size", [1.0, 1e-9])
def test_causes_follow_the_scale(size: float) -> None:
    """Small values are not close to what they are not."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(1)) * size
    assert _slope(x, torch.where(x > 0, x, 0.2 * x)) == pytest.approx(0.2)
    assert _slope(x, torch.where(x > 0, 3 * x, 0.2 * x)) is None


def test_small_numbers_in_another_order_diverge(tmp_path: Path) -> None:
    """A layer whose output is of order 1e-6, its channels reversed."""

    def net(*, reverse: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        with torch.no_grad():
            model[2].weight *= 1e-6
            model[2].bias *= 1e-6
            if reverse:
                model[2].weight.copy_(model[2].weight.flip(0))
        return model

    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    for reverse in (False, True):
        model = net(reverse=reverse)
        with tap.record(model, tmp_path / str(reverse), layers="all", inputs=True):
            model(x)
    result = tap.compare(tmp_path / "False", tmp_path / "True")
    assert result.first_divergence is not None
    assert (result.first_divergence.layer, result.first_divergence.origin) == ("2", "made here")


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-9])
def test_gradients_that_are_off_diverge_however_small_they_are(tmp_path: Path, size: float) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    for factor in (1.0, 1.3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        with tap.record(model, tmp_path / str(factor), layers="all", grads=True):
            (model(x).mean() * size * factor).backward()
    result = tap.compare(tmp_path / "1.0", tmp_path / "1.3")
    assert {row.verdict for row in result.layers} == {"diverged"}


def test_a_convolution_scaled_by_two_per_cent_is_found_at_any_size(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    for gain in (1.0, 1.02):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        with torch.no_grad():
            model[2].weight *= 1e-4 * gain
            model[2].bias *= 1e-4 * gain
            with tap.record(model, tmp_path / str(gain), layers="all", inputs=True):
                model(x)
    first = tap.compare(tmp_path / "1.0", tmp_path / "1.02").first_divergence
    assert first is not None
    assert first.layer == "2"
    assert first.causes[0].kind == "factor"
