"""Two runs that write text: where they part, and why."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tensortap as tap
from tensortap.comparing.generation import GenerationComparison
from tensortap.reporting.comparisons import comparison_text

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "eos_token_id": 2,
    "initializer_range": 0.12,
}
STEPS = 24
KINDS = ("llama", "gpt2", "t5")


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    torch.manual_seed(0)
    t5 = transformers.T5Config(
        vocab_size=256,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    gpt2 = transformers.GPT2Config(
        vocab_size=256, n_embd=64, n_layer=2, n_head=4, eos_token_id=2, initializer_range=0.12
    )
    made = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "t5": transformers.T5ForConditionalGeneration(t5),
    }
    return {name: model.eval() for name, model in made.items()}


def prompt(seed: int, rows: int = 1, length: int = 6) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (rows, length), generator=random)


def write(
    model: Any,
    path: Path,
    ids: torch.Tensor,
    *,
    record: dict[str, Any] | None = None,
    **options: Any,
) -> torch.Tensor:
    options = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, **options}
    recording = {"layers": "blocks", "inputs": True, "overwrite": True, **(record or {})}
    with tap.record(model, path, **recording) as rec:
        written = model.generate(ids, **options)
    assert rec.failure is None
    return written


def compared(path: Path) -> tuple[tap.Comparison, GenerationComparison]:
    result = tap.compare(path / "a", path / "b")
    return result, result.generations[0]


# What is recorded.


@pytest.mark.parametrize("name", KINDS)
def test_what_was_written_is_in_the_manifest(name: str, models: Any, tmp_path: Path) -> None:
    model, ids = models[name], prompt(0, rows=2)
    plain = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    written = write(model, tmp_path / "a", ids, max_new_tokens=5)
    assert torch.equal(written, plain)
    assert "generate" not in vars(model), "the model is as it was"
    run = tap.open(tmp_path / "a")
    (found,) = run.manifest.generations
    assert found["tokens"] == written[:, -found["steps"] :].tolist()
    assert found["prompt"] == ids.tolist() and found["prompt_length"] == 6
    assert (found["epoch"], found["batch"], found["before"]) == (0, 0, 0)
    assert found["sampled"] is False and found["beams"] == 1
    assert found["text"] is None and found["pieces"] is None
    logits = run[""].port("output")
    assert [record.call for record in logits] == list(range(found["steps"]))
    if name != "t5":  # there a cross attention is among the layers, but the tokens are the same
        assert run.layers[-1] == "" or "" in run.layers
    for step, record in enumerate(logits):
        assert record.leaf == ".logits" and record.shape == (2, 1, 256)
        best = record.tensor()[:, -1].argmax(dim=-1).tolist()
        rows = [row[step] for row in found["tokens"]]
        assert all(token in (want, 0) for token, want in zip(rows, best, strict=True))


def test_text_where_there_is_a_tokenizer(models: Any, tmp_path: Path) -> None:
    with tap.record(models["llama"], tmp_path / "a", keep="summary") as rec:
        rec.decode = lambda tokens: "-".join(map(str, tokens))
        models["llama"].generate(prompt(0), max_new_tokens=3, do_sample=False, pad_token_id=0)
        models["llama"].generate(prompt(0), max_new_tokens=2, do_sample=False, pad_token_id=0)
        rec.step()
        models["llama"].generate(prompt(1), max_new_tokens=2, do_sample=False, pad_token_id=0)
    first, second, third = tap.open(tmp_path / "a").manifest.generations
    tokens = first["tokens"][0]
    assert first["text"] == ["-".join(map(str, tokens))]
    assert first["pieces"] == [[str(token) for token in tokens]]
    assert (second["batch"], second["before"]) == (0, 3)
    assert (third["batch"], third["before"]) == (1, 0)


def test_a_generate_that_raises_leaves_the_model_as_it_was(models: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(models["llama"])
    with pytest.raises(ValueError, match="max_new_tokens"), tap.record(model, tmp_path / "a"):
        model.generate(prompt(0), max_new_tokens=-1)
    assert "generate" not in vars(model) and not model._forward_hooks


class Wrapped(torch.nn.Module):
    """As a multimodal model is: it hands its inputs to the language model's own generate."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.language_model = language_model

    def generate(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        written: torch.Tensor = self.language_model.generate(input_ids=ids + 0, **options)
        return written


def test_the_model_inside_is_the_one_that_writes(models: Any, tmp_path: Path) -> None:
    written = write(Wrapped(models["llama"]), tmp_path / "a", prompt(3), max_new_tokens=5)
    run = tap.open(tmp_path / "a")
    (found,) = run.manifest.generations
    assert found["tokens"] == written[:, 6:].tolist() and found["steps"] == 5
    assert len(run[""].records) == 5
    assert "generate" not in vars(models["llama"])


def test_a_root_that_is_recorded_has_the_logits_already(models: Any, tmp_path: Path) -> None:
    (seed, *_) = seeds_that_part(models, "llama", tmp_path, 1)
    half = copy.deepcopy(models["llama"]).bfloat16()
    for side, model in (("a", models["llama"]), ("b", half)):
        write(model, tmp_path / side, prompt(seed), record={"layers": ["blocks", ""]})
    run = tap.open(tmp_path / "a")
    logits = [r for r in run[""].port("output") if r.leaf == ".logits"]
    assert len({r.call for r in logits}) == len(logits)
    result, found = compared(tmp_path)
    assert result and found.kind == "rounding" and found.error > 0


def test_a_run_that_is_judged_while_it_writes_says_so(models: Any, tmp_path: Path) -> None:
    write(models["llama"], tmp_path / "a", prompt(1), max_new_tokens=4)
    write(
        models["llama"],
        tmp_path / "b",
        prompt(1),
        max_new_tokens=4,
        record={"against": tmp_path / "a"},
    )
    notes = tap.open(tmp_path / "b").notes
    assert any(note.startswith("Text was generated while this run was compared") for note in notes)


# Where the texts part.


def seeds_that_part(models: Any, name: str, tmp_path: Path, wanted: int = 2) -> list[int]:
    """Prompts after which the model writes other tokens in bf16."""
    model, half = models[name], copy.deepcopy(models[name]).bfloat16()
    found = []
    for seed in range(60):
        options = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
        both = [one.generate(prompt(seed), **options) for one in (model, half)]
        if both[0].shape != both[1].shape or not torch.equal(*both):
            found.append(seed)
        if len(found) == wanted:
            return found
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_flip_of_bf16_is_rounding(name: str, models: Any, tmp_path: Path) -> None:
    seeds = seeds_that_part(models, name, tmp_path)
    assert seeds
    half = copy.deepcopy(models[name]).bfloat16()
    for seed in seeds:
        write(models[name], tmp_path / "a", prompt(seed))
        write(half, tmp_path / "b", prompt(seed))
        result, found = compared(tmp_path)
        assert found.kind == "rounding" and found.first is not None
        assert result and found.layers == ()
        assert found.reference_tokens[: found.first] == found.candidate_tokens[: found.first]
        assert found.reference_token != found.candidate_token
        assert found.best == found.reference_token
        assert 0 <= found.margin <= 4 * found.error
        assert found.judged_steps == found.first + 1
        sentence = result.sentence
        assert f"The texts part at token {found.first + 1} of" in sentence
        assert "rounding decides this token" in sentence and "was not judged" in sentence
        # only the steps with the same inputs were compared
        for row in result.layers:
            assert all(part.moments <= found.judged_steps for part in row.parts), row.layer
        assert result.same_input is not False
        assert "moments" not in sentence, "no step is said to be missing on one side"


def test_without_the_cut_the_later_steps_would_diverge(models: Any, tmp_path: Path) -> None:
    """The test above cannot pass by chance: after the flip the layers have other inputs."""
    (seed, *_) = seeds_that_part(models, "llama", tmp_path, 1)
    half = copy.deepcopy(models["llama"]).bfloat16()
    write(models["llama"], tmp_path / "a", prompt(seed))
    write(half, tmp_path / "b", prompt(seed))
    for side in "ab":
        path = tmp_path / side / "recording.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "generations": []}))
    assert not tap.compare(tmp_path / "a", tmp_path / "b")


def test_a_bug_in_a_layer_is_named(models: Any, tmp_path: Path) -> None:
    broken = copy.deepcopy(models["llama"])
    with torch.no_grad():
        broken.model.layers[1].self_attn.o_proj.weight *= 2
    write(models["llama"], tmp_path / "a", prompt(1))
    write(broken, tmp_path / "b", prompt(1))
    result, found = compared(tmp_path)
    assert not result and found.kind == "bug" and found.first is not None
    assert found.layers[0].startswith("model.layers.1")
    assert "That is not rounding: up to that step model.layers.1" in result.sentence


def test_what_comes_after_the_logits_is_told_apart(models: Any, tmp_path: Path) -> None:
    write(models["llama"], tmp_path / "a", prompt(1))
    write(models["llama"], tmp_path / "b", prompt(1), repetition_penalty=5.0)
    result, found = compared(tmp_path)
    assert found.kind == "bug" and found.layers == () and found.error == 0
    assert not result, "no layer diverged, and yet the text is another one"
    assert "so something after the logits chose the token" in result.sentence


def test_sampling_depends_on_the_draw(models: Any, tmp_path: Path) -> None:
    for side, seed in (("a", 0), ("b", 1)):
        torch.manual_seed(seed)
        write(models["llama"], tmp_path / side, prompt(1), do_sample=True)
    result, found = compared(tmp_path)
    assert found.kind == "sampled" and found.first is not None
    assert result, "a draw is not a divergence"
    assert "depends on the draw" in result.sentence


def test_the_same_text(models: Any, tmp_path: Path) -> None:
    for side in "ab":
        write(models["t5"], tmp_path / side, prompt(1))
    result, found = compared(tmp_path)
    assert found.kind == "same" and found.first is None and result
    assert result.sentence.startswith(f"All {len(found.reference_tokens)} tokens are the same.")


def test_other_lengths_are_no_difference(models: Any, tmp_path: Path) -> None:
    write(models["llama"], tmp_path / "a", prompt(1), max_new_tokens=8)
    write(models["llama"], tmp_path / "b", prompt(1), max_new_tokens=5)
    result, found = compared(tmp_path)
    assert found.kind == "same" and result
    assert "The first 5 tokens are the same; the reference wrote 8, the candidate 5" in str(found)
    assert all(row.verdict == "identical" for row in result.layers)


def test_other_prompts_are_not_compared(models: Any, tmp_path: Path) -> None:
    write(models["llama"], tmp_path / "a", prompt(1))
    write(models["llama"], tmp_path / "b", prompt(2))
    result, found = compared(tmp_path)
    assert not found.same_prompt and found.kind == "unknown"
    assert "different prompts" in result.sentence


def test_a_batch_is_judged_up_to_its_first_flip(models: Any, tmp_path: Path) -> None:
    seeds = seeds_that_part(models, "llama", tmp_path, 1)
    ids = torch.cat([prompt(100), prompt(seeds[0])])
    half = copy.deepcopy(models["llama"]).bfloat16()
    write(models["llama"], tmp_path / "a", ids)
    write(half, tmp_path / "b", ids)
    result, found = compared(tmp_path)
    assert result and found.first is not None
    ours, theirs = (tap.open(tmp_path / side).manifest.generations[0]["tokens"] for side in "ab")
    firsts = [
        next((n for n, (x, y) in enumerate(zip(*pair, strict=False)) if x != y), STEPS)
        for pair in zip(ours, theirs, strict=True)
    ]
    assert found.first == min(firsts) and firsts[found.row] == found.first
    assert f"in sequence {found.row + 1} of 2: the reference writes" in str(found)


def test_a_floor_run_is_cut_where_it_writes_something_else(models: Any, tmp_path: Path) -> None:
    (seed, *_) = seeds_that_part(models, "llama", tmp_path, 1)
    half = copy.deepcopy(models["llama"]).bfloat16()
    write(models["llama"], tmp_path / "a", prompt(seed))
    write(half, tmp_path / "floor", prompt(seed))
    broken = copy.deepcopy(models["llama"])
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight *= 1.5
    write(broken, tmp_path / "b", prompt(seed))
    assert not tap.compare(tmp_path / "a", tmp_path / "b", floor=tmp_path / "floor")
    write(models["llama"], tmp_path / "c", prompt(seed))
    assert tap.compare(tmp_path / "a", tmp_path / "c", floor=tmp_path / "floor")


def test_only_summaries_keep_the_logits_all_the_same(models: Any, tmp_path: Path) -> None:
    (seed, *_) = seeds_that_part(models, "llama", tmp_path, 1)
    half = copy.deepcopy(models["llama"]).bfloat16()
    for side, model in (("a", models["llama"]), ("b", half)):
        write(model, tmp_path / side, prompt(seed), record={"keep": "summary"})
    _, found = compared(tmp_path)
    assert found.first is not None and found.margin >= 0 and found.error > 0


# How it is shown.


def test_json_terminal_and_page_show_both_texts(models: Any, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    jsonschema = pytest.importorskip("jsonschema")
    (seed, *_) = seeds_that_part(models, "llama", tmp_path, 1)
    half = copy.deepcopy(models["llama"]).bfloat16()
    for side, model in (("a", models["llama"]), ("b", half)):
        with tap.record(model, tmp_path / side, layers="blocks") as rec:
            rec.decode = lambda tokens: "".join(f"<{token}>" for token in tokens)
            model.generate(prompt(seed), max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    result, found = compared(tmp_path)
    data = json.loads(result.to_json())
    schema = json.loads((Path(__file__).parents[2] / "docs/comparison.schema.json").read_text())
    jsonschema.validate(data, schema)
    (one,) = data["generations"]
    assert one["first"] == found.first and one["kind"] == "rounding"
    assert one["reference_text"] != one["candidate_text"] and one["sentence"] == str(found)
    text = comparison_text(result)
    piece = f"<{found.candidate_token}>"
    assert piece in text and "first to differ" in text
    page = result.to_html()
    assert "What the two runs wrote" in page and f"token {found.first + 1}" in page
    recorded = json.loads((tmp_path / "a" / "recording.json").read_text())
    schema = json.loads((Path(__file__).parents[2] / "docs/recording.schema.json").read_text())
    jsonschema.validate(recorded, schema)
