"""The self-check finds a tap that changes the model, and a name that is another layer's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tensortap.taps.programs.selfcheck import check_linear, check_output


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize(
    "value",
    [
        _random(2, 3),
        (_random(2), None, {"logits": _random(3, 4)}),
        torch.tensor([1.0, float("nan"), float("inf")]),
        torch.tensor([True, False]),
        torch.tensor(3, dtype=torch.int8),
        torch.empty(0, 3),
        _random(2, 2, dtype=torch.bfloat16),
        torch.complex(_random(2), _random(2)),
    ],
    ids=lambda value: str(getattr(value, "dtype", type(value).__name__)),
)
def test_the_same_output_passes(value: object) -> None:
    assert check_output(value, value, exact=True).passed


@pytest.mark.parametrize(
    ("plain", "tapped", "words"),
    [
        (torch.zeros(2), torch.zeros(3), "another shape"),
        (torch.zeros(2), torch.zeros(2).double(), "another dtype"),
        (torch.zeros(2), (torch.zeros(2),), "returns [0]"),
        (torch.zeros(2), torch.tensor([0.0, 1e-30]), "differs by 1e-30"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), "differs by inf"),
        ((torch.zeros(2), None), (torch.zeros(2), torch.zeros(1)), "[1] holds other tensors"),
    ],
)
def test_another_output_fails_in_words(plain: object, tapped: object, words: str) -> None:
    found = check_output(plain, tapped, exact=True)
    assert not found.passed
    assert words in found.text


def test_where_a_compiler_fuses_otherwise_last_bits_may_differ() -> None:
    value = _random(64)
    close, far = value * (1 + 1e-7), value * (1 + 1e-3)
    assert not check_output(value, close, exact=True).passed
    assert check_output(value, close, exact=False).passed
    assert not check_output(value, far, exact=False).passed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_last_bit_of_a_coarse_output_may_differ(dtype: torch.dtype) -> None:
    value = _random(64).to(dtype)
    eps = torch.finfo(dtype).eps
    assert check_output(value, (value.double() * (1 + eps)).to(dtype), exact=False).passed
    assert not check_output(value, (value.double() * (1 + 9 * eps)).to(dtype), exact=False).passed


def test_what_is_close_is_not_called_the_same() -> None:
    value = _random(64)
    found = check_output((value, value), (value * (1 + 1e-6), value), exact=False)
    largest = float((value * (1 + 1e-6)).double().sub(value.double()).abs().max())
    assert found.passed
    assert found.largest == pytest.approx(largest)
    assert found.allowed == pytest.approx(1e-5 * float(value.abs().max()))
    assert "same with and without" not in found.text


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_linear_that_is_not_finite_where_its_product_is(wrong: float) -> None:
    weight, operand = _random(16, 32), _random(4, 32)
    output = linear(operand, weight)
    output[1, 2] = wrong
    found = check_linear("fc", weight, None, operand, output)
    assert found is not None
    assert not found.passed
    assert found.to_dict()["largest"] is None  # JSON has no infinite
    operand[1] = wrong
    of_nothing = check_linear("fc", weight, None, operand, linear(_random(4, 32), weight))
    assert of_nothing is not None
    assert not of_nothing.passed


def test_a_linear_that_is_not_finite_as_its_product_is_passes() -> None:
    weight, operand = _random(16, 32), _random(4, 32)
    operand[1] = float("nan")
    operand[2] = float("inf")
    found = check_linear("fc", weight, None, operand, linear(operand, weight))
    assert found is not None
    assert found.passed, found.text
    half = torch.full((2, 32), 100.0, dtype=torch.float16)
    found = check_linear("fc", half, None, half * 3, linear(half * 3, half))
    assert found is not None
    assert found.passed, found.text  # 32 x 30,000 is more than float16 has


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_a_linear_agrees_with_its_weight(dtype: torch.dtype, biased: bool, offset: float) -> None:
    weight, bias = _random(16, 300, dtype=dtype), _random(16, dtype=dtype) if biased else None
    operand = (_random(2, 5, 300) + offset).to(dtype)
    found = check_linear("fc", weight, bias, operand, linear(operand, weight, bias))
    assert found is not None
    assert found.passed, found.text


def test_a_linear_that_has_anothers_weight_fails() -> None:
    weight, operand = _random(16, 32), _random(4, 32)
    wrong = linear(operand, weight.flip(0))
    found = check_linear("fc", weight, None, operand, wrong)
    assert found is not None
    assert not found.passed
    assert "'fc'" in found.text


def test_a_linear_without_its_bias_fails() -> None:
    weight, bias, operand = _random(16, 32), torch.full((16,), 0.5), _random(4, 32)
    found = check_linear("fc", weight, bias, operand, linear(operand, weight))
    assert found is not None
    assert not found.passed


def test_a_linear_of_another_shape_fails() -> None:
    found = check_linear("fc", _random(16, 32), None, _random(4, 32), _random(4, 15))
    assert found is not None
    assert not found.passed
    assert "[4, 15]" in found.text


def test_flattened_rows_are_the_same_product() -> None:
    weight, operand = _random(16, 32), _random(2, 3, 32)
    found = check_linear("fc", weight, None, operand, linear(operand, weight).reshape(6, 16))
    assert found is not None
    assert found.passed


def test_what_is_no_float_product_is_not_judged() -> None:
    whole = torch.ones(2, 3, dtype=torch.int8)
    assert check_linear("fc", _random(4, 3), None, whole, _random(2, 4)) is None
    assert check_linear("fc", _random(4, 3), None, torch.empty(0, 3), torch.empty(0, 4)) is None
