"""The built-in target."""

from __future__ import annotations

import pytest
import torch

from tensortap.demo import MODES, build
from tensortap.errors import OptionError
from tensortap.targets import load_target


def test_parts_and_shapes() -> None:
    target = build(seq_len=12, samples=3)
    assert len(target.model.blocks) == 8
    assert len(target.batches) == 3
    assert target.mode == "fp32"
    assert not target.model.training
    with torch.no_grad():
        logits = target(target.batches[0])
    assert logits.shape == (1, 12, target.model.embedding.num_embeddings)
    assert torch.isfinite(logits).all()
    first, second, _ = (batch.kwargs["input_ids"] for batch in target.batches)
    assert not torch.equal(first, second)


def test_same_seed_same_bits_and_random_state_left_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = build(seed=3), build(seed=3), build(seed=4)
    assert torch.equal(state, torch.get_rng_state())
    pairs = zip(first.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(first.batches[0].kwargs["input_ids"], again.batches[0].kwargs["input_ids"])
    assert not torch.equal(first.model.head.weight, other.model.head.weight)
    with torch.no_grad():
        assert torch.equal(first(first.batches[0]), again(again.batches[0]))


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_one_model_in_other_dtypes(mode: str) -> None:
    reference, target = build(seq_len=8), build(mode=mode, seq_len=8)
    assert {p.dtype for p in target.model.parameters()} == {MODES[mode]}
    assert torch.equal(target.model.head.weight, reference.model.head.weight.to(MODES[mode]))
    with torch.no_grad():
        got, expected = target(target.batches[0]), reference(reference.batches[0])
    assert got.dtype == MODES[mode]
    torch.testing.assert_close(got.float(), expected, rtol=0.1, atol=0.1)


def test_attention_is_causal() -> None:
    target = build(seq_len=8)
    ids = target.batches[0].kwargs["input_ids"]
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 1000
    with torch.no_grad():
        before, after = target.model(ids), target.model(changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_options_reach_it_by_name() -> None:
    target = load_target("tensortap.demo:build", {"dtype": "bf16", "seq_len": 5}, ["samples=2"])
    assert target.mode == "bf16"
    assert [tuple(b.kwargs["input_ids"].shape) for b in target.batches] == [(1, 5), (1, 5)]
    assert target.name == "tensortap.demo:build"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "int3"}, "fp32, bf16, fp16"),
        ({"seq_len": 0}, "seq_len"),
        ({"samples": -1}, "samples"),
        ({"mode": "bf16", "dtype": torch.float16}, "disagree"),
        ({"dtype": torch.int8}, "torch.int8"),
    ],
)
def test_bad_options_are_told(options: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        build(**options)  # type: ignore[arg-type]
