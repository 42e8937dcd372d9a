"""Errors that good inputs bring along, and a layer magnifies, are no divergence; a bug there is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensortap as tap
from tensortap.comparing.results import Comparison

Change = Callable[[nn.Module], object]


def compared(path: Path, model: nn.Module, x: Tensor, *changes: Change) -> Comparison:
    other = copy.deepcopy(model)
    for change in changes:
        change(other)
    dtype = next(other.parameters()).dtype
    with torch.no_grad():
        for name, one in (("a", model), ("b", other)):
            with tap.record(one, path / name, layers="all", inputs=True, overwrite=True):
                one(x if one is model else x.to(dtype))
    return tap.compare(path / "a", path / "b")


def bf16(model: nn.Module) -> object:
    return model.to(torch.bfloat16)


def weights_off(model: nn.Module) -> object:
    """Another order of sums, or a grid: every weight off by a little."""
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(7))
        weight.data.mul_(1 + 3e-7 * noise)
    return None


class Differences(nn.Module):
    """A token is the small difference of two large ones, and a norm makes it as large as others."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(self.left(x) - self.right(x)))


def differences() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Differences().eval()
    x = torch.randn(2, 40, 64)
    wanted = torch.linalg.lstsq(
        model.left.weight.data - model.right.weight.data,
        (model.right.bias.data - model.left.bias.data)[:, None],
    ).solution[:, 0]
    x[1, 7] = wanted + 3e-4 * torch.randn(64)
    return model, x


def test_a_norm_makes_the_rounding_of_a_small_token_large(tmp_path: Path) -> None:
    model, x = differences()
    result = compared(tmp_path, model, x, bf16)
    assert result.same, result.sentence
    error = next(p.error for p in result["norm"].parts if p.port == "output")
    assert error > 0.02  # what is judged as rounding: most of it at one token


def test_a_wrong_token_behind_the_same_norm_is_found(tmp_path: Path) -> None:
    model, x = differences()

    def wrong(other: nn.Module) -> object:
        def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
            output = output.clone()
            output[0, 3] *= -1
            return output

        return other.get_submodule("norm").register_forward_hook(hook, prepend=True)

    result = compared(tmp_path, model, x, bf16, wrong)
    assert result.first_divergence is not None
    assert result.first_divergence.layer == "norm"


class Gated(nn.Module):
    """What an activation lets through is little, and as wrong as what it was given."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 64)
        self.up.bias.data.fill_(shift)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def gated() -> tuple[nn.Module, Tensor]:
    """All that is given to the activation is negative, a value by next to nothing."""
    torch.manual_seed(0)
    model = Gated(-4.0).eval()
    x = torch.randn(2, 1, 64)
    with torch.no_grad():
        most = model.up(x)[0, 0].argmax()
        model.up.bias.data[most] -= float(model.up(x)[0, 0, most]) + 1e-4
    return model, x


def test_values_that_rounding_lifts_above_zero(tmp_path: Path) -> None:
    model, x = gated()

    def lifted(other: nn.Module) -> object:
        most = other.get_submodule("up")(x)[0, 0].argmax()
        return other.get_submodule("up").bias.data[most].add_(0.05)

    result = compared(tmp_path, model, x, lifted, bf16)
    row = result["act"]
    assert row.verdict in ("identical", "within"), row.why
    assert not bool(tap.open(tmp_path / "a")["act"].output.any())


def test_a_leak_where_zeros_should_be_is_found(tmp_path: Path) -> None:
    model, x = gated()
    result = compared(tmp_path, model, x, lambda other: setattr(other, "act", nn.LeakyReLU(0.3)))
    assert result.first_divergence is not None
    assert result.first_divergence.layer == "act"


class Attention(nn.Module):
    """Scores that vary by much: attention sees very few tokens."""

    def __init__(self, width: int = 64, heads: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width) for _ in range(4)
        )
        for sharp in (self.q_proj, self.k_proj):
            nn.init.normal_(sharp.weight, std=0.75)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        scale = self.scale / q.shape[-1] ** 0.5
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("change", [bf16, weights_off])
def test_attention_that_sees_few_tokens_magnifies(change: Change, tmp_path: Path) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(Attention(), nn.LayerNorm(64), Attention()).eval()
        result = compared(tmp_path, model, torch.randn(2, 32, 64), change)
        assert result.same, result.sentence


def test_another_scale_of_such_scores_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), nn.LayerNorm(64), Attention()).eval()
    x = torch.randn(2, 32, 64)

    def scaled(other: nn.Module) -> object:
        return setattr(other.get_submodule("2"), "scale", 1.01)

    result = compared(tmp_path, model, x, weights_off, scaled)
    assert result.first_divergence is not None
    assert result.first_divergence.layer == "2.o_proj"


class Product(nn.Module):
    def forward(self, *parts: Tensor) -> Tensor:
        made = parts[0]
        for part in parts[1:]:
            made = made * part
        return made


class Many(nn.Module):
    """One layer that is given six tensors, each with an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.product = Product()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(*(part(x) for part in self.parts))


def test_the_errors_of_several_inputs_add_up(tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = compared(tmp_path, Many().eval(), torch.randn(2, 40, 64), bf16)
    part = next(p for p in result["product"].parts if p.port == "output")
    assert part.verdict == "within"
    assert part.floor_ratio is not None
    assert part.floor_ratio < 2.5
