"""A quantised mode with a bug that its wide floor does not call a divergence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tap


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64) for _ in range(8))).eval()


X = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))


def record(model: nn.Module, folder: Path) -> str:
    with torch.no_grad(), tap.record(model, folder, inputs=True):
        model(X)
    return str(folder)


def told(result: tap.Comparison) -> list[str]:
    return [note for note in result.notes if "The error jumps" in note]


def test_a_bias_that_was_lost_is_told_of(model: nn.Module, tmp_path: Path) -> None:
    sound = record(model, tmp_path / "fp32")
    quantised = tap.in_mode(model, "fake:w8a8", inputs=X)
    clean = record(quantised, tmp_path / "clean")
    with torch.no_grad():
        quantised[3].down.bias.zero_()
    broken = record(quantised, tmp_path / "broken")
    assert told(tap.compare(sound, clean)) == []
    result = tap.compare(sound, broken)
    assert result.first_divergence is None  # the estimate is too wide for it
    (note,) = told(result)
    assert note.startswith("The error jumps at '3', ") and "fake int8" in note
    found = tap.compare(sound, broken, floor=clean).first_divergence
    assert found is not None and found.layer == "3"  # as the note says
    assert told(tap.compare(sound, broken, floor=clean)) == []


@pytest.mark.parametrize("mode", ["fake:w8a8", "fake:w4", "fake:w4a8:0.999", "fake:w2a2", "bf16"])
def test_sound_modes_are_not(model: nn.Module, tmp_path: Path, mode: str) -> None:
    quantised = tap.in_mode(model, mode, inputs=X).float()
    result = tap.compare(record(model, tmp_path / "a"), record(quantised, tmp_path / "b"))
    assert told(result) == []
