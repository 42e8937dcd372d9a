"""`record`: what is run, what is said, how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import Run

from tensortap.recording import open as open_recording

TARGET = """
import torch
from torch import nn

class Blow(nn.Module):
    def forward(self, x):
        raise RuntimeError("the model's own trouble")

class Model(nn.Module):
    def __init__(self, last=None):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.last = last or nn.Identity()
    def forward(self, x):
        return self.last(self.second(self.first(x)))

def build(width: int = 4, seed: int = 0):
    torch.manual_seed(seed)
    return Model(), [torch.randn(2, width) for _ in range(3)]

def broken():
    return Model(Blow()), torch.ones(2, 4)

def rubbish():
    return 7

def loss():
    class WithLoss(Model):
        def forward(self, x):
            y = super().forward(x)
            return {"logits": y * 100, "loss": (y ** 2).sum()}
    return WithLoss(), torch.ones(2, 4)

def frozen():
    return Model().requires_grad_(False), torch.ones(2, 4)

def twice():
    import tensortap as tap
    def run(model, batch):
        model(*batch.args)
        return model(*batch.args)
    return tap.Target(Model(), torch.ones(2, 4), run=run)

class Leave(nn.Module):
    def forward(self, x):
        raise SystemExit(0)

def leaving():
    return Model(Leave()), torch.ones(2, 4)

def elsewhere():
    import os
    os.chdir("/")
    return Model(), torch.ones(2, 4)

def silent():
    class Skips(Model):
        def forward(self, x):
            return self.first(x)
    return Skips(), torch.ones(2, 4)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "my_model.py"
    path.write_text(TARGET)
    return str(path)


def test_record_says_what_it_did(run: Run, target: str, tmp_path: Path) -> None:
    result = run("record", f"{target}:build", "-o", tmp_path / "run", "-l", "first", "-l", "second")
    assert result.code == 0
    assert result.out.startswith("Recorded 2 layers, 6 records, ")
    assert str(tmp_path / "run") in result.out
    assert f"next: tensortap show {tmp_path / 'run'}" in result.err
    recording = open_recording(tmp_path / "run")
    assert recording.layers == ["first", "second"]
    assert recording.status == "complete"
    assert recording.manifest.target["spec"].endswith("my_model.py:build")


def test_record_json(run: Run, target: str, tmp_path: Path) -> None:
    result = run("record", f"{target}:build", "-o", tmp_path / "run", "--json")
    assert result.json["records"] == 9
    assert result.json["layers"] == 3
    assert "no repeated blocks; its leaves" in " ".join(result.json["notes"])
    assert "note: The model has no repeated blocks" in result.err


def test_options_reach_the_target(run: Run, target: str, tmp_path: Path) -> None:
    place = {"a": ("--seed", 7, "--set", "width=4"), "b": ("--seed", 7), "c": ("--seed", 8)}
    outputs = {}
    for name, options in place.items():
        assert run("record", f"{target}:build", "-o", tmp_path / name, *options).code == 0
        outputs[name] = open_recording(tmp_path / name)["second"].output
    assert torch.equal(outputs["a"], outputs["b"])
    assert not torch.equal(outputs["a"], outputs["c"])
    assert open_recording(tmp_path / "c").manifest.seed == 8
    refused = run("record", f"{target}:build", "-o", tmp_path / "d", "--mode", "wide")
    assert refused.code == 2
    assert "has no mode 'wide'" in refused.err
    refused = run("record", f"{target}:build", "-o", tmp_path / "d", "--samples", "3")
    assert refused.code == 2
    assert "does not take 'samples'. It takes width, seed" in refused.err


