"""recipes/minimax_m2 beyond the document: other prompts, checkpoints, bad trees, bad words."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from minimax_reader import RECIPE, ROOT, Reader, bare_python
from warm_python import WarmPython

pytest.importorskip("transformers")

HERE = "import sys; sys.path.insert(0, '.')\n"


@pytest.fixture
def fresh(tmp_path: Path, warm: WarmPython) -> Reader:
    """A copy of the recipe in which nothing was compiled."""
    return Reader(tmp_path / "fresh", warm)


@pytest.fixture
def planted(minimax: Reader, tmp_path: Path) -> Path:
    """The compiled model's tree with a NaN in layer 12 and a jump at layer 40."""
    tree = tmp_path / "planted"
    shutil.copytree(minimax.compiled, tree)
    bad = torch.load(tree / "layer_12_output.pt")
    bad[0, 3, 5] = torch.nan
    torch.save(bad, tree / "layer_12_output.pt")
    torch.save(torch.load(tree / "layer_40_output.pt") + 25, tree / "layer_40_output.pt")
    return tree


# The compiled model.


def test_the_compiled_model_routes_another_prompt_as_eager_does(minimax: Reader) -> None:
    asked = "--prompt 'zzz 完全不同的提示 !?' --output-dir"
    ran = minimax.type(
        f"python test_layer_by_layer.py --skip-compile {asked} other/compiled\n"
        f"python test_layer_by_layer_gpu.py {asked} other/eager\n"
        "python compare_gpu_neuron_outputs.py --gpu-path other/eager --neuron-path other/compiled "
        "--layer-pattern '*' --report-path other/reports"
    )
    assert ran.code == 0, ran.err
    assert "Identical: all 64 compared layers have the same bits." in ran.out
    assert "Running on the CPU" in ran.err or torch.cuda.is_available()
    assert "The prompt has 28 tokens (a token a byte): padded to 128" in ran.err
    other = minimax.folder / "other"
    assert (other / "compiled_recording" / "recording.json").exists()
    last = [torch.load(tree / "layer_61_output.pt") for tree in (minimax.gpu, other / "eager")]
    assert not torch.allclose(*last, atol=0.1)


BAKED = """
import torch
from minimax import compiled, model
from tensortap import Target
from tensortap.errors import TargetError
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM
from dataclasses import asdict
from pathlib import Path

torch.manual_seed(0)
config = MiniMaxM2Config(**asdict(model.TINY), vocab_size=259, num_hidden_layers=2, use_cache=False,
                         experts_implementation="eager", initializer_range=0.1)
made = MiniMaxM2ForCausalLM(config).eval()
wanted = model.chosen(tiny=True, seq_len=16)
keep, compiled._keep_the_choice = compiled._keep_the_choice, lambda model: None
for prompt in (torch.full((1, 16), 7), torch.arange(16)[None], torch.arange(16)[None]):
    try:
        target = Target(made, {"input_ids": prompt}, config={})
        print(compiled.compile_model(wanted, target, Path("traced")).layers)
    except TargetError as error:
        print(error)
        if "repeated" in str(error):
            compiled._keep_the_choice = keep
    print(Path("traced/minimax_m2.json").exists())
"""


