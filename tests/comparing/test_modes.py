"""Every mode of a folder against a reference."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import tensortap as tap
from schemas import validate
from support import Net
from tensortap.errors import ComparisonError, NotARecordingError, OptionError
from tensortap.recording import Manifest, Row, Writer
from tensortap.recording.layouts import import_tree
from tensortap.reporting.comparisons import layer_screen, modes_document_text


@pytest.fixture
def folder(tmp_path: Path, net: Net, ids: torch.Tensor) -> Path:
    """fp32, bf16, a broken mode with other inputs, and something that is no recording."""
    runs = tmp_path / "runs"

    def record(name: str, model: Net, inputs: torch.Tensor) -> None:
        with tap.record(model, runs / name, layers="all"):
            model(inputs)

    record("fp32", net, ids)
    record("bf16", copy.deepcopy(net).bfloat16(), ids)
    off = copy.deepcopy(net)
    with torch.no_grad():
        off.blocks[0].down.weight.mul_(1.5)
    record("off", off, ids)
    record("other", net, ids + 1)
    (runs / "comparisons").mkdir()
    (runs / "notes.txt").write_text("not a recording")
    return runs


def test_a_row_a_mode(folder: Path) -> None:
    table = tap.compare_modes(folder)
    assert table.reference == "fp32"
    assert [row.mode for row in table.modes] == ["bf16", "off", "other"]
    bf16 = table["bf16"]
    assert bf16.same
    assert bf16.same_input is True
    assert (bf16.first_layer, bf16.last_layer) == ("blocks.0", "blocks.2")
    comparison = bf16.comparison
    assert comparison is not None
    first = comparison["blocks.0"].difference
    assert first is not None
    assert bf16.first_layer_mse == first.mse
    values = [row.difference.correlation for row in comparison.layers if row.difference]
    assert bf16.mean_correlation == pytest.approx(
        sum(v for v in values if not math.isnan(v)) / sum(not math.isnan(v) for v in values)
    )
    assert table["off"].first_divergence == "blocks.0.down"
    assert table["off"].same is False
    assert table["other"].same_input is False
    assert any("other" in text for text in table.warnings)
    assert not table.same


def test_sorting_puts_the_undefined_last(folder: Path) -> None:
    shutil.copytree(folder / "bf16", folder / "broken")
    segment = next((folder / "broken").glob("*.safetensors"))
    segment.write_bytes(segment.read_bytes()[:100])
    table = tap.compare_modes(folder)
    assert table["broken"].problem
    assert table["broken"].same is None
    up = table.sorted_by("last_layer_mse")
    down = table.sorted_by("last_layer_mse", descending=True)
    assert up.modes[-1].mode == down.modes[-1].mode == "broken"
    assert [r.mode for r in up.modes[:-1]] == [r.mode for r in down.modes[:-1]][::-1]
    by_max = table.sorted_by("max_abs").modes
    largest = [c["blocks.2"].difference for row in by_max if (c := row.comparison) is not None]
    values = [found.max_abs for found in largest if found is not None]
    assert len(values) == 3
    assert values == sorted(values)
    with pytest.raises(OptionError, match="Sort by a column"):
        table.sorted_by("colour")


def test_comparisons_are_saved_as_the_documents_do(folder: Path) -> None:
    paths = tap.compare_modes(folder).save(folder / "comparisons")
    assert [path.name for path in paths] == [
        "mode_bf16_vs_fp32.json",
        "mode_off_vs_fp32.json",
        "mode_other_vs_fp32.json",
        "summary.json",
    ]
    data = json.loads(paths[1].read_text())
    validate(data, "comparison")
    assert (data["mode"], data["reference"]) == ("off", "fp32")
    assert data["candidate"] == str(folder / "off")
    assert data["first_divergence"]["layer"] == "blocks.0.down"
    table = json.loads(paths[-1].read_text())
    validate(table, "summary")
    assert [row["mode"] for row in table["modes"]] == ["bf16", "off", "other"]
    assert [path.name for path in folder.glob("comparisons/*.tmp")] == []


def test_saving_on_the_way(folder: Path, tmp_path: Path) -> None:
    tap.compare_modes(folder, modes=["off"], save=True)
    assert {path.name for path in (folder / "comparisons").iterdir()} == {
        "mode_off_vs_fp32.json",
        "summary.json",
    }
    tap.compare_modes(folder, modes="bf16", save=tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "mode_bf16_vs_fp32.json").exists()
    assert [row.mode for row in tap.compare_modes(folder).modes] == ["bf16", "off", "other"]


def write(path: Path, mode: str | None, value: float = 1.0, *, close: bool = True) -> None:
    writer = Writer(str(path), Manifest(mode=mode))
    for number in range(2):
        writer.add(Row(f"layers.{number}", "output", order=number), torch.arange(24.0) * value)
    if close:
        writer.close()
    else:
        writer.flush()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """What `record --modes` writes: folders of safe names, the true ones in the manifests."""
    runs = tmp_path / "runs"
    write(runs / "fp32", "fp32")
    write(runs / "fake-w8a8-0.9999", "fake:w8a8:0.9999", 1.5)
    write(runs / "2-1", "2-1", 2.0)
    write(runs / "comparisons", "no mode")
    return runs


def test_modes_are_known_by_their_true_names_and_by_their_folders(written: Path) -> None:
    table = tap.compare_modes(written)
    assert [row.mode for row in table.modes] == ["2-1", "fake:w8a8:0.9999"]
    for reference in ("fake:w8a8:0.9999", "fake-w8a8-0.9999"):
        table = tap.compare_modes(written, reference, modes=["fp32", "2-1"])
        assert table.reference == "fake:w8a8:0.9999"
        assert [row.mode for row in table.modes] == ["fp32", "2-1"]
        assert table["2-1"].last_layer_mae == pytest.approx(0.5 * 11.5)
    paths = table.save(written / "comparisons")
    assert paths[0].name == "mode_fp32_vs_fake-w8a8-0.9999.json"
    assert json.loads(paths[0].read_text())["reference"] == "fake:w8a8:0.9999"


def test_modes_whose_files_would_have_one_name_get_two(written: Path) -> None:
    write(written / "a", "a:b", 3.0)
    write(written / "b", "a/b", 4.0)
    paths = tap.compare_modes(written, modes=["a", "b"]).save(written / "comparisons")
    assert [json.loads(path.read_text())["mode"] for path in paths[:2]] == ["a:b", "a/b"]
    assert len({path.name for path in paths}) == 3


def test_what_was_not_closed_is_a_row_that_says_so(written: Path) -> None:
    write(written / "int8", "int8", close=False)
    manifest = Manifest(mode="int4", status="failed", failure="no kernel for int4")
    (written / "int4").mkdir()
    (written / "int4" / "recording.json").write_text(json.dumps(manifest.to_dict()))
    table = tap.compare_modes(written)
    assert "was not closed" in table["int8"].problem
    assert "failed" in table["int4"].problem
    assert "no kernel for int4" in table["int4"].problem
    assert table["2-1"].same is False
    assert tap.compare_modes(written, partial=True)["int8"].same
    with pytest.raises(ComparisonError, match=r"runs/int8 was not closed.*--partial"):
        tap.compare_modes(written, "int8")
    with pytest.raises(ComparisonError, match=r"No mode could be compared. int8: .* int4: "):
        tap.compare_modes(written, modes=["int8", "int4"])


def test_choosing_modes(written: Path) -> None:
    table = tap.compare_modes(written, modes=["fp32", "2-1", "2-1"])
    assert [row.mode for row in table.modes] == ["2-1"]
    with pytest.raises(OptionError, match=r"no mode 'fp16' in .*, only: 2-1, fake:w8a8:0.9999, f"):
        tap.compare_modes(written, modes=["fp16"])
    with pytest.raises(OptionError, match=r"reference itself.*: 2-1, fake:w8a8:0.9999\."):
        tap.compare_modes(written, modes="fp32")


def test_no_mode_is_its_own_floor(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written.parent)
    table = tap.compare_modes(written, floor="runs/2-1", truth="./runs/2-1")
    comparison = table["2-1"].comparison
    other = table["fake:w8a8:0.9999"].comparison
    assert comparison is not None and other is not None
    assert table["2-1"].same is False
    assert not comparison.floor.startswith("measured")
    assert other.floor.startswith("measured")
    assert (comparison.truth, other.truth) == (None, "runs/2-1")
    assert [text for text in table.warnings if "2-1 is the" in text] == [
        "2-1 is the floor itself, and was compared without one.",
        "2-1 is the truth itself, and was compared without one.",
    ]
    with pytest.raises(OptionError, match="is the reference itself"):
        tap.compare_modes("runs", floor="runs/fp32")


def test_what_to_record_is_said_as_the_others_were(tmp_path: Path, net: Net) -> None:
    selection = {
        "layers": ["blocks", "head*"],
        "ports": ["input", "output"],
        "command": "tensortap record 'my model.py:build' --mode bf16 --seq-len 8",
    }
    manifest = Manifest(mode="bf16", selection=selection)
    writer = Writer(str(tmp_path / "bf16"), manifest)
    writer.add(Row("x", "output"), torch.ones(2))
    writer.close()
    like = "tensortap record 'my model.py:build' --seq-len 8 --layers blocks --layers 'head*'"
    with pytest.raises(ComparisonError) as caught:
        tap.compare_modes(tmp_path, "fake:w8")
    said = f"{like} --inputs --mode fake:w8 -o {tmp_path}/fake-w8"
    assert str(caught.value).endswith(f"only: bf16. Record it first: {said}")
    with pytest.raises(ComparisonError) as caught:
        tap.compare_modes(tmp_path, "bf16")
    assert str(caught.value).endswith(f"{like} --inputs --mode MODE -o {tmp_path}/MODE")


def test_to_dict_is_what_the_design_names(folder: Path) -> None:
    data = json.loads(tap.compare_modes(folder).to_json())
    assert data["reference"] == "fp32"
    keys = "mode same same_input first_layer_mse first_layer_mae last_layer_mse last_layer_mae"
    for row in data["modes"]:
        assert set(f"{keys} mean_correlation first_divergence".split()) <= set(row)


def test_a_reference_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ComparisonError, match=r"Record it first: tensortap record .*--mode fp16"):
        tap.compare_modes(folder, reference="fp16")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotARecordingError, match="There is no recording in"):
        tap.compare_modes(tmp_path / "empty")
    with pytest.raises(NotARecordingError, match="There is no recording in"):
        tap.compare_modes(tmp_path / "nowhere")
    lone = tmp_path / "lone"
    shutil.copytree(folder / "fp32", lone / "fp32")
    with pytest.raises(ComparisonError, match="alone"):
        tap.compare_modes(lone)


def test_a_bad_option_is_no_row(folder: Path) -> None:
    with pytest.raises(OptionError, match="does not exist"):
        tap.compare_modes(folder, rules=[".*: colour < 1"])


def test_a_notebook_shows_a_table_with_nothing_unescaped(folder: Path) -> None:
    (folder / "off").rename(folder / "<b>off")
    html = tap.compare_modes(folder)._repr_html_()
    assert html.count("<tr>") == 4
    assert "&lt;b&gt;off" in html
    assert "<b>" not in html


def test_a_mode_with_nan_or_without_a_layer_is_not_close(tmp_path: Path) -> None:
    """Numbers of the finite values, or of the layers that are left, would be those of a twin."""
    tree = tmp_path / "tree"
    tree.mkdir()
    first, last = np.random.default_rng(0).normal(size=(2, 2, 8, 4)).astype(np.float32)
    broken = first.copy()
    broken[0, 3, 1] = np.nan
    for mode, arrays in {
        "fp32": {0: first, 23: last},
        "nan": {0: broken, 23: last},
        "half": {0: first},
    }.items():
        for number, array in arrays.items():
            np.save(tree / f"mode_{mode}_layer_{number}.npy", array)
    import_tree(tree, str(tmp_path / "runs"))
    table = tap.compare_modes(tmp_path / "runs")
    nan, half = table["nan"], table["half"]
    for value in (nan.first_layer_mse, nan.first_layer_mae, nan.mean_correlation):
        assert math.isnan(value)
    assert nan.last_layer_mse == 0 and nan.grade == "undefined" and not nan.same
    assert half.first_layer_mse == 0 and half.last_layer == "layer_23"
    assert math.isnan(half.last_layer_mse) and math.isnan(half.last_layer_mae)
    text = modes_document_text(table)
    assert re.search(r"^nan +undefined +undefined +0\.0+e\+00 +0\.0+ +undefined$", text, re.M)
    assert re.search(r"^half +0\.0+e\+00 +0\.0+ +missing +missing +1\.0+$", text, re.M)
    told = " ".join(table.warnings)
    assert "nan is NaN or infinite at layer_0 where fp32 is not" in told
    assert "half has no layer_23: its last layer has no numbers." in told
    screen = str(layer_screen(nan.comparison, "layer_0"))
    assert "of the 63 values that are finite on both sides; 1 are not." in screen
    assert "undefined (MSE), undefined (correlation)" in screen


class Residual(torch.nn.Module):
    """Eight blocks, so that there are some to tell by."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(64)
            self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(self.Block() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_bug_below_the_floor_of_a_quantised_mode_is_a_jump(tmp_path: Path) -> None:
    """A lost bias is less than int8 may make at worst, and far more than the other layers make."""
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(8, 64)
    good, bad = (tap.in_mode(model, "fake:w8a8", inputs=x) for _ in range(2))
    with torch.no_grad():
        bad.blocks[3].down.bias.zero_()
        for mode, run in (("fp32", model), ("good", good), ("bad", bad)):
            with tap.record(run, tmp_path / mode, mode=mode, inputs=True):
                run(x)
    modes = tap.compare_modes(tmp_path)
    assert modes.same
    (warning,) = modes.warnings
    assert warning.startswith("bad: the error jumps at blocks.3, from at most 0.")
    known = tap.compare_modes(tmp_path, floor=tmp_path / "good", modes="bad")
    assert known["bad"].first_divergence == "blocks.3" and known.warnings == ()
