"""The commands and snippets of documents 002 and 003, typed as their reader would.

They stand here as the documents have them (comments aside), and run in a copy of recipes/quamba,
one after the other, in the shell. `python3` is a fork of a warm interpreter.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import traceback
from collections.abc import Callable
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
  MSE:               {scientific}
  RMSE:             {number}
  MAE:              {number}

📈 Relative Metrics:
  Relative MSE:      {scientific} ({percent}%)
  Relative MAE:      {scientific} ({percent}%)
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
    number = r" *-?\d+\.\d{6}(?:e[+-]\d\d)?"  # an exponent where six decimals would be zeros
    holes = {
        "number": number,
        "scientific": r"\d\.\d{6}e[+-]\d\d",
        "percent": r" *\d+\.\d{3}",
        "ten": rf"'{number}'(?:, '{number}'){{9}}",
        "shape": r"\d+(?:, \d+)+",
    }
    text = re.escape(screen.strip("\n"))
    for hole, fills in holes.items():
        text = text.replace(r"\{" + hole + r"\}", fills)
    return text


class Failures:
    """All that does not hold in a document, told together.

    A document is one test, since its commands take long: of two workers none has to run them
    again, or to wait until the other one has.
    """

    def __init__(self) -> None:
        self._told: list[str] = []

    def check(self, holds: Callable[..., None], *given: Any) -> None:
        try:
            holds(*given)
        except Exception:
            words = ", ".join(repr(value) for value in given if not isinstance(value, Reader))
            self._told.append(f"{holds.__name__}({words})\n{traceback.format_exc()}")

    def tell(self) -> None:
        if self._told:
            pytest.fail("\n".join(self._told), pytrace=False)


def run_snippet(reader: Reader, snippet: str, names: dict[str, Any]) -> str:
    """Run a snippet in the reader's folder, and return what it prints."""
    said, before = io.StringIO(), Path.cwd()
    os.chdir(reader.folder)
    try:
        with contextlib.redirect_stdout(said):
            exec(snippet, names)
    finally:
        os.chdir(before)
    return said.getvalue()


# Document 002.

MODES_OF_002 = {
    "./capture_first_layer.sh": ALL,
    "./capture_first_layer.sh essential": ESSENTIAL,
    "./capture_first_layer.sh quant_only": QUANTISED,
    "./capture_first_layer.sh fp32 0 2-1 2-4": ["fp32", "0", "2-1", "2-4"],
    "./capture_first_layer.sh fp32 0 2-1": ["fp32", "0", "2-1"],
    find(DOCUMENT_002, "save_first_layer_io.py"): ALL,
    find(DOCUMENT_002, "save_first_layer_io.py", "--modes"): ["fp32", "0", "2-1", "2-4"],
}


def test_document_002(warm: WarmPython, tmp_path: Path) -> None:
    """Its commands from top to bottom, the files and screens that it promises, its snippets."""
    pytest.importorskip("matplotlib").use("Agg")
    reader = Reader(tmp_path / "quamba", warm)
    for command in commands(DOCUMENT_002):
        reader.type(command)
    failures = Failures()
    failures.check(every_command_of_002_succeeds, reader)
    for command, modes in MODES_OF_002.items():
        failures.check(
            the_modes_that_were_asked_for_are_in_the_file_and_on_the_screen, reader, command, modes
        )
    failures.check(another_file_and_length, reader)
    failures.check(the_statistics_have_the_documents_structure, reader)
    failures.check(random_weights_are_said, reader)
    failures.check(the_snippets_of_002_run, reader)
    failures.tell()


def every_command_of_002_succeeds(reader: Reader) -> None:
    for ran in reader.ran.values():
        assert ran.code == 0, f"{ran.command}\n{ran.out}\n{ran.err}"


def the_modes_that_were_asked_for_are_in_the_file_and_on_the_screen(
    reader: Reader, command: str, modes: list[str]
) -> None:
    ran = reader[command]
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


def another_file_and_length(reader: Reader) -> None:
    ran = reader[find(DOCUMENT_002, "--seq_len")]
    assert ran.arrays["custom_output.npz:mode_0_input"][:2] == (1, 1024)
    assert reader.json("custom_output_stats.json")["seq_len"] == 1024


def the_statistics_have_the_documents_structure(reader: Reader) -> None:
    stats = reader.json("first_layer_io_all_modes_stats.json")
    assert {"timestamp", "model", "pretrained_dir", "seq_len", "modes"} <= set(stats)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", stats["timestamp"])
    assert stats["model"] == "quamba-130m-w8a8"
    assert stats["pretrained_dir"] == "pretrained_models/Quamba1-pa9999/pa-0.9999"
    assert stats["weights"] == "seeded random weights (seed 0)"
    assert stats["first_layer_input"] == "the same bits in all 3 modes"
    assert list(stats["modes"]) == ["fp32", "0", "2-1"]
    with np.load(reader.folder / "first_layer_io_all_modes.npz") as held:
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


