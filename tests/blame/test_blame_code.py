"""Bugs beside the modules: in the code of a forward, in layers without inputs, in a tower."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from blame_models import Chain, batch, make, recorded
from torch import Tensor, nn

import tensortap as tap


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.scale, self.gain = 0.25, 1.0

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) * self.scale
        result: Tensor = self.o(scores.softmax(-1) @ self.v(x)) * self.gain
        return result


class Positions(nn.Module):
    """A learned table: its forward takes no tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, width))

    def forward(self, length: int) -> Tensor:
        return self.table[:length]


class Model(nn.Module):
    def __init__(self, blocks: int = 4, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.positions = Positions(width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(blocks))
        self.act = nn.Tanh()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)
        self.start = self.residual = self.logits = 1.0
        self.bias: Any = 0.0
        self.cap: Any = 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x) * self.start) + self.positions(x.shape[1])
        for block in self.blocks:
            x = x * self.residual + block(x)
        y = self.head(self.act(self.norm(x))) * self.logits + self.bias
        return y if self.cap is None else self.cap * torch.tanh(y / self.cap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("at", "name", "value", "after", "before"),
    [
        ("", "logits", 2.0, "head", None),
        ("", "bias", 1.0, "head", None),
        ("", "cap", None, "head", None),
        ("", "start", 1.5, "stem", "act"),
        ("", "residual", 1.2, "blocks.0", "blocks.1"),
        ("blocks.1", "scale", 4.0, "blocks.1.v", "blocks.1.o"),
        ("blocks.2", "gain", 1.5, "blocks.2.o", None),
    ],
)
def test_the_code_of_a_forward_is_named_with_its_place(
    at: str,
    name: str,
    value: Any,
    after: str,
    before: str | None,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    model = make(Model)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = copy.deepcopy(model)
    setattr(candidate.get_submodule(at), name, value)
    result = tap.blame(path, candidate.to(dtype), batch().to(dtype))
    assert result.culprit == at
    assert result.share > 0.5
    assert result.made_in is not None
    assert (result.made_in.layer, result.made_in.after, result.made_in.before) == (
        at,
        after,
        before,
    )
    assert result.made_in.source.startswith("test_blame_code.py:")
    assert "forward" in result.sentence
    assert result.to_dict()["made_in"] == result.made_in.to_dict()
    assert any(row.layer == at for row in result.layers)
    if name == "start":
        assert result.causes[0].details["factor"] == pytest.approx(value, rel=1e-2)


def test_a_model_without_a_bug_has_no_code_to_blame(tmp_path: Path) -> None:
    model = make(Model)
    path = recorded(tmp_path / "ref", model, batch())
    low = copy.deepcopy(model).bfloat16()
    result = tap.blame(path, low, batch().bfloat16())
    assert (result.culprit, result.made_in) == (None, None)


def test_a_table_that_takes_no_tensors_is_named(tmp_path: Path) -> None:
    model = make(Model)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = copy.deepcopy(model)
    with torch.no_grad():
        candidate.positions.table.copy_(candidate.positions.table.roll(1, 0))
    result = tap.blame(path, candidate, batch())
    assert (result.culprit, result.made_in) == ("positions", None)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.left(x), self.right(x)), -1)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.layers = nn.ModuleList(Attention(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_where_all_layers_of_one_tower_err_the_tower_is_named(tmp_path: Path) -> None:
    model = make(Towers)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = copy.deepcopy(model)
    for layer in candidate.right.layers:
        layer.scale = 0.5
    assert tap.blame(path, candidate, batch()).culprit == "right"
    for layer in candidate.left.layers:
        layer.scale = 0.5
    assert tap.blame(path, candidate, batch()).culprit is None


def test_a_leaf_with_a_bug_costs_no_more_runs(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = copy.deepcopy(model)
    with torch.no_grad():
        candidate.blocks[1].up.weight.mul_(1.5)
    result = tap.blame(path, candidate, batch())
    assert result.culprit == "blocks.1.up"
    assert result.made_in is None
    assert result.forwards <= 2 * 4 + 3
