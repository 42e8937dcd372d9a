"""Scripts that reproduce a layer without tensortap: run in a process of their own."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.demo import BUG_LAYER, build
from tensortap.errors import OptionError, RecordingExistsError, TargetError
from tensortap.targets import load_target

Recorded = Callable[..., tap.Recording]

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def run_script(path: Path) -> tuple[int, dict[str, float], str]:
    """The exit code, the relative error of each output, and all that was said."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, path.name],
        cwd=path.parent,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    errors = re.findall(r"^(output.*?): relative L2 error (\S+)", done.stdout, re.MULTILINE)
    return done.returncode, {name: float(e) for name, e in errors}, done.stdout + done.stderr


def imported(path: Path) -> set[str]:
    """The packages that a script imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def test_a_script_shows_the_difference_without_us(tmp_path: Path) -> None:
    good, bad = build(seq_len=8), build(mode="bug", seq_len=8)
    with tap.record(good.model, tmp_path / "run", layers=BUG_LAYER, inputs=True):
        good(good.batches[0])
    found = tap.replay(tmp_path / "run", BUG_LAYER, bad)
    files = found.to_script(tmp_path / "out" / "bug.py")
    assert [file.name for file in files] == ["bug.py", "bug.safetensors"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["bug.py", "bug.safetensors"]
    text = files[0].read_text()
    assert "layer = torch.nn.Linear(in_features=1024, out_features=256)" in text
    assert imported(files[0]) == {"sys", "pathlib", "torch", "safetensors"}
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 80
    code, errors, said = run_script(files[0])
    assert code == 1, said
    assert errors["output"] == pytest.approx(found.error, rel=1e-4)
    assert "The output differs." in said

    fine = tap.replay(tmp_path / "run", BUG_LAYER, good)
    with pytest.raises(RecordingExistsError, match=r"bug\.py is there already"):
        fine.to_script(files[0])
    code, errors, said = run_script(fine.to_script(files[0], overwrite=True)[0])
    assert code == 0, said
    assert errors["output"] < 1e-6


def sequence(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


LAYERS: list[tuple[nn.Module, tuple[Any, ...]]] = [
    (nn.Linear(8, 3, bias=False), (X,)),
    (nn.LayerNorm(8, eps=1e-3, bias=False), (X,)),
    (nn.RMSNorm(8, eps=1e-4), (X,)),
    (nn.BatchNorm1d(8, affine=False).train(), (X,)),
    (nn.Conv2d(2, 4, (3, 1), stride=2, padding="valid", groups=2), (X.view(1, 2, 4, 4),)),
    (nn.ConvTranspose1d(8, 2, 3, output_padding=1, stride=2), (X[:, :, None],)),
    (nn.Embedding(9, 4, padding_idx=0), (torch.arange(6),)),
    (nn.GELU("tanh"), (X,)),
    (nn.ReLU(inplace=True), (X,)),
    (nn.LSTM(8, 4, 2, bidirectional=True, batch_first=True), (X[None],)),
    (nn.GRU(8, 4), (X[None],)),
    (nn.MultiheadAttention(8, 2, bias=False, batch_first=True), (X[None],) * 3),
    (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu"), (X[None],)),
    (nn.Bilinear(8, 8, 2), (X, X)),
    (sequence(nn.Linear(8, 8), sequence(nn.Dropout(0.3), nn.Softmax(-1))), (X,)),
    (nn.Linear(8, 8).to(torch.bfloat16), (X.bfloat16(),)),
    (nn.Linear(8, 8).double(), (X.double(),)),
]


@pytest.mark.parametrize(("layer", "args"), LAYERS, ids=lambda v: type(v).__name__)
def test_layers_of_torch_are_made_by_their_constructors(
    layer: nn.Module, args: tuple[Any, ...], recorded: Recorded, tmp_path: Path
) -> None:
    """The script is run before it is said to be written, so that files mean equal numbers."""
    if not isinstance(layer, nn.BatchNorm1d):
        layer.eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1)  # a constructor alone does not get them right
        run = recorded(layer, *args, inputs=True, layers=[""])
    found = tap.replay(run, "", layer)
    assert found.same
    files = found.to_script(tmp_path / "layer.py")
    assert len(files) == 2
    assert f"torch.nn.{type(layer).__name__}(" in files[0].read_text()
    assert "def make(" not in files[0].read_text()


OWN = """
import torch
from torch import nn
from beside import FACTOR

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.full((width,), 0.25), persistent=False)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain + self.shift

