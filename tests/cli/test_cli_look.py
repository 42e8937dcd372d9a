"""`show`, `check`, `plot`, `export`, `import`, `doctor`."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path

import pytest
import torch
from commands import Run

from tensortap.cli.check import check as check_verb
from tensortap.errors import OptionError
from tensortap.recording import Limits, Manifest, Row, Structure, Writer
from tensortap.recording import open as open_recording
from tensortap.sizes import parse_size


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    """A recording with a NaN, an infinity, a large mean and a dead layer."""
    blocks = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    writer = Writer(str(tmp_path / "sick"), Manifest(structure=Structure(blocks)))
    bad = torch.zeros(2, 3, 5)
    bad[0, 0, 0], bad[0, 0, 1], bad[0, 0, 2] = math.nan, math.inf, 1.0
    tensors = [torch.ones(2, 3, 5) * torch.arange(5), bad, torch.zeros(2, 3, 5)]
    tensors.append(50 + torch.arange(30.0).view(2, 3, 5))
    for order, (name, tensor) in enumerate(zip(blocks, tensors, strict=True)):
        writer.add(Row(name, "output", type="Block", order=order), tensor)
    writer.close()
    return tmp_path / "sick"


def test_show_rows_in_order(run: Run, demo: Path) -> None:
    result = run("show", demo)
    assert result.code == 0
    lines = result.out.splitlines()
    assert "complete" in lines[0]
    assert "DemoModel" in lines[0]
    assert "mode fp32" in lines[0]
    for title in (
        "layer",
        "type",
        "port",
        "records",
        "shape",
        "dtype",
        "mean",
        "std",
        "NaN",
        "Inf",
    ):
        assert title in lines[1]
    names = [line.split()[0] for line in lines[3:]]
    assert names == [
        name
        for name in ("embedding", *(f"blocks.{i}" for i in range(8)), "final_norm")
        for _ in range(2)
    ]
    assert "\x1b" not in result.out


def test_show_json_and_each(run: Run, demo: Path) -> None:
    merged = run("show", demo, "--port", "output", "--json").json["layers"]
    each = run("show", demo, "--port", "output", "--each", "--json").json["layers"]
    assert len(merged) == 10
    assert len(each) == 20
    row = merged[1]
    assert row["layer"] == "blocks.0"
    assert row["shape"] == [1, 12, 256]
    assert row["dtype"] == "float32"
    assert row["records"] == 2
    both = torch.cat([r.tensor() for r in open_recording(demo)["blocks.0"].port("output")]).double()
    assert row["mean"] == pytest.approx(float(both.mean()), rel=1e-9)
    assert row["std"] == pytest.approx(float(both.std(correction=0)), rel=1e-9)
    assert [r["batch"] for r in each if r["layer"] == "blocks.0"] == [0, 1]
    one = run("show", demo, "--port", "output", "--batch", "1", "--json").json["layers"]
    assert {row["batch"] for row in one} == {1}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["blocks"], [f"blocks.{i}" for i in range(8)]),
        (["blocks.{0,6-7}"], ["blocks.0", "blocks.6", "blocks.7"]),
        (["first", "final_norm"], ["blocks.0", "final_norm"]),
        (["type:RMSNorm"], ["final_norm"]),
        (["re:e.*"], ["embedding"]),
        (["all", "!blocks.*"], ["embedding", "final_norm"]),
    ],
)
def test_show_patterns(run: Run, demo: Path, patterns: list[str], expected: list[str]) -> None:
    arguments = [part for p in patterns for part in ("--layers", p)]
    rows = run("show", demo, *arguments, "--port", "output", "--json").json["layers"]
    assert [row["layer"] for row in rows] == expected


def test_show_one_layer(run: Run, demo: Path) -> None:
    result = run("show", demo, "blocks.3")
    assert result.code == 0
    layer = open_recording(demo)["blocks.3"]
    for part in (
        "INPUT",
        "OUTPUT",
        "First 10:",
        "Mean:",
        "Std:",
        "Range:",
        "Zeros:",
        "L2:",
        "RMS:",
    ):
        assert part in result.out
    assert "50%" in result.out
    assert "█" in result.out
    assert "1 other record" in result.out
    assert f"{layer.output.flatten()[0]:.6g}" in result.out
    before = open_recording(demo)["blocks.2"].output.double()
    change = (layer.output.double() - before).abs().mean()
    assert f"from the layer before (blocks.2):        {change:.6g}" in result.out


def test_show_one_layer_json(run: Run, demo: Path) -> None:
    data = run("show", demo, "blocks.3", "--batch", "1", "--json").json
    assert [s["port"] for s in data["layers"]] == ["input", "output"]
    section = data["layers"][1]
    tensor = open_recording(demo)["blocks.3"].port("output")[1].tensor()
    expected = torch.quantile(tensor.double(), 0.95)
    assert section["quantiles"]["0.95"] == pytest.approx(float(expected), rel=1e-12)
    assert section["quantiles_exact"] is True
    assert section["other_records"] == 0
    changes = {c["neighbour"]: c["mean_abs_change"] for c in data["changes"]}
    after = open_recording(demo)["blocks.4"].port("output")[1].tensor()
    expected = (after.double() - tensor.double()).abs().mean()
    assert changes["blocks.4"] == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["blocks.33"], "Did you mean 'blocks.3'"),
        (["--layers", "typo.*"], "There is no layer 'typo.*'"),
        (["--port", "middle"], "The ports are: input, output"),
        (["--batch", "9"], "There is no batch 9 here, only: 0, 1"),
        (["--port", "grad_input"], "There is no port 'grad_input' here, only: input, output"),
        (["--layers", "re:("], "not a regular expression"),
    ],
)
def test_show_mistakes(run: Run, demo: Path, arguments: list[str], said: str) -> None:
    result = run("show", demo, *arguments)
    assert result.code == 2
    assert said in result.err
    assert result.out == ""


def test_undefined_statistics_are_null(run: Run, tmp_path: Path) -> None:
    writer = Writer(str(tmp_path / "run"), Manifest())
    writer.add(Row("a", "output"), torch.full((3,), math.nan))
    writer.add(Row("b", "output", order=1), torch.tensor([math.inf, 1.0]))
    writer.add(Row("c", "output", order=2), torch.empty(0, 4))
    writer.close()
    rows = run("show", tmp_path / "run", "--json").json["layers"]
    assert rows[0]["mean"] is None
    assert rows[0]["nan"] == 3
    assert rows[1]["max"] == 1.0
    assert rows[2]["count"] == 0
    for name in "abc":
        assert run("show", tmp_path / "run", name, "--json").code == 0
        assert run("show", tmp_path / "run", name).code == 0


def test_notes_of_an_unfinished_recording(run: Run, tmp_path: Path) -> None:
    writer = Writer(str(tmp_path / "run"), Manifest())
    writer.add(Row("a", "output"), torch.ones(3))
    writer.flush()
    result = run("show", tmp_path / "run")
    assert result.code == 0
    assert "note: The recording is still being written, by process" in result.err
    writer.close()


def test_damaged_recording_and_partial(run: Run, tmp_path: Path) -> None:
    writer = Writer(str(tmp_path / "run"), Manifest())
    writer.add(Row("a", "output"), torch.ones(3))
    writer.close()
    (tmp_path / "run" / "segment-r000-000900.safetensors").write_bytes(b"\0")
    result = run("show", tmp_path / "run")
    assert result.code == 2
    assert "segment-r000-000900.safetensors is truncated" in result.err
    assert "--partial" in result.err
    partial = run("show", tmp_path / "run", "--partial")
    assert partial.code == 0
    assert "truncated" in partial.err


def test_names_cannot_drive_the_terminal(run: Run, tmp_path: Path) -> None:
    writer = Writer(str(tmp_path / "run"), Manifest(mode="\x1b[2J"))
    writer.add(Row("a\x1b[31m[bold]x", "output", type="[red]T"), torch.ones(3))
    writer.close()
    for arguments in (["show"], ["check"]):
        result = run(*arguments, tmp_path / "run")
        assert "\x1b" not in result.out + result.err
    assert "[bold]x" in run("show", tmp_path / "run").out
    assert "[red]T" in run("show", tmp_path / "run").out


def test_check(run: Run, demo: Path, sick: Path) -> None:
    assert run("check", demo).code == 0
    assert "10 layers: healthy" in run("check", demo).out
    result = run("check", sick)
    assert result.code == 1
    assert "2 errors" in result.out
    data = run("check", sick, "--json").json
    kinds = {(f["layer"], f["kind"], f["severity"]) for f in data["findings"]}
    assert ("blocks.1", "nan", "error") in kinds
    assert ("blocks.1", "inf", "error") in kinds
    assert ("blocks.2", "dead", "warning") in kinds
    assert ("blocks.3", "exploding", "warning") in kinds
    assert data["errors"] == 2
    assert all(f["text"] for f in data["findings"])


def test_check_strict_and_limits(run: Run, demo: Path) -> None:
    assert run("check", demo, "--max-mean", "1e-9").code == 0
    assert run("check", demo, "--max-mean", "1e-9", "--strict").code == 1
    assert run("check", demo, "--max-abs", "0.1", "--strict").code == 1
    assert run("check", demo, "--strict").code == 0


def test_every_limit_is_a_flag_with_its_default() -> None:
    flags = inspect.signature(check_verb).parameters
    for field in dataclasses.fields(Limits):
        assert flags[field.name].default == field.default


def test_plot(run: Run, demo: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "l3.png"
    result = run("plot", demo, "blocks.3", "-o", out)
    assert result.code == 0
    assert result.out.strip() == str(out)
    assert out.read_bytes().startswith(b"\x89PNG")
    data = run("plot", demo, "blocks.3", "-o", out, "--port", "input", "--batch", 1, "--json").json
    assert (data["port"], data["batch"]) == ("input", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["blocks.3", "-o", "x.nonsense"], "Cannot write x.nonsense"),
        (["nothing", "-o", "x.png"], "There is no layer 'nothing'"),
        (["blocks.3", "-o", "x.png", "--leaf", "[7]"], "There is no leaf '[7]' here"),
    ],
)
def test_plot_mistakes(run: Run, demo: Path, arguments: list[str], said: str) -> None:
    result = run("plot", demo, *arguments)
    assert result.code == 2
    assert said in result.err


def test_plot_without_matplotlib(
    run: Run, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = run("plot", demo, "blocks.3", "-o", tmp_path / "x.png")
    assert result.code == 2
    assert "pip install 'tensortap[plot]'" in result.err


def test_export_and_import_again(run: Run, demo: Path, tmp_path: Path) -> None:
    out = run("export", demo, "--layout", "pt", "-o", tmp_path / "out")
    assert out.code == 0
    assert "Wrote 11 files" in out.out
    assert "cannot hold: inputs: 20 records of 10 layers; later batches: 10 records" in out.err
    again = run("import", tmp_path / "out", "-o", tmp_path / "again")
    assert again.code == 0
    assert "Imported 10 layers, 10 records" in again.out
    a, b = open_recording(demo), open_recording(tmp_path / "again")
    assert b.layers == a.layers
    assert all(torch.equal(a[name].output, b[name].output) for name in a.layers)
    assert run("show", tmp_path / "again", "layer_3").code == 0


@pytest.mark.parametrize("layout", ["npy", "npz"])
def test_export_json(run: Run, demo: Path, tmp_path: Path, layout: str) -> None:
    data = run("export", demo, "--layout", layout, "-o", tmp_path / "out", "--json").json
    assert data["layout"] == layout
    assert all((tmp_path / "out" / name).exists() for name in data["files"])
    assert any(item["what"] == "other layers" for item in data["left_out"])
    data = run("import", tmp_path / "out", "-o", tmp_path / "again", "--json").json
    assert data["recordings"][0]["mode"] == "fp32"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "{d}", "--layout", "zip", "-o", "x"], "The layouts are: "),
        (["export", "{d}", "--layout", "npz", "--layer", "no", "-o", "x"], "no layer 'no'"),
        (["export", "{d}", "--mode", "../up", "--layout", "npy", "-o", "x"], "leave its folder"),
        (["import", "nowhere", "-o", "x"], "nowhere does not exist"),
        (["import", "{d}", "-o", "x"], "is already a recording"),
        (["show", "nowhere"], "There is no recording at nowhere"),
        (["check", "nowhere"], "There is no recording at nowhere"),
    ],
)
def test_mistakes(
    run: Run, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    result = run(*(a.format(d=demo) for a in arguments))
    assert result.code == 2
    assert result.err.startswith("tensortap: ")
    assert said in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_show_of_a_tree_says_import(run: Run, tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "layer_0_output.pt")
    result = run("show", tmp_path)
    assert result.code == 2
    assert f"tensortap import {tmp_path}" in result.err


def test_manifest_from_the_future(run: Run, tmp_path: Path) -> None:
    (tmp_path / "recording.json").write_text('{"format": 99}')
    result = run("show", tmp_path)
    assert result.code == 2
    assert "Install a newer tensortap" in result.err


def test_doctor(run: Run) -> None:
    data = run("doctor", "--json").json
    assert data["versions"]["torch"] == torch.__version__
    assert data["numerics"]["backend"] in ("native", "reference")
    assert {"npy", "npz", "pt"} <= set(data["layouts"])
    text = run("doctor").out
    assert "backend" in text
    assert data["numerics"]["why"] in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1GiB", 1 << 30),
        ("512MB", 512_000_000),
        ("64M", 64 << 20),
        ("1048576", 1 << 20),
        ("1.5 GiB", 3 << 29),
        ("2b", 2),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 QB", "1iB", "nan"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="no size"):
        parse_size(text)
