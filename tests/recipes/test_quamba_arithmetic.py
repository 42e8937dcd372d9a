"""The integers of recipes/quamba are integers: against float64, over shapes and at the extremes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import quamba_package  # noqa: F401  puts the recipe's package on the path
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from quamba import integers
from quamba.calibration import Percentile
from quamba.hadamard import block_size, rotate
from quamba.integers import conv_sums, dequantise, on_grid, product_sums, quantise, scale_for
from quamba.layers import Int8Conv, Int8Linear, QuantiseDynamically
from quamba.scan import OPERANDS, FloatScan, FusedScan, PlainScan
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

quick = settings(max_examples=60, deadline=None, derandomize=True)
HALF_ULP = 2.0**-24


def int8(seed: int, *shape: int, extreme: bool) -> Tensor:
    """Random codes; or the ends of the range alone, where sums are largest."""
    generator = torch.Generator().manual_seed(seed)
    if not extreme:
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    ends = torch.tensor([-128, -127, 127], dtype=torch.int8)
    return ends[torch.randint(3, shape, generator=generator)]


@quick
@given(
    rows=st.sampled_from([(0,), (1,), (2, 3), (17,), (1, 0, 4), (3, 16)]),
    width=st.sampled_from([0, 1, 2, 7, 8, 9, 31, 64, 768]),
    columns=st.sampled_from([1, 2, 10, 33]),
    extreme=st.booleans(),
    native=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_are_summed_exactly(
    rows: tuple[int, ...], width: int, columns: int, extreme: bool, native: bool, seed: int
) -> None:
    """By torch's int8 product and by the int32 one that stands in for it on other CPUs."""
    codes = int8(seed, *rows, width, extreme=extreme)
    weight = int8(seed + 1, columns, width, extreme=extreme)
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(integers, "int8_matmul_is_exact", lambda: False)
        sums = product_sums(codes, weight)
    assert sums.dtype == torch.int32 and sums.shape == (*rows, columns)
    assert torch.equal(sums.double(), codes.double() @ weight.double().t())


@quick
@given(
    batch=st.integers(0, 2),
    channels=st.integers(1, 9),
    length=st.integers(0, 9),
    taps=st.integers(1, 5),
    extreme=st.booleans(),
    seed=st.integers(0, 99),
)
def test_convolutions_are_summed_exactly(
    batch: int, channels: int, length: int, taps: int, extreme: bool, seed: int
) -> None:
    codes = int8(seed, batch, channels, length, extreme=extreme)
    weight = int8(seed + 1, channels, taps, extreme=extreme)
    sums = conv_sums(codes, weight)
    assert sums.dtype == torch.int32 and sums.shape == codes.shape
    if codes.numel():
        padded = F.pad(codes.double(), (taps - 1, 0))
        expected = F.conv1d(padded, weight.double()[:, None], groups=channels)
        assert torch.equal(sums.double(), expected)


def test_floats_are_refused() -> None:
    """A float that slipped in would give the same numbers and no integer arithmetic."""
    codes, weight = torch.zeros(2, 9), torch.zeros(3, 9, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"int8 codes are multiplied here, got torch\.float32"):
        product_sums(codes, weight)
    with pytest.raises(TypeError, match="int8 codes"):
        conv_sums(weight[None], codes)


@quick
@given(st.floats(2.0**-126, 2.0**120, width=32))
def test_the_grid_gives_every_code_back(scale: float) -> None:
    """So a mode that leaves int8 and requantises (2-0, 2-3) hands the same codes to the scan."""
    codes = torch.arange(-127, 128).to(torch.int8)
    step = torch.tensor(scale)
    assert torch.equal(quantise(dequantise(codes, step), step), codes)
    assert torch.equal(on_grid(dequantise(codes, step), step), dequantise(codes, step))


@quick
@given(st.floats(0, 2.0**127, width=32, allow_subnormal=True))
def test_a_bound_is_code_127(bound: float) -> None:
    scale = scale_for(bound)
    assert scale.dtype == torch.float32 and scale > 0 and torch.isfinite(scale)
    code = quantise(torch.tensor([bound, -bound]), scale)
    assert code.abs().max() <= 127
    if bound >= 127 * torch.finfo(torch.float32).tiny:
        assert code.tolist() == [127, -127]


