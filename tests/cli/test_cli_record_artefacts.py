"""`record model.pt`, `.pt2`, `.onnx`, `.xml`: the layers and numbers of the eager model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Run
from safetensors.torch import save_file

from tensortap.recording import open as open_recording

TARGET = '''
import torch
from torch import nn

import tensortap as tap
from tensortap.taps.programs.base import Argument, HeardCall, Place, Run

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(self.act(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 20)
    def forward(self, input_ids, mask):
        x = self.embed(input_ids) * mask.unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

def inputs():
    return {"input_ids": torch.arange(10).reshape(2, 5), "mask": torch.ones(2, 5)}

def build():
    torch.manual_seed(0)
    return Model().eval(), inputs()

def scripted():
    model, given = build()
    return torch.jit.script(model), given

def elsewhere():
    return build()[0], {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "mask": torch.ones(1, 1)}

class Lying:
    """A compiled model whose tapped run computes something else, under the wrong names."""
    runtime, absent, notes = "lying", "It was lost.", []
    places = [Place("inner", "Linear"), Place("gone", "Identity", gone="it passes its input on"),
              Place("guess", "Linear", "inferred"), Place("", "Lying")]
    arguments = [Argument("x", torch.float32, (2, None))]
    def tapped(self, layers, *, inputs, linears):
        def run(args, kwargs):
            x = args[0] if args else kwargs["x"]
            calls = [HeardCall(name, [("", x + 1)], operand=x) for name in ("inner", "guess")
                     if name in (*layers, *linears)]
            return Run(x + 1, calls)
        return run
    def plain(self, args, kwargs):
        return args[0] if args else kwargs["x"]
    def linears(self):
        return {"inner": (torch.eye(3), None)}
    def describe(self):
        return {"class": "Lying", "parameters": 0, "dtypes": {}}
    def divert(self, call):
        return None

def lying():
    return tap.Target(Lying(), torch.ones(2, 3))
'''
KINDS = ("traced.pt", "scripted.pt", "model.pt2", "named.pt2", "model.onnx", "model.xml")
NEEDS = {"model.onnx": ("onnx", "onnxruntime", "onnxscript"), "model.xml": ("openvino",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model as a function, in every form, with its inputs in every form."""
    folder = tmp_path_factory.mktemp("artefacts")
    (folder / "my_model.py").write_text(TARGET)
    names: dict[str, object] = {"__name__": "my_model"}
    exec(TARGET, names)
    given = names["inputs"]()  # type: ignore[operator]
    save_file(given, folder / "in.safetensors")
    arrays = {name: tensor.numpy() for name, tensor in given.items()}
    np.savez(folder / "in.npz", **arrays)
    np.savez(folder / "positions.npz", *arrays.values())
    (folder / "in.json").write_text(json.dumps({name: a.tolist() for name, a in arrays.items()}))
    other = {**given, "input_ids": given["input_ids"] + 1}
    save_file(other, folder / "other.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    from tensortap.targets import load_target

    module: torch.nn.Module = load_target(f"{folder / 'my_model.py'}:build").model
    return module


@pytest.fixture(scope="module")
def made(folder: Path, model: torch.nn.Module):  # type: ignore[no-untyped-def]
    """Makes a form of the model once it is asked for."""

    def make(name: str) -> Path:
        path = folder / name
        for package in NEEDS.get(name, ()):
            pytest.importorskip(package)
        if path.exists():
            return path
        given = {"input_ids": torch.arange(10).reshape(2, 5), "mask": torch.ones(2, 5)}
        args = tuple(given.values())
        if name == "traced.pt":
            torch.jit.trace(model, args, check_trace=False).save(path)  # type: ignore[no-untyped-call]
        elif name == "scripted.pt":
            torch.jit.script(model).save(path)
        elif name == "model.pt2":
            torch.export.save(torch.export.export(model, args), path)
        elif name == "named.pt2":
            torch.export.save(torch.export.export(model, (), given), path)
        elif name == "model.onnx":
            torch.onnx.export(model, args, str(path), dynamo=True, verbose=False)
        else:
            import openvino

            converted = openvino.convert_model(model, example_input=given)
            openvino.save_model(converted, path, compress_to_fp16=False)
        return path

    return make


@pytest.fixture
def eager(run: Run, folder: Path) -> Path:
    path = folder / "eager"
    if not path.exists():
        done = run("record", f"{folder / 'my_model.py'}:build", "-o", path, "-l", "all", "--inputs")
        assert done.code == 0
    return path


@pytest.mark.parametrize("name", KINDS)
def test_a_file_gives_what_the_eager_model_gives(
    run: Run, folder: Path, made, eager: Path, tmp_path: Path, name: str
) -> None:
    path, out = made(name), tmp_path / "run"
    given = folder / "in.safetensors"
    done = run("record", path, "-o", out, "-l", "all", "--inputs-from", given, "--json")
    assert done.code == 0, done.err
    assert done.json["runtime"] not in ("eager", None)
    assert done.json["self_checks"]["passed"] > 0
    assert done.json["self_checks"]["failed"] == 0
    assert "warning" not in done.err
    compared = run("compare", eager, out, "--json")
    assert compared.code == 0, compared.err
    rows = {row["layer"]: row for row in compared.json["layers"]}
    expected = set(open_recording(eager).layers)
    assert expected <= set(rows)
    for layer in expected:
        assert rows[layer]["verdict"] in ("identical", "within"), (layer, rows[layer])
        if not name.endswith((".onnx", ".xml")):
            assert rows[layer]["verdict"] == "identical", layer
    recording = open_recording(out)
    assert recording.manifest.target["spec"] == str(path)


@pytest.mark.parametrize("given", ["in.npz", "positions.npz", "in.json"])
@pytest.mark.parametrize("name", ["traced.pt", "model.pt2", "model.onnx", "model.xml"])
def test_inputs_of_every_form_are_the_same_inputs(
    run: Run, folder: Path, made, eager: Path, tmp_path: Path, given: str, name: str
) -> None:
    done = run("record", made(name), "-o", tmp_path / "run", "--inputs-from", folder / given)
    assert done.code == 0, done.err
    assert "Recorded 2 layers" in done.out
    assert f"next: tensortap show {tmp_path / 'run'}" in done.err
    ours = open_recording(tmp_path / "run")["blocks.1"].output
    torch.testing.assert_close(ours, open_recording(eager)["blocks.1"].output)


def test_a_batch_a_file(run: Run, folder: Path, made, tmp_path: Path) -> None:
    files = [folder / "in.safetensors", folder / "other.safetensors"]
    words = [word for file in files for word in ("--inputs-from", file)]
    path = made("traced.pt")
    done = run("record", path, "-o", tmp_path / "run", *words, "--no-self-check", "-l", "embed")
    assert done.code == 0, done.err
    recording = open_recording(tmp_path / "run")
    assert [record.batch for record in recording["embed"].records] == [0, 1]
    one, two = (record.tensor() for record in recording["embed"].records)
    assert not torch.equal(one, two)
    command = shlex.split(recording.manifest.selection["command"])
    expected = ["tensortap", "record", path, *words, "--no-self-check"]
    assert command == [str(word) for word in expected]
    assert recording.manifest.self_checks == []


def test_a_plan_needs_no_inputs(run: Run, made, tmp_path: Path) -> None:
    done = run("record", made("traced.pt"), "--plan", "-l", "blocks.*", "-l", "head")
    assert done.code == 0
    assert "3 layers; sizes are not known without running" in done.out
    assert "scope" in done.out
    rows = run("record", made("traced.pt"), "--plan", "--json").json["layers"]
    assert [row["layer"] for row in rows] == ["blocks.0", "blocks.1"]
    assert all(row["provenance"] == "scope" and row["shape"] is None for row in rows)


def test_against_another(run: Run, folder: Path, made, eager: Path, tmp_path: Path) -> None:
    words = ["record", made("traced.pt"), "-o", tmp_path / "run", "--against", eager]
    same = run(*words, "--inputs-from", folder / "in.safetensors", "--json")
    assert same.code == 0, same.err
    assert same.json["comparison"]["same"] and same.json["runtime"] == "torchscript"
    words[3] = tmp_path / "other"
    assert run(*words, "--inputs-from", folder / "other.safetensors").code == 1
    words[3] = tmp_path / "coarse"
    found = run(*words, "--inputs-from", folder / "other.safetensors", "--coarse", "--json")
    assert found.code == 1, found.err
    assert found.json["window"]["layers"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{f}/traced.pt"], "brings no inputs along. Give --inputs-from FILE"),
        (["{f}/traced.pt"], "It takes input_ids, mask"),
        (["{f}/trased.pt", "{in}"], "traced.pt"),
        (["{f}/nothing.onnx", "{in}"], "does not exist"),
        (["{f}", "{in}"], "is a folder"),
        (["{f}/in.safetensors", "{in}"], "holds weights and no model"),
        (["{f}/in.json", "{in}"], "of no kind that is known by its name"),
        (["{f}/my_model.py", "{in}"], "my_model.py:FUNCTION"),
        (["{f}/traced.pt:build", "{in}"], "has no function 'build'"),
        (["{f}/traced.pt", "{in}", "--runtime", "abacus"], "no runtime 'abacus'"),
        (["{f}/traced.pt", "{in}", "--runtime", "export"], "holds no exported program"),
        (["{f}/traced.pt", "{in}", "--seq-len", "3", "--mode", "x"], "--mode and --seq-len cannot"),
        (["{f}/traced.pt", "{in}", "--set", "a=1"], "--set a=… cannot change it"),
        (["{f}/traced.pt", "--prompt", "hi"], "Token ids go into a file"),
        (["{f}/traced.pt", "{in}", "--manifest", "{f}/no.taps.json"], "--manifest file"),
        (["{f}/traced.pt", "{in}", "--weights", "{f}/im.safetensors"], "in.safetensors'"),
        (["{f}/traced.pt", "{in}", "--names-from", "{f}"], "--names-from file"),
        (["{f}/traced.pt", "{in}", "--custom-ops", "{f}/no.so"], "--custom-ops file"),
        (["{f}/traced.pt", "{in}", "--grads"], "Gradients cannot be recorded"),
        (["{f}/traced.pt", "{in}", "-l", "blokcs.0"], "Near names: 'blocks.0'"),
        (["{f}/traced.pt", "--inputs-from", "{f}/wrong.safetensors"], "'mask' is missing; 'maks'"),
        (["{f}/my_model.py:build", "{in}", "--weights", "{f}/in.npz"], "--weights is for compiled"),
        (["{f}/my_model.py:build", "--accept-inferred"], "--accept-inferred is for compiled"),
        (["{f}/my_model.py:build", "--inputs-from", "{f}/wrong.safetensors"], "'maks' is unknown"),
        (["{f}/my_model.py:lying", "{in}"], "'x' is missing"),
    ],
)  # fmt: skip
def test_mistakes(
    run: Run, folder: Path, made, tmp_path: Path, words: list[str], said: str
) -> None:
    made("traced.pt")
    wrong = {"input_ids": torch.ones(2, 5).long(), "maks": torch.ones(2, 5)}
    save_file(wrong, folder / "wrong.safetensors")
    filled: list[str] = []
    for word in words:
        given = ["--inputs-from", f"{folder}/in.safetensors"]
        filled += given if word == "{in}" else [word.replace("{f}", str(folder))]
    result = run("record", *filled, "-o", tmp_path / "out")
    assert result.code == 2, result.err
    assert result.out == ""
    assert said in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["traced.pt", "model.pt2", "model.onnx"])