def random_weights_are_said(reader: Reader) -> None:
    for command, ran in reader.ran.items():
        if not command.startswith("sed"):
            assert "pa-0.9999 does not exist" in ran.err and "seeded random" in ran.err


def the_snippets_of_002_run(reader: Reader) -> None:
    reader.type("./capture_first_layer.sh essential")  # the document's best practice
    names: dict[str, Any] = {}
    said = "".join(run_snippet(reader, snippet, names) for snippet in SNIPPETS_002)
    assert "Available keys: ['mode_fp32_input', 'mode_fp32_output', 'mode_0_input'" in said
    assert np.any(names["diff_0"] != 0)
    assert float(re.findall(r"MSE: (.*)", said)[0]) == pytest.approx(
        np.mean(names["diff_0"] ** 2), rel=1e-5
    )
    picture = reader.folder / "first_layer_output_diff.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


# Document 003.

FILES_OF_003: list[tuple[list[str], str, tuple[int, int]]] = [
    (["--mode", "fp32", "10"], "fp32", (10, 512)),
    (["./save_all_modes.sh", "fp_only"], "fp32", (10, 512)),
    (["--mode", "0"], "0", (10, 512)),
    (["--mode", "2-1", "--quantize", "--output_dir"], "2-1", (10, 512)),
    (["--mode", "2-1", "--quantize"], "2-1", (10, 512)),
    (["./save_all_modes.sh", "essential"], "2-4", (10, 48)),
    (["--mode", "fp32", "100"], "fp32", (100, 1024)),
]

MODES_OF_003 = {
    "./save_all_modes.sh": ALL,
    "./save_all_modes.sh fp_only": ["fp32"],
    "./save_all_modes.sh quant_only": QUANTISED,
    "./save_all_modes.sh essential": ESSENTIAL,
    "./save_all_modes.sh fp32 0 2-1 2-4": ["fp32", "0", "2-1", "2-4"],
}


def test_document_003(warm: WarmPython, tmp_path: Path) -> None:
    """Its commands, files, screens and session; who is told to save a mode first does so."""
    reader = Reader(tmp_path / "quamba", warm)
    reference: dict[int, np.ndarray[Any, Any]] = {}
    for command in commands(DOCUMENT_003):
        if "--calib_seqlen" in command:  # replaces the reference of the table
            folder = reader.folder / "layer_outputs"
            reference = {i: np.load(folder / f"mode_fp32_layer_{i}.npy") for i in (0, 23)}
        ran = reader.type(command)
        if told := re.search(r"Save it first: (python3 .*)", ran.err):
            reader.type(told[1])
            reader.type(command)
    failures = Failures()
    failures.check(every_command_of_003_succeeds, reader)
    for words, mode, shape in FILES_OF_003:
        failures.check(a_mode_has_its_files, reader, words, mode, shape)
    failures.check(the_tree_is_the_documents, reader)
    for command, modes in MODES_OF_003.items():
        failures.check(groups_and_lists_are_these_modes, reader, command, modes)
    for command in ("./comparewithfp 2-1", find(DOCUMENT_003, "compare_with_fp.py", "fp32")):
        failures.check(the_screen_is_the_documents, reader, command)
    failures.check(another_reference_is_saved_first, reader)
    for command in ("./compare_all_modes.sh", "./QUICK_RUN.sh"):
        failures.check(the_table_is_the_documents, reader, command)
    failures.check(the_table_has_the_numbers_of_the_files, reader, reference)
    failures.check(a_comparison_is_saved_where_it_is_asked_for, reader)
    failures.check(the_session_runs, reader)
    failures.check(the_head_of_the_script_is_edited, reader)
    failures.tell()


def every_command_of_003_succeeds(reader: Reader) -> None:
    for ran in reader.ran.values():
        assert ran.code == 0, f"{ran.command}\n{ran.out}\n{ran.err}"


def a_mode_has_its_files(
    reader: Reader, words: list[str], mode: str, shape: tuple[int, int]
) -> None:
    ran = reader[find(DOCUMENT_003, *words)]
    for layer in (0, 23):
        held = ran.arrays[f"layer_outputs/mode_{mode}_layer_{layer}.npy"]
        assert len(held) == 3 and held[:2] == shape
    assert f"layer_outputs/mode_{mode}_stats.json" in ran.files


