"""`record` with several modes: the table, the notes, the exit codes."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Run

from tensortap.cli.main import main
from tensortap.recording import open as open_recording

TARGET = '''
import torch
from torch import nn
import tensortap as tap
from tensortap.taps.programs.base import Argument, HeardCall, Place, Run

MODES = ("fp32", "double", "broken", "ctrl-c")
MODE_GROUPS = {"good": ("fp32", "double")}

class Net(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.mode = mode
        if mode == "double":
            self.second.weight.data.mul_(2)
    def forward(self, x):
        if self.mode == "broken":
            raise RuntimeError("the model's own trouble")
        if self.mode == "ctrl-c":
            raise KeyboardInterrupt
        return self.second(self.first(x))

def build(mode="fp32", samples: int = 2, seed: int = 0):
    torch.manual_seed(seed)
    print("a word of the target")
    return Net(mode), [torch.randn(2, 4) for _ in range(samples)]

class Lying:
    """A compiled model whose tapped run computes something else."""
    runtime, absent, notes = "lying", "It was lost.", []
    places = [Place("inner", "Linear"), Place("", "Lying")]
    arguments = [Argument("x", torch.float32, (2, None))]
    def tapped(self, layers, *, inputs, linears):
        return lambda args, kwargs: Run(args[0] + 1, [HeardCall("inner", [("", args[0] + 1)])])
    def plain(self, args, kwargs):
        return args[0]
    def linears(self):
        return {}
    def describe(self):
        return {"class": "Lying", "parameters": 0, "dtypes": {}}
    def divert(self, call):
        return None

def lying(mode):
    return tap.Target(Lying(), torch.ones(2, 3), mode=mode)
'''


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cli-modes") / "my_modes.py"
    path.write_text(TARGET)
    return str(path)


def test_a_table_notes_by_mode_and_what_comes_next(run: Run, target: str, tmp_path: Path) -> None:
    done = run("record", f"{target}:build", "-o", tmp_path / "runs", "--modes", "good")
    assert done.code == 0, done.err
    head, _, *rows = done.out.splitlines()
    assert head.split() == ["mode", "status", "layers", "records", "size", "seconds"]
    assert [row.split()[:4] for row in rows] == [
        ["fp32", "recorded", "2", "4"],
        ["double", "recorded", "2", "4"],
    ]
    assert "note: fp32, double: The model has no repeated blocks" in done.err
    assert done.err.endswith(f"next: tensortap compare {tmp_path / 'runs'}\n")
    assert "a word of the target" in done.err
    command = open_recording(tmp_path / "runs" / "double").manifest.selection["command"]
    assert command == f"tensortap record {target}:build --mode double"


def test_a_mode_that_fails_is_said_and_the_others_go_on(
    run: Run, target: str, tmp_path: Path
) -> None:
    words = ("--mode", "broken", "--mode", "fp32", "--samples", 1)
    done = run("record", f"{target}:build", "-o", tmp_path, *words, "--json")
    assert done.code == 2
    assert done.json["folder"] == str(tmp_path)
    broken, fine = done.json["modes"]
    assert (broken["mode"], broken["status"], broken["layers"]) == ("broken", "failed", 0)
    assert "the model's own trouble" in broken["problem"]
    assert (fine["mode"], fine["status"], fine["problem"]) == ("fp32", "recorded", None)
    assert fine["path"] == str(tmp_path / "fp32") and fine["records"] == 2 and fine["nbytes"] > 0
    assert fine["seconds"] > 0 and fine["self_checks"] == {"passed": 0, "failed": 0}
    assert "tensortap: mode broken failed: The model failed in batch 0: RuntimeError" in done.err


def test_one_problem_of_several_modes_is_said_once(run: Run, target: str, tmp_path: Path) -> None:
    done = run("record", f"{target}:build", "-o", tmp_path, "--modes", "good", "--set", "x=1")
    assert done.code == 2
    assert done.err.count("does not take 'x'") == 1
    assert "tensortap: modes fp32, double failed: " in done.err


def test_one_mode_is_the_recording_itself_unless_it_is_among_modes(
    run: Run, target: str, tmp_path: Path
) -> None:
    one = run("record", f"{target}:build", "-o", tmp_path / "one", "--mode", "double")
    assert one.code == 0 and one.out.startswith("Recorded 2 layers, 4 records, ")
    assert open_recording(tmp_path / "one").manifest.mode == "double"
    many = run("record", f"{target}:build", "-o", tmp_path / "many", "--modes", "double")
    assert many.code == 0 and "mode" in many.out.splitlines()[0]
    there = open_recording(tmp_path / "many" / "double")
    assert torch.equal(there["second"].output, open_recording(tmp_path / "one")["second"].output)


def test_resume(run: Run, target: str, tmp_path: Path) -> None:
    words = ("record", f"{target}:build", "-o", tmp_path / "runs")
    assert run(*words, "--modes", "fp32").code == 0
    taken = run(*words, "--modes", "good")
    assert taken.code == 2
    assert f"tensortap: {tmp_path / 'runs' / 'fp32'} already holds a recording" in taken.err
    done = run(*words, "--modes", "good", "--resume")
    assert done.code == 0
    assert [row.split()[:2] for row in done.out.splitlines()[2:]] == [
        ["fp32", "kept"],
        ["double", "recorded"],
    ]
    other = run(*words, "--modes", "good", "--resume", "--inputs", "--seed", 4)
    assert other.code == 2
    assert "--inputs was off and is on" in other.err and "seed was not given and is 4" in other.err


UNSEEDED = """
import random
import numpy as np
import torch