def test_rounding_and_cutting() -> None:
    x = torch.tensor([0.5, 1.5, -0.5, -1.5, 126.6, 1e9, -1e9, math.inf, -math.inf])
    codes = quantise(x, torch.tensor(1.0))
    assert codes.tolist() == [0, 2, 0, -2, 127, 127, -127, 127, -127]
    assert quantise(torch.zeros(3), scale_for(0.0)).tolist() == [0, 0, 0]
    codes, scale = QuantiseDynamically()(torch.tensor([[[3.0, -6.0]], [[1.0, 2.0]]]))
    assert codes.tolist() == [[[64, -127]], [[64, 127]]], "each sample has its own scale"
    assert scale.flatten().tolist() == pytest.approx([6 / 127, 2 / 127])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("codes", [False, True])
def test_a_linear_layer_against_its_simulation(bias: bool, codes: bool) -> None:
    """Four roundings to float32 and no more: of the sum, the scales, their product and the bias."""
    torch.manual_seed(0)
    source = nn.Linear(96, 40, bias=bias)
    scale = torch.tensor(0.031)
    layer = Int8Linear(source, scale, codes=codes)
    x = torch.randn(2, 7, 96)
    given_codes = quantise(x, scale)
    y = layer(given_codes if codes else x)

    weight = quantise(source.weight.detach(), scale_for(source.weight.abs().max()))
    assert torch.equal(layer.weight, weight)
    product = given_codes.double() @ weight.double().t()
    product *= scale.double() * layer.weight_scale.double()
    offset = source.bias.double() if bias else torch.zeros(40).double()
    slack = 4 * HALF_ULP * (product.abs() + offset.abs())
    assert bool(((y.double() - (product + offset)).abs() <= slack).all())
    assert F.mse_loss(y, source(x)) < 1e-4  # and it is the float layer, to 8 bits


@pytest.mark.parametrize("static", [True, False])
def test_a_convolution_against_its_simulation(static: bool) -> None:
    torch.manual_seed(0)
    source = nn.Conv1d(12, 12, 4, groups=12, padding=3)
    x = torch.randn(2, 12, 20)
    scale = torch.tensor(0.04) if static else scale_for(x.abs().amax((1, 2), True))
    output_scale = torch.tensor(0.01)
    y = {
        kind: Int8Conv(source, scale if static else None, kind, output_scale)(x)
        for kind in ("float", "grid", "codes")
    }
    weight = quantise(source.weight.detach(), scale_for(source.weight.abs().max()))
    padded = F.pad(quantise(x, scale).double(), (3, 0))
    sums = F.conv1d(padded, weight.double(), groups=12)
    simulated = F.silu(
        sums * (scale.double() * scale_for(source.weight.abs().max()).double())
        + source.bias.double()[:, None]
    )
    assert (y["float"].double() - simulated).abs().max() < 1e-6
    assert y["codes"].dtype == torch.int8
    assert torch.equal(y["codes"], quantise(y["float"], output_scale))
    assert torch.equal(y["grid"], dequantise(y["codes"], output_scale))
    expected = F.silu(source(x)[..., :20])
    assert (y["float"] - expected).abs().max() < 0.05


