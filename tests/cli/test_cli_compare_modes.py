"""`compare` over a folder of modes: all of them, or one, against the reference."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import Run

from schemas import validate
from tensortap.demo import BUG_LAYER as PLANTED
from tensortap.recording import Manifest, Row, Writer

BUG_LAYER = ".".join(PLANTED.split(".")[:2])  # the block that holds it
WEIGHTS = f"note: bug: 1 layer has other weights than in the reference: {PLANTED}.\n"


def write(path: Path, mode: str, tensors: dict[str, torch.Tensor], *, close: bool = True) -> None:
    writer = Writer(str(path), Manifest(mode=mode))
    for order, (name, tensor) in enumerate(tensors.items()):
        writer.add(Row(name, "output", order=order), tensor)
    if close:
        writer.close()
    else:
        writer.flush()


@pytest.fixture
def some(modes: Path, tmp_path: Path) -> Path:
    """Our own copy of a reference and two modes."""
    folder = tmp_path / "runs"
    for name in ("fp32", "bf16", "bug"):
        shutil.copytree(modes / name, folder / name)
    return folder


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Small recordings under safe names: one like the reference, one half made."""
    folder = tmp_path / "small"
    values = {f"layers.{i}": torch.linspace(-1, 1, 24).view(4, 6) for i in range(3)}
    write(folder / "fp32", "fp32", values)
    write(folder / "fake-w8a8", "fake:w8a8", values)
    write(folder / "int8", "int8", {"layers.0": values["layers.0"]}, close=False)
    return folder


def test_a_block_a_mode_and_the_documents_table(run: Run, some: Path) -> None:
    result = run("compare", some)
    assert result.code == 1
    blocks = result.out.split("\n\n")
    assert blocks[0].splitlines() == [
        "bf16 vs fp32: same",
        "  No divergence: 9 compared layers, 0 identical, 9 within.",
    ]
    lines = blocks[1].splitlines()
    assert lines[0] == f"bug vs fp32: diverged, first at {BUG_LAYER}"
    assert lines[1].startswith(f"  First divergence at {BUG_LAYER} (made here")
    table = "\n\n".join(blocks[2:]).splitlines()
    assert table[1] == "SUMMARY TABLE - All Modes vs fp32"
    assert table[5] == "-" * 100
    for line, name in zip(table[6:8], ("bf16", "bug"), strict=True):
        mse, mae = r"\d\.\d{6}e[-+]\d\d {4}", r"\d\.\d{6}"
        assert re.fullmatch(f"{name:<11}{mse}{mae} {{5}}{mse}{mae} {{8}}{mae}", line)
    assert table[8] == "=" * 80
    assert table[9] == "Layer 0 is blocks.0, the last layer blocks.7."
    assert (
        result.err == f"{WEIGHTS}note: Wrote 2 comparisons and summary.json to {some}/comparisons\n"
    )


def test_the_files_are_the_comparisons(run: Run, some: Path) -> None:
    run("compare", some)
    folder = some / "comparisons"
    assert sorted(path.name for path in folder.iterdir()) == [
        "mode_bf16_vs_fp32.json",
        "mode_bug_vs_fp32.json",
        "summary.json",
    ]
    saved = json.loads((folder / "mode_bug_vs_fp32.json").read_text())
    validate(saved, "comparison")
    assert (saved.pop("mode"), saved["reference"]) == ("bug", "fp32")
    plain = run("compare", some / "fp32", some / "bug", "--json").json
    assert saved == {**plain, "reference": "fp32"}
    table = json.loads((folder / "summary.json").read_text())
    validate(table, "summary")
    assert table == run("summary", some, "--json").json


def test_no_save(run: Run, some: Path) -> None:
    result = run("compare", some, "--no-save")
    assert (result.code, result.err) == (1, WEIGHTS)
    assert run("compare", some, "bf16", "--no-save").code == 0
    assert not (some / "comparisons").exists()


def test_a_folder_that_takes_no_files(run: Run, some: Path) -> None:
    (some / "comparisons").write_text("in the way")
    for mode in ([], ["bug"]):
        result = run("compare", some, *mode)
        assert result.code == 2
        assert "First divergence at" in result.out
        assert "The comparison was not saved. Cannot create the folder" in result.err
        assert result.err.endswith("Or add --no-save.\n")


