"""Nobody is blamed where a grid meets outliers, or a layer magnifies what is rounded in it."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensortap as tap


class Block(nn.Module):
    """A few of the values that `down` is given dwarf the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 160), nn.Linear(160, 64)
        nn.init.normal_(self.down.weight, std=0.15)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[1].up.weight.data[:2] *= 20

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def recorded(model: nn.Module, x: Tensor, path: Path) -> tap.Recording:
    with torch.no_grad(), tap.record(model, path, layers="all", inputs=True):
        model(x)
    return tap.open(path)


def test_a_grid_that_meets_outliers_is_nobodys_fault(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 32, 64)
    reference = recorded(model, x, tmp_path / "a")
    low = tap.in_mode(model, "fake:w8a8", inputs=x)
    result = tap.blame(reference, low, x)
    assert result.culprit is None, result.sentence
    worst = max(result.layers, key=lambda row: 0 if row.share != row.share else row.share)
    assert worst.layer == "blocks.1"  # though it makes most of the error
    assert worst.share > 0.5


def test_a_bug_beside_such_a_grid_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 32, 64)
    reference = recorded(model, x, tmp_path / "a")
    low = tap.in_mode(model, "fake:w8a8", inputs=x)
    low.get_submodule("blocks.2.down").bias.data.add_(1.0)
    assert tap.blame(reference, low, x).culprit == "blocks.2.down"


class Attention(nn.Module):
    """Attention that sees the very nearest tokens alone, whatever is a little off."""

    def __init__(self, sharp: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        for part in (self.q, self.k):
            nn.init.normal_(part.weight, std=sharp / 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.o(y.transpose(1, 2).flatten(2))


def test_attention_that_magnifies_is_not_blamed(tmp_path: Path) -> None:
    torch.manual_seed(3)
    blocks = (Attention(sharp) for sharp in (1.0, 1.0, 6.0, 1.0))
    model, x = nn.Sequential(*blocks).eval(), torch.randn(2, 32, 64)
    reference = recorded(model, x, tmp_path / "a")
    other = copy.deepcopy(model)
    for weight in other.parameters():
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(7))
        weight.data.mul_(1 + 2e-7 * noise)
    result = tap.blame(reference, other, x)
    assert result.culprit is None, result.sentence
