"""`tensortap record --against`, `--stop` and `--coarse`: output, exit codes, commands to go on."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import tensortap as tap
from tensortap.cli.main import main

BUILD = "tensortap.demo:build"
BUG = "blocks.4.mlp.down"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streaming")
    call(path, "record", BUILD, "-o", "fp32", "--layers", "all", "--inputs", "--samples", "2")
    call(path, "record", BUILD, "-o", "sketch", "--layers", "all", "--keep", "sketch")
    return path


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def call(folder: Path, *words: str, code: int = 0) -> tuple[str, str]:
    """A command in this process, in a folder: its output and what it says beside it."""
    out, err = io.StringIO(), io.StringIO()
    with inside(folder), redirect_stdout(out), redirect_stderr(err):
        with pytest.raises(SystemExit) as caught:
            main(list(words))
    assert int(caught.value.code or 0) == code, err.getvalue()
    assert "Traceback" not in err.getvalue()
    return out.getvalue(), err.getvalue()


def test_against(folder: Path) -> None:
    options = ("--mode", "bug", "--layers", "all", "--inputs", "--samples", "2")
    out, err = call(folder, "record", BUILD, "-o", "bug", *options, "--against", "fp32", code=1)
    assert f"First divergence at {BUG} (made here" in out
    assert "Kept " in err and " of the " in err
    assert (folder / "bug" / "comparison.json").exists()
    assert len(tap.open(folder / "bug").records) == 100 * 2 * 2


def test_nothing_diverged(folder: Path) -> None:
    options = ("--mode", "bf16", "--samples", "2", "--against", "fp32", "--json")
    out, _ = call(folder, "record", BUILD, "-o", "bf16", *options)
    data = json.loads(out)
    assert data["comparison"]["same"] and data["stopped_at"] is None
    assert data["bytes_kept"] == 0 < data["bytes_seen"]


def test_stop(folder: Path) -> None:
    options = ("--mode", "bug", "--layers", "all", "--samples", "2", "--stop", "--json")
    out, err = call(folder, "record", BUILD, "-o", "stopped", *options, "--against", "fp32", code=1)
    data = json.loads(out)
    assert data["stopped_at"] == BUG
    assert "inputs" not in [item["name"] for item in data["comparison"]["environment"]]
    assert data["comparison"]["first_divergence"]["layer"] == BUG
    assert "stopped at the first divergence" in err
    recording = tap.open(folder / "stopped")
    assert recording.layers[-1] == BUG and recording.status == "complete"
    assert recording.steps == [(0, 0)]


def test_a_rule_decides(folder: Path) -> None:
    rule = ("--rule", ".*: error < 0.1", "--samples", "2")
    out, _ = call(
        folder, "record", BUILD, "-o", "ruled", "--mode", "bug", "--against", "fp32", *rule
    )
    assert "No divergence" in out


def test_coarse_with_tensors(folder: Path) -> None:
    options = ("--mode", "bug", "--samples", "2", "--coarse", "--json")
    out, _ = call(folder, "record", BUILD, "-o", "window", *options, "--against", "fp32", code=1)
    data = json.loads(out)
    assert data["window"]["layers"] == [BUG] and data["window"]["sure"]
    assert data["window"]["good"] == "blocks.4.mlp.activation"
    assert data["comparison"]["first_divergence"]["origin"] == "made here"
    recording = tap.open(folder / "window")
    assert recording.layers == [BUG]
    assert {r.port for r in recording.records if r.stored} == {"input", "output"}


def test_coarse_without_tensors_says_what_to_run(folder: Path) -> None:
    out, err = call(
        folder,
        "record",
        BUILD,
        "-o",
        "far",
        "--mode",
        "bug",
        "--against",
        "sketch",
        "--coarse",
        code=1,
    )
    assert f"'{BUG}', the first that is surely bad" in out
    commands = [line[6:] for line in err.splitlines() if line.startswith("next: ")]
    assert len(commands) == 2
    for command, code in zip(commands, (0, 1), strict=True):
        words = shlex.split(command)
        assert words[0] == "tensortap"
        out, _ = call(folder, *words[1:], code=code)
    assert "made here" in out


def test_coarse_finds_nothing(folder: Path) -> None:
    out, err = call(folder, "record", BUILD, "-o", "none", "--against", "sketch", "--coarse")
    assert "Nothing is suspect" in out
    assert "nothing was recorded" in err
    assert not (folder / "none").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-o", "x", "--stop"), "--against RUN"),
        (("-o", "x", "--coarse"), "--against RUN"),
        (("-o", "x", "--against", "nowhere"), "There is no recording at nowhere"),
        (("-o", "fp32", "--against", "fp32", "--overwrite"), "where the new recording should go"),
        (("-o", "fp32", "--against", "sketch", "--coarse"), "already holds a recording"),
        (("-o", "x", "--against", "fp32", "--rule", "x"), "rule"),
    ],
)
def test_mistakes(folder: Path, words: tuple[str, ...], message: str) -> None:
    out, err = call(folder, "record", BUILD, *words, code=2)
    assert message in err and not out
    assert not (folder / "x").exists()


@pytest.mark.parametrize("role", ["--against", "--floor"])
def test_coarse_never_writes_over_what_it_compares_with(folder: Path, role: str) -> None:
    call(folder, "record", BUILD, "-o", "mine", "--layers", "all", "--keep", "sketch")
    others = () if role == "--against" else ("--against", "sketch")
    words = ("-o", "mine/../mine", "--mode", "bug", role, "mine", *others, "--coarse")
    out, err = call(folder, "record", BUILD, *words, "--overwrite", code=2)
    assert "where the new recording should go" in err and not out
    assert tap.open(folder / "mine").manifest.mode != "bug"
    shutil.rmtree(folder / "mine")


def test_coarse_may_go_where_the_window_of_the_reference_would(folder: Path) -> None:
    words = ("--mode", "bug", "--against", "sketch", "--coarse", "-o", "./sketch-window")
    _, err = call(folder, "record", BUILD, *words, "--overwrite", code=1)
    commands = [line[6:] for line in err.splitlines() if line.startswith("next: ")]
    for command, code in zip(commands, (0, 1), strict=True):
        out, _ = call(folder, *shlex.split(command)[1:], code=code)
    assert "made here" in out


RAISING = """
import torch
from torch import nn

def build(mode="good"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if mode == "bad":
        calls = []
        def hook(*_):
            calls.append(1)
            assert len(calls) < 2, "the second call"
        model[1].register_forward_hook(hook)
    return model, [torch.randn(3, 8) for _ in range(3)]
"""


def test_a_model_that_raises_is_a_sentence_also_with_coarse(folder: Path) -> None:
    (folder / "raising.py").write_text(RAISING)
    call(folder, "record", "raising.py:build", "-o", "raising", "--layers", "all")
    words = ("-o", "raised", "--mode", "bad", "--against", "raising", "--coarse")
    out, err = call(folder, "record", "raising.py:build", *words, code=2)
    assert "The model failed in batch 1: AssertionError: the second call" in err and not out
    assert not (folder / "raised").exists()
