"""Simulated quantisation: the grid, the scales, calibration, and what a model makes of them."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tensortap as tap
from tensortap.errors import OptionError, TargetError
from tensortap.targets import Target
from tensortap.targets.modes.builtin import apply_mode, in_mode
from tensortap.targets.modes.fake import (
    FakeMode,
    fake_quantise,
    parse_fake,
    quantised_weight,
    symmetric_scale,
)
from tensortap.targets.modes.observing import TopValues, observe

quick = settings(max_examples=60, deadline=None)
bits_of = st.integers(2, 16)
floats = st.lists(
    st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, -0.0, 1.0, 0.5, 1e-38]),
    min_size=1,
    max_size=40,
)


def top(bits: int) -> int:
    return 2 ** (bits - 1) - 1


def reference(x: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """The definition, in numpy: divide, round half to even, clamp, multiply."""
    return np.clip(np.rint(x / scale), -top(bits), top(bits)) * scale


@quick
@given(floats, bits_of, st.sampled_from([np.float32, np.float64]), st.floats(0.01, 2))
def test_values_land_where_the_definition_puts_them(
    values: list[float], bits: int, kind: type, part: float
) -> None:
    x = np.array(values, kind)
    scale = symmetric_scale(torch.from_numpy(x).abs().amax() * part, bits)
    made = fake_quantise(torch.from_numpy(x), scale, bits).numpy()
    assert np.array_equal(made, reference(x, scale.numpy(), bits))
    assert np.array_equal(fake_quantise(torch.from_numpy(made), scale, bits).numpy(), made)


@quick
@given(floats, bits_of, st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_the_error_is_half_a_step_inside_the_range_and_the_rest_is_clipped(
    values: list[float], bits: int, dtype: torch.dtype
) -> None:
    x = torch.tensor(values, dtype=torch.float64).clamp(-6e4, 6e4).to(dtype)
    scale = float(symmetric_scale(x.abs().amax() / 2, bits))
    made, exact = fake_quantise(x, scale, bits).double(), x.double()
    limit = top(bits) * scale
    inside = exact.abs() <= limit
    rounding = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).tiny
    error = (made - exact).abs()
    assert bool((error <= scale * 0.5 * (1 + 1e-6) + rounding)[inside].all())
    clipped = exact.sign() * limit
    assert bool(((made - clipped).abs() <= torch.finfo(dtype).eps * limit)[~inside].all())
    steps = made / scale
    near = (steps - steps.round()).abs() <= torch.finfo(dtype).eps * steps.abs() + 1e-4
    assert bool(near.all()), "off the grid"
    assert steps.abs().max() <= top(bits) * (1 + torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [2, 8, 16])
def test_the_ends_of_a_dtype_are_safe(dtype: torch.dtype, bits: int) -> None:
    kind = torch.finfo(dtype)
    for largest in (0.0, kind.tiny, kind.smallest_normal, 1.0, kind.max):
        x = torch.tensor([0.0, largest, -largest], dtype=dtype)
        made = fake_quantise(x, symmetric_scale(x.abs().amax(), bits), bits)
        assert bool(made.isfinite().all())
        assert made[0] == 0
        assert torch.allclose(made.double(), x.double(), rtol=0.01, atol=1e-37)


def test_halves_go_to_the_even_neighbour() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 300.0, -300.0])
    assert fake_quantise(x, 1.0, 8).tolist() == [0, 2, 2, -0.0, -2, 126, 127, 127, -127]


@quick
@given(
    st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=300), min_size=1, max_size=6),
    st.sampled_from([0.01, 0.5, 0.9, 0.99, 0.9999, 1.0]),
)
def test_the_percentile_is_exact_over_all_batches(parts: list[list[float]], q: float) -> None:
    every = np.abs(np.array([value for part in parts for value in part], np.float32))
    if not every.size:
        return
    values = TopValues(every.size, q)
    for part in parts:
        values.update(torch.tensor(part, dtype=torch.float32))
    expected = np.quantile(every.astype(np.float64), q)
    assert values.quantile == pytest.approx(expected, rel=1e-12, abs=1e-30)
    torches = float(torch.quantile(torch.from_numpy(every).double(), q))
    assert values.quantile == pytest.approx(torches, rel=1e-9, abs=1e-30)


def test_the_percentile_of_many_values_holds_few_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(50_000, generator=generator) * (9 - i) for i in range(8)]
    values = TopValues(400_000, 0.999)
    held = []
    for part in parts:
        values.update(part)
        held.append(sum(array.size for array in values._held))
    assert max(held[1:]) < 6000
    assert values.quantile == np.quantile(torch.cat(parts).abs().double().numpy(), 0.999)


def test_another_number_of_values_is_not_taken_for_the_same() -> None:
    values = TopValues(10, 0.5)
    values.update(torch.ones(9))
    assert math.isnan(values.quantile)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fake:w8a8", FakeMode("fake:w8a8", 8, 8)),
        ("fake:w4a8:0.9999", FakeMode("fake:w4a8:0.9999", 4, 8, 0.9999)),
        ("fake:w2", FakeMode("fake:w2", 2, None)),
        ("fake:a16", FakeMode("fake:a16", None, 16)),
        ("fake:w8a8:tensor", FakeMode("fake:w8a8:tensor", 8, 8, None, True)),
        ("fake:w8a8:tensor:0.99", FakeMode("fake:w8a8:tensor:0.99", 8, 8, 0.99, True)),
    ],
)
def test_names_are_read(name: str, expected: FakeMode) -> None:
    assert parse_fake(name) == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fake", r"'fake' is no mode of simulated quantisation. Write fake:w8a8, fake:w4 or"),
        ("fake:", "is no mode"),
        ("fake:a8w8", "is no mode"),
        ("fake:w8a8x", "is no mode"),
        ("fake:w1", "gives weights 1 bits, expected 2 to 16"),
        ("fake:w8a17", "gives activations 17 bits"),
        ("fake:w8a8:99.99", r"clips at 99.99, expected .* Write 0.9999 for 99.99 %"),
        ("fake:w8a8:0", "clips at 0, expected more than 0"),
        ("fake:w8a8:nan", "clips at nan"),
        ("fake:w8a8:tenser", "'tenser' where a percentile may be. Write"),
        ("fake:w8a8:0.9:0.8", "says '0.8' beside"),
        ("fake:w8:0.9", "clips activations, and quantises none. Write fake:w8, or"),
        ("fake:a8:tensor", "is about weights, and quantises none"),
    ],
)
def test_a_misspelt_name_gets_a_sentence(name: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        apply_mode(Target(nn.Linear(4, 4), torch.ones(1, 4)), name)


def layer_kinds() -> list[nn.Module]:
    return [
        nn.Linear(6, 5),
        nn.Conv1d(4, 6, 3, groups=2),
        nn.Conv2d(3, 4, 3),
        nn.Conv3d(2, 3, 2),
        nn.ConvTranspose1d(4, 6, 3, groups=2),
        nn.ConvTranspose2d(4, 3, 3),
        nn.ConvTranspose3d(2, 4, 2),
    ]


def channels(layer: nn.Module, weight: Tensor) -> list[Tensor]:
    """The weights of each output channel, by the definition of the layer."""
    if not isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return list(weight)
    size = layer.in_channels // layer.groups
    return [
        weight[group * size : (group + 1) * size, channel]
        for group in range(layer.groups)
        for channel in range(layer.out_channels // layer.groups)
    ]


@pytest.mark.parametrize("layer", layer_kinds(), ids=lambda layer: type(layer).__name__)
def test_each_output_channel_has_its_own_scale(layer: nn.Module) -> None:
    torch.manual_seed(0)
    weight = torch.randn_like(layer.weight) * torch.rand_like(layer.weight).exp()
    made = quantised_weight(layer, weight, FakeMode("", 4, None))
    pairs = zip(channels(layer, weight), channels(layer, made), strict=True)
    for own, quantised in pairs:
        expected = reference(own.numpy(), own.abs().amax().numpy() / np.float32(7), 4)
        assert np.array_equal(quantised.numpy(), expected)
        assert quantised.unique().numel() > 2
    whole = quantised_weight(layer, weight, FakeMode("", 4, None, per_tensor=True))
    assert np.array_equal(
        whole.numpy(), reference(weight.numpy(), weight.abs().amax().numpy() / np.float32(7), 4)
    )


@pytest.mark.parametrize("layer", layer_kinds(), ids=lambda layer: type(layer).__name__)
def test_a_layer_computes_with_quantised_operands(layer: nn.Module) -> None:
    torch.manual_seed(0)
    shape = (7, 6) if isinstance(layer, nn.Linear) else (2, layer.in_channels, *(5,) * 3)
    x = torch.randn(shape[: 2 if isinstance(layer, nn.Linear) else layer.weight.ndim])
    made = in_mode(layer, "fake:w4a5", inputs=x)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.copy_(quantised_weight(layer, layer.weight, FakeMode("", 4, None)))
    expected = twin(fake_quantise(x, symmetric_scale(x.abs().amax(), 5), 5))
    assert torch.equal(made(x), expected)
    assert torch.equal(made(input=x), expected)
    assert type(made) is type(layer)
    assert not torch.equal(made(x), layer(x))


def test_transformers_conv1d_is_a_linear_the_other_way_round() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    layer, x = utils.Conv1D(3, 5), torch.randn(2, 5)
    made = in_mode(layer, "fake:w4a8", inputs={"x": x})
    columns = [reference(c.numpy(), c.abs().amax().numpy() / 7, 4) for c in layer.weight.detach().T]
    assert np.array_equal(made.weight.detach().T.numpy(), np.stack(columns))
    operand = fake_quantise(x, symmetric_scale(x.abs().amax(), 8), 8)
    assert torch.allclose(made(x), operand @ made.weight + layer.bias)


class Net(nn.Module):
    """A head that is tied to an embedding, a convolution, norms, and a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5))
        self.idle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embedding.weight
        self.calls: list[int] = []

    def forward(self, ids: Tensor, cache: list[int]) -> Tensor:
        cache.append(1)
        self.calls.append(len(cache))
        x = self.norm(self.conv(self.embedding(ids).transpose(1, 2))).transpose(1, 2)
        return self.head(self.body(x))


