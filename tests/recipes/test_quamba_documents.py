"""The commands and snippets of documents 002 and 003, typed as their reader would.

They stand here as the documents have them (comments aside), and run in a copy of recipes/quamba,
one after the other, in the shell. `python3` is a fork of a warm interpreter.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quamba_reader import RECIPE, Reader
from warm_python import WarmPython

pytest.importorskip("transformers")

ALL = ["fp32", "0", "2-0", "2-1", "2-2", "2-3", "2-4", "3"]
ESSENTIAL = ["fp32", "0", "2-1", "2-2", "2-4"]
QUANTISED = ["0", "2-0", "2-1", "2-2", "2-3", "2-4", "3"]
DIVERGED = (0, 1)  # what a comparison may exit with, when nothing went wrong

# To save time the reader edits the heads of the shell scripts (sed), as document 003 tells them to.
DOCUMENT_002 = r"""
python3 save_first_layer_io.py \
    --pretrained_dir pretrained_models/Quamba1-pa9999/pa-0.9999
python3 save_first_layer_io.py \
    --pretrained_dir pretrained_models/Quamba1-pa9999/pa-0.9999 \
    --modes fp32 0 2-1 2-4
python3 save_first_layer_io.py \
    --pretrained_dir pretrained_models/Quamba1-pa9999/pa-0.9999 \
    --output_file custom_output.npz \
    --seq_len 1024
sed -i 's/^SEQ_LEN=512/SEQ_LEN=48/' capture_first_layer.sh
./capture_first_layer.sh
./capture_first_layer.sh essential
./capture_first_layer.sh quant_only
./capture_first_layer.sh fp32 0 2-1 2-4
./capture_first_layer.sh fp32 0 2-1
"""

DOCUMENT_003 = r"""
python3 save_layer_outputs.py quamba-130m-w8a8 \
    --pretrained_dir pretrained_models/Quamba1-pa9999/pa-0.9999 \
    --mode fp32 \
    --output_dir layer_outputs \
    --calib_data_num 10
./save_all_modes.sh fp_only
python3 save_layer_outputs.py quamba-130m-w8a8 \
    --pretrained_dir pretrained_models/Quamba1-pa9999/pa-0.9999 \
    --mode 2-1 \
    --quantize \
    --output_dir layer_outputs
python3 save_layer_outputs.py quamba-130m-w8a8 \
    --pretrained_dir pretrained_models/Quamba1-pa9999/pa-0.9999 \
    --mode 0 \
    --quantize \
    --output_dir layer_outputs
./comparewithfp 2-1
python3 compare_with_fp.py 2-1 --reference fp32 --output_dir layer_outputs
python3 save_layer_outputs.py quamba-130m-w8a8 \
    --pretrained_dir pretrained_models/Quamba1-pa9999/pa-0.9999 \
    --mode 2-1 --quantize
sed -i 's/^CALIB_SEQLEN=512/CALIB_SEQLEN=48/' save_all_modes.sh
./save_all_modes.sh quant_only
./save_all_modes.sh essential
./save_all_modes.sh fp32 0 2-1 2-4
./save_all_modes.sh
./compare_all_modes.sh
python3 compare_with_fp.py 2-1 --reference fp16
python3 compare_with_fp.py 2-1 --save_comparison results/mode_2-1_comparison.json
./QUICK_RUN.sh
python3 save_layer_outputs.py quamba-130m-w8a8 \
    --pretrained_dir pretrained_models/Quamba1-pa9999/pa-0.9999 \
    --mode fp32 \
    --calib_data_num 100 \
    --calib_seqlen 1024
"""

SNIPPETS_002 = (
    """
import numpy as np

data = np.load('first_layer_io_all_modes.npz')

print("Available keys:", data.files)

mode0_input = data['mode_0_input']    # Shape: [1, 512, 768]
mode0_output = data['mode_0_output']

mode21_input = data['mode_2-1_input']
mode21_output = data['mode_2-1_output']

diff = mode21_output - mode0_output
print(f"Max difference: {np.max(np.abs(diff))}")
""",
    """
import json

with open('first_layer_io_all_modes_stats.json', 'r') as f:
    stats = json.load(f)

mode0_stats = stats['modes']['0']
print(f"Mode 0 input mean: {mode0_stats['input']['mean']}")
print(f"Mode 0 output mean: {mode0_stats['output']['mean']}")

