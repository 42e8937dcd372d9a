"""A cause that was planted in random tensors of random shapes is found, with its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensortap.comparing.causes import Cause, explain

quick = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors are faster on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FLOORS = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}

seeds = st.integers(0, 10**6)
shapes = st.tuples(st.integers(1, 3), st.integers(5, 40), st.sampled_from([16, 24, 32, 48, 64]))
dtypes = st.sampled_from(DTYPES)


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def best(reference: Tensor, candidate: Tensor, **options: object) -> Cause:
    found = explain(reference, candidate, **options)  # type: ignore[arg-type]
    assert found
    assert all(0 <= cause.explains <= 1 for cause in found)
    return found[0]


def cast(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(dtype) for tensor in tensors]


@quick
@given(seeds, shapes, dtypes, st.floats(-3, 3).filter(lambda a: min(abs(a - 1), abs(a)) > 0.05))
def test_a_factor(seed: int, shape: tuple[int, ...], dtype: torch.dtype, a: float) -> None:
    reference, candidate = cast(dtype, r := values(seed, *shape), a * r)
    found = best(reference, candidate, floor=FLOORS[dtype])
    if abs(a + 1) < 0.02:
        assert found.kind == "sign"
        return
    assert found.kind == "factor"
    assert found.details["factor"] == pytest.approx(a, rel=2e-2)
    # Against float64: the part of the error that the best factor removes.
    r, c = reference.double(), candidate.double()
    fitted = float((r * c).sum() / (r * r).sum())
    left = float((c - fitted * r).square().sum() / (c - r).square().sum())
    assert found.details["factor"] == pytest.approx(fitted, rel=1e-9)
    assert found.explains == pytest.approx(1 - left, abs=1e-9)


@quick
@given(seeds, shapes, st.floats(0.05, 5))
def test_a_shift(seed: int, shape: tuple[int, ...], b: float) -> None:
    reference = values(seed, *shape).float()
    found = best(reference, reference - b)
    assert found.kind == "shift"
    assert found.details["shift"] == pytest.approx(-b, rel=1e-4)
    assert found.text == f"output = reference - {b:.4g}"


@quick
@given(seeds, shapes, st.floats(0.3, 0.9), st.floats(0.3, 2))
def test_a_factor_and_a_shift(seed: int, shape: tuple[int, ...], a: float, b: float) -> None:
    reference = values(seed, *shape).float()
    found = best(reference, a * reference + b)
    assert found.kind == "affine"
    assert found.details["factor"] == pytest.approx(a, rel=1e-4)
    assert found.details["shift"] == pytest.approx(b, rel=1e-4)


@quick
@given(seeds, shapes, dtypes)
def test_a_sign(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    reference = values(seed, *shape).to(dtype)
    found = best(reference, -reference)
    assert (found.kind, found.explains) == ("sign", 1.0)


@quick
@given(seeds, shapes, st.integers(0, 3))
def test_the_sign_of_a_head(seed: int, shape: tuple[int, ...], head: int) -> None:
    reference = values(seed, *shape).float()
    width = shape[-1] // 4
    candidate = reference.clone()
    candidate[..., head * width : (head + 1) * width] *= -1
    found = best(reference, candidate)
    assert found.kind == "sign"
    assert found.details["channels"] == list(range(head * width, (head + 1) * width))


@quick
@given(seeds, shapes)
def test_a_bias(seed: int, shape: tuple[int, ...]) -> None:
    reference = values(seed, *shape).float()
    bias = values(seed + 1, shape[-1]).float()
    found = best(reference, reference - bias)
    assert found.kind == "bias"
    assert found.details["per"] == "channel"
    assert found.details["constants"] == pytest.approx((-bias).tolist(), abs=1e-4)


@quick
@given(seeds, st.integers(8, 40), st.integers(5, 12), st.integers(5, 12))
def test_the_bias_of_a_convolution(seed: int, channels: int, height: int, width: int) -> None:
    reference = values(seed, 2, channels, height, width).float()
    candidate = reference + values(seed + 1, channels, 1, 1).float()
    found = best(reference, candidate)
    assert (found.kind, found.details["axis"]) == ("bias", 1)


@quick
@given(seeds, shapes)
def test_a_factor_for_each_channel(seed: int, shape: tuple[int, ...]) -> None:
    reference = values(seed, *shape).float()
    gains = 1 + 0.3 * values(seed + 1, shape[-1]).float()
    found = best(reference, reference * gains)
    assert (found.kind, found.details["per"]) == ("factors", "channel")
    assert found.details["factors"] == pytest.approx(gains.tolist(), abs=1e-4)


@quick
@given(seeds, shapes)
def test_a_factor_for_each_token(seed: int, shape: tuple[int, ...]) -> None:
    reference = values(seed, *shape).float()
    gains = torch.linspace(0.9, 1, shape[0] * shape[1]).reshape(*shape[:-1], 1)
    found = best(reference, reference * gains)
    assert (found.kind, found.details["per"]) == ("factors", "token")


@quick
@given(seeds, shapes, dtypes)
def test_heads_in_another_order(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    reference = values(seed, *shape).to(dtype)
    width = shape[-1] // 4
    heads = reference.unflatten(-1, (4, width))
    found = best(reference, heads[..., [1, 0, 2, 3], :].flatten(-2), floor=FLOORS[dtype])
    assert found.kind == "permutation"
    assert found.text == f"heads in another order: 1, 0, 2, 3 (of width {width})"
    assert found.explains == 1


@quick
@given(seeds, shapes)
def test_channels_in_another_order(seed: int, shape: tuple[int, ...]) -> None:
    reference = values(seed, *shape).float()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(shape[-1], generator=generator)
    while bool((order == torch.arange(len(order))).any()):
        order = torch.randperm(shape[-1], generator=generator)
    found = best(reference, reference[..., order])
    assert (found.kind, found.details["order"]) == ("permutation", order.tolist())


@quick
@given(seeds, shapes, st.data())
def test_two_tokens_swapped(seed: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    reference = values(seed, *shape).float()
    a, b = sorted(data.draw(st.sets(st.integers(0, shape[1] - 1), min_size=2, max_size=2)))
    candidate = reference.clone()
    candidate[:, [a, b]] = reference[:, [b, a]]
    found = best(reference, candidate)
    assert found.kind == "permutation"
    assert found.text == f"tokens {a} and {b} (of {shape[1]}) swapped"


@quick
@given(seeds, shapes, st.integers(1, 2), st.booleans())
def test_tokens_rolled(seed: int, shape: tuple[int, ...], by: int, back: bool) -> None:
    reference = values(seed, *shape).float()
    by = -by if back else by
    found = best(reference, reference.roll(by, 1))
    assert (found.kind, found.details["roll"]) == ("permutation", by)


@quick
@given(seeds, shapes, st.integers(1, 2), st.booleans())
def test_tokens_off_by_some(seed: int, shape: tuple[int, ...], by: int, back: bool) -> None:
    """What comes in at the border belongs to tokens that are not here."""
    samples, tokens, channels = shape
    table = values(seed, samples, tokens + 2, channels).float()
    first = table[:, :tokens], table[:, by : by + tokens]
    reference, candidate = first if back else first[::-1]
    found = best(reference, candidate)
    assert (found.kind, found.details["offset"]) == ("offset", -by if back else by)


@quick
@given(seeds, shapes)
def test_positions_that_are_added_off_by_one(seed: int, shape: tuple[int, ...]) -> None:
    samples, tokens, channels = shape
    came = values(seed, samples, tokens, channels).float()
    table = values(seed + 1, tokens + 1, channels).float()
    found = best(came + table[:-1], came + table[1:], input=came)
    assert (found.kind, found.details) == ("offset", {"offset": -1, "of": "added"})


@quick
@given(seeds, st.integers(5, 24), st.integers(1, 3))
def test_a_transpose(seed: int, size: int, samples: int) -> None:
    reference = values(seed, samples, size, size).float()
    found = best(reference, reference.transpose(-1, -2))
    assert (found.kind, found.explains) == ("transpose", 1.0)


@quick
@given(seeds, shapes)
def test_a_wrong_reshape(seed: int, shape: tuple[int, ...]) -> None:
    reference = values(seed, *shape).float()
    heads = reference.unflatten(-1, (4, -1))
    found = best(reference, heads.transpose(1, 2).reshape(shape))
    assert (found.kind, found.explains) == ("transpose", 1.0)
    inner = best(reference, heads.transpose(-1, -2).reshape(shape))
    assert (inner.kind, inner.explains) == ("transpose", 1.0)
    assert f"(4, {shape[-1] // 4}) read as ({shape[-1] // 4}, 4)" in inner.text


@quick
@given(seeds, shapes, st.data())
def test_tokens_from_one_on(seed: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    reference = values(seed, *shape).float()
    first = data.draw(st.integers(1, shape[1] - 2))
    candidate = reference.clone()
    candidate[:, first:] += 0.3 * values(seed + 1, shape[0], shape[1] - first, shape[2]).float()
    found = best(reference, candidate)
    assert found.kind == "tokens"
    if first == 1:  # a causal mask gives the first token nothing to look at
        assert found.text.startswith(f"all tokens but the first (of {shape[1]})")
    else:
        assert found.text == f"tokens from {first} on (of {shape[1]})"
    before = best(candidate.flip(1), reference.flip(1))
    assert before.text == f"tokens up to {shape[1] - first - 1} (of {shape[1]})"


@quick
@given(seeds, shapes, st.data())
def test_one_token_alone(seed: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    reference = values(seed, *shape).float()
    at = data.draw(st.integers(0, shape[1] - 1))
    candidate = reference.clone()
    candidate[:, at] += values(seed + 1, shape[0], shape[2]).float()
    found = best(reference, candidate)
    assert found.kind == "tokens"
    names = {0: "the first token", shape[1] - 1: "the last token"}
    assert found.text.startswith(names.get(at, f"token {at} of {shape[1]}"))
    assert found.details["places"][1] == [at]


@quick
@given(seeds, shapes, st.data())
def test_one_channel_alone(seed: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    reference = values(seed, *shape).float()
    at = data.draw(st.integers(0, shape[2] - 1))
    candidate = reference.clone()
    candidate[..., at] = values(seed + 1, shape[0], shape[1]).float()
    found = best(reference, candidate)
    assert (found.kind, found.text) == ("channels", f"channel {at} of {shape[2]} alone")
    candidate = reference.clone()
    candidate[..., at] *= 1.5
    found = best(reference, candidate)
    assert found.text == f"channel {at} of {shape[2]} alone: output = 1.5 x reference"


def test_one_sample_alone_and_one_token_of_it() -> None:
    reference = values(0, 6, 10, 16).float()
    candidate = reference.clone()
    candidate[4] = values(1, 10, 16).float()
    found = best(reference, candidate)
    assert (found.kind, found.text) == ("samples", "sample 4 of 6 alone")
    candidate = reference.clone()
    candidate[4, 3] *= 0
    found = best(reference, candidate)
    assert found.text == "token 3 of sample 4 alone: the candidate is zero"
    candidate[1, 7] += 1
    assert best(reference, candidate).text == "token 7 of sample 1, token 3 of sample 4 alone"


@quick
@given(seeds, shapes, st.floats(0.3, 1.5))
def test_a_clamp(seed: int, shape: tuple[int, ...], level: float) -> None:
    reference = values(seed, *shape).float()
    found = best(reference, reference.clamp(-level, level))
    assert (found.kind, found.explains) == ("saturation", 1.0)
    assert found.text == f"candidate clamped at ±{level:.4g}"
    above = best(reference, reference.clamp(max=level))
    assert (above.kind, above.text) == ("saturation", f"candidate clamped at {level:.4g}")


@quick
@given(seeds, shapes)
def test_the_maximum_of_a_format(seed: int, shape: tuple[int, ...]) -> None:
    reference = 400 * values(seed, *shape).float()
    reference[0, 0, 0] = 4000
    found = best(reference, reference.clamp(-448, 448))
    assert found.kind == "saturation"
    assert found.text == "candidate clamped at ±448, the maximum of float8_e4m3fn" or (
        found.text == "candidate clamped at 448, the maximum of float8_e4m3fn"
    )
    relu = best(reference, reference.relu())
    assert relu.text == "candidate clamped from below at 0, as by a ReLU"


def test_a_clamp_of_one_channel() -> None:
    reference = values(0, 2, 24, 64).float()
    candidate = reference.clone()
    candidate[..., 5] = candidate[..., 5].clamp(-0.2, 0.2)
    found = best(reference, candidate)
    assert found.kind == "saturation"
    assert found.text == "channel 5 of 64 alone: candidate clamped at ±0.2"


@quick
@given(
    seeds,
    shapes,
    st.sampled_from(
        [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32]
    ),
)
def test_rounding(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    reference = values(seed, *shape)
    candidate = reference.to(dtype)
    for given_in in (candidate, candidate.to(torch.float64)):
        found = explain(reference, given_in)
        assert [cause.kind for cause in found] == ["rounding"]
        assert found[0].details["format"] == str(dtype).removeprefix("torch.")
        assert found[0].explains == 1


def test_rounding_to_tf32() -> None:
    reference = 1e-6 * values(0, 4, 64).float()
    bits = reference.view(torch.int32)
    candidate = ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    found = best(reference, candidate)
    assert (found.kind, found.text) == ("rounding", "output = reference rounded to tf32")


def test_computing_in_a_narrower_format() -> None:
    x, weight = values(0, 48, 64), values(1, 128, 64)
    narrow = (x.bfloat16() @ weight.bfloat16().T).double()
    found = best(x @ weight.T, narrow)
    assert (found.kind, found.details["format"]) == ("rounding", "bfloat16")


@quick
@given(seeds, shapes, st.sampled_from([4, 8]), st.sampled_from([None, -1, -2]), dtypes)
def test_a_grid_of_integers(
    seed: int, shape: tuple[int, ...], bits: int, per: int | None, dtype: torch.dtype
) -> None:
    reference = values(seed, *shape)
    steps = 2 ** (bits - 1) - 1
    if per is None:
        peak = reference.abs().amax()
    else:
        peak = reference.abs().amax((0, 1) if per == -1 else -1, keepdim=True)
    candidate = (reference / peak * steps).round() * peak / steps
    if dtype == torch.bfloat16 and bits == 8:
        return  # bfloat16 has fewer digits than the grid has steps
    found = best(reference.to(dtype), candidate.to(dtype), floor=FLOORS[dtype])
    assert found.kind in ("grid", "rounding") if dtype == torch.float16 else "grid"
    if dtype in (torch.float32, torch.float64):
        assert found.details["format"] == f"int{bits}"
        assert found.details["per"] == {None: "tensor", -1: "channel", -2: "token"}[per]


@quick
@given(seeds, shapes, st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]), st.booleans())
def test_a_grid_of_fp8(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype, per_token: bool
) -> None:
    reference = values(seed, *shape).float()
    peak = reference.abs().amax(-1, keepdim=True) if per_token else reference.abs().amax()
    scale = peak / torch.finfo(dtype).max
    candidate = (reference / scale).to(dtype).float() * scale
    found = best(reference, candidate)
    assert found.kind == "grid"
    assert found.details["format"] == str(dtype).removeprefix("torch.")


@quick
@given(seeds, shapes)
def test_a_residual(seed: int, shape: tuple[int, ...]) -> None:
    came, made = values(seed, *shape).float(), values(seed + 1, *shape).float()
    missing = best(came + made, made, input=came)
    assert (missing.kind, missing.details["factor"]) == ("residual", -1.0)
    doubled = best(came + made, 2 * came + made, input=came)
    assert (doubled.kind, doubled.details["factor"]) == ("residual", 1.0)
    skipped = best(came + made, came, input=came)
    assert skipped.kind == "skipped"
    branch = best(came + made, came + 1.05 * made, input=came)
    assert branch.text == "what the layer adds to its input = 1.05 x the reference's"


@quick
@given(seeds, shapes)
def test_another_activation(seed: int, shape: tuple[int, ...]) -> None:
    came = values(seed, 4, *shape).float()
    silu, gelu = torch.nn.functional.silu(came), torch.nn.functional.gelu(came)
    assert best(silu, gelu, input=came).kind == "function"


def test_a_large_tensor_is_sampled_and_says_so() -> None:
    reference = torch.randn(6, 1024, 1024, generator=torch.Generator().manual_seed(0))
    found = best(reference, 1.02 * reference)
    assert found.text == "output = 1.02 x reference"
    assert found.details["elements"] == reference.numel() > found.details["sampled"]
    candidate = reference.clone()
    candidate[5, 1000] += 1
    found = best(reference, candidate)
    assert found.text.startswith("token 1000 of sample 5 alone: output = reference + 1")
    assert math.isclose(found.explains, 1, abs_tol=1e-9)


def test_a_wrong_reshape_of_a_large_tensor() -> None:
    reference = torch.randn(2, 512, 2048, generator=torch.Generator().manual_seed(0))
    heads = reference.unflatten(-1, (16, 128)).transpose(1, 2)
    found = best(reference, heads.reshape(reference.shape))
    assert (found.kind, found.explains) == ("transpose", 1.0)
    assert found.text == "a wrong reshape: (512, 16, 128) read as (16, 512, 128)"


def test_orders_of_many_channels() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(8, 3000, generator=generator)
    order = torch.randperm(3000, generator=generator)
    found = best(reference, reference[:, order])
    assert (found.kind, found.explains) == ("permutation", 1.0)
    assert found.details["order"] == order[:256].tolist()


def test_the_fewest_numbers_are_said() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(2, 3, 8, 8, generator=generator)
    found = best(reference, reference * (1 + torch.randn(1, 3, 1, 1, generator=generator)))
    assert (found.kind, found.details["count"]) == ("factors", 3)
    found = best(reference, reference * (1 + torch.randn(2, 3, 8, 1, generator=generator)))
    assert (found.kind, found.details["count"]) == ("factors", 48)


def test_words_of_levels() -> None:
    reference = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    found = best(reference, torch.full_like(reference, 3))
    assert found.text == "the candidate is 3 everywhere"
    found = best(6e4 * reference, (6e4 * reference).clamp(-65504, 65504))
    assert found.text == "candidate clamped at ±65504, the maximum of float16"
