"""`demo`: four modes recorded and compared, the bug named, and nothing of others written over."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from commands import Run

import tensortap as tap
from tensortap.cli.main import main
from tensortap.recording import open as open_recording

MODES = ["fp32", "bf16", "int8", "bug"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a demo, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("demo") / "modes", io.StringIO()
    with pytest.raises(SystemExit) as caught, contextlib.redirect_stdout(printed):
        main(["demo", "-o", str(folder)])
    assert not caught.value.code
    return folder, printed.getvalue()


def test_demo_names_the_bug(shown: tuple[Path, str]) -> None:
    folder, out = shown
    for mode in MODES:
        assert open_recording(folder / mode).manifest.mode == mode
        assert f"Checked {mode}: healthy" in out
    assert "final_norm" in out
    lines = {line.split(":")[0].strip(): line for line in out.splitlines() if ": " in line}
    assert "First divergence at blocks.4 (made here" in lines["bug"]
    for mode in ("bf16", "int8"):
        assert "No divergence" in lines[mode]
        assert "times the floor of" in lines[mode]
        assert "estimated" in lines[mode]
    assert "All Modes vs fp32" in out
    assert "blocks.4.mlp.down returns 1.02 times what it should" in out
    assert f"The page about it is {folder}/report.html" in out
    page = (folder / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "blocks.4" in page


def test_its_commands_run(run: Run, shown: tuple[Path, str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, out = shown
    offered = out.split("Try next:")[1].splitlines()
    commands = [line.split()[1:] for line in offered if line.strip().startswith("tensortap")]
    assert len(commands) == 5
    assert commands[0] == ["compare", f"{folder}/fp32", f"{folder}/bug", "blocks.4"]
    for words in commands:
        expected = 1 if words[0] in ("compare", "blame") else 0  # they show the bug
        assert run(*words).code == expected, words


def test_demo_as_json(run: Run, shown: tuple[Path, str]) -> None:
    folder, _ = shown
    data = run("demo", "-o", folder, "--json").json  # an earlier demo is replaced
    assert data["findings"] == []
    assert {row["port"] for row in data["layers"]} == {"input", "output"}
    assert data["recordings"] == {mode: f"{folder}/{mode}" for mode in MODES}
    assert data["report"] == f"{folder}/report.html"
    assert data["comparisons"]["bug"]["first_divergence"]["layer"] == "blocks.4"
    rows = {row["mode"]: row for row in data["summary"]["modes"]}
    assert {mode: row["first_divergence"] for mode, row in rows.items()} == {
        "bf16": None,
        "int8": None,
        "bug": "blocks.4",
    }
    assert all(row["same_input"] for row in rows.values())


@pytest.mark.parametrize("inside", ["", "int8"])
def test_demo_keeps_what_is_not_its_own(run: Run, inside: str, tmp_path: Path) -> None:
    import torch

    mine = tmp_path / "demo" / inside
    model = torch.nn.Linear(2, 2)
    with tap.record(model, mine, layers="all"):
        model(torch.ones(1, 2))
    refused = run("demo", "-o", tmp_path / "demo")
    assert refused.code == 2
    assert "no earlier demo" in refused.err
    assert "--overwrite" in refused.err
    assert open_recording(mine).layers == [""]
    assert not (tmp_path / "demo" / "fp32").exists()
    assert run("demo", "-o", tmp_path / "demo", "--overwrite").code == 0
    assert open_recording(tmp_path / "demo" / "int8").manifest.mode == "int8"


def test_demo_keeps_another_report(run: Run, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    refused = run("demo", "-o", tmp_path)
    assert refused.code == 2
    assert "report.html" in refused.err
    assert (tmp_path / "report.html").read_text() == "mine"


def test_demo_takes_the_place_of_a_recording_of_the_demo(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    assert run("record", "tensortap.demo:build", "-o", out, "--layers", "first").code == 0
    assert run("demo", "-o", out).code == 0
    assert not (out / "recording.json").exists()
    assert open_recording(out / "fp32").manifest.mode == "fp32"
