"""Where and when two runs first part, and who made it: loops, generation, gradients, moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.errors import OptionError

Recorded = Callable[..., tap.Recording]


class Step(nn.Module):
    """A layer that is called in a loop, and is wrong at one call."""

    def __init__(self, wrong_at: int = -1) -> None:
        super().__init__()
        self.wrong_at, self.calls = wrong_at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(1.5 * x)
        if self.calls == self.wrong_at:
            y = y * 1.1
        self.calls += 1
        return y


class Loop(nn.Module):
    def __init__(self, wrong_at: int = -1) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.step = Step(wrong_at)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(4):
            x = self.step(x)
        return x


def test_a_looped_layer_is_judged_at_the_call_that_went_wrong(recorded: Recorded) -> None:
    x = torch.linspace(-1, 1, 40).view(5, 8)
    left = recorded(Loop(), x, inputs=True)
    result = tap.compare(left, recorded(Loop(wrong_at=2), x, inputs=True))
    first = result.first_divergence
    assert first is not None
    assert (first.layer, first.origin, first.input_verdict) == ("step", "made here", "within")
    assert "call 2" in first.why
    output = next(part for part in first.parts if part.port == "output")
    assert output.diverged_at == ((0, 0, 2), (0, 0, 3))
    assert output.to_dict()["first_diverged"] == [0, 0, 2]


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: float) -> torch.Tensor:
        ctx.gain = gain
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.gain, None


class Leaky(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Backward.apply(x, self.gain)
        return result


def test_a_bad_backward_is_made_where_the_gradient_that_came_in_is_good(recorded: Recorded) -> None:
    def run(gain: float) -> tap.Recording:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Leaky(gain), nn.Linear(6, 6), nn.Tanh())
        x = torch.randn(4, 6)
        return recorded(
            model, call=lambda: model(x).square().sum().backward(), grads=True, inputs=True
        )

    result = tap.compare(run(1.0), run(1.1))
    first = result.first_divergence
    assert first is not None
    assert (first.layer, first.origin) == ("1", "made here")
    assert first.why.startswith("grad_input: ")
    assert "for the gradients that came in agree" in result.sentence
    assert result["0"].origin == "inherited"
    assert result["2"].verdict == "identical"


def test_moments_of_one_side_alone_are_said_on_which_side(recorded: Recorded) -> None:
    model = nn.Linear(4, 4)

    def run(batches: int) -> tap.Recording:
        torch.manual_seed(1)
        data = [torch.randn(3, 4) for _ in range(batches)]
        return recorded(model, call=lambda: [model(x) for x in data])

    result = tap.compare(run(6), run(1))
    (row,) = result.layers
    assert row.verdict == "identical"
    (gap,) = (part for part in row.parts if part.verdict == "missing")
    assert gap.why.endswith("only in the reference and 2 more")
    assert "that only one side has" in result.sentence
    assert "summaries" not in result.sentence
    assert row.difference is not None


def test_a_same_shape_that_was_transposed_is_a_divergence_with_a_hint(recorded: Recorded) -> None:
    torch.manual_seed(0)
    model, x = nn.Identity(), torch.randn(8, 8)
    row = tap.compare(recorded(model, x), recorded(model, x.T.contiguous())).layers[0]
    assert row.verdict == "diverged"
    assert row.hints[-1] == "the values agree under 'permute (1, 0)' of the candidate"


def test_padding_that_was_cut_is_not_identical(recorded: Recorded) -> None:
    torch.manual_seed(0)
    model, x = nn.Identity(), torch.randn(2, 5, 8)
    padded = nn.functional.pad(x, (0, 0, 0, 3))
    row = tap.compare(recorded(model, x), recorded(model, padded)).layers[0]
    assert row.verdict == "within"
    assert row.transform == "padding: first 5 of 8 on axis 1"
    assert "not compared" in row.why


class Shifted(nn.Module):
    """An offset, then a norm that takes it away and leaves its rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)
        self.shift = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.down = nn.Linear(32, 32)
        with torch.no_grad():
            self.shift.bias.fill_(100.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.shift(self.up(x))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rounding_that_a_norm_magnifies_is_nobody_s_fault(
    dtype: torch.dtype, recorded: Recorded
) -> None:
    torch.manual_seed(0)
    model, x = Shifted(), torch.randn(4, 50, 32)
    left = recorded(model, x, inputs=True)
    result = tap.compare(left, recorded(model.to(dtype), x.to(dtype), inputs=True))
    assert result.same, result.sentence


def test_noise_at_the_floor_is_within_wherever_it_falls(recorded: Recorded) -> None:
    """Noise that differs from token to token falls on other tokens in another run."""
    model = nn.Identity()
    x = torch.randn(1, 64, 256, generator=torch.Generator().manual_seed(0))

    def noisy(seed: int, size: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randn(1, 64, 1, generator=generator).exp()
        return x + size * 1e-3 * tokens * torch.randn(x.shape, generator=generator)

    left = recorded(model, x)
    for seed in range(6):
        floor, right = recorded(model, noisy(seed, 1.0)), recorded(model, noisy(99 - seed, 1.1))
        result = tap.compare(left, right, floor=floor)
        ratio = result.layers[0].floor_ratio
        assert ratio is not None
        assert result.same or ratio > 2, result.sentence


def test_a_repeat_run_that_is_identical_is_no_stricter_than_none(recorded: Recorded) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    left, repeat = recorded(model, x), recorded(model, x)
    right = recorded(nn.Linear(64, 64).double().requires_grad_(False), x.double())
    other = nn.Linear(64, 64).double()
    other.load_state_dict(model.state_dict())
    right = recorded(other, x.double())
    without, beside = tap.compare(left, right), tap.compare(left, right, floor=repeat)
    assert without.same
    assert beside.same
    assert beside.layers[0].floor == without.layers[0].floor


def test_a_floor_is_a_third_run_on_the_same_inputs(recorded: Recorded) -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    left, right = recorded(model, x), recorded(model.double(), x.double())
    for role in ("floor", "truth"):
        with pytest.raises(OptionError, match=f"The {role} .* is the candidate itself"):
            tap.compare(left, right, **{role: right})
        other = recorded(model, 2 * x.double())
        told = tap.compare(left, right, **{role: other}).warnings
        assert any(text.startswith(f"The {role} ") and "other inputs" in text for text in told)


def test_what_summaries_cannot_tell_is_said(recorded: Recorded) -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    slim = recorded(model, x, keep="summary")
    result = tap.compare(slim, slim, preset="documents")
    assert "1 layer is judged by summaries alone" in result.sentence
    assert any(note.startswith("The preset documents cannot be applied") for note in result.notes)
    row = result.to_dict()["layers"][0]
    assert row["mse"] is None
    assert row["cosine"] is None
    floor = tap.compare(recorded(model, x), recorded(model.double(), x.double()), floor=slim).floor
    assert floor.startswith("estimated")


def test_masks_at_the_limit_of_another_dtype_agree(recorded: Recorded) -> None:
    model = nn.Identity()

    def mask(dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
        rows = torch.arange(6)
        hidden = rows[None, :] > rows[:, None] + shift
        return torch.zeros(6, 6, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)

    left = recorded(model, mask(torch.float32))
    for dtype in (torch.float16, torch.float64, torch.bfloat16):
        assert tap.compare(left, recorded(model, mask(dtype))).layers[0].verdict == "within"
    assert not tap.compare(left, recorded(model, mask(torch.float16, shift=1))).same


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.scale, self.gain = 0.25, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) * self.scale
        result: torch.Tensor = self.o(scores.softmax(-1) @ self.v(x)) * self.gain
        return result


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.start = self.residual = self.logits = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.start
        for block in self.blocks:
            x = x * self.residual + block(x)
        result: torch.Tensor = self.head(x) * self.logits
        return result


@pytest.mark.parametrize(
    ("at", "name", "value", "first", "made_in", "words"),
    [
        ("blocks.1", "scale", 0.3, "blocks.1.o", ("blocks.1", "blocks.1.v", "blocks.1.o"),
         "made in the forward of blocks.1, after v, before o; the inputs of blocks.1 agree"),
        ("blocks.1", "gain", 1.1, "blocks.1", ("blocks.1", "blocks.1.o", None),
         "made in the forward of blocks.1, after o, for its inputs agree"),
        ("", "start", 1.1, "blocks.0.q", ("", "stem", "blocks.0"),
         "made in the model's own forward, after stem, before blocks.0; the inputs of the model"),
        ("", "residual", 1.1, "blocks.1.q", ("", "blocks.0", "blocks.1"), "before blocks.1"),
        ("", "logits", 1.1, "", ("", "head", None), "made in the model's own forward, after head"),
        ("blocks.2.k", "bias", None, "blocks.2.k", ("blocks.2.k", None, None), "(made here, for"),
    ],
)  # fmt: skip
def test_the_module_whose_code_made_it_is_named_and_not_an_innocent_child(
    at: str,
    name: str,
    value: float | None,
    first: str,
    made_in: tuple[str, str | None, str | None],
    words: str,
    recorded: Recorded,
) -> None:
    torch.manual_seed(0)
    model, x = Decoder().eval(), torch.randn(2, 6, 8)
    left = recorded(model, x, inputs=True)
    setattr(model.get_submodule(at), name, value)
    result = tap.compare(left, recorded(model, x, inputs=True))
    assert result.first_divergence is not None
    assert result.first_divergence.layer == first
    assert result.maker is not None
    assert (result.maker.layer, result.maker.after, result.maker.before) == made_in
    assert words in result.sentence
    assert result.to_dict()["first_divergence"]["made_in"]["layer"] == made_in[0]


def test_without_inputs_no_module_is_called_the_maker(recorded: Recorded) -> None:
    torch.manual_seed(0)
    model, x = Decoder().eval(), torch.randn(2, 6, 8)
    left = recorded(model, x)
    model.blocks[1].scale = 0.3
    result = tap.compare(left, recorded(model, x))
    assert result.maker is None
    assert "unknown whether made here" in result.sentence
    assert result.to_dict()["first_divergence"]["made_in"] is None


def test_where_the_bits_part_is_said_though_all_is_within(recorded: Recorded) -> None:
    torch.manual_seed(0)
    model, x = Decoder().eval().bfloat16(), torch.randn(2, 6, 8, dtype=torch.bfloat16)
    left = recorded(model, x, inputs=True)
    model.blocks[1].scale = 0.252
    result = tap.compare(left, recorded(model, x, inputs=True))
    assert result.same
    found = result.first_bit_difference
    assert found is not None
    assert found.layer == "blocks.1.o"
    assert found.row.verdict == "within"
    assert found.maker is not None
    assert (found.maker.layer, found.maker.after) == ("blocks.1", "blocks.1.v")
    words = "The bits first differ at blocks.1.o (made in the forward of blocks.1, after v, before"
    assert words in result.sentence
    assert "that alone does not prove a bug" in result.sentence
    assert result.to_dict()["first_bit_difference"]["made_in"]["layer"] == "blocks.1"


def test_bits_that_differ_from_the_start_say_nothing(recorded: Recorded) -> None:
    torch.manual_seed(0)
    model, x = Decoder().eval(), torch.randn(2, 6, 8)
    left = recorded(model, x, inputs=True)
    same = tap.compare(left, recorded(model, x, inputs=True))
    assert same.first_bit_difference is None
    low = recorded(model.bfloat16(), x.bfloat16(), inputs=True)
    result = tap.compare(left, low)
    assert result.first_bit_difference is None
    assert "bits first" not in result.sentence
    slim = recorded(model, x.bfloat16(), inputs=True, keep="summary")
    assert tap.compare(left, slim).first_bit_difference is None


def test_bits_part_at_a_step_of_many(recorded: Recorded) -> None:
    x = torch.linspace(-1, 1, 40).view(5, 8)
    left = recorded(Loop(), x, inputs=True)
    result = tap.compare(left, recorded(Loop(wrong_at=2), x, inputs=True))
    found = result.first_bit_difference
    assert found is not None
    assert found.layer == "step"
    assert found.row.main is not None
    assert found.row.main.bits_differ_at == (0, 0, 2)
