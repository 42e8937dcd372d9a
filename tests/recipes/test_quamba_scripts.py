"""What the scripts of recipes/quamba do beyond the documents' own commands."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quamba_reader import RECIPE, ROOT, Reader
from warm_python import WarmPython

pytest.importorskip("transformers")

OUT = "layer_outputs"
SIZES = "--calib_data_num 2 --calib_seqlen 16"


@pytest.fixture(scope="module")
def reader(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A copy of the recipe in which fp32, 0 and 2-1 are saved."""
    reader = Reader(tmp_path_factory.mktemp("scripts") / "quamba", warm)
    ran = reader.type(f"./save_all_modes.sh fp32 0 2-1 {SIZES}")
    assert ran.code == 0, ran.err
    return reader


def said(stderr: str) -> str:
    """The one sentence of a command that failed."""
    (line,) = [line for line in stderr.splitlines() if line.startswith("tensortap: ")]
    return line.removeprefix("tensortap: ")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            "./save_all_modes.sh 2-9",
            r"no mode '2-9'\. Did you mean '2-.'\? Its modes are fp32",
        ),
        ("./capture_first_layer.sh essentials", r"no mode 'essentials'.*Groups: all, essential"),
        (
            "python3 save_layer_outputs.py quamba-130m-w8a8 --mode fp32 --quantize",
            r"--quantize does not fit --mode fp32, which is not quantised\. Leave it out",
        ),
        (
            "python3 save_layer_outputs.py quamba-130m-w8a8 --mode 0 fp16 --quantize",
            r"--quantize does not fit --mode fp16",
        ),
        ("python3 save_layer_outputs.py --output_dir README.md", r"README.md is a file"),
        ("python3 save_first_layer_io.py --output_file io.txt", r"io.txt is no \.npz file"),
        ("python3 compare_with_fp.py nonsense", r"no mode 'nonsense'\. The modes are fp32, 0, 2-0"),
        ("./comparewithfp 2-4", r"mode 2-4 is not saved; layer_outputs holds 0, 2-1, fp32"),
        ("./comparewithfp fp32", r"Mode fp32 is the reference itself"),
        ("./comparewithfp 0 --reference 3", r"reference mode 3 is not saved.*--mode 3 --quantize"),
        (
            "./comparewithfp 0 --output_dir nowhere",
            r"no files mode_<mode>_layer_<i>.npy in nowhere",
        ),
        (
            "./compare_all_modes.sh --save_comparison all.json",
            r"--save_comparison names one file, and there are several modes",
        ),
    ],
)
def test_bad_input_is_a_sentence(reader: Reader, command: str, sentence: str) -> None:
    before = reader.type("true").files
    ran = reader.type(command)
    assert ran.code == 2
    assert re.search(sentence, said(ran.err)), ran.err
    assert ran.files == before


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("./save_all_modes.sh fp_only --pretrained_dir nowhere", "nowhere"),
        ("./save_all_modes.sh fp_only --percentile 2", "percentile is 2.0"),
        ("python3 save_layer_outputs.py another-model", "no model 'another-model'"),
        ("python3 save_layer_outputs.py --layers 99", "99"),
    ],
)
def test_a_model_that_cannot_be_built_is_a_sentence(
    reader: Reader, command: str, sentence: str
) -> None:
    before = reader.type("true").files
    ran = reader.type(command)
    assert ran.code == 2
    assert sentence in ran.err and "Traceback" not in ran.err, ran.err
    assert ran.files == before


def test_what_is_wrong_in_every_mode_is_said_once(reader: Reader) -> None:
    ran = reader.type("./capture_first_layer.sh --pretrained_dir nowhere --output_file new/io.npz")
    assert ran.code == 2 and not (reader.folder / "new").exists()
    told = [line for line in ran.err.splitlines() if "nowhere" in line]
    assert len(told) == 1 and "Modes fp32, 0, 2-0, 2-1, 2-2, 2-3, 2-4, 3 failed" in told[0], told
    ran = reader.type("./save_all_modes.sh fp32 --seed 99999999999999999999")
    assert ran.code == 2 and "is no whole number from 0" in ran.err


@pytest.mark.parametrize("layers", ["embedding", "final_norm backbone.layers.3.mixer"])
def test_a_number_is_a_blocks(reader: Reader, layers: str) -> None:
    """What is no block has no number, and takes no block's file."""
    before = reader.type("true").files
    ran = reader.type(f"./save_all_modes.sh fp_only {SIZES} --layers {layers} --output_dir none")
    assert ran.code == 2, ran.out
    assert "holds no output tensors of blocks" in said(ran.err)
    assert ran.files == before


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_sizes_are_whole_numbers(reader: Reader, value: str) -> None:
    ran = reader.type(f"python3 save_layer_outputs.py --calib_data_num {value}")
    assert ran.code == 2
    assert "no whole number of at least 1" in ran.err or "expected one argument" in ran.err


