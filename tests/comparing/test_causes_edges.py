"""Every dtype, every shape, every odd value: an answer, and never a number that is none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tensortap.comparing.causes import Cause, explain
from tensortap.errors import OptionError

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
SHAPES = [(), (0,), (1,), (2,), (7,), (1, 1), (3, 0, 2), (1, 5), (5, 1), (2, 3), (2, 3, 4)]
SHAPES += [(2, 2, 3, 4), (1, 2, 2, 2, 3)]


def checked(found: tuple[Cause, ...]) -> tuple[Cause, ...]:
    assert len(found) <= 3
    for cause in found:
        assert 0 <= cause.explains <= 1
        assert cause.text
        json.dumps(cause.to_dict(), allow_nan=False)
    return found


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    reference, candidate = (5 * values(n, *shape) for n in (0, 1))
    if dtype.is_complex:
        reference, candidate = reference * (1 + 2j), candidate * (1 + 2j)
    if dtype in (torch.bool, torch.uint8):
        reference, candidate = reference.abs(), candidate.abs() - 2
        candidate = candidate.clamp(0)
    reference, candidate = reference.to(dtype), candidate.to(dtype)
    assert explain(reference, reference.clone()) == ()
    checked(explain(reference, candidate))
    checked(explain(reference, candidate, floor=0.1, input=reference))
    checked(explain(torch.zeros_like(reference), candidate))
    checked(explain(reference, torch.zeros_like(reference)))


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers(dtype: torch.dtype) -> None:
    reference = (values(0, 2, 8, 16) + 1j * values(1, 2, 8, 16)).to(dtype)
    assert explain(reference, 1.5 * reference)[0].text == "output = 1.5 x reference"
    turned = reference.clone()
    turned[..., 3] += 1 + 1j
    assert explain(reference, turned)[0].text.startswith("channel 3 of 16 alone")


def test_different_dtypes_on_both_sides() -> None:
    reference = values(0, 4, 16)
    assert explain(reference, (1.5 * reference).double())[0].kind == "factor"
    assert explain(reference.bfloat16(), (1.5 * reference).float(), floor=4e-3)[0].kind == "factor"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_said_and_left_out(bad: float) -> None:
    reference = values(0, 2, 24, 64)
    candidate = reference.clone()
    candidate[1, 4, 3] = bad
    (cause,) = checked(explain(reference, candidate))
    assert (cause.kind, cause.explains) == ("not finite", 1.0)
    name = "NaN" if math.isnan(bad) else "Inf"
    assert str(cause) == f"{name} in the candidate, 1 value at token 4 of sample 1, channel 3"
    odd, gain = checked(explain(reference, 1.02 * candidate))
    assert odd.kind == "not finite"
    assert gain.text == "output = 1.02 x reference"
    both = reference.clone()
    both[1, 4, 3] = bad
    assert explain(both, candidate) == ()
    assert [cause.text for cause in explain(both, 1.02 * candidate)] == [gain.text]
    (cause,) = checked(explain(candidate, reference))
    assert cause.text.startswith("NaN or Inf on one side")


def test_an_overflow() -> None:
    reference = 40000 * values(0, 2, 24, 64)
    (odd, *_) = checked(explain(reference, reference.half()))
    assert odd.text.endswith("all where the reference is beyond 65504, the maximum of float16")


def test_nothing_but_nan() -> None:
    reference = values(0, 3, 5)
    (cause,) = checked(explain(reference, torch.full_like(reference, math.nan)))
    assert (cause.kind, cause.details["count"]) == ("not finite", 15)


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e-30, 1e30, 1e150, 1e250, 1e307])
def test_very_small_and_very_large_values(size: float) -> None:
    reference = values(0, 4, 16).double() * size
    (found,) = checked(explain(reference, 1.5 * reference))
    assert found.text == "output = 1.5 x reference"
    assert explain(reference, reference.clone()) == ()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1e-310, 1e-200, 1e200, 1e307])
def test_what_is_said_of_such_values_is_in_their_unit(size: float) -> None:
    reference = values(0, 4, 16).double() * size
    (found,) = checked(explain(reference, reference + 0.25 * size))
    assert (found.kind, found.details["shift"]) == ("shift", pytest.approx(0.25 * size))
    (found,) = checked(explain(reference, reference.clamp(max=0.5 * size)))
    assert (found.kind, found.details["high"]) == ("saturation", 0.5 * size)
    bias = values(1, 16).double() * size
    (found,) = checked(explain(reference, reference + bias))
    assert found.details["constants"] == pytest.approx(bias.tolist(), rel=1e-6)
    (found,) = checked(explain(reference, values(2, 4, 16).double() * size))
    assert "relative size 1" in found.text


@pytest.mark.filterwarnings("error")
def test_an_error_beyond_all_measure() -> None:
    reference = values(0, 4, 16).double()
    (found,) = checked(explain(reference, reference + 1e308 * values(1, 4, 16).double().tanh()))
    assert found.kind == "noise"
    assert "reference is zero" not in found.text
    candidate = reference * 1e200
    candidate[0, 3] = math.nan
    found = checked(explain(reference * 1e200, candidate * 1.25))[1]
    assert found.text == "output = 1.25 x reference"


def test_a_reference_of_zeros() -> None:
    zeros = torch.zeros(2, 8, 16)
    assert explain(zeros, zeros + 0.5)[0].text == "output = reference + 0.5"
    assert explain(zeros, zeros + values(0, 16))[0].kind == "bias"
    (cause,) = explain(zeros, values(0, 2, 8, 16))
    assert cause.text.startswith("nothing simple fits")
    assert cause.details["size"] is None
    assert explain(values(0, 2, 8, 16), zeros)[0].text == "the candidate is zero"


def test_constants() -> None:
    ones = torch.ones(2, 8, 16)
    found = checked(explain(ones, 3 * ones))
    assert found[0].text == "output = 3 x reference"


@pytest.mark.parametrize("floor", [math.nan, math.inf, -1.0])
def test_a_floor_that_is_none(floor: float) -> None:
    reference = values(0, 2, 8, 16)
    assert explain(reference, 2 * reference, floor=floor)[0].kind == "factor"


def test_an_input_of_another_shape_is_not_looked_at() -> None:
    reference = values(0, 2, 8, 16)
    assert explain(reference, 2 * reference, input=values(1, 2, 8, 4))[0].kind == "factor"
    infinite = torch.full_like(reference, math.inf)
    assert explain(reference, 2 * reference, input=infinite)[0].kind == "factor"


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[::2],
        lambda x: x.clone().requires_grad_(),
        lambda x: x.expand(3, *x.shape),
    ],
)
def test_views_and_tensors_that_need_gradients(make: Callable[[Tensor], Tensor]) -> None:
    reference = values(0, 12, 16)
    found = explain(make(reference), make(1.5 * reference))
    assert found[0].text == "output = 1.5 x reference"


def test_the_tensors_are_left_as_they_were() -> None:
    reference, noise = values(0, 2, 24, 64), values(1, 2, 24, 64)
    candidate, given = reference + noise, values(2, 2, 24, 64)
    copies = [tensor.clone() for tensor in (reference, candidate, given)]
    candidate[0, 0, 0] = copies[1][0, 0, 0] = math.inf
    explain(reference, candidate, input=given)
    for tensor, copy in zip((reference, candidate, given), copies, strict=True):
        assert torch.equal(tensor, copy)


def test_other_shapes_are_refused_in_words() -> None:
    with pytest.raises(OptionError, match=r"\(2, 3\).*\(3, 2\)"):
        explain(values(0, 2, 3), values(0, 3, 2))


def test_words() -> None:
    cause = Cause("factor", 0.9981, "output = 0.9808 x reference", {"factor": 0.9808})
    assert str(cause) == "explains 99.8 % of the error: output = 0.9808 x reference"
    assert cause.to_dict() == {
        "kind": "factor",
        "explains": 0.9981,
        "text": "output = 0.9808 x reference",
        "details": {"factor": 0.9808},
    }
