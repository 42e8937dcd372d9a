"""Clean quantised models do not diverge without a floor run, and a bug among them does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.ao.quantization as quantization
from torch import Tensor, nn

import tensortap as tap
from tensortap.comparing.results import Comparison
from tensortap.taps.grids import grids_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(64), nn.GELU()
        self.up, self.down = nn.Linear(64, 160), nn.Linear(160, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks whose norms make outliers, as those of large language models do."""

    def __init__(self, outliers: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 40)
        with torch.no_grad():
            for block in self.blocks:
                block.norm.weight[:2] *= outliers

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.one, self.act, self.two = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dequant(self.two(self.act(self.one(self.quant(x)))))
        return self.head(x.mean((2, 3)))


def static(model: nn.Module, x: Tensor) -> nn.Module:
    model = copy.deepcopy(model)
    model.qconfig = quantization.get_default_qconfig("x86")
    model.head.qconfig = None
    prepared = quantization.prepare(model)
    prepared(x)
    return quantization.convert(prepared)


def dynamic(model: nn.Module, x: Tensor) -> nn.Module:
    return quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)


def mode(name: str) -> Callable[[nn.Module, Tensor], nn.Module]:
    return lambda model, x: tap.in_mode(model, name, inputs=x)


def compared(left: nn.Module, right: nn.Module, x: Tensor, folder: Path) -> Comparison:
    for name, model in (("a", left), ("b", right)):
        with torch.no_grad(), tap.record(model, folder / name, layers="all", inputs=True) as rec:
            model(x)
            rec.step()
    return tap.compare(folder / "a", folder / "b")


def clean(result: Comparison) -> bool:
    bad = [row for row in result.layers if row.verdict not in ("identical", "within")]
    assert not bad, [(row.layer, row.verdict, row.why) for row in bad[:5]]
    return result.same


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("outliers", [1.0, 40.0])
@pytest.mark.parametrize(
    "quantise",
    [mode("fake:w8a8"), mode("fake:w4a8"), mode("fake:w8a8:tensor"), dynamic],
    ids=["w8a8", "w4a8", "per tensor", "dynamic"],
)
def test_clean_pairs(
    tmp_path: Path, quantise: Callable[[nn.Module, Tensor], nn.Module], outliers: float
) -> None:
    torch.manual_seed(0)
    model, x = Net(outliers).eval(), torch.randn(8, 32, 64)
    assert clean(compared(model, quantise(model, x), x, tmp_path))


@pytest.mark.filterwarnings("ignore")
def test_static_int8_of_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Convolutions().eval(), torch.randn(4, 3, 20, 20)
    low = static(model, x)
    found = grids_of(low)
    assert set(found) == {"quant", "one", "two"}
    assert all(grid["dtype"] == "int8" and grid["result"] > 0 for grid in found.values())
    assert clean(compared(model, low, x, tmp_path))


def test_one_quantised_layer_of_many(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net(1.0).eval(), torch.randn(8, 32, 64)
    low = copy.deepcopy(model)
    low.head = tap.in_mode(nn.Sequential(low.head), "fake:w8a8", inputs=x)[0]
    assert clean(compared(model, low, x, tmp_path))
    with torch.no_grad():  # the others have no grid, and no more room than before
        low.blocks[1].down.weight *= 1.001
    result = compared(model, low, x, tmp_path / "bad")
    assert result.first_divergence is not None
    assert result.first_divergence.layer == "blocks.1.down"


@pytest.mark.parametrize(("outliers", "gain"), [(1.0, 1.1), (40.0, -1.0)])
def test_a_bug_in_a_quantised_layer(tmp_path: Path, outliers: float, gain: float) -> None:
    torch.manual_seed(0)
    model, x = Net(outliers).eval(), torch.randn(8, 32, 64)
    bad = copy.deepcopy(model)
    with torch.no_grad():
        bad.blocks[1].down.weight *= gain
    result = compared(model, tap.in_mode(bad, "fake:w8a8", inputs=x), x, tmp_path)
    assert result.first_divergence is not None
    assert result.first_divergence.layer == "blocks.1.down"


def test_what_a_grid_costs_is_measured() -> None:
    """The number in the manifest is the error that the weight has."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(256, 64))
    x = torch.randn(4, 256)
    for name in ("fake:w8a8", "fake:w4a8", "fake:w4"):
        low = tap.in_mode(layer, name, inputs=x)
        error = (low[0].weight - layer[0].weight).norm() / layer[0].weight.norm()
        assert grids_of(low)["0"]["weight"] == pytest.approx(error.item(), rel=0.1)
    assert grids_of(layer) == {}