def test_the_defaults_are_the_documents(reader: Reader) -> None:
    said = " ".join(reader.type("python3 save_first_layer_io.py --help").out.split())
    for default in (
        "--model MODEL default: quamba-130m-w8a8",
        "(default: pretrained_models/Quamba1-pa9999/pa-0.9999;",
        "(default: fp32 0 2-0 2-1 2-2 2-3 2-4 3)",
        "--output_file FILE default: first_layer_io_all_modes.npz",
        "--seq_len N default: 512",
    ):
        assert default in said
    said = " ".join(reader.type("python3 save_layer_outputs.py --help").out.split())
    for default in ("samples (default: 10)", "(default: 512)", "--output_dir DIR default: layer"):
        assert default in said


def test_a_mode_that_fails_does_not_stop_the_others(reader: Reader, warm: WarmPython) -> None:
    broken = Reader(reader.folder.parent / "broken", warm)
    with (broken.folder / "quamba" / "target.py").open("a") as file:
        file.write(
            "\n\n_build = build\n\n\ndef build(mode: str = 'fp32', **options: object):\n"
            "    if mode == '0':\n        raise RuntimeError('no luck today')\n"
            "    return _build(mode, **options)\n"
        )
    ran = broken.type(f"./save_all_modes.sh fp32 0 2-1 {SIZES}")
    assert ran.code == 2
    assert re.search("Mode 0 failed: .*no luck today", ran.err)
    saved = {name for name in ran.files if name.endswith("_stats.json")}
    assert saved == {f"layer_outputs/mode_{mode}_stats.json" for mode in ("fp32", "2-1")}
    ran = broken.type("./capture_first_layer.sh fp32 0 2-1 --seq_len 16")
    assert ran.code == 2 and "Mode 0 failed" in ran.err
    modes = {name.split(":mode_")[1] for name in ran.arrays if ":" in name}
    assert modes == {"fp32_input", "fp32_output", "2-1_input", "2-1_output"}
    ran = broken.type(f"./QUICK_RUN.sh fp32 0 2-1 {SIZES} --output_dir quick")
    assert ran.code == 2 and "SUMMARY TABLE" in ran.out and "\n2-1 " in ran.out
    ran = broken.type("./capture_first_layer.sh 0 --output_file none.npz")
    assert ran.code == 2 and "none.npz" not in ran.files


@pytest.mark.parametrize(
    ("layers", "indices"), [("0 11-12 23", [0, 11, 12, 23]), ("all", range(24)), ("last", [23])]
)
def test_more_layers_can_be_saved(reader: Reader, layers: str, indices: list[int]) -> None:
    out = f"out_{layers.replace(' ', '_')}"
    ran = reader.type(f"./save_all_modes.sh fp_only {SIZES} --output_dir {out} --layers {layers}")
    assert ran.code == 0, ran.err
    files = {name for name in ran.arrays if name.startswith(f"{out}/")}
    assert files == {f"{out}/mode_fp32_layer_{i}.npy" for i in indices}


def test_saving_again_replaces_a_mode_and_leaves_the_others(reader: Reader) -> None:
    reader.type(f"./save_all_modes.sh fp32 2-2 {SIZES} --output_dir again --layers 0 1 23")
    ran = reader.type(f"./save_all_modes.sh fp32 {SIZES} --output_dir again")
    there = {name for name in ran.arrays if name.startswith("again/mode_")}
    assert there == {
        *(f"again/mode_fp32_layer_{i}.npy" for i in (0, 23)),
        *(f"again/mode_2-2_layer_{i}.npy" for i in (0, 1, 23)),
    }


def test_the_model_may_stand_behind_the_modes(reader: Reader) -> None:
    command = f"python3 save_layer_outputs.py {SIZES} --output_dir behind --mode 0 quamba-130m-w8a8"
    ran = reader.type(command)
    assert ran.code == 0, ran.err
    assert "behind/mode_0_layer_23.npy" in ran.files


