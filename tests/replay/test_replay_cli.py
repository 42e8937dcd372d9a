"""`tensortap replay` and the ruler on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tensortap.cli.main import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Done(int(caught.value.code or 0), out, err)

    return call


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "fp32"
    layers = ["--layers", "blocks.4", "--layers", "blocks.4.mlp.down", "--seq-len", "8"]
    with pytest.raises(SystemExit) as caught:
        main(["record", "tensortap.demo:build", "-o", str(path), "--inputs", *layers])
    assert not caught.value.code
    return path


def test_exit_codes_and_words(run: Any, recording: Path) -> None:
    same = run("replay", recording, "blocks.4", "tensortap.demo:build")
    assert same.code == 0
    assert f"blocks.4 returns the same bits as in {recording}." in same.out
    bf16 = run("replay", recording, "blocks.4", "tensortap.demo:build", "--mode", "bf16")
    assert bf16.code == 0
    assert "note: The recorded inputs were cast from float32 to bfloat16." in bf16.err
    bug = run("replay", recording, "blocks.4.mlp.down", "tensortap.demo:build", "--mode", "bug")
    assert bug.code == 1
    assert "Layer blocks.4.mlp.down - Comparison Results" in bug.out
    assert "output = 1.02 x reference" in bug.out
    lost = run("replay", recording, "blocks.5", "tensortap.demo:build")
    assert lost.code == 2
    assert lost.err.startswith("tensortap: There is no layer 'blocks.5'")
    assert not lost.out


def test_data_for_programs(run: Any, recording: Path, tmp_path: Path) -> None:
    script = tmp_path / "new" / "bug.py"
    arguments = ("replay", recording, "blocks.4.mlp.down", "tensortap.demo:build", "--mode", "bug")
    done = run(*arguments, "--json", "--script", script)
    assert done.code == 1
    data = json.loads(done.out)
    assert data["same"] is False
    assert data["verdict"] == "diverged"
    assert data["how"] == "alone"
    assert data["error"] == pytest.approx(0.02, rel=1e-3)
    assert data["causes"][0]["kind"] == "factor"
    assert data["script"] == [str(script), str(script.with_suffix(".safetensors"))]
    assert all(Path(file).is_file() for file in data["script"])
    assert "note: Wrote" in done.err
    again = run(*arguments, "--script", script)
    assert again.code == 2
    assert "is there already" in again.err
    assert not again.out  # asked before anything runs
    assert run(*arguments, "--script", script, "--overwrite").code == 1
    assert run(*arguments, "--script", tmp_path / "bug").code == 2


def test_a_target_is_chosen_as_for_record(run: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Layer(torch.nn.Linear):\n"
        "    def forward(self, x, times):\n"
        "        return super().forward(x) * times\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, gain):\n"
        "        super().__init__()\n"
        "        torch.manual_seed(0)\n"
        "        self.layer = Layer(4, 4)\n"
        "        self.layer.weight.data.mul_(gain)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x, 2)\n"
        "def build(gain: float = 1.0, samples: int = 1):\n"
        "    return Net(gain), [torch.ones(2, 4) + n for n in range(samples)]\n"
    )
    spec = f"{tmp_path / 'own.py'}:build"
    assert run("record", spec, "-o", tmp_path / "run", "--inputs", "--samples", "2").code == 0
    inside = run("replay", tmp_path / "run", "layer", spec, "--samples", "2", "--json")
    assert inside.code == 0
    assert json.loads(inside.out)["how"] == "inside"
    assert "cannot be called on its recorded tensors alone" in inside.err
    few = run("replay", tmp_path / "run", "layer", spec)
    assert few.code == 2
    assert "--batch" in few.err
    assert run("replay", tmp_path / "run", "layer", spec, "--batch", "0").code == 0
    bad = run("replay", tmp_path / "run", "layer", spec, "--batch", "0", "--set", "gain=1.1")
    assert bad.code == 1
    wide = run("replay", tmp_path / "run", "layer", spec, "--batch", "0", "--dtype", "float64")
    assert wide.code == 0
    assert "takes no dtype" in wide.err


def test_the_ruler_on_the_command_line(run: Any, tmp_path: Path) -> None:
    for mode, options in {
        "fp64": ("--dtype", "float64"),
        "bug": ("--mode", "bug"),
        "fp32": (),
    }.items():
        done = run(
            *("record", "tensortap.demo:build", "-o", tmp_path / mode, "--seq-len", "8"),
            *("--layers", "blocks", *options),
        )
        assert done.code == 0
    found = run(
        "compare", tmp_path / "bug", tmp_path / "fp32", "--truth", tmp_path / "fp64", "--json"
    )
    assert found.code == 1
    data = json.loads(found.out)
    assert data["truth"] == str(tmp_path / "fp64")
    assert "the reference may be the worse side (first at blocks.4, " in data["sentence"]
    rows = {row["layer"]: row for row in data["layers"]}
    assert rows["blocks.4"]["nearer"] == "candidate"
    assert rows["blocks.4"]["candidate_error"] < 1e-5 < rows["blocks.4"]["reference_error"]
    assert rows["blocks.3"]["nearer"] is None
    text = run("compare", tmp_path / "bug", tmp_path / "fp32", "--truth", tmp_path / "fp64").out
    assert "nearer to truth" in text


def test_a_script_that_cannot_be_written_does_not_take_the_verdict_along(
    run: Any, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Cache:\n"
        "    seen = None\n"
        "class Layer(torch.nn.Linear):\n"
        "    def forward(self, x, cache):\n"
        "        cache.seen = x if cache.seen is None else cache.seen + x\n"
        "        return super().forward(cache.seen)\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, gain):\n"
        "        super().__init__()\n"
        "        torch.manual_seed(0)\n"
        "        self.layer = Layer(4, 4)\n"
        "        self.layer.weight.data.mul_(gain)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x, Cache())\n"
        "def build(gain: float = 1.0):\n"
        "    return Net(gain), torch.ones(2, 4)\n"
    )
    spec = f"{tmp_path / 'own.py'}:build"
    assert run("record", spec, "-o", tmp_path / "run", "--inputs").code == 0
    words = ("replay", tmp_path / "run", "layer", spec, "--set", "gain=1.1")
    done = run(*words, "--script", tmp_path / "bug.py", "--json")
    assert done.code == 2
    assert "cannot be written as a script" in done.err
    data = json.loads(done.out)
    assert data["verdict"] == "diverged" and data["script"] == []


@pytest.mark.parametrize("name", ["torch.py", "safetensors.py", "json.py", "torch.bug.py"])
def test_a_script_does_not_hide_what_it_imports(
    run: Any, recording: Path, tmp_path: Path, name: str
) -> None:
    words = ("replay", recording, "blocks.4", "tensortap.demo:build", "--script", tmp_path / name)
    done = run(*words)
    assert done.code == 2 and not done.out
    assert "would hide the module" in done.err
