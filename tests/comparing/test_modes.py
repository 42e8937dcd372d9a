"""Every mode of a folder against a reference."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import tensortap as tap
from support import Net
from tensortap.errors import ComparisonError, NotARecordingError, OptionError


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
        "mode_bf16_comparison.json",
        "mode_off_comparison.json",
        "mode_other_comparison.json",
    ]
    data = json.loads(paths[1].read_text())
    assert data["first_divergence"]["layer"] == "blocks.0.down"


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
