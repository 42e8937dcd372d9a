"""The page about the monitor says what happens."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from monitor_models import batches, files, small

import tensortap as tap
from forked_commands import Commands

PAGE = Path(__file__).resolve().parents[2] / "docs" / "monitor.md"


def test_the_python_of_the_page_runs(tmp_path, monkeypatch, forked: Commands) -> None:
    monkeypatch.chdir(tmp_path)
    make, look, compare = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    make, loop = make.split("for epoch", 1)
    for folder in ("runs/again", "runs/train"):
        names = {
            "model": small(),
            "loader": batches(),
            "batch": batches()[0],
            "loss_of": lambda model, batch: model(batch).square().mean(),
        }
        torch.manual_seed(0)
        exec(make.replace("runs/train", folder), names)
        exec(look, names)
        assert names["single"]["attention"]["output_shape"] == [[4, 5, 8], [4, 5, 5]]
        exec("for epoch" + loop, names)
    exec(compare, {"tap": tap, **names})
    assert files(tmp_path / "runs" / "train") == [
        "epoch_layers.0.ffn_epoch1.pt",
        "epoch_layers.0.ffn_epoch5.pt",
        "epoch_layers.1.ffn_epoch1.pt",
        "epoch_layers.1.ffn_epoch5.pt",
        "single_attention_epoch1_batch0.pt",
        "single_attention_epoch5_batch0.pt",
    ]
    plot = re.search(r"`tensortap (plot .*?)`", PAGE.read_text())
    assert plot is not None
    done = forked.run(plot[1].split(), tmp_path)
    assert done.code == 0, done.stderr
    for verb in ("show", "check"):
        assert f"`tensortap {verb} runs/train`" in PAGE.read_text()
        assert forked.run([verb, "runs/train"], tmp_path).code == 0


def test_the_page_names_every_method() -> None:
    text = PAGE.read_text()
    for name in vars(tap.Monitor):
        if not name.startswith("_") and callable(getattr(tap.Monitor, name)):
            assert name in text or name in {"pause", "resume", "close", "watch"}, name
