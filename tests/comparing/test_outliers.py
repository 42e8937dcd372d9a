"""One bad token or channel among good ones."""

from __future__ import annotations

import pytest
import torch

from tensortap.comparing.outliers import find_outliers, non_finite_places
from tensortap.numerics.profile import profile


def noisy(reference: torch.Tensor, size: float, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(reference.shape, generator=generator)
    return reference * (1 + size * noise)


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0))


def found(reference: torch.Tensor, candidate: torch.Tensor, least: float = 0.0) -> list[str]:
    own = profile(reference, candidate)
    assert own is not None
    return [str(outlier) for outlier in find_outliers(own, None, least)]


def test_even_noise_has_no_outlier(tensor: torch.Tensor) -> None:
    assert found(tensor, noisy(tensor, 1e-3)) == []


def test_a_bad_token_is_named_with_its_sample(tensor: torch.Tensor) -> None:
    candidate = noisy(tensor, 1e-3)
    candidate[1, 17] = -candidate[1, 17]
    (text,) = found(tensor, candidate)
    assert text.startswith("token 17 of sample 1: error ")


def test_a_bad_channel_is_named(tensor: torch.Tensor) -> None:
    tensor[..., 5] *= 20
    candidate = noisy(tensor, 1e-3)
    candidate[..., 5] = candidate[..., 5].clamp(-8, 8)
    assert [text.split(":")[0] for text in found(tensor, candidate)] == ["channel 5"]


def test_a_channel_that_is_almost_zero_is_no_outlier(tensor: torch.Tensor) -> None:
    tensor[..., 5] *= 1e-7
    candidate = tensor + 1e-3 * torch.randn(tensor.shape, generator=torch.Generator())
    assert found(tensor, candidate) == []


def test_errors_below_the_least_do_not_count(tensor: torch.Tensor) -> None:
    candidate = noisy(tensor, 1e-6)
    candidate[0, 3] *= 1.001
    assert found(tensor, candidate, least=1e-2) == []
    assert found(tensor, candidate, least=1e-5) != []


def test_many_bad_ones_are_the_layer_s_fault(tensor: torch.Tensor) -> None:
    candidate = noisy(tensor, 1e-3)
    candidate[:, :30] *= -1
    assert not any(text.startswith("token") for text in found(tensor, candidate))


def test_a_floor_that_errs_in_the_same_place_excuses_it(tensor: torch.Tensor) -> None:
    candidate, floor = noisy(tensor, 1e-3), noisy(tensor, 1e-3, seed=2)
    for run in (candidate, floor):
        run[0, 3] *= 1.1
    own, other = profile(tensor, candidate), profile(tensor, floor)
    assert own is not None
    assert find_outliers(own, None, 0.0) != []
    assert find_outliers(own, other, 0.0) == []


def test_where_nan_stands_is_named(tensor: torch.Tensor) -> None:
    candidate = tensor.clone()
    candidate[0, 3, 9] = float("nan")
    own = profile(tensor, candidate)
    assert own is not None
    assert non_finite_places(own) == "token 3 of sample 0, channel 9"