def test_a_quick_run_compares_what_it_saved(reader: Reader, warm: WarmPython) -> None:
    """Wherever that is: in the folder of an option, or of the head of save_all_modes.sh."""
    quick = Reader(reader.folder.parent / "quick", warm)
    shutil.copytree(reader.folder / "layer_outputs", quick.folder / "layer_outputs")
    ran = quick.type(f"./QUICK_RUN.sh fp32 2-4 {SIZES} --output_dir=two")
    assert ran.code == 0, ran.err
    assert "\n2-4 " in ran.out and "\n2-1 " not in ran.out
    ran = quick.type("./QUICK_RUN.sh bogus")
    assert ran.code == 2 and "SUMMARY TABLE" not in ran.out, "it would be an older run's"
    quick.type("sed -i 's|^OUTPUT_DIR=.*|OUTPUT_DIR=\"here too\"  # mine|' save_all_modes.sh")
    ran = quick.type(f"./QUICK_RUN.sh fp32 3 {SIZES} && ln -s $PWD/comparewithfp two/linked")
    assert ran.code == 0 and "\n3 " in ran.out and "\n2-1 " not in ran.out, ran.err
    ran = quick.type("two/linked 3; ./comparewithfp 2-1")
    assert "Layer 23 - Comparison Results" in ran.out
    assert "2-1 is not saved; here too holds 3, fp32." in ran.err
    assert "--mode 2-1 --quantize --output_dir 'here too' --calib_data_num 2" in ran.err


def test_other_weights_and_scales_are_told(reader: Reader) -> None:
    out = f"{SIZES} --output_dir mixed"
    reader.type(f"./save_all_modes.sh fp32 0 {out}")
    reader.type(f"./save_all_modes.sh 2-1 {out} --seed 5 --percentile 0.9 --layers 0 3")
    ran = reader.type("./compare_all_modes.sh --output_dir mixed")
    assert "Mode 2-1 was saved with weights seeded random weights (seed 5), mode fp32" in ran.err
    assert "Mode 2-1 was saved with percentile 0.9, mode 0 with 0.9999" in ran.err
    assert "Mode 0 was saved with" not in ran.err
    ran = reader.type("./comparewithfp 3 --output_dir mixed --reference 2-1")
    assert "--percentile 0.9 --seed 5 --layers 0 3" in said(ran.err)


def test_arrays_that_cannot_be_compared_are_told_of(reader: Reader) -> None:
    """And stop nobody else: no layer in common, a missing one, NaN, or a file that is torn."""
    folder = reader.folder / "odd"
    folder.mkdir()
    first, last = np.random.default_rng(0).normal(size=(2, 2, 8, 4)).astype(np.float32)
    broken = first.copy()
    broken[0, 0, 0] = np.nan
    for mode, arrays in {
        "fp32": {0: first, 23: last},
        "twin": {0: first, 23: last},
        "moved": {1: first, 22: last},
        "half": {0: first},
        "nan": {0: broken, 23: last},
        "torn": {0: first},
    }.items():
        for number, array in arrays.items():
            np.save(folder / f"mode_{mode}_layer_{number}.npy", array)
    (folder / "mode_torn_stats.json").write_text('{"mode": ')
    ran = reader.type("./compare_all_modes.sh --output_dir odd")
    assert ran.code == 2
    assert "The same bits at every saved layer: fp32 = twin.\n" in ran.out
    assert re.search(r"^half +0\.0+e\+00 +0\.0+ +missing +missing ", ran.out, re.MULTILINE)
    assert re.search(r"^nan +undefined +undefined +0\.0+e\+00 ", ran.out, re.MULTILINE)
    assert "Mode torn cannot be read: odd/mode_torn_stats.json " in ran.err
    moved = "Mode moved is saved at layer 1, 22 and the reference fp32 at layer 0, 23: they have "
    assert moved in ran.err and "nan is NaN or infinite at layer_0" in ran.err
    assert reader.type("./comparewithfp twin --output_dir odd").code == 0
    assert moved in said(reader.type("./comparewithfp moved --output_dir odd").err)
    ran = reader.type("./comparewithfp half --output_dir odd")
    assert ran.code == 0 and "Mode half has no layer_23: it was not compared." in ran.err
    assert "mode_torn_stats" in said(reader.type("./comparewithfp torn --output_dir odd").err)


def test_an_error_of_ours_is_no_difference(reader: Reader, warm: WarmPython) -> None:
    broken = Reader(reader.folder.parent / "ours", warm)
    with (broken.folder / "compare_with_fp.py").open("r+") as file:
        text = file.read().replace("def command() -> int:", "def command() -> int:\n    1 / 0")
        file.seek(0)
        file.write(text)
    ran = broken.type("./comparewithfp 2-1")
    assert ran.code == 2 and "ZeroDivisionError" in ran.err


