"""The python of the page about watching runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tensortap as tap

PAGE = Path(__file__).resolve().parents[2] / "docs" / "watch.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    model = torch.nn.Sequential(block, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    names: dict[str, Any] = {
        "tap": tap,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": torch.randn(6, 2, 4),
        "loss_of": lambda model, batch: model(batch).square().mean(),
    }
    exec(code, names)
    run = tap.open("runs/train")
    assert {r.batch for r in run.records if r.port == "scalar"} == set(range(12))
    assert {(r.epoch, r.batch) for r in run.records if r.port == "output"} == {(0, 0), (1, 10)}
    assert {r.port for r in run.records} == {
        "output",
        "grad_output",
        "grad_param",
        "param",
        "update",
        "scalar",
    }
