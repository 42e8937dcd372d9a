"""Exported programs with taps that are programs again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from programs.eager_calls import eager_calls, same
from tensortap.errors import OptionError, TargetError
from tensortap.taps.programs.base import Options
from tensortap.taps.programs.exported.kind import open_exported
from tensortap.taps.programs.exported.tapped import tapped_export, tapped_program


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + self.linear(self.norm(x))
        return y, y.sum(-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x, total = block(x)
        x, total = self.blocks[0](x)
        return {"x": x * scale, "total": total}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model = Model().eval()
    path = tmp_path_factory.mktemp("tapped") / "m.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(
            model,
            (torch.randn(4, 8),),
            {"scale": torch.tensor(2.0)},
            dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2)}, "scale": None},
            preserve_module_call_signature=("blocks.0",),
            strict=False,
        )
    torch.export.save(exported, path)
    return model, path


LAYERS = ["blocks.0", "blocks.1", "blocks.1.linear"]
ENTRIES = [
    ("blocks.0", 0, "[0]"),
    ("blocks.0", 0, "[1]"),
    ("blocks.1.linear", 0, ""),
    ("blocks.1", 0, "?0"),
    ("blocks.1", 0, "?1"),  # which nobody reads
    ("blocks.0", 1, "[0]"),
    ("blocks.0", 1, "[1]"),
]


def _check(model: nn.Module, tapped: Any, entries: Any) -> None:
    assert [(entry.layer, entry.call, entry.leaf) for entry in entries] == ENTRIES
    assert {entry.type for entry in entries} == {"Block", "Linear"}
    x, scale = torch.randn(7, 8), torch.tensor(3.0)
    output, eager = eager_calls(model, (x,), {"scale": scale})
    with torch.no_grad():
        found, taps = tapped(x, scale=scale)
    assert all(same(found[key], output[key]) for key in ("x", "total"))
    calls: dict[str, list[Any]] = {}
    for layer, leaves in eager:
        calls.setdefault(layer, []).append(leaves)
    assert len(taps) == len(entries)
    for entry, tap in zip(entries, taps, strict=True):
        leaves = calls[entry.layer][entry.call]
        known = dict(leaves)
        known.update((f"?{index}", tensor) for index, (_, tensor) in enumerate(leaves))
        assert same(tap, known[entry.leaf])


def test_a_module_that_returns_taps_too(saved: tuple[nn.Module, Path]) -> None:
    model, path = saved
    _check(model, *tapped_program(open_exported(path, Options()), LAYERS))


def test_it_can_be_exported_again(saved: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, path = saved
    exported, entries = tapped_export(open_exported(path, Options()), LAYERS)
    torch.export.save(exported, tmp_path / "again.pt2")
    _check(model, torch.export.load(tmp_path / "again.pt2").module(), entries)


def test_what_cannot_be_tapped(saved: tuple[nn.Module, Path]) -> None:
    program = open_exported(saved[1], Options())
    with pytest.raises(OptionError, match="no layer 'block'"):
        tapped_program(program, ["block"])
    module = torch.export.load(saved[1]).module()
    with pytest.raises(TargetError, match="no example inputs"):
        tapped_export(open_exported(module, Options()), LAYERS)
