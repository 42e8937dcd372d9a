"""docs/neuron.md, run as it is written, with `torch.jit.trace` for a compiler that is not here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from programs.models import MODELS
from support import Net

PAGE = Path(__file__).resolve().parents[2] / "docs" / "neuron.md"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the compiler's name, whose trace is torch's own."""
    module = ModuleType("torch_neuronx")
    module.trace = lambda model, example: torch.jit.trace(model, example)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_neuronx", module)


def demo() -> tuple[nn.Module, tuple[Any, ...]]:
    model, args, _ = MODELS["demo"]()
    return model, args


@pytest.mark.usefixtures("stand_in")
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {"build": demo}
    for code in blocks:
        exec(code, names)
    result = names["result"]
    assert [(row.layer, row.verdict) for row in result.layers] == [
        ("blocks.0", "identical"),
        ("blocks.1", "identical"),
        ("", "identical"),
    ]
    model, example = demo()
    for number in range(2):
        neuron = torch.jit.load(f"part{number}.pt")
        with tap.record(neuron, f"part{number}", manifest=f"part{number}.taps.json") as rec:
            rec.run(*example)
        part = tap.compare("runs/eager", f"part{number}")
        assert {row.layer: row.verdict for row in part.layers} == {
            f"blocks.{number}": "identical",
            f"blocks.{1 - number}": "missing",
            "": "identical",
        }
    assert not any(module._forward_hooks for module in model.modules())


class OnDevice(nn.Module):
    """Samples inside, and returns no logits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net().eval()

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        return {"tokens": self.net(ids).argmax(-1), "logits": None}


def test_logits_that_are_none_are_said_and_the_head_can_be_tapped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = OnDevice(), torch.arange(6).view(1, 6)
    wrapped = tap.instrument(model, ["net.blocks.*", "net.head"])

    class Traced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = wrapped

        def forward(self, ids: torch.Tensor) -> Any:
            output, taps = self.wrapped(ids)
            return output["tokens"], *taps  # what a compiler that flattens returns

    compiled = torch.jit.trace(Traced(), (ids,))
    path = wrapped.manifest.save(tmp_path / "model.taps.json")
    said = "The model's own output at ['logits'] is None in this run."
    assert said in wrapped.manifest.notes
    assert '"tensor": false' in path.read_text()
    with tap.record(compiled, tmp_path / "run", manifest=path) as rec:
        output = rec.run(ids)
    run = tap.open(tmp_path / "run")
    assert said in run.notes
    assert output["logits"] is None
    assert torch.equal(output["tokens"], model(ids)["tokens"])
    assert torch.equal(run["net.head"].output, model.net(ids))