def test_a_trace_that_holds_one_prompts_experts_is_refused(fresh: Reader) -> None:
    ran = fresh.python(HERE + BAKED)
    assert ran.code == 0, ran.err
    few, kept, many, kept_too, proven, there = ran.out.splitlines()
    assert "not compute what the eager one does: on a prompt of random tokens it fails" in few
    assert "not compute what the eager one does: on one token repeated it fails" in many
    assert "depends on its input in a way that a trace cannot hold" in many
    assert kept == kept_too == "False"
    assert "model.layers.1" in proven and there == "True"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "test_layer_by_layer.py --test-type attention",
            "invalid choice: 'attention' (choose from",
        ),
        ("test_layer_by_layer_gpu.py --test-type full", "invalid choice: 'full' (choose from"),
        (
            "test_layer_by_layer.py --skip-compile --seq-len 33",
            "takes sequences of 128 tokens, and --seq-len is 33. Run the command once without "
            "--skip-compile.",
        ),
        (
            "test_layer_by_layer.py --skip-compile --seed 5",
            "seeded random weights (seed 0, hidden 32), and not seeded random weights (seed 5, "
            "hidden 32). Run the command once without --skip-compile.",
        ),
        ("test_layer_by_layer.py --seq-len 0", "'0' is no whole number from 1"),
        ("test_layer_by_layer.py --prompt ''", "--prompt is empty"),
        ("test_layer_by_layer.py --model-path nowhere", "--model-path is 'nowhere', which is no"),
        ("test_layer_by_layer.py --model-path minimax", "has no config.json"),
        ("test_layer_by_layer_gpu.py --device tpu9", "'tpu9' cannot be used here"),
        ("test_layer_by_layer.py --skip-compile --output-dir target.py", "a file. Give a folder"),
        (
            "compare_gpu_neuron_outputs.py --gpu-path nowhere",
            "--gpu-path is 'nowhere', which is no",
        ),
        (
            "compare_gpu_neuron_outputs.py --layer-pattern 'block_*'",
            "is called 'block_*'. It holds",
        ),
        ("compare_gpu_neuron_outputs.py --report-path target.py", "a file. Give a folder"),
        ("compare_gpu_neuron_outputs.py --neuron-path minimax", "no file *_output.pt"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(minimax: Reader, words: str, said: str) -> None:
    ran = minimax.type(f"python {words}")
    assert ran.code == 2, ran.err
    assert said in ran.err
    assert "Traceback" not in ran.err and not ran.out


def test_there_must_be_something_compiled_and_it_must_be_whole(
    minimax: Reader, fresh: Reader
) -> None:
    skip = "python test_layer_by_layer.py --skip-compile"
    again = "Run the command once without --skip-compile."
    ran = fresh.type(skip)
    assert ran.code == 2 and "There is no compiled model in" in ran.err and again in ran.err
    traced = fresh.folder / "traced_model"
    traced.mkdir()
    for file in minimax.compiled.parents[1].glob("minimax_m2.*"):
        shutil.copy(file, traced)
    model = traced / "minimax_m2.pt"
    model.write_bytes(model.read_bytes()[:-1000])
    ran = fresh.type(skip)
    assert ran.code == 2 and "is another file than the one its manifest is of" in ran.err
    (traced / "minimax_m2.json").write_text("{}")
    ran = fresh.type(skip)
    assert ran.code == 2 and "is damaged" in ran.err and again in ran.err


def test_other_settings_and_other_versions_need_another_compiled_model(
    minimax: Reader, fresh: Reader
) -> None:
    skip = "python test_layer_by_layer.py --skip-compile"
    traced = fresh.folder / "traced_model"
    traced.mkdir()
    for file in minimax.compiled.parents[1].glob("minimax_m2.*"):
        shutil.copy(file, traced)
    about = traced / "minimax_m2.json"
    known = json.loads(about.read_text())
    known["made_for"]["versions"]["torch"] = "1.0"
    about.write_text(json.dumps(known))
    ran = fresh.type(skip)
    assert ran.code == 2 and "was made with torch 1.0 and transformers" in ran.err, ran.err
    source = fresh.folder / "minimax" / "model.py"
    text = source.read_text()
    assert '"initializer_range": 0.1' in text
    source.write_text(text.replace('"initializer_range": 0.1', '"initializer_range": 0.2'))
    ran = fresh.type(skip)
    assert ran.code == 2, ran.err
    assert "another model: seeded random weights (seed 0, hidden 32) with other set" in ran.err
    assert "Run the command once without --skip-compile." in ran.err


# Checkpoints.

CHECKPOINT = """
import torch
from dataclasses import asdict
from minimax import model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(3)
config = MiniMaxM2Config(**asdict(model.TINY), vocab_size=50, num_hidden_layers=3)
MiniMaxM2ForCausalLM(config).save_pretrained("checkpoint")
words = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 7, "world": 9}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained("checkpoint")
dense = LlamaConfig(vocab_size=259, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                    num_attention_heads=2)
LlamaForCausalLM(dense).to(torch.bfloat16).save_pretrained("dense")
"""


def test_a_checkpoint_of_ones_own(fresh: Reader) -> None:
    made = fresh.python(HERE + CHECKPOINT)
    assert made.code == 0, made.err
    asked = "--model-path checkpoint --prompt 'hello big world' --seq-len 5"
    ran = fresh.type(
        f"python test_layer_by_layer.py {asked}\n"
        f"python test_layer_by_layer.py {asked} --skip-compile\n"
        f"python test_layer_by_layer_gpu.py {asked}\n"
        "python compare_gpu_neuron_outputs.py"
    )
    assert ran.code == 0, ran.err
    assert "Identical: all 3 compared layers have the same bits." in ran.out
    tree = fresh.folder / "traced_model" / "test_layers" / "full_model"
    assert sorted(path.name for path in tree.iterdir()) == [
        "embedding_output.pt",
        "final_norm_output.pt",
        *(f"layer_{index}_output.pt" for index in range(3)),
        "metadata.pt",
    ]
    metadata = torch.load(tree / "metadata.pt")
    assert metadata["input_ids"].tolist() == [[7, 0, 9, 0, 0]]
    assert metadata["prompt"] == "hello big world"
    assert metadata["config"]["num_hidden_layers"] == 3
    # Another checkpoint is another model, also of the same size and time, and a token that is not
    # in its vocabulary a sentence.
    weights = fresh.folder / "checkpoint" / "model.safetensors"
    about, data = weights.stat(), bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))
    ran = fresh.type(f"python test_layer_by_layer.py {asked} --skip-compile")
    assert ran.code == 2 and "was made of another model" in ran.err
    for file in (fresh.folder / "checkpoint").glob("tokenizer*"):
        file.unlink()
    ran = fresh.type(f"python test_layer_by_layer_gpu.py {asked}")
    assert ran.code == 2 and "vocabulary ends at 49" in ran.err
    # A pickle is not loaded.
    weights.rename(weights.with_name("pytorch_model.bin"))
    ran = fresh.type("python test_layer_by_layer_gpu.py --model-path checkpoint --prompt '\x01'")
    assert ran.code == 2 and "a pickle" in ran.err and "Traceback" not in ran.err
    # Any architecture will do, in the dtype it was saved in.
    ran = fresh.type("python test_layer_by_layer.py --model-path dense --output-dir dense/out")
    assert ran.code == 0, ran.err
    assert torch.load(fresh.folder / "dense" / "out" / "layer_1_output.pt").dtype == torch.bfloat16