for mode, data in stats['modes'].items():
    print(f"Mode {mode}: output mean = {data['output']['mean']:.6f}")
""",
    """
import numpy as np
import matplotlib.pyplot as plt

data = np.load('first_layer_io_all_modes.npz')

fp32_output = data['mode_fp32_output']
mode0_output = data['mode_0_output']
mode21_output = data['mode_2-1_output']

diff_0 = mode0_output - fp32_output
diff_21 = mode21_output - fp32_output

print(f"Mode 0 vs FP32:")
print(f"  MSE: {np.mean(diff_0**2):.6e}")
print(f"  MAE: {np.mean(np.abs(diff_0)):.6f}")

print(f"\\nMode 2-1 vs FP32:")
print(f"  MSE: {np.mean(diff_21**2):.6e}")
print(f"  MAE: {np.mean(np.abs(diff_21)):.6f}")

plt.figure(figsize=(12, 4))
plt.subplot(1, 2, 1)
plt.hist(diff_0.flatten(), bins=100, alpha=0.7)
plt.title('Mode 0 - FP32')
plt.xlabel('Difference')

plt.subplot(1, 2, 2)
plt.hist(diff_21.flatten(), bins=100, alpha=0.7)
plt.title('Mode 2-1 - FP32')
plt.xlabel('Difference')

plt.tight_layout()
plt.savefig('first_layer_output_diff.png')
""",
    """
data = np.load('first_layer_io_all_modes.npz')
""",
)

SESSION_003 = """
>>> import numpy as np
>>> fp32_layer0 = np.load('layer_outputs/mode_fp32_layer_0.npy')
>>> mode21_layer0 = np.load('layer_outputs/mode_2-1_layer_0.npy')
>>> diff = mode21_layer0 - fp32_layer0
>>> print(f"Max diff: {np.max(np.abs(diff))}")
"""

SCREEN_002 = """
==================================================================================================
MODE {mode}
==================================================================================================

📥 INPUT (Shape: [{shape}]):
  First 10 values: [{ten}]
  Mean: {number}
  Std:  {number}
  Range: [{number}, {number}]

📤 OUTPUT (Shape: [{shape}]):
  First 10 values: [{ten}]
  Mean: {number}
  Std:  {number}
  Range: [{number}, {number}]
"""

SCREEN_003 = """
================================================================================
Layer {layer} - Comparison Results
================================================================================

📊 FP32 Reference Statistics:
  Mean:      {number}
  Std:       {number}
  Range:     [{number}, {number}]

📊 Mode Output Statistics:
  Mean:      {number}
  Std:       {number}
  Range:     [{number}, {number}]

📏 Difference (Mode - FP32):
  Mean Diff:        {number}
  Std Diff:         {number}
  Mean Abs Diff:    {number}
  Max Abs Diff:     {number}

❌ Error Metrics:
  MSE:               {number}
  RMSE:             {number}
  MAE:              {number}

📈 Relative Metrics:
  Relative MSE:      {number} ({number}%)
  Relative MAE:      {number} ({number}%)
  Correlation:      {number}

📊 Absolute Difference Percentiles:
  50th (Median):    {number}
  90th:             {number}
  95th:             {number}
  99th:             {number}
"""

TABLE_003 = """
================================================================================
SUMMARY TABLE - All Modes vs fp32
================================================================================

Mode       Layer 0 MSE     Layer 0 MAE  Last Layer MSE  Last Layer MAE  Avg Corr
----------------------------------------------------------------------------------------------------
"""


def commands(document: str) -> list[str]:
    """The commands of a document, one a string, broken lines joined."""
    lines = document.strip().replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines]


def find(document: str, *words: str) -> str:
    """The one command that has these words and, of those, the fewest others."""
    fitting = [c for c in commands(document) if set(words) <= set(c.split())]
    return min(fitting, key=lambda command: len(command.split()))


def pattern(screen: str) -> str:
    """A regular expression for a screen of the documents."""
    number = r" *-?\d+(?:\.\d+)?(?:e[+-]\d+)?"
    ten = rf"'{number}'(?:, '{number}'){{9}}"
    text = re.escape(screen.strip("\n"))
    for hole, fills in (("number", number), ("ten", ten), ("shape", r"\d+(?:, \d+)+")):
        text = text.replace(r"\{" + hole + r"\}", fills)
    return text


@pytest.fixture(scope="module")
def first_layer(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Document 002 from top to bottom."""
    reader = Reader(tmp_path_factory.mktemp("002") / "quamba", warm)
    for command in commands(DOCUMENT_002):
        reader.type(command)
    return reader


