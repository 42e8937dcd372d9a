"""Causes told by what was made before: sums, gates, caps, dropout, softmax, biases of attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensortap as tap
from tensortap.comparing.causes import explain

Recorded = Callable[..., Any]


class Gated(nn.Module):
    """A norm of a product with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.gated = True

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x * F.silu(gate) if self.gated else x
        return y * y.square().mean(-1, keepdim=True).rsqrt() * self.weight


class Attention(nn.Module):
    """Queries, keys and values by head in one projection; positions are added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(16, 48), nn.Linear(16, 16)
        self.scale, self.biased = 0.5, True

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        qkv = self.query_key_value(x).reshape(*x.shape[:2], 4, 3, 4).transpose(1, 2)
        q, k, v = qkv.unbind(-2)
        scores = q @ k.transpose(-1, -2) * self.scale + (bias if self.biased else 0)
        result: Tensor = self.dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(8, 16), nn.Linear(8, 16)
        self.norm, self.attention = Gated(), Attention()
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(16, 6)
        self.table, self.bias = nn.Parameter(torch.randn(12, 16)), nn.Parameter(torch.randn(12, 12))
        self.residual, self.placed, self.cap, self.mode = 1.0, True, 2.0, "nearest"
        self.heat = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.stem(x), self.gate(x))
        y = y + self.table if self.placed else y
        y = y * self.residual + self.attention(y, self.bias[None, None])
        weights = self.drop((y @ y.transpose(1, 2) * self.heat / 8).softmax(-1))
        z = self.head(weights @ y)
        z = F.interpolate(z[:, None, ::2, ::2], scale_factor=2, mode=self.mode)
        return self.cap * torch.tanh(z / self.cap) if self.cap else z


@pytest.mark.parametrize(
    ("at", "name", "value", "kind", "words"),
    [
        ("norm", "gated", False, "gate", "silu(the layer's input [1])"),
        ("", "placed", False, "positions", "the same in all samples"),
        ("attention", "scale", 0.4, "scale", "0.4 instead of 0.5"),
        ("attention", "biased", False, "positions", "what is added to the scores"),
        ("", "heat", 0.3, "scale", "softmax of scores that are 0.3 times"),
        ("", "cap", None, "saturation", "reference = 2 x tanh(output / 2): a soft cap is lost"),
    ],
)
def test_what_was_made_before_tells_the_cause(
    at: str, name: str, value: Any, kind: str, words: str, recorded: Recorded
) -> None:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(3, 12, 8)
    left = recorded(model, x, inputs=True)
    wrong = copy.deepcopy(model)
    setattr(wrong.get_submodule(at), name, value)
    right = recorded(wrong, x, inputs=True)
    first = tap.compare(left, right).first_divergence
    assert first is not None
    assert first.causes[0].kind == kind, first.causes
    assert words in first.causes[0].text
    blamed = tap.blame(left, wrong, x)
    assert (blamed.culprit, blamed.causes[0].kind) == (at, kind)
    assert words in blamed.causes[0].text


def test_a_residual_that_is_scaled(recorded: Recorded) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.part = nn.Linear(16, 16), 1.0

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x * self.part + self.line(x)
            return result

    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 12, 16)
    left = recorded(model, x, inputs=True)
    model[1].part = 0.5
    first = tap.compare(left, recorded(model, x, inputs=True)).first_divergence
    assert first is not None and first.layer == "1"
    assert first.causes[0].text == "output = reference - 0.5 x the layer's input"
    assert first.causes[0].kind == "residual"


def test_a_sum_goes_before_a_gate_that_is_the_same_for_all_tokens(recorded: Recorded) -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 4)
            self.places, self.scale = nn.Embedding(12, 16), 4.0

        def forward(self, ids: Tensor) -> Tensor:
            places = self.places(torch.arange(ids.shape[1]))
            result: Tensor = self.head(self.embed(ids) * self.scale + places)
            return result

    torch.manual_seed(0)
    model, ids = Embedded(), torch.randint(0, 20, (2, 12))
    left = recorded(model, ids, inputs=True)
    model.scale = 1.0
    first = tap.compare(left, recorded(model, ids, inputs=True)).first_divergence
    assert first is not None
    assert first.causes[0].kind == "residual"
    assert "output = reference - 3 x 'embed'" in first.causes[0].text


def test_what_is_handed_on_unchanged_says_nothing(recorded: Recorded) -> None:
    """The reference of a gate is the product, not the dropout behind it that does nothing."""

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(16, 16) for _ in range(3))
            self.act, self.drop, self.gated = nn.SiLU(), nn.Dropout(0.1), True

        def forward(self, x: Tensor) -> Tensor:
            y = self.act(self.gate(x))
            result: Tensor = self.down(self.drop(y * self.up(x) if self.gated else self.up(x)))
            return result

    torch.manual_seed(0)
    model, x = MLP().eval(), torch.randn(2, 12, 16)
    left = recorded(model, x, inputs=True)
    model.gated = False
    first = tap.compare(left, recorded(model, x, inputs=True)).first_divergence
    assert first is not None
    assert first.causes[0].kind == "gate"
    assert "the gate is lost" in first.causes[0].text


def test_dropout_that_is_left_on() -> None:
    torch.manual_seed(0)
    reference = torch.randn(2, 24, 64)
    keep = torch.rand(reference.shape) > 0.1
    (cause, *_) = explain(reference, reference * keep / 0.9, floor=1e-6)
    assert cause.kind == "dropout"
    assert cause.details["factor"] == pytest.approx(1 / 0.9)
    # A mask that is not made up for is no dropout.
    assert explain(reference, reference * keep, floor=1e-6)[0].kind != "dropout"


def test_softmax_under_another_mask() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 4, 12, 12)
    real = torch.arange(12) < torch.tensor([12, 9])[:, None]
    right = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(-1)
    (cause,) = explain(right, scores.softmax(-1), floor=1e-6)
    assert cause.kind == "mask"
    assert "tokens 9 to 11 of sample 1 (padding) should be hidden" in cause.text
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    right = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    (cause,) = explain(right, scores.softmax(-1), floor=1e-6)
    assert "the tokens that come after should be hidden" in cause.text


def test_a_picture_that_is_made_larger_otherwise() -> None:
    torch.manual_seed(0)
    small = torch.randn(2, 3, 6, 6)
    right = F.interpolate(small, scale_factor=2, mode="nearest")
    wrong = F.interpolate(small, scale_factor=2, mode="bilinear")
    (cause, *_) = explain(right, wrong, axes=("sample", "channel", "row", "column"))
    assert (cause.kind, cause.details["reference"]) == ("reduction", "nearest resizing")


def test_an_activation_that_is_lost() -> None:
    torch.manual_seed(0)
    made = torch.randn(2, 24, 64)
    (cause, *_) = explain(F.silu(made), made, floor=1e-6)
    assert (cause.kind, cause.text) == (
        "function",
        "reference = silu(output): an activation is lost",
    )