def test_a_run_that_fails_says_why_and_leaves_nothing_behind(
    run: Run, folder: Path, made, tmp_path: Path, name: str
) -> None:
    far = {"input_ids": torch.full((2, 5), 999), "mask": torch.ones(2, 5)}
    save_file(far, folder / "far.safetensors")
    words = ["record", made(name), "--inputs-from", folder / "far.safetensors", "-o"]
    failed = run(*words, tmp_path / "out")
    assert failed.code == 2
    assert re.search(r"out of range|out of bounds|out of data bounds", failed.err), failed.err
    assert "is kept" not in failed.err
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    assert run(*words, tmp_path / "out").code == 2
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("verb", [["blame", "{e}"], ["replay", "{e}", "norm"]])
def test_single_layers_need_the_eager_model(
    run: Run, made, eager: Path, folder: Path, verb: list[str]
) -> None:
    words = [word.replace("{e}", str(eager)) for word in verb]
    refused = run(*words, made("traced.pt"))
    assert refused.code == 2
    assert "is a compiled model" in refused.err and "the eager model" in refused.err
    live = run(*words, f"{folder / 'my_model.py'}:scripted")
    assert live.code == 2
    assert "tensortap: " in live.err


def test_help_names_every_runtime(run: Run) -> None:
    from tensortap.cli.targeting import RuntimeOption
    from tensortap.taps.programs.kinds import kinds

    (option,) = RuntimeOption.__metadata__  # type: ignore[attr-defined]
    for kind in kinds():
        assert kind.name in option.help or kind.name == "opaque"