def build(mode="a"):
    inputs = torch.randn(1, 2) + random.random() + np.random.rand()
    return torch.nn.Linear(2, 2), inputs.float()
"""


def test_a_later_command_draws_the_same_numbers(run: Run, tmp_path: Path) -> None:
    """And without fp32, what comes next, and the sentence where it was forgotten, name another."""
    (tmp_path / "unseeded.py").write_text(UNSEEDED)
    words = ("record", f"{tmp_path}/unseeded.py:build", "-l", "all", "--inputs", "-o")
    for more in (("--modes", "a"), ("--modes", "a,b", "--resume"), ("--modes", "c")):
        torch.seed()  # as in a new process
        np.random.seed()
        random.seed()
        done = run(*words, tmp_path / "runs", *more)
        assert done.code == 0
        assert done.err.endswith(f"next: tensortap compare {tmp_path}/runs --reference a\n") == (
            "--resume" in more
        )
    lost = run("compare", tmp_path / "runs")
    assert lost.code == 2 and "(take another one with --reference a), only: a, b, c." in lost.err
    torch.seed()
    assert run(*words, tmp_path / "runs" / "d", "--mode", "d").code == 0
    first = open_recording(tmp_path / "runs" / "a")[""]
    for mode in "bcd":
        found = open_recording(tmp_path / "runs" / mode)[""]
        assert torch.equal(found.input, first.input) and torch.equal(found.output, first.output)


def test_resume_of_one_recording(run: Run, target: str, tmp_path: Path) -> None:
    words = ("record", f"{target}:build", "-o", tmp_path / "run", "--mode", "fp32", "--resume")
    assert run(*words).out.startswith("Recorded 2 layers")
    kept = run(*words)
    assert kept.code == 0 and kept.out.startswith(f"Kept {tmp_path / 'run'}, which is complete")
    assert run(*words, "--json").json["kept"] is True
    other = run(*words, "--samples", 1)
    assert other.code == 2 and "samples was not given and is 1" in other.err
    os.truncate(next((tmp_path / "run").glob("segment*")), 100)
    assert run(*words).out.startswith("Recorded 2 layers")


def test_against_each(run: Run, target: str, tmp_path: Path) -> None:
    assert run("record", f"{target}:build", "-o", tmp_path / "base", "--mode", "fp32").code == 0
    words = ("record", f"{target}:build", "-o", tmp_path / "runs", "--against", tmp_path / "base")
    done = run(*words, "--modes", "good")
    assert done.code == 1, done.err
    assert [row.split()[-1] for row in done.out.splitlines()[2:]] == ["none", "second"]
    assert "note: double: " in done.err
    assert (tmp_path / "runs" / "double" / "comparison.json").is_file()
    same = run(*words, "--modes", "fp32", "--overwrite", "--json")
    assert same.code == 0 and same.json["modes"][0]["compared"]["same"] is True
    coarse = run(*words, "--modes", "good", "--coarse")
    assert coarse.code == 2 and "--coarse looks for the window of one mode" in coarse.err


def test_a_self_check_that_fails_is_exit_1(run: Run, target: str, tmp_path: Path) -> None:
    done = run("record", f"{target}:lying", "-o", tmp_path, "--modes", "good", "-l", "inner")
    assert done.code == 1, done.err
    assert "warning: fp32: self-check failed: " in done.err


def test_an_interrupt_says_what_is_done(run: Run, target: str, tmp_path: Path) -> None:
    words = ("record", f"{target}:build", "-o", tmp_path, "--modes", "fp32,ctrl-c,double")
    done = run(*words)
    assert done.code == 130
    assert [row.split()[:2] for row in done.out.splitlines()[2:]] == [["fp32", "recorded"]]
    assert "tensortap: interrupted. Done: fp32; not done: ctrl-c, double." in done.err
    told = run(*words, "--resume", "--json")
    assert told.code == 130 and told.json["interrupted"] is True
    assert [row["status"] for row in told.json["modes"]] == ["kept"]
    assert told.json["left"] == ["ctrl-c", "double"]


def test_plan_of_each(run: Run, target: str, tmp_path: Path) -> None:
    done = run("record", f"{target}:build", "--modes", "good", "--plan")
    assert done.code == 0
    assert done.out.startswith("fp32:\n") and "\ndouble:\n" in done.out
    told = run("record", f"{target}:build", "--modes", "good", "--plan", "--json")
    assert [plan["mode"] for plan in told.json["modes"]] == ["fp32", "double"]
    assert told.json["modes"][0]["layers"]


def test_calibration_reaches_built_in_modes(run: Run, target: str, tmp_path: Path) -> None:
    words = ("record", f"{target}:build", "--calib", 1, "-o")
    done = run(*words, tmp_path / "runs", "--modes", "fp32,fake:w8a8")
    assert done.code == 0, done.err
    assert "note: fake:w8a8: The mode 'fake:w8a8' was calibrated on 1" in done.err
    unused = run(*words, tmp_path / "one", "--mode", "fp32")
    assert "note: --calib is for the built-in fake: modes" in unused.err


NOISY = """
import ctypes, os
import torch