def test_early_stop_stops_and_can_be_refused(run: Run, target: str, tmp_path: Path) -> None:
    stopped = run("record", f"{target}:build", "-o", tmp_path / "a", "-l", "first")
    assert stopped.code == 0
    assert "Each forward was stopped behind 'first'" in stopped.err
    ran_on = run(
        "record", f"{target}:broken", "-o", tmp_path / "b", "-l", "first", "--no-early-stop"
    )
    assert ran_on.code == 2
    assert "tensortap: The model failed in batch 0: RuntimeError: the model's own trouble" in (
        ran_on.err
    )
    assert "my_model.py:7" in ran_on.err
    assert open_recording(tmp_path / "b")["first"].output.shape == (2, 4)
    assert open_recording(tmp_path / "b").status == "failed"


def test_grads_from_the_loss(run: Run, target: str, tmp_path: Path) -> None:
    result = run("record", f"{target}:loss", "-o", tmp_path / "a", "-l", "last", "--grads")
    assert result.code == 0
    layer = open_recording(tmp_path / "a")["last"]
    assert torch.allclose(layer.grad_output, 2 * layer.output)
    assert "Gradients are those of the output's loss" in result.err


def test_grads_from_the_mean(run: Run, target: str, tmp_path: Path) -> None:
    result = run("record", f"{target}:build", "-o", tmp_path / "a", "-l", "last", "--grads")
    assert result.code == 0
    assert torch.allclose(
        open_recording(tmp_path / "a")["last"].grad_output, torch.full((2, 4), 1 / 8)
    )
    refused = run("record", f"{target}:frozen", "-o", tmp_path / "b", "--grads")
    assert refused.code == 2
    assert "requires gradients" in refused.err


def test_a_targets_own_run(run: Run, target: str, tmp_path: Path) -> None:
    assert run("record", f"{target}:twice", "-o", tmp_path / "a", "-l", "last").code == 0
    assert [r.call for r in open_recording(tmp_path / "a")["last"].records] == [0, 1]


def test_summary_alone(run: Run, target: str, tmp_path: Path) -> None:
    out = tmp_path / "a"
    run("record", f"{target}:build", "-o", out, "--keep", "summary", "--histograms", "--no-outputs",
        "--inputs")  # fmt: skip
    records = open_recording(out).records
    assert {record.port for record in records} == {"input"}
    assert not any(record.stored for record in records)
    assert all(record.summary.histogram is not None for record in records)


def test_plan_runs_nothing(run: Run, target: str, tmp_path: Path) -> None:
    result = run("record", f"{target}:build", "--plan", "-l", "first", "--inputs")
    assert result.code == 0
    assert (
        "1 layer, 2 records a batch, at most 64 B a batch; about 192 B for 3 batches" in result.out
    )
    assert "would run no further than 'first'" in result.out
    data = run("record", f"{target}:build", "--plan", "-l", "first", "--json").json
    assert data["layers"][0]["shape"] == [2, 4]
    assert data["nbytes_all"] == 96
    assert list(tmp_path.iterdir()) == [tmp_path / "my_model.py"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{t}:rubbish", "-o", "{o}"], "returned the int 7"),
        (["{t}:none", "-o", "{o}"], "has no function 'none'"),
        (["nowhere.py:build", "-o", "{o}"], "'nowhere.py' does not exist"),
        (["{t}:build"], "Give a folder with -o DIR"),
        (["{t}:build", "-o", "{o}", "-l", "secnd"], "Near names: 'second'"),
        (["{t}:build", "-o", "{o}", "--keep", "all"], "--keep must be tensors, sketch or summary"),
        (["{t}:build", "-o", "{o}", "--budget", "much"], "'much' is no size"),
        (["{t}:build", "-o", "{o}", "--budget", "1"], "at least 1 MiB"),
        (["{t}:build", "-o", "{t}/x"], "Cannot create the folder"),
        (["{t}:build", "-o", "{o}", "--set", "width"], "not of the form key=value"),
        (["{t}:build", "-o", "{o}", "--no-outputs"], "Nothing to record"),
        (["{t}:build", "-o", "{o}", "--prompt", "x"], "--prompt is for hf:DIR"),
        (["{t}:silent", "-o", "{o}", "-l", "second", "--no-early-stop"], "Nothing was recorded"),
    ],
)
def test_mistakes(run: Run, target: str, tmp_path: Path, arguments: list[str], said: str) -> None:
    filled = [a.format(t=target, o=tmp_path / "out") for a in arguments]
    result = run("record", *filled)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("tensortap: ") or "\ntensortap: " in result.err
    assert said in result.err