def test_the_commands_of_our_own_pages_run(reader: Reader) -> None:
    """Those of tensortap, one page after the other, on short sequences; scripts run above."""
    tensortap = reader.folder / "bin" / "tensortap"
    tensortap.parent.mkdir()
    tensortap.write_text("#!/usr/bin/env python3\nfrom tensortap.cli.main import main\nmain()\n")
    tensortap.chmod(0o755)
    pages = (RECIPE / "SSM_MODE_GUIDE.md", RECIPE / "README.md", ROOT / "docs" / "quamba.md")
    blocks = (re.findall(r"```(?:ba)?sh\n(.*?)```", page.read_text(), re.DOTALL) for page in pages)
    lines = [line for block in itertools.chain(*blocks) for line in block.splitlines()]
    found = [line for line in lines if line.startswith("tensortap ")]
    assert len(found) == 8
    for line in found:
        short = re.sub(r"(?=-o runs)", "--seq-len 16 ", line) if " record " in line else line
        ran = reader.type(f"PATH=$PWD/bin:$PATH; {short}")
        expected = re.search(r"# exit (\d)", line)
        assert ran.code == int(expected[1] if expected else 0), f"{short}\n{ran.out}{ran.err}"
        assert ran.out.strip()


@pytest.mark.parametrize(
    ("option", "facts"),
    [
        ("--hadamard", {"hadamard": True}),
        ("--percentile 0.9", {"percentile": 0.9}),
        ("--calib 1", {"calib": 1}),
    ],
)
def test_options_of_the_model_reach_it(reader: Reader, option: str, facts: dict[str, Any]) -> None:
    ran = reader.type(f"./save_all_modes.sh 0 {SIZES} --output_dir other {option}")
    assert ran.code == 0, ran.err
    stats = reader.json("other/mode_0_stats.json")
    assert {key: stats[key] for key in facts} == facts
    usual, other = (np.load(reader.folder / f"{d}/mode_0_layer_0.npy") for d in (OUT, "other"))
    assert not np.array_equal(usual, other)


def test_statistics_say_what_was_run(reader: Reader) -> None:
    stats = reader.json("layer_outputs/mode_0_stats.json")
    assert stats["model"] == "quamba-130m-w8a8"
    assert stats["weights"] == "seeded random weights (seed 0)"
    assert (stats["samples"], stats["seq_len"], stats["tiny"]) == (2, 16, True)
    told = stats["fused_minus_plain"]
    assert len(told["layers"]) == 24
    worst = max(row["max_abs"] for row in told["layers"])
    assert 0 < worst < 1e-2, "two ways to write one scan"
    assert "fused_minus_plain" not in reader.json("layer_outputs/mode_2-1_stats.json")
    told = reader.type("./compare_all_modes.sh").out
    assert "Fused path minus plain PyTorch, on the same operands: at most" in told
    assert re.search(r"Mode 0 \(fused\) minus mode 2-1 \(plain PyTorch\): backbone.layers.0 ", told)


def test_which_modes_are_the_same_bits(reader: Reader) -> None:
    folder = reader.folder / "bits"
    shutil.copytree(reader.folder / "layer_outputs", folder)
    for layer in (0, 23):
        for mode, source in (("2-0", "0"), ("2-3", "fp32")):
            array = np.load(folder / f"mode_{source}_layer_{layer}.npy")
            np.save(folder / f"mode_{mode}_layer_{layer}.npy", array)
    flipped = np.load(folder / "mode_2-3_layer_23.npy")
    flipped[0, 0, 0] = np.nextafter(flipped[0, 0, 0], np.float32(9))
    np.save(folder / "mode_2-3_layer_23.npy", flipped)
    ran = reader.type("python3 compare_with_fp.py 0 2-0 2-3 --output_dir bits")
    assert "The same bits at every saved layer: 0 = 2-0.\n" in ran.out


def test_files_of_others_are_compared(reader: Reader) -> None:
    """Without statistics, under a mode of their own: the arrays are all there is."""
    folder = reader.folder / "layer_outputs"
    for layer in (0, 23):
        array = np.load(folder / f"mode_fp32_layer_{layer}.npy")
        np.save(folder / f"mode_mine_layer_{layer}.npy", array * np.float32(1.01))
    ran = reader.type("./comparewithfp mine && touch went_on")
    assert ran.code == 0, ran.err
    assert (reader.folder / "went_on").exists()
    assert re.findall(r"^Layer (\d+) - ", ran.out, re.MULTILINE) == ["0", "23"]
    saved = reader.json("comparisons/mode_mine_vs_fp32.json")
    assert (saved["mode"], saved["reference"]) == ("mine", "fp32")
    for row, layer in zip(saved["layers"], (0, 23), strict=True):
        array = np.load(folder / f"mode_fp32_layer_{layer}.npy").astype(float)
        assert row["mse"] == pytest.approx((0.01**2) * (array**2).mean(), rel=1e-3)
    for path in folder.glob("mode_mine_*"):
        path.unlink()


