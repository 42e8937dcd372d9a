"""`hf:DIR` on tiny checkpoints that are saved here."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensortap.errors import MissingExtraError, OptionError, TargetError
from tensortap.targets import load_target

transformers = pytest.importorskip("transformers")

WORDS = ["[UNK]", "the", "cat", "sat", "on", "mat"]
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 6,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],  # Llama takes two
    )
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def llama_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).train().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def llama(llama_source: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(llama_source, tmp_path / "checkpoint"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []

    def refuse(*args: object, **_: object) -> None:
        calls.append(args)
        raise OSError("a test reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return calls


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class TestLoading:
    def test_prompts_are_one_batch_each(self, llama_source: Path, no_network: list[object]) -> None:
        prompts = ["the cat sat", "the mat"]
        target = load_target(f"hf:{llama_source}", {}, prompts=prompts)
        assert type(target.model).__name__ == "LlamaForCausalLM"
        assert not target.model.training
        assert [b.kwargs["input_ids"].tolist() for b in target.batches] == [[[1, 2, 3]], [[1, 5]]]
        assert set(target.batches[0].kwargs) == {"input_ids", "attention_mask"}
        assert target.prompt == prompts
        assert target.config is not None and target.config["hidden_size"] == 16
        json.dumps(target.config)
        with torch.no_grad():
            assert target(target.batches[0]).logits.shape == (1, 3, 6)
        assert no_network == []

    def test_inputs_from_a_file(self, llama_source: Path, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        ids, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 1, 0]])
        path = tmp_path / "in.safetensors"
        save_file({"input_ids": ids, "attention_mask": mask}, path)
        target = load_target(f"hf:{llama_source}", {}, inputs_from=[path])
        assert torch.equal(target.batches[0].kwargs["attention_mask"], mask)
        assert target(target.batches[0]).logits.shape == (1, 3, 6)
        save_file({"input_ids": ids + 5}, path)
        with pytest.raises(OptionError, match="has the id 6"):
            load_target(f"hf:{llama_source}", {}, inputs_from=[path])
        save_file({"input_idz": ids}, path)
        with pytest.raises(OptionError, match="'input_idz' is unknown") as caught:
            load_target(f"hf:{llama_source}", {}, inputs_from=[path])
        assert "did you mean 'input_ids'" in str(caught.value)

    def test_no_bar_for_every_mode(
        self, llama_source: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        shown = transformers.utils.logging.is_progress_bar_enabled()
        capfd.readouterr()
        load_target(f"hf:{llama_source}", {"mode": "bf16"}, prompts=["cat"])
        assert "%|" not in capfd.readouterr().err
        assert transformers.utils.logging.is_progress_bar_enabled() == shown

    def test_the_weights_are_those_of_the_file(self, llama_source: Path) -> None:
        from safetensors.torch import load_file

        target = load_target(f"hf:{llama_source}", {}, prompts=["cat"])
        stored = load_file(llama_source / "model.safetensors")
        state = target.model.state_dict()
        assert stored and all(torch.equal(state[name], value) for name, value in stored.items())
        assert target.notes == ()

    @pytest.mark.parametrize(
        ("options", "dtype"),
        [
            ({}, torch.float32),
            ({"dtype": "bf16"}, torch.bfloat16),
            ({"mode": "fp16"}, torch.float16),
        ],
    )
    def test_dtype(self, llama_source: Path, options: Any, dtype: torch.dtype) -> None:
        target = load_target(f"hf:{llama_source}", options, prompts=["cat"])
        assert {p.dtype for p in target.model.parameters()} == {dtype}
        assert target.mode == options.get("mode")

    def test_seq_len_cuts(self, llama_source: Path) -> None:
        target = load_target(f"hf:{llama_source}", {"seq_len": 2}, prompts=["the cat sat on"])
        assert target.batches[0].kwargs["input_ids"].tolist() == [[1, 2]]

    def test_no_architecture_is_automodel(self, llama: Path) -> None:
        edit_config(llama, architectures=None)
        target = load_target(f"hf:{llama}", {}, prompts=["cat"])
        assert type(target.model).__name__ == "LlamaModel"

    def test_encoder_and_decoder(self, tmp_path: Path) -> None:
        config = transformers.T5Config(
            d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=6,
            decoder_start_token_id=0,
        )  # fmt: skip
        transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
        ids = tmp_path / "ids.json"
        ids.write_text("[[1, 2, 3], [3, 2, 1]]")
        target = load_target(f"hf:{tmp_path}", {}, input_ids=ids)
        with torch.no_grad():
            assert target(target.batches[0]).logits.shape == (2, 1, 6)

    def test_weights_that_are_missing_are_noted(self, llama: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(llama / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
        target = load_target(f"hf:{llama}", {"seed": 1}, prompts=["cat"])
        assert "model.norm.weight" in target.notes[0]


class TestInputIds:
    @pytest.mark.parametrize(
        ("name", "text", "expected"),
        [
            ("ids.json", "[1, 2, 3]", [[1, 2, 3]]),
            ("ids.json", "[[1, 2], [3, 4]]", [[1, 2], [3, 4]]),
            ("ids.txt", "1 2 3\n", [[1, 2, 3]]),
            ("ids.txt", "1, 2\n3, 4\n\n", [[1, 2], [3, 4]]),
        ],
    )
    def test_files(
        self, llama_source: Path, tmp_path: Path, name: str, text: str, expected: list[list[int]]
    ) -> None:
        (tmp_path / name).write_text(text)
        target = load_target(f"hf:{llama_source}", {}, input_ids=tmp_path / name)
        assert target.batches[0].kwargs["input_ids"].tolist() == expected
        assert target.prompt is None

    def test_npy(self, llama_source: Path, tmp_path: Path) -> None:
        np.save(tmp_path / "ids.npy", np.array([[1, 2], [3, 4]], dtype=np.int32))
        target = load_target(f"hf:{llama_source}", {"seq_len": 1}, input_ids=tmp_path / "ids.npy")
        ids = target.batches[0].kwargs["input_ids"]
        assert ids.tolist() == [[1], [3]] and ids.dtype == torch.int64

    @pytest.mark.parametrize(
        ("name", "text", "words"),
        [
            ("ids.json", "[1, 6]", ["the id 6", "position 1", "0 to 5"]),
            ("ids.json", "[[1], [-1]]", ["the id -1", "row 1"]),
            ("ids.json", "[[1, 2], [3]]", ["rows of 1 to 2"]),
            ("ids.json", "[1.5]", ["1.5"]),
            ("ids.json", "[true]", ["True"]),
            ("ids.json", "{}", ["dict"]),
            ("ids.json", "[]", ["empty"]),
            ("ids.json", "[1", ["cannot be read"]),
            ("ids.json", "[[[1]]]", ["[1]"]),
            ("ids.json", f"[{2**70}]", [str(2**70)]),
            ("ids.txt", "the cat", ["cannot be read"]),
            ("ids.txt", "", ["empty"]),
            ("ids.npy", "no array", ["cannot be read"]),
        ],
    )
    def test_rubbish_is_told(
        self, llama_source: Path, tmp_path: Path, name: str, text: str, words: list[str]
    ) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(OptionError) as caught:
            load_target(f"hf:{llama_source}", {}, input_ids=tmp_path / name)
        for word in words:
            assert word in str(caught.value)

    def test_a_pickled_array_is_not_loaded(self, llama_source: Path, tmp_path: Path) -> None:
        np.save(tmp_path / "ids.npy", np.array([{}], dtype=object), allow_pickle=True)
        with pytest.raises(OptionError, match="cannot be read"):
            load_target(f"hf:{llama_source}", {}, input_ids=tmp_path / "ids.npy")

    def test_no_file(self, llama_source: Path, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="does not exist"):
            load_target(f"hf:{llama_source}", {}, input_ids=tmp_path / "ids.json")


class TestSentences:
    def fails(self, folder: Path, *words: str, **options: Any) -> None:
        with pytest.raises(TargetError) as caught:
            load_target(f"hf:{folder}", options, prompts=["the cat"])
        assert "\n" not in str(caught.value)
        for word in words:
            assert word in str(caught.value)

    def test_no_folder(self, tmp_path: Path) -> None:
        self.fails(tmp_path / "nowhere", "does not exist", "downloads")

    def test_no_config(self, llama: Path) -> None:
        (llama / "config.json").unlink()
        self.fails(llama, "config.json")

    def test_damaged_config(self, llama: Path) -> None:
        (llama / "config.json").write_text("{")
        self.fails(llama, "config.json")

    def test_unknown_model_type(self, llama: Path) -> None:
        edit_config(llama, model_type="from_the_future")
        self.fails(llama, "from_the_future")

    @pytest.mark.parametrize("name", ["NoSuchModelForCausalLM", "AutoModel", "LlamaConfig"])
    def test_unknown_architecture(self, llama: Path, name: str) -> None:
        edit_config(llama, architectures=[name])
        self.fails(llama, f"{name!r}", "not part of transformers")

    def test_no_weights(self, llama: Path) -> None:
        (llama / "model.safetensors").unlink()
        self.fails(llama, "no weights", "model.safetensors")

    def test_pickled_weights_are_not_loaded(self, llama: Path) -> None:
        (llama / "model.safetensors").unlink()
        torch.save({}, llama / "pytorch_model.bin")
        self.fails(llama, "pytorch_model.bin", "pickle")

    def test_a_missing_shard(self, llama: Path) -> None:
        (llama / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
        (llama / "model.safetensors.index.json").write_text(json.dumps(index))
        self.fails(llama, "model-00001-of-00001.safetensors", "1 of 1")

    def test_truncated_weights(self, llama: Path) -> None:
        path = llama / "model.safetensors"
        path.write_bytes(path.read_bytes()[:100])
        self.fails(llama, "cannot be loaded")

    def test_weights_of_another_size(self, llama: Path) -> None:
        edit_config(llama, intermediate_size=64)
        self.fails(llama, "cannot be loaded")

    def test_no_tokenizer(self, llama: Path) -> None:
        for path in llama.glob("tokenizer*"):
            path.unlink()
        self.fails(llama, "no tokenizer", "--input-ids")

    def test_code_in_the_folder_is_not_run(self, llama: Path) -> None:
        ran = llama / "ran"  # by its full path: transformers runs a copy elsewhere
        (llama / "modeling_evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
        edit_config(
            llama,
            model_type="evil",
            auto_map={"AutoConfig": "modeling_evil.C", "AutoModel": "modeling_evil.M"},
        )
        self.fails(llama, "not run")
        assert not ran.exists()

    def test_a_model_that_takes_no_tokens(self, tmp_path: Path) -> None:
        sizes = {k: v for k, v in SIZES.items() if k.startswith(("hidden", "inter", "num"))}
        config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
        transformers.ViTModel(config).save_pretrained(tmp_path)
        save_tokenizer(tmp_path)
        self.fails(tmp_path, "'pixel_values'", "target function")

    def test_transformers_missing(
        self, llama_source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingExtraError, match=r"tensortap\[hf\]"):
            load_target(f"hf:{llama_source}", {}, prompts=["cat"])

    @pytest.mark.parametrize(
        ("options", "inputs", "words"),
        [
            ({}, {}, "Give --prompt TEXT, --input-ids FILE, or --inputs-from FILE"),
            ({}, {"prompts": ["a"], "input_ids": "b"}, "both given"),
            ({}, {"prompts": ["a"], "inputs_from": ["b"]}, "--prompt and --inputs-from are both"),
            ({"seq_len": 2}, {"inputs_from": ["b"]}, "--seq-len cuts"),
            ({"samples": 3}, {"prompts": ["a"]}, "does not take 'samples'"),
            ({"dtype": "int3"}, {"prompts": ["a"]}, "no dtype"),
            ({"device": "abacus"}, {"prompts": ["a"]}, "device 'abacus'"),
            ({"seq_len": 0}, {"prompts": ["a"]}, "seq_len"),
            ({}, {"prompts": [""]}, "no tokens"),
        ],
    )
    def test_options(self, llama_source: Path, options: Any, inputs: Any, words: str) -> None:
        with pytest.raises(OptionError, match=words):
            load_target(f"hf:{llama_source}", options, **inputs)


def test_generate_records_what_it_writes(llama: Path, tmp_path: Path) -> None:
    from tensortap.targets.running import Settings, record_target

    target = load_target(f"hf:{llama}", {"generate": 4}, prompts=["the cat", "sat on the mat"])
    plain = target(target.batches[1])
    assert plain.shape[1] <= 8
    run, _ = record_target(target, str(tmp_path / "run"), Settings(), lambda done, total: None)
    first, second = run.manifest.generations
    assert (first["batch"], second["batch"]) == (0, 1)
    assert first["steps"] == len(first["tokens"][0]) <= 4
    assert second["tokens"] == plain[:, second["prompt_length"] :].tolist()
    words = [WORDS[token] for token in second["tokens"][0]]
    assert second["pieces"] == [words] and second["text"] == [" ".join(words)]


def test_generate_can_sample_with_a_seed(llama: Path) -> None:
    options = {"generate": 4, "seed": 3}
    texts = []
    for _ in range(2):
        target = load_target(f"hf:{llama}", options, ["do_sample=true"], prompts=["the cat"])
        torch.manual_seed(3)
        texts.append(target(target.batches[0]))
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("options", "sets", "words"),
    [
        ({"generate": 0}, (), "generate is '0', expected a whole number from 1"),
        ({"generate": 2}, ("do_sample=perhaps",), "do_sample is 'perhaps', expected true or false"),
        ({}, ("do_sample=true",), "Say how many: --generate N"),
    ],
)
def test_generate_refuses_what_it_cannot_do(
    llama: Path, options: dict[str, Any], sets: tuple[str, ...], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        load_target(f"hf:{llama}", options, sets, prompts=["the cat"])


def test_a_model_without_a_head_cannot_generate(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.LlamaModel(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(TargetError, match="no head that writes tokens"):
        load_target(f"hf:{tmp_path}", {"generate": 2}, prompts=["the cat"])
