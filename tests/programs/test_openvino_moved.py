"""OpenVINO joins sums and products with constants: a layer's own may go to what reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tensortap as tap

openvino = pytest.importorskip("openvino")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.matrix) + self.shift


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 0.5


AFTER: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "residual": lambda net, x, h: x + h,  # nothing to join
    "half": lambda net, x, h: x + 0.5 * h,
    "gamma": lambda net, x, h: x + h * net.gamma,
    "shifted": lambda net, x, h: x * (h + net.gamma),
    "less": lambda net, x, h: torch.tanh(h - net.gamma),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "norm": Norm,
    "affine": Affine,
    "scaled": Scaled,
    "activation": nn.SiLU,
    "block": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),  # a gain of ones is left out
}


class Net(nn.Module):
    def __init__(self, layer: str, after: str) -> None:
        super().__init__()
        self.start, self.layer, self.end = nn.Linear(8, 8), LAYERS[layer](), nn.Linear(8, 4)
        self.gamma = nn.Parameter(torch.randn(8))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(functional.gelu(self.start(x)))
        return self.end(functional.silu(AFTER[self.after](self, x, h)))


def converted(model: nn.Module, x: Tensor, how: str, folder: Path) -> Any:
    if how == "torch":
        return openvino.convert_model(model, example_input=x)
    torch.onnx.export(model, (x,), folder / "m.onnx", input_names=["x"], dynamo=False)
    return openvino.convert_model(folder / "m.onnx")


@pytest.mark.parametrize("how", ["torch", "onnx"])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_has_its_value_or_none(layer: str, after: str, how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net(layer, after).eval(), torch.randn(2, 5, 8)
    with tap.record(model, tmp_path / "eager", layers="all"), torch.no_grad():
        model(x)
    with tap.record(converted(model, x, how, tmp_path), tmp_path / "run", layers="all") as rec:
        rec.run(x)
    eager, run = tap.open(tmp_path / "eager"), tap.open(tmp_path / "run")
    for name in run.layers:
        torch.testing.assert_close(run[name].output, eager[name].output, rtol=1e-4, atol=1e-4)
    assert all(check["passed"] for check in run.manifest.self_checks)
    assert "start" in run.layers
    if after == "residual":
        assert "layer" in run.layers
    elif layer in ("linear", "affine"):
        (reason,) = [s["reason"] for s in run.manifest.skipped if s["layer"] == "layer"]
        assert "moved" in reason or "fused" in reason
        assert "layer" not in {check["layer"] for check in run.manifest.self_checks}
    elif layer == "activation" and after == "half":
        assert "layer" in run.layers  # it ends in no sum or product that could be joined


class Convolved(nn.Module):
    """Freezing folds a batch norm, a factor or a constant into the convolution before it."""

    def __init__(self, after: str) -> None:
        super().__init__()
        self.start, self.block = nn.Conv2d(3, 8, 3, bias=False), nn.Sequential(nn.Conv2d(8, 8, 1))
        self.norm, self.end, self.after = nn.BatchNorm2d(8), nn.Linear(6, 4), after
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.start(x).relu())
        made = {"norm": self.norm, "factor": lambda h: 2 * h, "constant": lambda h: h + 1}
        return self.end(made[self.after](h).sigmoid())


@pytest.mark.parametrize("after", ["norm", "factor", "constant"])
def test_what_freezing_folded_is_missing(after: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Convolved(after).eval(), torch.randn(1, 3, 8, 8)
    with tap.record(model, tmp_path / "eager", layers="all"), torch.no_grad():
        model(x)
    frozen = torch.jit.freeze(torch.jit.trace(model, x))
    made = openvino.convert_model(frozen, input=[1, 3, 8, 8])
    with tap.record(made, tmp_path / "run", layers="all") as rec:
        rec.run(x)
    eager, run = tap.open(tmp_path / "eager"), tap.open(tmp_path / "run")
    assert {"start", "end"} <= set(run.layers)
    for name in run.layers:
        torch.testing.assert_close(run[name].output, eager[name].output, rtol=1e-4, atol=1e-4)
    gone = {s["layer"]: s["reason"] for s in run.manifest.skipped}
    told = "would be a guess" if after == "constant" else "freezing folded"
    assert all(told in gone[name] for name in ("block", "block.0"))
