"""Tensors of which only a part is looked at: the part tells of the whole, in bounded time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tensortap.comparing.causes import explain
from tensortap.comparing.causes.sample import LIMIT

_MOST = 1 << 22


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mixed(seed: int, count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(2048, 2048), (3000, 1500), (512, 4096), (2, 1500, 1024)])
def test_an_order_of_tokens(shape: tuple[int, ...]) -> None:
    reference = values(0, *shape)
    assert reference.numel() > LIMIT
    order = mixed(1, shape[-2])
    (found,) = explain(reference, reference.index_select(-2, order))
    assert (found.kind, found.details["of"]) == ("permutation", "tokens")
    assert found.details["order"] == order[:256].tolist()
    assert found.explains == 1


@pytest.mark.parametrize("shape", [(2048, 2048), (512, 4096), (1100, 1000)])
def test_an_order_of_channels(shape: tuple[int, ...]) -> None:
    reference = values(0, *shape)
    order = mixed(1, shape[-1])
    (found,) = explain(reference, reference[:, order])
    assert (found.kind, found.details["of"]) == ("permutation", "channels")


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_transpose(contiguous: bool) -> None:
    reference = values(0, 2048, 2048)
    candidate = reference.T.contiguous() if contiguous else reference.T
    (found,) = explain(reference, candidate)
    assert found.kind == "transpose"


def test_tokens_off_by_some() -> None:
    reference = values(0, 2, 2048, 1024)
    candidate = torch.cat((torch.zeros(2, 3, 1024), reference[:, :-3]), 1)
    (found,) = explain(reference, candidate)
    assert (found.kind, found.details["offset"]) == ("offset", 3)


@pytest.mark.parametrize("first", [1, 300, 511])
def test_what_was_done_to_a_part_is_not_put_down_to_all(first: int) -> None:
    reference = values(0, 512, 4096)
    candidate = reference.clone()
    candidate[first:] *= 1.2
    (found,) = explain(reference, candidate)
    assert found.kind == "tokens"
    assert found.details["places"][0][:1] == [first]
    assert found.details["within"]["factor"] == pytest.approx(1.2)


def test_a_row_of_a_large_tensor_and_what_was_done_to_it() -> None:
    reference = values(0, 2, 1024, 1024)
    candidate = reference.clone()
    candidate[1, 700] *= 1.3
    candidate[0, 20] *= 1.3
    (found,) = explain(reference, candidate)
    assert found.details["places"] == [[0, 20], [1, 700]]
    assert found.details["within"]["factor"] == pytest.approx(1.3)


def test_a_few_clamped_values_and_a_nan_are_in_the_part() -> None:
    reference = values(0, 2048, 2048)
    (found,) = explain(reference, reference.clamp(-4.5, 4.5))
    assert found.kind == "saturation"
    candidate = reference.clone()
    candidate[1234, 77] = float("nan")
    (found,) = explain(reference, candidate)
    assert found.text.startswith("NaN in the candidate, 1 value at token 1234, channel 77")


@pytest.mark.parametrize(
    "shape", [(_MOST,), (_MOST, 1), (2048, 1, 2048), (_MOST // 2, 2), (2,) * 22], ids=str
)
def test_time_is_bounded(shape: tuple[int, ...]) -> None:
    reference, noise = values(0, *shape), values(1, *shape)
    one = reference.clone()
    one.view(-1)[77] += 3
    half = torch.where(
        torch.arange(_MOST).reshape(shape) > _MOST // 2, reference + noise, reference
    )
    explain(values(0, 64, 32), values(1, 64, 32))  # all is loaded
    for candidate in (reference + 0.01 * noise, one, half):
        start = time.process_time()
        explain(reference, candidate)
        assert time.process_time() - start < 2.5  # half of it, where nothing else runs


def test_a_half_of_a_long_axis() -> None:
    reference, noise = values(0, _MOST // 2), values(1, _MOST // 2)
    candidate = torch.where(torch.arange(_MOST // 2) >= _MOST // 4, reference + noise, reference)
    (found,) = explain(reference, candidate)
    assert found.kind == "channels"
    assert found.details["places"][1][0] == _MOST // 4