def test_experts_go_one_by_one_where_groups_cannot_be_multiplied(minimax: Reader) -> None:
    asked = (
        "print([can_group(d, t) for d in ('cpu', 'meta') for t in (torch.float32, torch.bfloat16)])"
    )
    ran = minimax.python(f"{HERE}import torch\nfrom minimax.model import can_group\n{asked}")
    assert ran.out == "[True, True, False, True]\n", ran.err  # meta shapes are CUDA's


def test_our_own_prompt_is_as_long_as_is_asked_for(minimax: Reader) -> None:
    asked = (
        "from minimax.model import chosen, tokens\n"
        "for length in (1, 128, 400):\n"
        "    made = tokens(chosen(seq_len=length), None)\n"
        "    read = bytes((made.ids[0] - 3).tolist()).decode()\n"
        "    print(list(made.ids.shape), read == made.prompt, made.note)"
    )
    ran = minimax.python(HERE + asked)
    assert ran.out == "[1, 1] True None\n[1, 128] True None\n[1, 400] True None\n", ran.err


def test_the_built_in_model_takes_one_core_alone(minimax: Reader) -> None:
    asked = (
        "import dataclasses, pathlib, torch\n"
        "from minimax.model import chosen, share_the_machine\n"
        "torch.set_num_threads(2)\n"
        "for found in (pathlib.Path('checkpoint'), None):\n"
        "    share_the_machine(dataclasses.replace(chosen(), checkpoint=found))\n"
        "    print(torch.get_num_threads())"
    )
    ran = minimax.python(HERE + asked)
    assert ran.out == "2\n1\n", ran.err


# Comparing.


def test_bad_layers_are_rows_and_the_first_is_named(
    minimax: Reader, planted: Path, tmp_path: Path
) -> None:
    (planted / "metadata.pt").unlink()  # somebody else's tree: tensors alone
    (planted / "layer_50_output.pt").unlink()
    torch.save(torch.ones(2, 3), planted / "layer_51_output.pt")
    torch.save(torch.ones(2, 3), planted / "layer_99_output.pt")
    reports = tmp_path / "reports"
    ran = minimax.type(
        f"python compare_gpu_neuron_outputs.py --gpu-path {minimax.gpu} --neuron-path {planted} "
        f"--report-path {reports}"
    )
    assert ran.code == 0, ran.err
    rows = {line.split()[0]: line for line in ran.out.splitlines() if line.startswith("layer_")}
    assert len(rows) == 63
    assert rows["layer_0"].endswith("identical")
    assert "diverged: 1 of 4096 pairs disagree about NaN or Inf" in rows["layer_12"]
    assert "25.000000" in rows["layer_40"] and "max_abs < 0.01 does not hold" in rows["layer_40"]
    assert "missing in the candidate" in rows["layer_50"]
    assert "The shapes do not fit" in rows["layer_51"]
    assert "missing in the reference" in rows["layer_99"]
    assert rows["layer_12"].split()[1:7] == ["undefined"] * 6
    assert "First divergence: layer_12\n绝对差异:\n  Max: undefined\n" in ran.out
    assert "\n良好范围：\n- Max abs diff < 0.01\n" in ran.out
    told = json.loads((reports / "comparison.json").read_text())
    assert told["same"] is False and told["first_divergence"]["layer"] == "model.layers.12"
    assert (reports / "comparison.txt").read_text() == ran.out
    assert "<html" in (reports / "comparison.html").read_text()