def test_a_note_that_all_modes_have_is_said_once(run: Run, tmp_path: Path) -> None:
    import tensortap as tap

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    for name in ("fp32", "a", "b"):
        with tap.record(model, tmp_path / name):
            model(torch.ones(3, 4))
    said = run("compare", tmp_path).err.splitlines()
    assert [line.split(": ")[1] for line in said[:-1]] == ["fp32, a, b"]


def test_json_has_every_comparison(run: Run, some: Path) -> None:
    result = run("compare", some, "--json")
    assert result.code == 1
    data = result.json
    validate(data, "summary")
    assert data["reference"] == "fp32"
    assert {row["mode"]: row["same"] for row in data["modes"]} == {"bf16": True, "bug": False}
    for row in data["modes"]:
        validate(row["comparison"], "comparison")
        assert len(row["comparison"]["layers"]) == 9
    bad = run("compare", some, "--json", "--only-bad").json["modes"]
    assert [len(row["comparison"]["layers"]) for row in bad] == [0, 4]
    text = run("compare", some, "--only-bad").out
    assert "bug vs fp32: diverged" in text
    assert "bf16 vs" not in text


def test_one_mode_is_shown_as_two_recordings_are(run: Run, some: Path) -> None:
    for more in ((), (BUG_LAYER,), ("--only-bad",), ("--json",), ("--layers", "blocks.{0,7}")):
        two = run("compare", some / "fp32", some / "bug", *more)
        one = run("compare", some, "bug", *more)
        assert (one.code, one.out) == (two.code, two.out) == (1, two.out)
        assert f"note: Wrote {some}/comparisons/mode_bug_vs_fp32" in one.err
    saved = json.loads((some / "comparisons" / "mode_bug_vs_fp32.json").read_text())
    assert [row["layer"] for row in saved["layers"]] == ["blocks.0", "blocks.7"]
    alone = some / "comparisons" / f"mode_bug_vs_fp32_layer_{BUG_LAYER}.json"
    assert [row["layer"] for row in json.loads(alone.read_text())["layers"]] == [BUG_LAYER]
    assert not (some / "comparisons" / "summary.json").exists()


def test_another_reference(run: Run, some: Path) -> None:
    result = run("compare", some, "-r", "bf16", "--json")
    assert [row["mode"] for row in result.json["modes"]] == ["bug", "fp32"]
    assert (some / "comparisons" / "mode_fp32_vs_bf16.json").exists()
    plain = run("compare", some / "bf16", some / "bug")
    assert run("compare", some, "bug", "--reference", "bf16").out == plain.out


def test_what_was_half_made_is_said_and_no_success(run: Run, written: Path) -> None:
    result = run("compare", written)
    assert result.code == 1
    assert "fake:w8a8 vs fp32: same\n  Identical: all 3 compared layers" in result.out
    assert "int8 vs fp32: not compared\n  The recording" in result.out
    assert re.search(r"\nint8       not compared: The recording .* was not closed", result.out)
    assert (written / "comparisons" / "mode_fake-w8a8_vs_fp32.json").exists()
    partial = run("compare", written, "--partial")
    assert partial.code == 0
    assert "note: int8: " in partial.err
    for name in ("fake:w8a8", "fake-w8a8"):
        assert run("compare", written, name).code == 0
    refused = run("compare", written, "int8")
    assert refused.code == 2
    assert "was not closed" in refused.err
    row = next(r for r in run("summary", written, "--json").json["modes"] if r["mode"] == "int8")
    assert "was not closed" in row["problem"]


def test_nothing_could_be_compared(run: Run, written: Path) -> None:
    shutil.rmtree(written / "fake-w8a8")
    result = run("compare", written)
    assert result.code == 2
    assert result.err.startswith("tensortap: No mode could be compared. int8: ")
    assert not (written / "comparisons").exists()
    shutil.rmtree(written / "int8")
    lone = run("compare", written)
    assert lone.code == 2
    assert (
        f"Record another mode first: tensortap record TARGET --mode MODE -o {written}/" in lone.err
    )