@quick
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=1).map(lambda s: s * 3),
    percentile=st.sampled_from([0.001, 0.5, 0.9, 0.99, 0.9999, 1.0]),
    seed=st.integers(0, 99),
)
def test_a_percentile_over_batches(sizes: list[int], percentile: float, seed: int) -> None:
    """From the largest values alone, what torch.quantile says of all of them."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, generator=generator) for size in sizes]
    seen = Percentile(percentile, len(parts))
    for part in parts:
        seen.add(part)
    expected = torch.quantile(torch.cat(parts).abs().double(), percentile)
    assert seen.value().item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("width", "block"), [(1, 1), (6, 2), (64, 64), (96, 32), (1536, 512)])
def test_the_hadamard_transform(width: int, block: int) -> None:
    """Orthogonal, its own inverse, and the Sylvester matrix in each block."""
    assert block_size(width) == block
    x = torch.randn(3, width, dtype=torch.float64)
    assert torch.allclose(rotate(rotate(x)), x)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while matrix.shape[0] < block:
        matrix = torch.kron(pair, matrix)
    expected = x.reshape(3, -1, block) @ (matrix / block**0.5)
    assert torch.allclose(rotate(x), expected.reshape(3, width))


def test_a_rotated_linear_layer_is_the_same_in_float_and_better_in_int8() -> None:
    """With one outlier channel: the rotation shares it out, and the grid becomes finer."""
    torch.manual_seed(0)
    source = nn.Linear(64, 16, bias=False).double()
    x = torch.randn(200, 64, dtype=torch.float64)
    x[:, 5] *= 60
    assert torch.allclose(rotate(x) @ rotate(source.weight).t(), source(x))
    source, x = source.float(), x.float()
    errors = []
    for hadamard in (False, True):
        seen = rotate(x) if hadamard else x
        layer = Int8Linear(source, scale_for(seen.abs().max()), hadamard=hadamard)
        errors.append(F.mse_loss(layer(x), source(x)).item())
    assert errors[1] < errors[0] / 2


def operands(seed: int, length: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """int8 operands of a scan, and their scales."""
    torch.manual_seed(seed)
    floats = {
        "u": torch.randn(2, length, 6),
        "dt": torch.randn(2, length, 6) - 2,
        "A_log": torch.rand(6, 4) * 2,
        "B": torch.randn(2, length, 4),
        "C": torch.randn(2, length, 4),
        "D": torch.rand(6),
        "z": torch.randn(2, length, 6),
    }
    scales = {name: scale_for(value.abs().max()) for name, value in floats.items()}
    codes = {name: quantise(floats[name], scales[name]) for name in OPERANDS}
    return codes, {**scales, "state": torch.tensor(0.05)}


def textbook(x: dict[str, Tensor]) -> Tensor:
    """The recurrence in float64, one step and one channel at a time."""
    x = {name: value.double() for name, value in x.items()}
    step = F.softplus(x["dt"])
    batch, length, inner = x["u"].shape
    y = torch.zeros(batch, length, inner, dtype=torch.float64)
    for b in range(batch):
        for i in range(inner):
            h = torch.zeros(x["A_log"].shape[1], dtype=torch.float64)
            for t in range(length):
                h = torch.exp(-torch.exp(x["A_log"][i]) * step[b, t, i]) * h
                h = h + step[b, t, i] * x["B"][b, t] * x["u"][b, t, i]
                y[b, t, i] = x["C"][b, t] @ h + x["D"][i] * x["u"][b, t, i]
    return y * F.silu(x["z"])


def test_all_scans_are_the_textbook_recurrence() -> None:
    """In one segment, where no state is rounded on its way."""
    codes, scales = operands(0, 20)
    floats = {name: dequantise(codes[name], scales[name]) for name in OPERANDS}
    expected = textbook(floats)
    for y in (
        FloatScan(64)(**floats),
        PlainScan(64, scales)(**codes),
        FusedScan(64, scales)(**codes),
    ):
        assert (y.double() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_segments_change_nothing_in_float() -> None:
    codes, scales = operands(1, 37)
    floats = {name: dequantise(codes[name], scales[name]) for name in OPERANDS}
    whole = FloatScan(64)(**floats)
    for segment in (1, 5, 16, 37):
        assert torch.equal(FloatScan(segment)(**floats), whole)


@pytest.mark.parametrize("kind", [PlainScan, FusedScan])
def test_the_state_is_kept_in_int8_between_segments(kind: Any) -> None:
    """Two segments are two scans, the second from the codes that the first left behind."""
    codes, scales = operands(2, 24)
    scan, kept = kind(12, scales), []
    scan.state.register_forward_hook(lambda _, args, output: kept.append((args[0], output)))
    y = scan(**codes)
    assert [output.dtype for _, output in kept] == [torch.int8] * 2
    assert torch.equal(kept[0][1], quantise(kept[0][0], scales["state"]))
    first = {n: v if v.dim() < 3 else v[:, :12] for n, v in codes.items()}
    assert torch.equal(kind(12, scales)(**first), y[:, :12])
    whole = kind(24, scales)(**codes)
    assert torch.equal(whole[:, :12], y[:, :12])
    step = (whole - y)[:, 12:].abs().max()
    assert 0 < step < 10 * scales["state"], "the rounding of the state shows, and is small"


def test_the_fused_path_holds_no_state_a_step() -> None:
    """The largest piece of memory that it asks for, against the states of all steps together."""
    codes, scales = operands(3, 64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        FusedScan(64, scales)(**codes)
    largest = max(event.self_cpu_memory_usage for event in seen.events())
    inputs, states = 2 * 64 * 6 * 4, 2 * 64 * 6 * 4 * 4
    assert inputs <= largest < states / 2