class Block(nn.Module):
    def __init__(self, width, twice=1):
        super().__init__()
        self.norm = Norm(width)
        self.parts = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.unused = None
        self.activation = nn.functional.silu
        self.factor = FACTOR * twice
        self.table = torch.linspace(0, 1, width)

    def forward(self, x):
        for part in self.parts:
            x = x + self.activation(part(self.norm(x))) * self.factor + self.table
        return x

class Kept(nn.Module):
    def __init__(self, width, power=2):
        super().__init__()
        self.width, self.power = width, power
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x) ** self.power

def build(bug=False):
    torch.manual_seed(0)
    model = nn.Sequential(Block(8, twice=2), Kept(8, power=3)).eval()
    if bug:
        model[0].parts[1].weight.data.mul_(1.05)
    return model, torch.linspace(-1, 1, 32).view(4, 8)
"""


def test_a_class_in_a_file_is_read_from_there(tmp_path: Path) -> None:
    place = tmp_path / "models"
    place.mkdir()
    (place / "own.py").write_text(OWN)
    (place / "beside.py").write_text("FACTOR = 0.5\n")
    spec = f"{place / 'own.py'}:build"
    good, bad = load_target(spec), load_target(spec, {}, ["bug=true"])
    with tap.record(good.model, tmp_path / "run", layers="all", inputs=True):
        good(good.batches[0])
    found = tap.replay(tmp_path / "run", "0", bad)
    script = found.to_script(tmp_path / "scripts" / "block.py")[0]
    text = script.read_text()
    assert f"reads the layer's class from {place / 'own.py'}" in " ".join(text.split())
    assert "make(" in text  # what the constructor was given is nowhere kept
    code, errors, said = run_script(script)
    assert code == 1, said
    assert errors["output"] == pytest.approx(found.error, rel=1e-4)
    kept = tap.replay(tmp_path / "run", "1", bad).to_script(tmp_path / "kept.py")[0]
    assert "own.Kept(width=8, power=3)" in kept.read_text()
    assert "tensortap" not in imported(kept)


def test_a_package_is_found_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "work" / "ourpackage"
    place.mkdir(parents=True)
    (place / "__init__.py").touch()
    (place / "beside.py").write_text("FACTOR = 0.5\n")
    (place / "model.py").write_text(OWN.replace("from beside", "from .beside"))
    monkeypatch.chdir(place.parent)
    target = load_target("ourpackage.model:build")
    with tap.record(target.model, tmp_path / "run", layers="all", inputs=True):
        target(target.batches[0])
    script = tap.replay(tmp_path / "run", "0", target).to_script(tmp_path / "s" / "block.py")[0]
    assert "from ourpackage.model import Block" in script.read_text()
    code, errors, said = run_script(script)
    assert code == 0, said
    assert errors["output"] < 1e-6


def test_a_layer_of_transformers_is_made_from_its_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    target = tap.Target(model, {"input_ids": torch.arange(6).view(1, 6)})
    with tap.record(model, tmp_path / "run", layers="all", inputs=True):
        target(target.batches[0])
    for name in ("mlp", "self_attn", "input_layernorm"):
        found = tap.replay(tmp_path / "run", f"model.layers.1.{name}", target)
        files = found.to_script(tmp_path / f"{name}.py")
        assert len(files) == 2
    text = (tmp_path / "self_attn.py").read_text()
    assert "LlamaConfig.from_dict(" in text
    assert "LlamaAttention(config=config, layer_idx=1)" in text
    assert "num_key_value_heads" in text
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.1)
    found = tap.replay(tmp_path / "run", "model.layers.1", target)
    code, errors, said = run_script(found.to_script(tmp_path / "layer.py")[0])
    assert code == 1, said
    (error,) = errors.values()
    assert error == pytest.approx(found.error, rel=1e-4)


def test_what_has_no_file_is_exported(recorded: Recorded, tmp_path: Path) -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.inner(x) * scale
            return y, y.argmax(-1)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Local()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, 3.0)[0]

    model = Whole().eval()
    run = recorded(model, X, inputs=True)
    with torch.no_grad():
        model.layer.inner.weight.mul_(1.5)
    found = tap.replay(run, "layer", model, X)
    assert found.how == "inside"
    files = found.to_script(tmp_path / "local.py")
    assert [file.suffix for file in files] == [".py", ".safetensors", ".pt2"]
    assert "layer(tensors['args[0]'], 3.0)" in files[0].read_text()
    code, errors, said = run_script(files[0])
    assert code == 1, said
    assert errors["output[0]"] == pytest.approx(found.error, rel=1e-4)
    # A script that needs no program leaves none of an earlier one behind.
    again = tap.replay(run, "layer.inner", model).to_script(files[0], overwrite=True)
    assert len(again) == 2
    assert not files[2].exists()


def test_what_cannot_be_written_is_said(recorded: Recorded, tmp_path: Path) -> None:
    class Moody(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum().item() > 0 else x

    model = Moody()
    run = recorded(model, X, inputs=True)
    found = tap.replay(run, "", model)
    with pytest.raises(TargetError, match=r"'\(root\)' \(Moody\) cannot be written as a script"):
        found.to_script(tmp_path / "moody.py")
    assert [p.name for p in tmp_path.iterdir()] == ["run1"]
    with pytest.raises(OptionError, match=r"ends in \.py"):
        found.to_script(tmp_path / "moody.txt")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(OptionError, match="is a folder"):
        found.to_script(tmp_path / "folder.py")
    (tmp_path / "there.safetensors").write_text("mine")
    with pytest.raises(RecordingExistsError, match=r"there\.safetensors is there already"):
        found.to_script(tmp_path / "there.py")
    assert (tmp_path / "there.safetensors").read_text() == "mine"


def test_hostile_names_stay_names(recorded: Recorded, tmp_path: Path) -> None:
    name = 'a"""\nraise SystemExit(3)\n"""\\'

    class Named(nn.Module):
        def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: x[name] + 1}

    model = nn.ModuleDict({name: nn.Linear(8, 8), "plain": Named()})
    target = tap.Target(model, X, name=name, run=lambda m, b: m[name](*b.args))
    with tap.record(model, tmp_path / "run", layers="all", inputs=True):
        target(target.batches[0])
        model["plain"]({name: X})
    found = tap.replay(tmp_path / "run", name, target)
    script = found.to_script(tmp_path / "linear.py")[0]
    ast.parse(script.read_text())
    code, errors, said = run_script(script)
    assert code == 0, said
    assert errors["output"] < 1e-6
    found = tap.replay(tmp_path / "run", "plain", target)
    assert found.verdict == "identical"
    with pytest.raises(TargetError, match="a name that is none in Python"):
        found.to_script(tmp_path / "plain.py")


def test_an_imaginary_part_counts(recorded: Recorded, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64))
    run = recorded(model, X.to(torch.complex64), inputs=True)
    with torch.no_grad():
        model[0].bias += 1j
    found = tap.replay(run, "0", model)
    assert found.verdict == "diverged"
    found.to_script(tmp_path / "imaginary.py")
    code, errors, said = run_script(tmp_path / "imaginary.py")
    assert code == 1 and "Warning" not in said
    assert errors["output"] == pytest.approx(found.error, rel=1e-4)