@pytest.fixture(scope="module")
def layer_outputs(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Document 003; where its reader is told to save a mode first, they do."""
    reader = Reader(tmp_path_factory.mktemp("003") / "quamba", warm)
    for command in commands(DOCUMENT_003):
        if "--calib_seqlen" in command:  # replaces the reference of the table
            folder = reader.folder / "layer_outputs"
            reader.kept = {i: np.load(folder / f"mode_fp32_layer_{i}.npy") for i in (0, 23)}
        ran = reader.type(command)
        if told := re.search(r"Save it first: (python3 .*)", ran.err):
            reader.type(told[1])
            reader.type(command)
    return reader


class TestDocument002:
    def test_every_command_succeeds(self, first_layer: Reader) -> None:
        for ran in first_layer.ran.values():
            assert ran.code == 0, f"{ran.command}\n{ran.out}\n{ran.err}"

    @pytest.mark.parametrize(
        ("command", "modes"),
        [
            ("./capture_first_layer.sh", ALL),
            ("./capture_first_layer.sh essential", ESSENTIAL),
            ("./capture_first_layer.sh quant_only", QUANTISED),
            ("./capture_first_layer.sh fp32 0 2-1 2-4", ["fp32", "0", "2-1", "2-4"]),
            ("./capture_first_layer.sh fp32 0 2-1", ["fp32", "0", "2-1"]),
            (find(DOCUMENT_002, "save_first_layer_io.py"), ALL),
            (find(DOCUMENT_002, "save_first_layer_io.py", "--modes"), ["fp32", "0", "2-1", "2-4"]),
        ],
    )
    def test_the_modes_that_were_asked_for_are_in_the_file_and_on_the_screen(
        self, first_layer: Reader, command: str, modes: list[str]
    ) -> None:
        ran = first_layer[command]
        keys = {f"mode_{mode}_{port}" for mode in modes for port in ("input", "output")}
        file = "first_layer_io_all_modes.npz:"
        assert {name for name in ran.arrays if name.startswith(file)} == {file + k for k in keys}
        length = 512 if command.startswith("python3") else 48
        assert {shape[:2] for name, shape in ran.arrays.items() if file in name} == {(1, length)}
        assert "first_layer_io_all_modes_stats.json" in ran.files
        assert re.findall(r"^MODE (.*)$", ran.out, re.MULTILINE) == modes
        for mode in modes:
            assert re.search(pattern(SCREEN_002.replace("{mode}", mode)), ran.out), ran.out
        assert f"the same bits in all {len(modes)} modes" in ran.out
        assert not [name for name in ran.files if ".tensortap-" in name]

    def test_another_file_and_length(self, first_layer: Reader) -> None:
        ran = first_layer[find(DOCUMENT_002, "--seq_len")]
        assert ran.arrays["custom_output.npz:mode_0_input"][:2] == (1, 1024)
        assert first_layer.json("custom_output_stats.json")["seq_len"] == 1024

    def test_the_statistics_have_the_documents_structure(self, first_layer: Reader) -> None:
        stats = first_layer.json("first_layer_io_all_modes_stats.json")
        assert {"timestamp", "model", "pretrained_dir", "seq_len", "modes"} <= set(stats)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", stats["timestamp"])
        assert stats["model"] == "quamba-130m-w8a8"
        assert stats["pretrained_dir"] == "pretrained_models/Quamba1-pa9999/pa-0.9999"
        assert stats["weights"] == "seeded random weights (seed 0)"
        assert stats["first_layer_input"] == "the same bits in all 3 modes"
        assert list(stats["modes"]) == ["fp32", "0", "2-1"]
        with np.load(first_layer.folder / "first_layer_io_all_modes.npz") as held:
            assert held["mode_0_input"].shape[1] == stats["seq_len"]
            for mode, told in stats["modes"].items():
                for port in ("input", "output"):
                    array, numbers = held[f"mode_{mode}_{port}"], told[port]
                    shape, ten, mean, std, least, most = list(numbers)[:6]
                    assert (shape, ten, mean, std) == ("shape", "first_10", "mean", "std")
                    assert (least, most) == ("min", "max")
                    assert numbers["shape"] == list(array.shape)
                    assert numbers["first_10"] == [float(v) for v in array.flatten()[:10]]
                    assert numbers["mean"] == pytest.approx(array.mean(dtype=float), abs=1e-6)
                    assert numbers["std"] == pytest.approx(array.std(dtype=float), rel=1e-6)
                    assert (numbers["min"], numbers["max"]) == (array.min(), array.max())

    def test_random_weights_are_said(self, first_layer: Reader) -> None:
        for command, ran in first_layer.ran.items():
            if not command.startswith("sed"):
                assert "pa-0.9999 does not exist" in ran.err and "seeded random" in ran.err

    def test_the_snippets_run(
        self,
        first_layer: Reader,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        pytest.importorskip("matplotlib").use("Agg")
        first_layer.type("./capture_first_layer.sh essential")  # the document's best practice
        monkeypatch.chdir(first_layer.folder)
        names: dict[str, Any] = {}
        for snippet in SNIPPETS_002:
            exec(snippet, names)
        said = capsys.readouterr().out
        assert "Available keys: ['mode_fp32_input', 'mode_fp32_output', 'mode_0_input'" in said
        assert np.any(names["diff_0"] != 0)
        assert float(re.findall(r"MSE: (.*)", said)[0]) == pytest.approx(
            np.mean(names["diff_0"] ** 2), rel=1e-5
        )
        assert Path("first_layer_output_diff.png").read_bytes().startswith(b"\x89PNG")


class TestDocument003:
    def test_every_command_succeeds(self, layer_outputs: Reader) -> None:
        for ran in layer_outputs.ran.values():
            compares = ran.command.startswith(("./comparewithfp", "python3 compare_with_fp.py"))
            expected = DIVERGED if compares else (0,)
            assert ran.code in expected, f"{ran.command}\n{ran.out}\n{ran.err}"

    @pytest.mark.parametrize(
        ("words", "mode", "shape"),
        [
            (["--mode", "fp32", "10"], "fp32", (10, 512)),
            (["./save_all_modes.sh", "fp_only"], "fp32", (10, 512)),
            (["--mode", "0"], "0", (10, 512)),
            (["--mode", "2-1", "--quantize", "--output_dir"], "2-1", (10, 512)),
            (["--mode", "2-1", "--quantize"], "2-1", (10, 512)),
            (["./save_all_modes.sh", "essential"], "2-4", (10, 48)),
            (["--mode", "fp32", "100"], "fp32", (100, 1024)),
        ],
    )
    def test_the_files_of_a_mode(
        self, layer_outputs: Reader, words: list[str], mode: str, shape: tuple[int, int]
    ) -> None:
        ran = layer_outputs[find(DOCUMENT_003, *words)]
        for layer in (0, 23):
            held = ran.arrays[f"layer_outputs/mode_{mode}_layer_{layer}.npy"]
            assert len(held) == 3 and held[:2] == shape
        assert f"layer_outputs/mode_{mode}_stats.json" in ran.files

    def test_the_tree_is_the_documents(self, layer_outputs: Reader) -> None:
        there = {name for name in layer_outputs["./save_all_modes.sh"].files if "/mode_" in name}
        tree = {
            f"layer_outputs/mode_{mode}_{what}"
            for mode in ALL
            for what in ("layer_0.npy", "layer_23.npy", "stats.json")
        }
        assert {name for name in there if name.startswith("layer_outputs/")} == tree

    @pytest.mark.parametrize(
        ("command", "modes"),
        [
            ("./save_all_modes.sh", ALL),
            ("./save_all_modes.sh fp_only", ["fp32"]),
            ("./save_all_modes.sh quant_only", QUANTISED),
            ("./save_all_modes.sh essential", ESSENTIAL),
            ("./save_all_modes.sh fp32 0 2-1 2-4", ["fp32", "0", "2-1", "2-4"]),
        ],
    )
    def test_groups_and_lists(self, layer_outputs: Reader, command: str, modes: list[str]) -> None:
        said = re.findall(r"^Mode (.*?):", layer_outputs[command].out, re.MULTILINE)
        assert said == modes

    @pytest.mark.parametrize(
        "command", ["./comparewithfp 2-1", find(DOCUMENT_003, "compare_with_fp.py", "fp32")]
    )
    def test_the_screen_is_the_documents(self, layer_outputs: Reader, command: str) -> None:
        ran = layer_outputs[command]
        for layer in ("0", "23"):
            assert re.search(pattern(SCREEN_003.replace("{layer}", layer)), ran.out), ran.out
        assert "comparisons/mode_2-1_vs_fp32.json" in ran.files

    def test_another_reference_is_saved_first(self, layer_outputs: Reader) -> None:
        saved = [command for command in layer_outputs.ran if "--mode fp16" in command]
        assert len(saved) == 1, "the reader was not told how to save fp16"
        (held,) = {layer_outputs[saved[0]].arrays["layer_outputs/mode_fp16_layer_23.npy"][:2]}
        assert held == (10, 48), "as mode 2-1 was saved"
        ran = layer_outputs["python3 compare_with_fp.py 2-1 --reference fp16"]
        assert "📊 FP16 Reference Statistics:" in ran.out
        assert "comparisons/mode_2-1_vs_fp16.json" in ran.files

    @pytest.mark.parametrize("command", ["./compare_all_modes.sh", "./QUICK_RUN.sh"])
    def test_the_table_is_the_documents(self, layer_outputs: Reader, command: str) -> None:
        ran = layer_outputs[command]
        assert TABLE_003.strip("\n") in ran.out
        table = ran.out.split("-" * 100 + "\n")[1].split("\n" + "=" * 80)[0]
        rows = [line.split() for line in table.splitlines()]
        saved_since = ["fp16"] if command == "./QUICK_RUN.sh" else []
        assert [row[0] for row in rows] == [*QUANTISED, *saved_since]
        assert all(len(row) == 6 and np.isfinite([float(v) for v in row[1:]]).all() for row in rows)
        assert {f"comparisons/mode_{mode}_vs_fp32.json" for mode in QUANTISED} <= ran.files

    def test_the_table_has_the_numbers_of_the_files(self, layer_outputs: Reader) -> None:
        out = layer_outputs["./QUICK_RUN.sh"].out
        row = re.search(r"^2-2 .*", out, re.MULTILINE)
        assert row is not None
        told = row[0].split()
        folder = layer_outputs.folder / "layer_outputs"
        reference = layer_outputs.kept
        for column, layer in ((1, 0), (3, 23)):
            pair = [reference[layer], np.load(folder / f"mode_2-2_layer_{layer}.npy")]
            error = pair[1].astype(float) - pair[0]
            assert float(told[column]) == pytest.approx((error**2).mean(), rel=1e-5)
            assert float(told[column + 1]) == pytest.approx(abs(error).mean(), abs=1e-6)

    def test_a_comparison_is_saved_where_it_is_asked_for(self, layer_outputs: Reader) -> None:
        saved = layer_outputs.json("results/mode_2-1_comparison.json")
        assert (saved["reference"], saved["candidate"]) == ("fp32", "2-1")
        assert [row["layer"] for row in saved["layers"]] == [
            "backbone.layers.0",
            "backbone.layers.23",
        ]
        same = layer_outputs.json("comparisons/mode_2-1_vs_fp32.json")
        assert saved["layers"][0]["mse"] == same["layers"][0]["mse"]

    def test_the_session_runs(
        self,
        layer_outputs: Reader,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(layer_outputs.folder)
        layer_outputs.type("./save_all_modes.sh fp_only")
        names: dict[str, Any] = {}
        exec("\n".join(line.removeprefix(">>> ") for line in SESSION_003.splitlines()), names)
        assert re.fullmatch(r"Max diff: [0-9.e-]+\n", capsys.readouterr().out)
        assert np.abs(names["diff"]).max() > 0

    def test_the_head_of_the_script_is_edited(self, layer_outputs: Reader) -> None:
        script = layer_outputs.folder / "save_all_modes.sh"
        head = script.read_text()
        for name, value in (("OUTPUT_DIR", '"elsewhere"'), ("CALIB_DATA_NUM", "3")):
            assert re.search(rf"^{name}=", head, re.MULTILINE)
            head = re.sub(rf"^{name}=\S+", f"{name}={value}", head, flags=re.MULTILINE)
        script.write_text(head)
        try:
            ran = layer_outputs.type("./save_all_modes.sh fp_only")
        finally:
            shutil.copy2(RECIPE / "save_all_modes.sh", script)
        assert ran.arrays["elsewhere/mode_fp32_layer_0.npy"][:2] == (3, 48)