def test_incomparable_layers_are_exit_1(run: Run, written: Path) -> None:
    odd = {"layers.0": torch.linspace(-1, 1, 24).view(4, 6), "layers.1": torch.ones(3, 7, 11)}
    shutil.rmtree(written / "int8")
    assert run("compare", written).code == 0
    write(written / "odd", "odd", odd)
    result = run("compare", written)
    assert result.code == 1
    assert "odd vs fp32: incomparable" in result.out


def test_options_reach_every_mode(run: Run, some: Path) -> None:
    assert run("compare", some, "--rule", ".*: max_abs < 100").code == 0
    assert run("compare", some, "--floor", some / "bf16").code == 0
    device = run("compare", some, "--preset", "device", "--json").json["modes"]
    assert {row["mode"]: row["same"] for row in device} == {"bf16": False, "bug": False}
    chosen = run("compare", some, "--layers", "blocks.{0,1}", "--json")
    assert chosen.code == 0
    assert [len(row["comparison"]["layers"]) for row in chosen.json["modes"]] == [2, 2]
    truth = run("compare", some, "-r", "bf16", "--truth", some / "fp32", "--json").json
    rows = {row["mode"]: row["comparison"] for row in truth["modes"]}
    assert {row["nearer"] for row in rows["bug"]["layers"]} == {"candidate"}
    assert rows["fp32"]["truth"] is None
    assert "fp32 is the truth itself, and was compared without one." in truth["warnings"]
    assert run("compare", some, "--metric", "none_such").code == 2


def test_pages(run: Run, some: Path, tmp_path: Path) -> None:
    result = run("compare", some, "--html", tmp_path / "pages")
    assert result.code == 1
    page = tmp_path / "pages" / "mode_bug_vs_fp32.html"
    assert str(page) in result.err
    assert BUG_LAYER in page.read_text()
    assert (tmp_path / "pages" / "mode_bf16_vs_fp32.html").exists()
    one = run("compare", some, "bug", "--html", tmp_path / "one.html")
    assert one.code == 1
    assert BUG_LAYER in (tmp_path / "one.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["{s}", "-r", "fp16"],
            "Record it first: tensortap record tensortap.demo:build --seq-len ",
        ),
        (["{s}", "fp16"], "There is no mode 'fp16' in {s}, only: bf16, bug, fp32."),
        (["{s}", "{s}/bug"], "To compare two recordings name both: tensortap compare {s}/bf16 {s}"),
        (["{s}", "fp32"], "fp32 is the reference itself. Name another mode (bf16, bug)"),
        (["{s}", "bug", "blocks.33"], "Did you mean 'blocks.3'"),
        (["{s}", "--html", "all.html"], "--html all.html is one page"),
        (["{s}/bug"], "Name the candidate too: tensortap compare {s}/bug CANDIDATE"),
        (["{s}/nowhere"], "There is no recording in {s}/nowhere: expected a folder of recordings"),
        (["{s}/nowhere", "{s}/bug"], "There is no recording at {s}/nowhere"),
        (["{s}/fp32", "{s}/bug", "-r", "fp32"], "--reference is for a folder of modes"),
        (["{s}/fp32", "{s}/bug", "--no-save"], "--no-save is for a folder of modes"),
    ],
)
def test_mistakes(run: Run, some: Path, arguments: list[str], said: str) -> None:
    result = run("compare", *(argument.format(s=some) for argument in arguments))
    assert result.code == 2
    assert said.format(s=some) in result.err
    assert result.out == ""
    assert len(result.err.strip().splitlines()) == 1
    assert not (some / "comparisons").exists()


def test_what_record_modes_writes(run: Run, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    options = ("--modes", "fp32,fake:w8a8", "-o", runs, "--seq-len", "8")
    recorded = run("record", "tensortap.demo:build", *options)
    assert recorded.code == 0
    assert (runs / "fake-w8a8" / "recording.json").exists()
    result = run("compare", runs)
    assert "fake:w8a8 vs fp32: " in result.out
    saved = json.loads((runs / "comparisons" / "mode_fake-w8a8_vs_fp32.json").read_text())
    assert saved["mode"] == "fake:w8a8"
    rows = run("summary", runs, "-r", "fake:w8a8", "--json").json
    assert rows["reference"] == "fake:w8a8"
    assert [row["mode"] for row in rows["modes"]] == ["fp32"]