def test_a_layer_that_one_tree_alone_has_is_a_difference(minimax: Reader, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(minimax.compiled, tree)
    (tree / "layer_0_output.pt").unlink()
    ran = minimax.type(f"python compare_gpu_neuron_outputs.py --neuron-path {tree}")
    assert ran.code == 0, ran.err
    assert "Identical: all 61 compared layers have the same bits. 1 layer is missing" in ran.out
    assert ran.out.endswith("\nThe trees differ: only one of them has all of layer_0.\n")


def test_layers_pair_by_the_numbers_of_their_files(minimax: Reader, tmp_path: Path) -> None:
    shutil.copy(minimax.gpu / "layer_2_output.pt", tmp_path / "layer_9_output.pt")
    ran = minimax.type(f"python compare_gpu_neuron_outputs.py --neuron-path {tmp_path}")
    assert ran.code == 0, ran.err
    rows = {line.split()[0]: line for line in ran.out.splitlines() if line.startswith("layer_")}
    assert len(rows) == 62 and "diverged" in rows.pop("layer_9")
    assert all("missing in the candidate" in row for row in rows.values())
    assert ran.out.endswith("only one of them has all of layer_0 and 60 more.\n")


def test_another_batch_size_is_a_difference(minimax: Reader, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("layer_0_output.pt", "layer_1_output.pt"):
        torch.save(torch.load(minimax.gpu / name).repeat(2, 1, 1), tree / name)
    ran = minimax.type(
        f"python compare_gpu_neuron_outputs.py --neuron-path {tree} --layer-pattern 'layer_[01]'"
    )
    assert ran.code == 0, ran.out
    assert "only one of them has all of layer_0 and 1 more.\n" in ran.out


def test_other_token_ids_are_said(minimax: Reader, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(minimax.gpu, tree)
    metadata = torch.load(tree / "metadata.pt")
    torch.save({**metadata, "input_ids": metadata["input_ids"] + 1}, tree / "metadata.pt")
    ran = minimax.type(f"python compare_gpu_neuron_outputs.py --gpu-path {tree}")
    assert ran.code == 0 and "warning: The two trees were made from other token ids" in ran.err


class Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("open('harm', 'w')",)


def test_code_in_a_tree_is_not_run(minimax: Reader, planted: Path) -> None:
    torch.save(Harm(), planted / "layer_1_output.pt")
    ran = minimax.type(f"python compare_gpu_neuron_outputs.py --neuron-path {planted}")
    assert ran.code == 2 and "holds Python code; tensortap never runs code" in ran.err
    assert not (minimax.folder / "harm").exists()


# The document's questions.


def test_the_questions_are_answered_by_check_show_and_plot(
    minimax: Reader, planted: Path, tmp_path: Path
) -> None:
    healthy = minimax.compiled.parent / "recording"
    ran = minimax.tensortap(f"check {healthy} --strict")
    assert ran.code == 0 and "64 layers: healthy" in ran.out
    run = tmp_path / "run"
    assert minimax.tensortap(f"import {planted} -o {run}").code == 0
    ran = minimax.tensortap(f"check {run} --json")
    assert ran.code == 1
    found = {(item["layer"], item["kind"]) for item in json.loads(ran.out)["findings"]}
    assert found == {
        ("model.layers.12", "nan"),
        ("model.layers.40", "exploding"),
        ("model.layers.40", "jump"),
        ("model.layers.41", "jump"),
    }
    ran = minimax.tensortap(f"check {run} --json --max-mean 30 --max-jump 30")
    assert [item["kind"] for item in json.loads(ran.out)["findings"]] == ["nan"]
    ran = minimax.tensortap(f"show {run} layer_40")
    assert "MEAN ABSOLUTE CHANGE" in ran.out and "(model.layers.39): 2" in ran.out
    picture = tmp_path / "layer_30.png"
    for place in (f"{healthy} model.layers.30", f"{run} layer_30"):
        assert minimax.tensortap(f"plot {place} -o {picture}").code == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()


def test_the_model_is_a_target_too(minimax: Reader, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ran = minimax.tensortap(f"record target.py:build -o {run} --layers last")
    assert ran.code == 0, ran.err
    ran = minimax.tensortap(
        f"compare {minimax.compiled.parent / 'recording'} {run} model.layers.61"
    )
    assert ran.code == 0 and "identical" in ran.out


# The folder.


def test_a_clone_needs_no_install(tmp_path: Path) -> None:
    ran = bare_python([str(RECIPE / "compare_gpu_neuron_outputs.py"), "--gpu-path", "x"], tmp_path)
    assert ran.code == 2
    assert ran.err.startswith("tensortap: --gpu-path is 'x', which is no folder.")


def test_an_error_of_ours_is_no_difference(fresh: Reader) -> None:
    ran = fresh.python(f"{HERE}from minimax.command import leave\nleave(lambda: 1 // 0)")
    assert ran.code == 2 and "ZeroDivisionError" in ran.err


def test_pytest_does_not_take_the_scripts_for_tests() -> None:
    assert 'testpaths = ["tests"]' in (ROOT / "pyproject.toml").read_text()
