"""Errors that good inputs bring along are known by the time they arrive, whoever hands them on."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tensortap as tap
from tensortap.comparing.align import LayerPair
from tensortap.comparing.turns import Turns


class Shift(nn.Module):
    """An offset, which a norm takes away and leaves the rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 64


class Shared(nn.Module):
    """The first layer is called again at the end, as the dropout of a T5 encoder is."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.shift, self.norm = nn.Dropout(), Shift(), nn.LayerNorm(48)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.shift(self.drop(x))))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(48), nn.Linear(48, 48)

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        return self.out(self.norm(x + more))


class Handed(nn.Module):
    """What a block hands to its first layer is a sum of what the block was given."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.norm = Shift(), nn.LayerNorm(48)
        self.blocks = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        more = self.norm(self.shift(x))
        for block in self.blocks:
            x = x + block(x, more)
        return x


def run(model: nn.Module, x: Tensor, path: Path) -> tap.Recording:
    with torch.no_grad(), tap.record(model, path, layers="all", inputs=True) as rec:
        for _ in range(2):
            model(x)
            rec.step()
    return tap.open(path)


@pytest.mark.parametrize("kind", [Shared, Handed])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_clean_in_half_precision(tmp_path: Path, kind: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(6, 20, 48)
    low = copy.deepcopy(model).to(dtype)
    result = tap.compare(run(model, x, tmp_path / "a"), run(low, x.to(dtype), tmp_path / "b"))
    assert result.same, [(r.layer, r.why) for r in result.layers if r.verdict == "diverged"]


def test_a_bug_behind_a_large_error_is_still_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Handed().eval(), torch.randn(6, 20, 48)
    low = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        low.blocks[1].out.weight.neg_()
    result = tap.compare(run(model, x, tmp_path / "a"), run(low, x.bfloat16(), tmp_path / "b"))
    assert result.first_divergence is not None
    assert result.first_divergence.layer == "blocks.1.out"


def test_inputs_come_when_the_call_begins(tmp_path: Path) -> None:
    model = Handed().eval()
    recording = run(model, torch.randn(2, 3, 48), tmp_path / "a")
    pairs = [LayerPair(recording[name], recording[name], "name") for name in recording.layers]
    turns: Turns[tuple[int, str, str]] = Turns(pairs)
    seen = []
    for number, pair in enumerate(pairs):
        for record in recording[pair.reference.name].records:
            turns.add(record, (record.batch, record.layer, record.port))
        seen += list(turns.due(number))
    first = [(layer, port) for batch, layer, port in seen if batch == 0]
    assert first == [
        ("", "input"),
        ("shift", "input"),
        ("shift", "output"),
        ("norm", "input"),
        ("norm", "output"),
        *(
            (f"blocks.{n}{layer}", port)
            for n in range(2)
            for layer, port in (
                ("", "input"),
                ("", "input"),
                (".norm", "input"),
                (".norm", "output"),
                (".out", "input"),
                (".out", "output"),
                ("", "output"),
            )
        ),
        ("", "output"),
    ]
