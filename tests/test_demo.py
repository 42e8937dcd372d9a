"""The built-in target."""

from __future__ import annotations

import pytest
import torch

import tensortap as tap
from tensortap.demo import BUG_GAIN, BUG_LAYER, MODES, Int8Linear, build
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


DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


@pytest.mark.parametrize("mode", DTYPES)
def test_modes_are_one_model_in_other_dtypes(mode: str) -> None:
    reference, target = build(seq_len=8), build(mode=mode, seq_len=8)
    assert {p.dtype for p in target.model.parameters()} == {DTYPES[mode]}
    assert torch.equal(target.model.head.weight, reference.model.head.weight.to(DTYPES[mode]))
    with torch.no_grad():
        got, expected = target(target.batches[0]), reference(reference.batches[0])
    assert got.dtype == DTYPES[mode]
    torch.testing.assert_close(got.float(), expected, rtol=0.1, atol=0.1)


def test_int8_is_near_and_its_weights_are_int8(tmp_path) -> None:
    reference, target = build(seq_len=8), build(mode="int8", seq_len=8)
    layers = [m for m in target.model.modules() if isinstance(m, Int8Linear)]
    assert len(layers) == 8 * 6
    assert all(m.weight.dtype == torch.int8 and not m.weight.requires_grad for m in layers)
    assert all((m.weight.abs().amax(1) == 127).all() for m in layers)  # the whole range is used
    with torch.no_grad():
        got, expected = target(target.batches[0]), reference(reference.batches[0])
    assert got.dtype == torch.float32
    error = (got - expected).norm() / expected.norm()
    assert 1e-3 < error < 3e-2
    with tap.record(target.model, tmp_path / "run", layers="first") as rec:
        target(target.batches[0])
    assert rec.failure is None
    assert tap.open(tmp_path / "run").manifest.target["dtypes"]["int8"] == 8 * 12 * 256 * 256


def test_int8_layer_is_its_definition() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(24, 16)
    x = torch.randn(2, 5, 24)
    x[0, 1] = 0
    w_scale = linear.weight.abs().amax(1) / 127
    x_scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    w = (linear.weight / w_scale[:, None]).round().long()
    q = (x / x_scale).round().long()
    expected = (q @ w.t()).float() * x_scale * w_scale + linear.bias
    with torch.no_grad():
        got = Int8Linear(linear)(x)
    torch.testing.assert_close(got, expected)
    assert torch.equal(got[0, 1], linear.bias)
    assert torch.equal(Int8Linear(linear)(x[0, 3]), got[0, 3])  # a single token


def test_the_bug_is_where_it_is_said_to_be() -> None:
    reference, target = build(seq_len=8).model, build(mode="bug", seq_len=8).model
    different = [
        name
        for (name, a), b in zip(reference.named_parameters(), target.parameters(), strict=True)
        if not torch.equal(a, b)
    ]
    assert different == [f"{BUG_LAYER}.weight", f"{BUG_LAYER}.bias"]
    x = torch.randn(3, 4 * 256)
    with torch.no_grad():
        right, wrong = (m.get_submodule(BUG_LAYER)(x) for m in (reference, target))
    torch.testing.assert_close(wrong, right * BUG_GAIN)


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
        ({"mode": "int3"}, ", ".join(MODES)),
        ({"seq_len": 0}, "seq_len"),
        ({"samples": -1}, "samples"),
        ({"mode": "bf16", "dtype": torch.float16}, "disagree"),
        ({"mode": "int8", "dtype": torch.bfloat16}, "disagree"),
        ({"dtype": torch.int8}, "torch.int8"),
    ],
)
def test_bad_options_are_told(options: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        build(**options)  # type: ignore[arg-type]


def test_the_training_demo_is_watched(tmp_path, monkeypatch, capsys) -> None:
    import json

    import tensortap as tap
    from tensortap.cli.main import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["demo", "--train", "--steps", "12", "--break-at", "7", "--json"])
    assert done.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == "runs/train" and said["steps"] == 12
    (alarm,) = said["alarms"]
    assert (alarm["layer"], alarm["port"], alarm["batch"]) == ("blocks.4", "output", 7)
    run = tap.open("runs/train")
    assert {r.batch for r in run.records if r.port == "output"} >= {0, 5, 6, 7, 10}
    for wrong in (["--steps", "3"], ["--train", "--steps", "0"], ["--train", "--break-at", "99"]):
        with pytest.raises(SystemExit) as done:
            main(["demo", "-o", "other", *wrong])
        assert done.value.code == 2