def test_a_function_may_return_a_compiled_model(
    run: Run, folder: Path, eager: Path, tmp_path: Path
) -> None:
    target = f"{folder / 'my_model.py'}:scripted"
    done = run("record", target, "-o", tmp_path / "a", "-l", "all", "--json")
    assert done.code == 0, done.err
    assert done.json["runtime"] == "torchscript"
    assert run("compare", eager, tmp_path / "a").code == 0
    other = ("--inputs-from", folder / "other.safetensors")
    done = run("record", target, "-o", tmp_path / "b", "-l", "all", *other)
    assert done.code == 0, done.err
    assert run("compare", eager, tmp_path / "b").code == 1


def test_a_functions_inputs_can_be_replaced(
    run: Run, folder: Path, eager: Path, tmp_path: Path
) -> None:
    target = f"{folder / 'my_model.py'}:elsewhere"
    given = ("--inputs-from", folder / "in.json")
    assert run("record", target, "-o", tmp_path / "a", "-l", "all", "--inputs", *given).code == 0
    compared = run("compare", eager, tmp_path / "a", "--json")
    assert compared.code == 0
    assert compared.json["counts"] == {"identical": len(open_recording(eager).layers)}


class TestSelfCheck:
    def test_a_failure_is_said_loudly_and_the_recording_is_there(
        self, run: Run, folder: Path, tmp_path: Path
    ) -> None:
        target = f"{folder / 'my_model.py'}:lying"
        done = run("record", target, "-o", tmp_path / "run", "-l", "all", "--json")
        assert done.code == 1, done.err
        assert done.json["self_checks"] == {"passed": 0, "failed": 2}
        assert done.json["runtime"] == "lying"
        assert done.err.count("warning: self-check failed:") == 2
        assert "note: Self-check failed" not in done.err
        recording = open_recording(tmp_path / "run")
        assert recording.status == "complete"
        assert torch.equal(recording["inner"].output, torch.full((2, 3), 2.0))
        assert run("check", tmp_path / "run").code == 1
        said = run("record", target, "-o", tmp_path / "run", "--overwrite", "-l", "inner")
        assert said.code == 1
        assert f"next: tensortap check {tmp_path / 'run'}" in said.err

    def test_it_can_be_left_out(self, run: Run, folder: Path, tmp_path: Path) -> None:
        target = f"{folder / 'my_model.py'}:lying"
        done = run(
            "record", target, "-o", tmp_path / "run", "--no-self-check", "--json", "-l", "all"
        )
        assert done.code == 0, done.err
        assert done.json["self_checks"] == {"passed": 0, "failed": 0}

    def test_guesses_and_losses_are_rows(self, run: Run, folder: Path, tmp_path: Path) -> None:
        target = f"{folder / 'my_model.py'}:lying"
        plan = run("record", target, "--plan", "-l", "all", "--json")
        assert plan.code == 0, plan.err
        rows = {row["layer"]: row for row in plan.json["layers"]}
        assert rows["gone"]["lost"] == "it passes its input on"
        assert "--accept-inferred" in rows["guess"]["lost"]
        assert rows["inner"]["lost"] is None and rows[""]["provenance"] == "hook"
        text = run("record", target, "--plan", "-l", "all")
        assert "2 layers, 1 more whose name would be a guess, 1 layer of which nothing" in text.out
        words = ("record", target, "-o", tmp_path / "run", "-l", "all", "--accept-inferred")
        assert run(*words).code == 1
        assert open_recording(tmp_path / "run").layers == ["inner", "guess", ""]