def test_a_model_that_leaves_is_no_success(run: Run, target: str, tmp_path: Path) -> None:
    done = run("record", f"{target}:leaving", "-o", tmp_path / "run", "-l", "all")
    assert done.code == 2
    assert "The model failed in batch 0: SystemExit: 0" in done.err


def test_a_target_that_goes_to_another_folder(
    run: Run, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("record", f"{target}:elsewhere", "-o", "here/run", "-l", "all")
    assert done.code == 0, done.err
    assert f"to {tmp_path}/here/run in" in done.out
    assert open_recording(tmp_path / "here" / "run").status == "complete"


def test_an_existing_recording_is_kept(run: Run, target: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run("record", f"{target}:build", "-o", out, "-l", "first")
    again = run("record", f"{target}:build", "-o", out, "-l", "second")
    assert again.code == 2
    assert "already holds a recording" in again.err
    assert "--overwrite" in again.err
    assert open_recording(out).layers == ["first"]
    assert run("record", f"{target}:build", "-o", out, "-l", "second", "--overwrite").code == 0
    assert open_recording(out).layers == ["second"]


TRAINING = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    return model, torch.randn(8, 4)

def evaluated():
    model, x = build()
    return model.eval(), x

def callable():
    return (lambda x: x * 2), torch.ones(2)
"""


def test_training_mode_is_said_and_eval_leaves_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    target = tmp_path / "training.py"
    made = run("record", f"{target}:build", "-o", tmp_path / "train", "--layers", "all")
    assert made.code == 0
    assert made.err.count("training mode") == 1
    assert "warning: The model was recorded in training mode: 1 layer normalises" in made.err
    assert "training mode" in run("show", tmp_path / "train").err
    assert "training mode" in run("show", tmp_path / "train", "--json").json["notes"][0]

    quiet = run("record", f"{target}:build", "-o", tmp_path / "eval", "--layers", "all", "--eval")
    assert "training mode" not in quiet.err
    command = open_recording(str(tmp_path / "eval")).manifest.selection["command"]
    assert command.endswith("--eval")
    run("record", f"{target}:evaluated", "-o", tmp_path / "true", "--layers", "all")
    assert run("compare", tmp_path / "true", tmp_path / "eval").code == 0

    differs = run("compare", tmp_path / "true", tmp_path / "train")
    assert differs.code == 1
    text = " ".join(differs.out.split())
    assert text.startswith("warning: The candidate was recorded in training mode")


def test_resume_knows_a_recording_in_eval_mode_from_another(run: Run, tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    words = ("record", f"{tmp_path / 'training.py'}:build", "-o", tmp_path / "run", "--resume")
    assert "Recorded" in run(*words, "--layers", "all").out
    assert "Kept" in run(*words, "--layers", "all").out
    other = run(*words, "--layers", "all", "--eval")
    assert other.code == 2 and "eval was not given and is on" in other.err


def test_eval_is_for_modules(run: Run, tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    made = run("record", f"{tmp_path / 'training.py'}:callable", "-o", tmp_path / "run", "--eval")
    assert made.code == 2 and "--eval puts a torch.nn.Module in eval mode" in made.err
    assert not (tmp_path / "run").exists()


def test_blame_and_replay_can_leave_training_mode(run: Run, tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    target = f"{tmp_path / 'training.py'}:build"
    run("record", target, "-o", tmp_path / "run", "--layers", "all", "--inputs", "--eval")
    assert run("blame", tmp_path / "run", target).code == 1
    assert run("blame", tmp_path / "run", target, "--eval").code == 0
    assert run("replay", tmp_path / "run", "1", target).code == 1
    assert run("replay", tmp_path / "run", "1", target, "--eval").code == 0
