"""The same samples in other batches: a wrong one is wrong, and no padding."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import tensortap as tap


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        x = self.two(x)
        return self.three(x)


def test_a_wrong_sample_is_not_taken_for_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(6, 5, 8)
    with tap.record(model, tmp_path / "ref", layers="leaves") as rec, torch.no_grad():
        for part in x.split(2):
            rec.run(part)
            rec.step()

    def spoil(module: nn.Module, args: object, output: Tensor) -> Tensor:
        output = output.clone()
        output[4] *= 1.5
        return output

    model.two.register_forward_hook(spoil)
    with tap.record(model, tmp_path / "one", layers="leaves") as rec, torch.no_grad():
        rec.run(x)
    result = tap.compare(tmp_path / "ref", tmp_path / "one")
    assert result.first_divergence is not None
    assert result.first_divergence.layer == "two"
    assert result["one"].verdict in ("identical", "within")
