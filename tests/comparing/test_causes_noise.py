"""No false hints: where nothing simple fits, that is said and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensortap.comparing.causes import explain

quick = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)

seeds = st.integers(0, 10**6)
shapes = st.one_of(
    st.tuples(st.integers(2, 4), st.integers(2, 40), st.sampled_from([8, 15, 32, 64])),
    st.tuples(st.integers(4, 60), st.sampled_from([8, 15, 32, 64])),
    st.tuples(st.integers(1, 3), st.integers(2, 4), st.integers(3, 16), st.sampled_from([8, 16])),
    st.tuples(st.integers(16, 400)),
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kinds(reference: Tensor, candidate: Tensor, **options: object) -> list[str]:
    return [cause.kind for cause in explain(reference, candidate, **options)]  # type: ignore[arg-type]


@quick
@given(seeds, shapes, st.sampled_from([1e-5, 1e-2, 0.3, 1.0]))
def test_noise_is_noise(seed: int, shape: tuple[int, ...], size: float) -> None:
    reference = values(seed, *shape).float()
    noise = size * values(seed + 1, *shape).float()
    came = values(seed + 2, *shape).float()
    assert kinds(reference, reference + noise) == ["noise"]
    assert kinds(reference, reference + noise, input=came) == ["noise"]


@quick
@given(seeds, shapes)
def test_unrelated_tensors_are_noise(seed: int, shape: tuple[int, ...]) -> None:
    """A factor near zero would take away the reference, which explains nothing."""
    reference, candidate = values(seed, *shape).float(), values(seed + 1, *shape).float()
    assert kinds(reference, candidate) == ["noise"]
    assert kinds(reference, 0.1 * candidate) == ["noise"]


@quick
@given(seeds, shapes)
def test_noise_that_grows_with_the_values_is_noise(seed: int, shape: tuple[int, ...]) -> None:
    reference = values(seed, *shape).float()
    reference *= torch.exp(2 * values(seed + 2, shape[-1]).float())  # channels of many sizes
    noise = 0.05 * reference * values(seed + 1, *shape).float()
    found = kinds(reference, reference + noise)
    assert found == ["noise"]


@quick
@given(seeds, st.integers(2, 5), st.integers(64, 512))
def test_few_tokens_do_not_make_a_bias(seed: int, tokens: int, channels: int) -> None:
    """With so few tokens one constant for each channel removes a good part of any noise."""
    reference = values(seed, tokens, channels).float()
    assert kinds(reference, reference + values(seed + 1, tokens, channels).float()) == ["noise"]


def test_massive_values_are_no_places() -> None:
    """An error in proportion to the values is largest where they are, and that is no hint."""
    reference = values(0, 2, 24, 64).float()
    reference[..., 3] *= 1000
    reference[:, 0] *= 300
    noise = 0.01 * reference * values(1, 2, 24, 64).float()
    assert kinds(reference, reference + noise) == ["noise"]
    assert [cause.text for cause in explain(reference, 1.02 * reference)] == [
        "output = 1.02 x reference"
    ]


def test_dead_tokens_and_channels_are_not_right_ones() -> None:
    reference = values(0, 2, 24, 64).float()
    reference[:, 12:] = 0
    noise = 0.1 * values(1, 2, 24, 64).float()
    noise[:, 12:] = 0
    assert kinds(reference, reference + noise) == ["noise"]


def test_other_weights_are_noise() -> None:
    x = values(0, 2, 24, 64).relu()  # with a mean, as activations have
    weight, other = values(1, 96, 64), values(2, 96, 64)
    assert kinds(x @ weight.T, x @ other.T) == ["noise"]
    square = values(3, 64, 64)
    assert kinds(x @ square.T, x @ square) == ["noise"]
    steps = weight.abs().amax(1, keepdim=True) / 7
    quantised = (weight / steps).round() * steps
    assert kinds(x @ weight.T, x @ quantised.T) == ["noise"]


def test_what_noise_says() -> None:
    reference = values(0, 2, 24, 64).float()
    candidate = reference + 0.03 * values(1, 2, 24, 64).float()
    (cause,) = explain(reference, candidate)
    assert str(cause) == (
        "nothing simple fits: the error has no structure that we know (relative size 0.03, spread "
        "evenly over tokens and channels)"
    )
    assert cause.explains == 0
    assert math.isclose(cause.details["size"], 0.03, rel_tol=0.05)
    (cause,) = explain(reference, candidate, floor=0.05)
    assert cause.text == (
        "nothing simple fits, and the error (0.03) is no larger than rounding explains (0.05)"
    )
    uneven = candidate.clone()
    uneven[..., ::12] += 0.15 * values(2, 2, 24, 6).float()
    (cause,) = explain(reference, uneven)
    assert "spread evenly over tokens, spread unevenly over channels" in cause.text


def test_what_is_on_a_grid_on_both_sides_is_not_put_down_to_it() -> None:
    reference = values(0, 2, 24, 64).mul(10).round()
    candidate = reference + values(1, 2, 24, 64).round()
    assert kinds(reference, candidate) == ["noise"]
    assert kinds(reference.int(), candidate.int()) == ["noise"]
    halves = values(0, 2, 24, 64).bfloat16()
    assert kinds(halves, halves + values(1, 2, 24, 64).bfloat16()) == ["noise"]


def test_a_real_cause_beats_the_format_of_the_candidate() -> None:
    reference = values(0, 2, 24, 64).float()
    candidate = (1.05 * reference).bfloat16()
    (cause,) = explain(reference, candidate, floor=2e-3)
    assert cause.text.startswith("output = 1.05 x reference")


SMALL = [(8,), (64,), (3, 2), (4, 4), (64, 2), (8, 16), (128, 1), (2, 5, 8), (2, 8, 16), (1, 1, 64)]


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_noise_beside_zeros_has_no_place(shape: tuple[int, ...]) -> None:
    zeros = torch.zeros(shape)
    found = [kinds(zeros, values(seed, *shape)) for seed in range(60)]
    assert found == [["noise"]] * 60


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_heavy_noise_has_hardly_ever_a_place(shape: tuple[int, ...]) -> None:
    found = [
        kinds(reference, reference + 0.1 * values(seed + 1000, *shape) ** 3)
        for seed in range(60)
        for reference in (values(seed, *shape), values(seed, *shape).relu())
    ]
    assert sum(kind != ["noise"] for kind in found) <= 4


def test_tokens_beside_zeros_that_are_right_are_left_out() -> None:
    zeros = torch.zeros(8, 16)
    for left in (0.0, 1e-4):
        candidate = values(0, 8, 16)
        candidate[:5] *= left
        reference = torch.ones(8, 16) if left == 0 else zeros
        (cause,) = explain(reference, reference + candidate)
        assert cause.text == "tokens from 5 on (of 8)"


@pytest.mark.parametrize("shape", [(64,), (16,), (8, 16), (128, 1), (2, 24, 64)], ids=str)
def test_what_lies_close_together_lies_on_no_grid(shape: tuple[int, ...]) -> None:
    for seed in range(20):
        for reference in (torch.ones(shape), -3 * torch.ones(shape), values(7, *shape).sign()):
            found = kinds(reference, reference + 1e-6 * values(seed, *shape))
            assert "grid" not in found


def test_unrelated_tensors_of_other_means_are_no_shift() -> None:
    for seed in range(10):
        for shape in ((16,), (8, 16), (2, 24, 64)):
            reference = 100 + values(seed, *shape)
            assert kinds(reference, values(seed + 100, *shape)) == ["noise"]
    assert kinds(100 + values(0, 8, 16), 50 + values(0, 8, 16)) == ["shift"]
    assert kinds(torch.ones(8, 16), 1.5 + 1e-3 * values(0, 8, 16))[0] in ("shift", "factor")