def batches(count: int = 3) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"ids": torch.randint(20, (2, 5), generator=generator), "cache": []} for _ in range(count)
    ]


def test_calibration_leaves_the_model_and_its_inputs_as_they_were() -> None:
    model, inputs = Net().train(), batches()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    keys = [set(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    target = Target(model, inputs)
    layers = {"conv": model.conv, "head": model.head, "idle": model.idle}
    found = observe(target, layers, target.batches, 0.9)
    assert set(found) == {"conv", "head"}
    assert found["conv"].count == 3 * 2 * 5 * 8
    assert found["conv"].clip < found["conv"].absmax
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [set(vars(module)) for module in model.modules()] == keys
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not model.calls
    assert all(not batch["cache"] for batch in inputs)


def test_static_scales_come_from_the_first_batches_alone() -> None:
    model = Net().eval()
    heard: list[Tensor] = []
    model.body[0].register_forward_pre_hook(lambda module, args: heard.append(args[0]))
    target = Target(model, batches())
    for batch in target.batches:
        target(batch)
    every = torch.cat([x.flatten() for x in heard[:2]]).abs().detach().double()
    layers = {"body.0": model.body[0]}
    for q in (0.9, 0.999):
        found = observe(target, layers, target.batches[:2], q)["body.0"]
        assert found.clip == pytest.approx(float(torch.quantile(every, q)), rel=1e-12)
        assert found.absmax == float(every.max())
    made = apply_mode(target, "fake:w8a4:0.9", calib=2)
    clip = torch.quantile(every, 0.9).float()
    x = heard[-1].detach() * 3
    expected = F.linear(
        fake_quantise(x, symmetric_scale(clip, 4), 4), model.body[0].weight, model.body[0].bias
    )
    assert torch.equal(made.model.body[0](x), expected)


def test_notes_tell_what_was_done_and_what_was_not() -> None:
    made = apply_mode(Target(Net().eval(), batches()), "fake:w8a8:0.999", calib=9)
    assert made.mode == "fake:w8a8:0.999"
    told = "\n".join(made.notes)
    assert "quantises the weights of 4 layers" in told
    assert "'embedding.weight' shared its values with a layer that is quantised now" in told
    assert "on 3 batches (of 3; 9 were asked for, there are no more)" in told
    assert "clipped at the 0.999 percentile of |x|" in told
    assert "never reached 1 of 4 layers, whose activations stay floats: 'idle'" in told


def test_only_the_weights_of_linears_and_convolutions_change() -> None:
    plain, made = Net().eval(), in_mode(Net().eval(), "fake:w8a8", inputs=batches())
    changed = {
        name
        for (name, old), new in zip(
            plain.named_parameters(remove_duplicate=False),
            dict(made.named_parameters(remove_duplicate=False)).values(),
            strict=True,
        )
        if not torch.equal(old, new)
    }
    assert changed == {"conv.weight", "body.0.weight", "idle.weight", "head.weight"}
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), made.buffers(), strict=True))
    assert list(dict(made.named_modules())) == list(dict(plain.named_modules()))
    assert [type(m) for m in made.modules()] == [type(m) for m in plain.modules()]