@pytest.mark.parametrize("split", [1, 2])
def test_an_instrumented_model_has_its_names_beside_it(
    run: Run, folder: Path, eager: Path, tmp_path: Path, split: int
) -> None:
    target, path = f"{folder / 'my_model.py'}:build", tmp_path / "model.pt"
    made = run("instrument", target, "-o", path, "-l", "all", "--split", split)
    assert made.code == 0, made.err
    artefact = path if split == 1 else tmp_path / "model.taps.json"
    given = ("--inputs-from", folder / "in.safetensors")
    done = run("record", artefact, "-o", tmp_path / "run", "-l", "all", *given)
    assert done.code == 0, done.err
    compared = run("compare", eager, tmp_path / "run", "--json")
    assert compared.json["counts"] == {"identical": len(open_recording(eager).layers)}


@pytest.mark.parametrize("text", ["no JSON", None])
def test_a_manifest_that_lies_beside_a_model_by_chance(
    run: Run, folder: Path, made, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "model.pt"
    if text is None:
        target = f"{folder / 'my_model.py'}:build"
        assert run("instrument", target, "-o", path, "--no-plain").code == 0
    else:
        (tmp_path / "model.taps.json").write_text(text)
    path.write_bytes(made("traced.pt").read_bytes())
    given = ("--inputs-from", folder / "in.safetensors")
    refused = run("record", path, "-o", tmp_path / "run", *given)
    assert refused.code == 2
    assert f"move '{tmp_path / 'model.taps.json'}' away" in refused.err
    (tmp_path / "model.taps.json").unlink()
    assert run("record", path, "-o", tmp_path / "run", *given).code == 0


def test_doctor_says_what_runs_compiled_models(run: Run) -> None:
    facts = run("doctor", "--json").json
    assert {"onnx", "openvino"} <= set(facts["extras"])
    for name in ("onnx", "openvino"):
        extra = facts["extras"][name]
        assert set(extra["found"]) | set(extra["missing"])
        assert extra["purpose"]
    text = run("doctor").out
    for word in ("onnxruntime", "openvino", "torchao", "record model.onnx"):
        assert word in text
