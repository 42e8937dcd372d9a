"""Blame runs the candidate on the inputs that the reference was recorded with."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from blame_models import Chain, batch, make, recorded
from typer.testing import CliRunner

import tensortap as tap
from tensortap.cli.main import app
from tensortap.comparing.blame.inputs import recorded_inputs
from tensortap.errors import OptionError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_inputs_those_of_the_reference_are_taken(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch(0), batch(1))
    candidate = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        candidate.blocks[2].down.weight.mul_(2)
        candidate.blocks[2].down.bias.mul_(2)
    result = tap.blame(path, candidate)
    assert result.culprit == "blocks.2.down"
    assert result.batches == 2
    given = recorded_inputs(tap.open(path))
    assert given is not None
    assert torch.equal(given[1][0], batch(1))


def test_a_checkpoint_needs_its_prompt_once(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "good")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "bad")
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    (tmp_path / "ids.json").write_text(json.dumps(ids.tolist()))
    path = str(tmp_path / "ref")
    run = CliRunner()
    given = ["--input-ids", str(tmp_path / "ids.json"), "--overwrite"]
    made = ["record", f"hf:{tmp_path / 'good'}", "-o", path, "--layers", "all", *given]
    for more in (["--inputs"], []):  # without the tensors, the manifest still has the token ids
        assert run.invoke(app, [*made, *more]).exit_code == 0
        found = run.invoke(app, ["blame", path, f"hf:{tmp_path / 'bad'}", "--json"])
        assert found.exit_code == 1, found.output
        assert '"culprit": "model.layers.1.mlp.up_proj"' in found.output
    assert run.invoke(app, [*made, "--inputs", "--generate", "3"]).exit_code == 0
    with pytest.raises(OptionError, match=r"steps of generate\(\)"):
        tap.blame(path, model)
