"""`summary`: the table of all modes against one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import Run

from schemas import validate
from tensortap.comparing.modes import SORTABLE
from tensortap.demo import BUG_LAYER as PLANTED
from tensortap.recording import Manifest, Row, Writer

BUG_LAYER = ".".join(PLANTED.split(".")[:2])  # the block that holds it


@pytest.fixture
def some(modes: Path, tmp_path: Path) -> Path:
    """Our own copy, with a recording of another model beside the modes."""
    folder = tmp_path / "runs"
    for name in ("fp32", "bf16", "bug", "other"):
        shutil.copytree(modes / name, folder / name)
    writer = Writer(str(folder / "alien"), Manifest(mode="alien"))
    writer.add(Row("quite.else", "output"), torch.ones(3))
    writer.close()
    (folder / "notes.txt").write_text("no recording")
    return folder


def test_the_table(run: Run, some: Path) -> None:
    result = run("summary", some)
    assert result.code == 0
    lines = result.out.splitlines()
    assert "SUMMARY TABLE - All Modes vs fp32" in lines
    head = next(line for line in lines if line.startswith("Mode "))
    titles = "Layer 0 MSE, Layer 0 MAE, Last Layer MSE, Last Layer MAE, Avg Corr, Grade, Same Input"
    places = [head.index(title) for title in titles.split(", ")]
    assert places == sorted(places)
    rows = {line.split()[0]: line for line in lines}
    assert BUG_LAYER in rows["bug"]
    assert "none" in rows["bf16"]
    assert "not compared" in rows["alien"]
    assert "quite.else" in rows["alien"]
    assert " no " in rows["other"]
    assert any(line.startswith("warning: ") and "other" in line for line in lines)
    assert "Layer 0 is blocks.0, the last layer blocks.7." in lines


def test_json_is_as_the_schema_says(run: Run, some: Path) -> None:
    result = run("summary", some, "--reference", "fp32", "--json")
    assert result.code == 0
    validate(result.json, "summary")
    rows = {row["mode"]: row for row in result.json["modes"]}
    assert set(rows) == {"bf16", "bug", "other", "alien"}
    assert rows["bug"]["first_divergence"] == BUG_LAYER
    assert rows["bug"]["first_layer_mse"] == 0
    assert rows["alien"]["problem"]
    assert rows["alien"]["same"] is None
    assert (rows["other"]["same_input"], rows["bf16"]["same_input"]) == (False, True)


def test_sorting(run: Run, some: Path) -> None:
    def order(*arguments: str) -> list[str]:
        return [row["mode"] for row in run("summary", some, "--json", *arguments).json["modes"]]

    assert order("--sort", "last_layer_mse") == ["bug", "bf16", "other", "alien"]
    assert order("--sort", "last_layer_mse", "--descending") == ["other", "bf16", "bug", "alien"]
    assert order("--sort", "cosine") == ["other", "bf16", "bug", "alien"]


def test_help_names_every_column_to_sort_by(run: Run) -> None:
    said = " ".join(run("summary", "--help").out.split())
    for metric in SORTABLE:
        assert metric in said


def test_saved_comparisons(run: Run, some: Path) -> None:
    result = run("summary", some, "--save", "--layers", "blocks.{0,7}")
    assert result.code == 0
    saved = some / "comparisons" / "mode_bug_vs_fp32.json"
    assert str(saved) in result.err
    assert not (some / "comparisons" / "mode_alien_vs_fp32.json").exists()
    data = json.loads(saved.read_text())
    validate(data, "comparison")
    assert [row["layer"] for row in data["layers"]] == ["blocks.0", "blocks.7"]
    again = run("summary", some)
    assert again.code == 0
    assert "\ncomparisons" not in again.out


def test_options_reach_every_mode(run: Run, some: Path) -> None:
    shutil.rmtree(some / "other")
    rows = run("summary", some, "--preset", "device", "--json").json["modes"]
    assert {row["mode"]: row["same"] for row in rows}["bf16"] is False
    rows = run("summary", some, "--rule", ".*: max_abs < 100", "--json").json["modes"]
    assert {row["mode"]: row["same"] for row in rows}["bug"] is True
    floor = run("summary", some, "--floor", some / "bf16", "--json").json["modes"]
    assert {row["mode"]: row["same"] for row in floor}["bug"] is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{s}", "--reference", "fp8"], "Record it first: tensortap record"),
        (["{s}/nowhere"], "There is no recording in"),
        (["{s}", "--sort", "beauty"], "Sort by a column (mode, first_layer_mse"),
        (["{s}", "--descending"], "--descending needs --sort"),
        (["{s}", "--preset", "strict"], "The presets are"),
    ],
)
def test_mistakes(run: Run, some: Path, arguments: list[str], said: str) -> None:
    result = run("summary", *(argument.format(s=some) for argument in arguments))
    assert result.code == 2
    assert said in result.err
    assert result.out == ""


def test_nothing_to_compare_is_trouble(run: Run, some: Path) -> None:
    for name in ("bf16", "bug", "other"):
        shutil.rmtree(some / name)
    result = run("summary", some)
    assert result.code == 2
    assert "alien" in result.err