def test_within_the_documents_limits(reader: Reader) -> None:
    folder = reader.folder / "limits"
    folder.mkdir()
    array = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
    np.save(folder / "mode_fp32_layer_0.npy", array)
    np.save(folder / "mode_a_layer_0.npy", array * np.float32(1.001))
    assert "diverged" in reader.type("./comparewithfp a --output_dir limits").out
    ran = reader.type("./comparewithfp a --output_dir limits --preset documents")
    assert ran.code == 0 and "diverged" not in ran.out
    np.save(folder / "mode_a_layer_0.npy", array)
    ran = reader.type("./comparewithfp a --output_dir limits")
    assert ran.code == 0 and "Verdict: identical" in ran.out


def test_other_samples_are_no_comparison(reader: Reader) -> None:
    reader.type("./save_all_modes.sh 2-4 --calib_data_num 3 --calib_seqlen 16")
    ran = reader.type("./comparewithfp 2-4")
    assert ran.code == 2
    assert "mode_2-4_layer_0.npy holds [3, 16, " in ran.err
    assert "Save mode 2-4 again: python3 save_layer_outputs.py quamba-130m-w8a8" in ran.err
    assert f"--mode 2-4 --quantize --output_dir layer_outputs {SIZES}" in ran.err
    table = reader.type("./compare_all_modes.sh")
    assert table.code == 2 and "\n2-1 " in table.out and "\n2-4 " not in table.out
    for path in (reader.folder / "layer_outputs").glob("mode_2-4_*"):
        path.unlink()


def test_weights_of_a_checkpoint(reader: Reader) -> None:
    """Also under the documents' default name, when the folder is there."""
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 3}
    model = MambaForCausalLM(MambaConfig(**sizes))
    model.save_pretrained(reader.folder / "mine")
    ran = reader.type(
        f"./save_all_modes.sh fp32 0 {SIZES} --pretrained_dir mine --output_dir from_mine"
    )
    assert ran.code == 0, ran.err
    assert "random weights" not in ran.err and "Loading weights" not in ran.err
    assert reader.json("from_mine/mode_0_stats.json")["weights"] == "mine"
    assert ran.arrays["from_mine/mode_0_layer_2.npy"] == (2, 16, 32)
    with torch.no_grad():
        model.backbone.layers[0].mixer.out_proj.weight[1] = torch.nan
    model.save_pretrained(reader.folder / "sick")
    ran = reader.type(f"./save_all_modes.sh fp32 0 {SIZES} --pretrained_dir sick --output_dir sick")
    assert ran.code == 2 and "Mode fp32: layer 0 holds 32 NaN and 0 infinite of 1024" in ran.err
    assert "Mode 0 failed: The float model has NaN or infinities at the input of in_pr" in ran.err
    ran = reader.type("./capture_first_layer.sh fp32 --seq_len 16 --pretrained_dir sick")
    assert "  Not finite, and left out above: 16 NaN and 0 infinite of 512\n" in ran.out
    default = "pretrained_models/Quamba1-pa9999/pa-0.9999"
    shutil.copytree(reader.folder / "mine", reader.folder / default)
    ran = reader.type("./capture_first_layer.sh fp32 --seq_len 16 --output_file trained.npz")
    assert ran.code == 0 and "random weights" not in ran.err
    assert reader.json("trained_stats.json")["weights"] == default
    shutil.rmtree(reader.folder / "pretrained_models")


def test_an_input_that_differs_is_told(reader: Reader) -> None:
    ran = reader.type("./capture_first_layer.sh fp32 2-1 fp16 --seq_len 16 --output_file half.npz")
    assert ran.code == 0, ran.err
    assert "not the same bits as in mode fp32: fp16." in ran.out


def test_a_clone_in_which_nothing_is_installed(reader: Reader, tmp_path: Path) -> None:
    """A real process, in another folder, that has to find the source tree by itself."""
    shutil.copytree(reader.folder / "layer_outputs", tmp_path / "layer_outputs")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [RECIPE / "comparewithfp", "0"],
        cwd=tmp_path,
        env={**environment, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Layer 23 - Comparison Results" in done.stdout
    saved = json.loads((tmp_path / "comparisons" / "mode_0_vs_fp32.json").read_text())
    assert saved["layers"][1]["layer"] == "backbone.layers.23"