def build(mode="fp32"):
    os.system("echo a process")
    os.write(1, b"a descriptor\\n")
    ctypes.CDLL(None).printf(b"a library\\n")  # which C keeps until it is flushed
    print("python")
    return torch.nn.Linear(2, 2), torch.ones(1, 2)
"""


@pytest.mark.parametrize("words", [("--modes", "a,b"), ("--mode", "a")])
def test_nothing_of_the_target_is_on_stdout(
    words: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    for more in (("-o", str(tmp_path / "runs")), ("--plan",)):
        with pytest.raises(SystemExit) as caught:
            main(["record", f"{tmp_path}/noisy.py:build", *words, *more, "-l", "all", "--json"])
        out, err = capfd.readouterr()
        assert not caught.value.code, err
        assert isinstance(json.loads(out), dict)
        for who in ("a process", "a descriptor", "a library", "python"):
            assert who in err
    print("still here")
    os.write(1, b"and here")
    assert capfd.readouterr().out == "still here\nand here"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--modes", "good,nothing"], "has no mode 'nothing'"),
        (["--modes", "good", "--jobs", "0"], "--jobs must be a whole number from 1"),
        (["--modes", "good", "--calib", "0"], "--calib must be a whole number from 1"),
        (["--modes", "good", "--resume", "--overwrite"], "Give one of them"),
    ],
)
def test_mistakes(run: Run, target: str, tmp_path: Path, words: list[str], said: str) -> None:
    done = run("record", f"{target}:build", "-o", tmp_path / "runs", *words)
    assert done.code == 2 and done.out == ""
    assert said in done.err
    assert not (tmp_path / "runs").exists()
