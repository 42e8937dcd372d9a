"""A user's default device is no business of a comparison's: meta stands for any other."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import tensortap as tap


def test_diverging_recordings_compare_under_a_default_device(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).eval()
    x = torch.randn(4, 16)
    with tap.record(model, tmp_path / "modes" / "fp32", layers="leaves"):
        model(x)
    with torch.no_grad():
        model[2].weight.mul_(1.5)
    with tap.record(model, tmp_path / "modes" / "bug", layers="leaves"):
        model(x)
    torch.set_default_device("meta")
    try:
        found = tap.compare(tmp_path / "modes" / "fp32", tmp_path / "modes" / "bug")
        table = tap.compare_modes(tmp_path / "modes", reference="fp32")
    finally:
        torch.set_default_device(None)
    assert found.first_divergence is not None
    assert found.first_divergence.layer == "2"
    assert not table["bug"].same
