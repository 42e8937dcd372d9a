"""`tensortap instrument`, and `tensortap record` of what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import Run
from safetensors.torch import save_file

import tensortap as tap
from tensortap.demo import DemoModel
from tensortap.targets import Target

TARGET = ("test_cli_instrument:small",)
IDS = torch.arange(8).view(1, 8)


def small() -> Target:
    """The demo's model, narrower."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DemoModel(50, 32, 8, 2)
    return Target(model.eval(), {"input_ids": IDS})


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs") / "in.safetensors"
    save_file({"input_ids": IDS}, str(path))
    return path


def test_instrument_record_compare(run: Run, tmp_path: Path, inputs: Path) -> None:
    model = tmp_path / "model.pt"
    layers = ("-l", "blocks.{0-2}", "-l", "head")
    done = run("instrument", *TARGET, "-o", model, *layers)
    assert done.code == 0, done.err
    assert "taps on 4 layers, 4 tensors, 4.6 KiB a run" in done.out
    assert "Checked: its taps are the eager model's." in done.out
    assert f"next: tensortap record {model}" in done.err
    assert run("record", *TARGET, "-o", tmp_path / "eager", *layers, "-l", "").code == 0
    recorded = run("record", model, "-o", tmp_path / "script", "--inputs-from", inputs)
    assert recorded.code == 0, recorded.err
    assert "model.taps.json', beside it" in recorded.err
    assert (tmp_path / "model.plain.pt").is_file() and "was not checked" not in recorded.err
    again = run("instrument", *TARGET, "-o", model, "--overwrite", "--no-plain")
    assert again.code == 0 and not (tmp_path / "model.plain.pt").exists()
    compared = run("compare", tmp_path / "eager", tmp_path / "script", "--json")
    assert compared.code == 0
    assert {row["verdict"] for row in compared.json["layers"]} == {"identical"}
    assert len(compared.json["layers"]) == 5


def test_three_parts_are_one_recording(run: Run, tmp_path: Path, inputs: Path) -> None:
    model = tmp_path / "model.pt"
    done = run("instrument", *TARGET, "-o", model, "--split", 3, "--json")
    assert done.code == 0, done.err
    told = done.json
    assert told["files"] == [str(tmp_path / f"model.{index}.pt") for index in range(3)]
    assert (told["layers"], told["tensors"], told["format"]) == (8, 8, "torchscript")
    assert told["nbytes"] == 8 * 8 * 32 * 4
    assert told["same"] is True and told["checked"] is True and told["failed"] == []
    held = [part["layers"] for part in json.loads(Path(told["manifest"]).read_text())["parts"]]
    assert [len(layers) for layers in held] in ([3, 3, 2], [3, 2, 3], [2, 3, 3])
    assert run("instrument", *TARGET, "-o", tmp_path / "whole.pt", "--no-plain").code == 0
    for name, file in (("parts", told["manifest"]), ("whole", tmp_path / "whole.pt")):
        assert run("record", file, "-o", tmp_path / name, "--inputs-from", inputs).code == 0
    parts, whole = tap.open(tmp_path / "parts"), tap.open(tmp_path / "whole")
    assert parts.layers == whole.layers
    for layer in whole.layers:
        assert torch.equal(parts[layer].output, whole[layer].output)
    shown = run("show", tmp_path / "parts")
    assert "The model's own output is the same in" in shown.out


LIAR = """
import torch
from torch import nn

class Liar(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()
    def forward(self, x):
        x = self.linear(x)
        return self.act(x * 2 if torch.jit.is_tracing() else x)

def build():
    torch.manual_seed(0)
    return Liar(), torch.randn(2, 4)
"""


def test_a_check_that_fails_is_exit_1(run: Run, tmp_path: Path) -> None:
    (tmp_path / "liar.py").write_text(LIAR)
    words = ("instrument", f"{tmp_path / 'liar.py'}:build", "-o", tmp_path / "model.pt")
    done = run(*words, "-l", "all")
    assert done.code == 1
    assert "taps are not what the eager model computes, " in done.err
    assert "'act': off by up to" in done.err
    assert "Checked" not in done.out
    unchecked = run(*words, "-l", "all", "--overwrite", "--no-check", "--json")
    assert unchecked.code == 0
    assert unchecked.json["checked"] is False and unchecked.json["same"] is None


def test_sentences(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    cases = {
        "--to is 'neff'": ("-o", model, "--to", "neff"),
        "does not say which format": ("-o", tmp_path / "model.neff"),
        "named .onnx, got": ("-o", model, "--to", "onnx"),
        "--split is 0": ("-o", model, "--split", 0),
        "--split is 99, expected a number from 1 to 8": ("-o", model, "--split", 99),
        "No layer matches 'nothing'": ("-o", model, "-l", "nothing"),
    }
    for sentence, words in cases.items():
        done = run("instrument", *TARGET, *words)
        assert done.code == 2
        assert sentence in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_of_another_artefact(run: Run, tmp_path: Path, inputs: Path) -> None:
    for name, layers in (("a", "blocks.0"), ("b", "blocks.1")):
        words = ("-o", tmp_path / f"{name}.pt", "-l", layers, "--no-plain", "--no-check")
        assert run("instrument", *TARGET, *words).code == 0
    words = ("-o", tmp_path / "run", "--inputs-from", inputs)
    done = run("record", tmp_path / "a.pt", "--manifest", tmp_path / "b.taps.json", *words)
    assert done.code == 2
    assert "was not made with the manifest" in done.err
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_transformers(run: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    (tmp_path / "ids.json").write_text("[[1, 2, 3, 4, 5]]")
    done = run(
        "instrument", f"hf:{tmp_path / 'llama'}", "--input-ids", tmp_path / "ids.json",
        "-o", tmp_path / "llama.pt",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "taps on 2 layers, 2 tensors" in done.out


def test_a_file_that_was_exported(run: Run, tmp_path: Path) -> None:
    model = DemoModel(50, 32, 2, 2).eval()
    torch.export.save(torch.export.export(model, (IDS,), strict=False), tmp_path / "model.pt2")
    done = run("instrument", tmp_path / "model.pt2", "-o", tmp_path / "tapped.pt2")
    assert done.code == 0, done.err
    assert "(pt2): taps on 2 layers, 2 tensors" in done.out
    assert "Checked" in done.out
    (tmp_path / "model.onnx").write_text("")
    other = run("instrument", tmp_path / "model.onnx", "-o", tmp_path / "x.pt")
    assert other.code == 2
    missing = run("instrument", tmp_path / "none.pt2", "-o", tmp_path / "x.pt")
    assert missing.code == 2
    assert "does not exist" in missing.err