def test_layers_that_share_a_weight_go_on_sharing_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    made = in_mode(model, "fake:w4a8", inputs=torch.randn(3, 4))
    assert made[0].weight is made[1].weight
    assert made[0].weight is not model[0].weight


def test_a_recording_has_the_inputs_as_they_were_given(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    made = in_mode(model, "fake:w4a4", inputs=x)
    with torch.no_grad():
        plain = made(x)
        with tap.record(made, tmp_path / "run", layers="leaves", inputs=True):
            assert torch.equal(made(x), plain)
    run = tap.open(tmp_path / "run")
    assert run.layers == ["0", "1", "2"]
    assert torch.equal(run["0"].input, x)
    assert torch.equal(run["2"].input, run["1"].output)
    operand = fake_quantise(x, symmetric_scale(x.abs().amax(), 4), 4)
    assert torch.equal(run["0"].output, F.linear(operand, made[0].weight, made[0].bias).detach())


def test_hooks_of_others_go_on() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    heard: list[Tensor] = []
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, output: heard.append(args[0]))
    x = torch.tensor([[0.1, 0.2, 0.3, 1.0]])
    target = apply_mode(Target(model, x), "fake:a3")
    heard.clear()
    target(target.batches[0])
    assert torch.equal(heard[0], x * 2)
    clipped = model[0].forward(torch.full((1, 4), 50.0))
    assert torch.allclose(clipped, model[0].forward(torch.full((1, 4), 2.0)))


