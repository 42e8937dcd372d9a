"""The python of docs/training.md runs as written, block after block."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import tensortap as tap
from support import Net

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
BATCHES = list(torch.randint(0, 16, (4, 2, 4), generator=torch.Generator().manual_seed(1)))


@pytest.fixture(autouse=True)
def state_of_our_own() -> Iterator[None]:
    """Both libraries keep their settings in the process and in its environment."""
    with mock.patch.dict(os.environ):
        yield
    if "accelerate.state" in sys.modules:
        state = sys.modules["accelerate.state"].AcceleratorState
        state._reset_state(reset_partial_state=True)


def block(title: str, number: int = 0) -> str:
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (text,) = (part for part in section if part.startswith(f"{title}\n"))
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


@pytest.fixture
def names(tmp_path, monkeypatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = Net(blocks=2)
    return {
        "tap": tap,
        "model": model,
        "loader": BATCHES,
        "loss_of": loss_of,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "seen": [],
    }


def run(code: str, names: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning|torch")
        warnings.filterwarnings("ignore", category=FutureWarning)
        exec(code, names)


def test_the_plain_loop(names) -> None:
    run(block("The plain loop"), names)
    recording = tap.open("runs/plain")
    assert recording.status == "complete"
    # Every tenth step is written, but what is logged is kept at every step.
    assert [r.batch for r in recording.records if r.layer == "loss"] == list(range(8))
    assert {r.batch for r in recording.records if r.port == "output"} == {0}


def test_the_loop(names) -> None:
    run(block("The plain loop", 1), names)
    assert tap.open("runs/loop").status == tap.open("runs/monitor").status == "complete"
    assert [(r.epoch, r.batch) for r in tap.open("runs/monitor").records] == [(1, 0)]


def test_lightning(names) -> None:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(blocks=2)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    names["module"] = Module()
    names["loader"] = torch.utils.data.DataLoader(torch.cat(BATCHES), batch_size=2)
    run(block("PyTorch Lightning"), names)
    assert tap.open("runs/lightning").status == "complete"


def test_the_trainer(names) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    names["hf_model"] = transformers.GPT2LMHeadModel(config)
    names["dataset"] = [{"input_ids": row, "labels": row} for row in torch.cat(BATCHES)]
    names["arguments"] = transformers.TrainingArguments(
        output_dir="out", max_steps=2, report_to="none", use_cpu=True, save_strategy="no"
    )
    run(block("Hugging Face Trainer"), names)
    assert tap.open("runs/trainer").status == "complete"


def test_accelerate(names) -> None:
    pytest.importorskip("accelerate")
    names["loader"] = torch.utils.data.DataLoader(torch.cat(BATCHES), batch_size=2)
    run(block("Accelerate"), names)
    recording = tap.open("runs/accelerate")
    assert recording.status == "complete"
    assert "loss" in {r.layer for r in recording.records}


def test_sinks(names, capsys) -> None:
    pytest.importorskip("tensorboard")
    run(block("Sinks"), names)
    for batch in BATCHES:
        loss_of(names["model"], batch).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    names["watch"].close()
    assert names["seen"] == [0, 1, 2, 3]
    assert capsys.readouterr().out.count("grad_norm") == 4
    assert list(Path("runs/tb").glob("events.out.*"))