def the_tree_is_the_documents(reader: Reader) -> None:
    there = {name for name in reader["./save_all_modes.sh"].files if "/mode_" in name}
    tree = {
        f"layer_outputs/mode_{mode}_{what}"
        for mode in ALL
        for what in ("layer_0.npy", "layer_23.npy", "stats.json")
    }
    assert {name for name in there if name.startswith("layer_outputs/")} == tree


def groups_and_lists_are_these_modes(reader: Reader, command: str, modes: list[str]) -> None:
    said = re.findall(r"^Mode (.*?):", reader[command].out, re.MULTILINE)
    assert said == modes


def the_screen_is_the_documents(reader: Reader, command: str) -> None:
    ran = reader[command]
    for layer in ("0", "23"):
        assert re.search(pattern(SCREEN_003.replace("{layer}", layer)), ran.out), ran.out
    assert "comparisons/mode_2-1_vs_fp32.json" in ran.files


def another_reference_is_saved_first(reader: Reader) -> None:
    saved = [command for command in reader.ran if "--mode fp16" in command]
    assert len(saved) == 1, "the reader was not told how to save fp16"
    (held,) = {reader[saved[0]].arrays["layer_outputs/mode_fp16_layer_23.npy"][:2]}
    assert held == (10, 48), "as mode 2-1 was saved"
    ran = reader["python3 compare_with_fp.py 2-1 --reference fp16"]
    assert "📊 FP16 Reference Statistics:" in ran.out
    assert "comparisons/mode_2-1_vs_fp16.json" in ran.files


def the_table_is_the_documents(reader: Reader, command: str) -> None:
    ran = reader[command]
    assert TABLE_003.strip("\n") in ran.out
    table = ran.out.split("-" * 100 + "\n")[1].split("\n" + "=" * 80)[0]
    rows = [line.split() for line in table.splitlines()]
    saved_since = ["fp16"] if command == "./QUICK_RUN.sh" else []
    assert [row[0] for row in rows] == [*QUANTISED, *saved_since]
    assert all(len(row) == 6 and np.isfinite([float(v) for v in row[1:]]).all() for row in rows)
    assert {f"comparisons/mode_{mode}_vs_fp32.json" for mode in QUANTISED} <= ran.files


def the_table_has_the_numbers_of_the_files(
    reader: Reader, reference: dict[int, np.ndarray[Any, Any]]
) -> None:
    out = reader["./QUICK_RUN.sh"].out
    row = re.search(r"^2-2 .*", out, re.MULTILINE)
    assert row is not None
    told = row[0].split()
    folder = reader.folder / "layer_outputs"
    for column, layer in ((1, 0), (3, 23)):
        pair = [reference[layer], np.load(folder / f"mode_2-2_layer_{layer}.npy")]
        error = pair[1].astype(float) - pair[0]
        assert float(told[column]) == pytest.approx((error**2).mean(), rel=1e-5)
        assert float(told[column + 1]) == pytest.approx(abs(error).mean(), abs=1e-6)


def a_comparison_is_saved_where_it_is_asked_for(reader: Reader) -> None:
    saved = reader.json("results/mode_2-1_comparison.json")
    assert (saved["reference"], saved["candidate"]) == ("fp32", "2-1")
    assert [row["layer"] for row in saved["layers"]] == ["backbone.layers.0", "backbone.layers.23"]
    same = reader.json("comparisons/mode_2-1_vs_fp32.json")
    assert saved["layers"][0]["mse"] == same["layers"][0]["mse"]


def the_session_runs(reader: Reader) -> None:
    reader.type("./save_all_modes.sh fp_only")
    names: dict[str, Any] = {}
    session = "\n".join(line.removeprefix(">>> ") for line in SESSION_003.splitlines())
    assert re.fullmatch(r"Max diff: [0-9.e-]+\n", run_snippet(reader, session, names))
    assert np.abs(names["diff"]).max() > 0


def the_head_of_the_script_is_edited(reader: Reader) -> None:
    script = reader.folder / "save_all_modes.sh"
    head = script.read_text()
    for name, value in (("OUTPUT_DIR", '"elsewhere"'), ("CALIB_DATA_NUM", "3")):
        assert re.search(rf"^{name}=", head, re.MULTILINE)
        head = re.sub(rf"^{name}=\S+", f"{name}={value}", head, flags=re.MULTILINE)
    script.write_text(head)
    try:
        ran = reader.type("./save_all_modes.sh fp_only")
    finally:
        shutil.copy2(RECIPE / "save_all_modes.sh", script)
    assert ran.arrays["elsewhere/mode_fp32_layer_0.npy"][:2] == (3, 48)