def test_a_forward_that_somebody_else_put_there_goes_on() -> None:
    model = nn.Linear(4, 4)
    own = model.forward
    model.forward = lambda input: own(input) + 100  # as accelerate does
    made = apply_mode(Target(model, torch.ones(1, 4)), "fake:w8a8").model
    assert float(made(torch.ones(1, 4)).detach().min()) > 90


def test_a_copy_is_independent_and_gradients_go_straight_through() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    x = torch.tensor([[0.5, -1.0, 0.25, 1.0]])
    made = in_mode(model, "fake:w8a8", inputs=x)
    twin = copy.deepcopy(made)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert torch.equal(twin(x)[0], made[0].bias)
    given_x = torch.tensor([[0.5, -1.0, 9.0, 1.0]], requires_grad=True)
    made(given_x).sum().backward()
    expected = made[0].weight.sum(0).detach()
    expected[2] = 0  # it was clipped
    assert torch.allclose(given_x.grad[0], expected)
    assert made[0].weight.grad is not None


def test_numbers_that_are_none_are_named_with_their_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].bias[0] = float("inf")
    with pytest.raises(TargetError, match=r"met 2 NaN or infinite values in the input of '1': no"):
        apply_mode(Target(model, [torch.ones(2, 2)]), "fake:w8a8")


def test_a_range_of_zero_is_safe_and_said() -> None:
    model = nn.Linear(3, 3)
    target = apply_mode(Target(model, torch.zeros(2, 3)), "fake:w8a8")
    assert "The calibrated range of 1 layer is zero" in "\n".join(target.notes)
    for x in (torch.zeros(1, 3), torch.ones(1, 3)):
        assert torch.equal(model(x)[0], model.bias)


def test_a_model_that_fails_in_calibration_is_a_sentence() -> None:
    with pytest.raises(TargetError, match="The model failed in batch 1: RuntimeError"):
        apply_mode(Target(nn.Linear(3, 3), [torch.ones(1, 3), torch.ones(1, 4)]), "fake:a8")


def test_a_second_run_unlike_the_first_is_a_sentence() -> None:
    counter = iter(range(100))

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.repeat(1 + next(counter), 1))

    with pytest.raises(TargetError, match="does the same thing twice"):
        apply_mode(Target(Growing(), torch.ones(1, 2)), "fake:a8:0.9")


@pytest.mark.parametrize("mask", [None, torch.tensor([[False] * 4, [False] * 3 + [True]])])
def test_a_fused_encoder_runs_its_layers(mask: Tensor | None) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    inputs = {"src": torch.randn(2, 4, 8), "src_key_padding_mask": mask}
    target = apply_mode(Target(model, inputs), "fake:w4a4")
    told = "\n".join(target.notes)
    assert "2 nn.TransformerEncoderLayer run layer by layer" in told
    assert "leaves 2 layers as they are ('layers.0.self_attn.out_proj'" in told
    linear = model.layers[0].linear1
    heard: list[Tensor] = []
    own = linear.forward
    linear.forward = lambda x: heard.append(own(x)) or heard[-1]
    with torch.no_grad():
        made = target(target.batches[0])
    assert len(heard) == 1
    assert bool(made.isfinite().all())


def test_a_model_is_quantised_once() -> None:
    target = apply_mode(Target(nn.Linear(4, 4), torch.ones(1, 4)), "fake:w8")
    with pytest.raises(OptionError, match=r"leaves the model itself: it is quantised already"):
        apply_mode(target, "fake:w4a4")
