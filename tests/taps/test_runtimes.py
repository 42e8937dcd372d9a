"""torch.compile, generate(), accelerate: the places where a plain hook goes wrong."""

from __future__ import annotations

import pytest
import torch

import tensortap as tap
from support import Net


def compare(run: tap.Recording, expected: tap.Recording) -> None:
    assert run.layers == expected.layers
    assert len(run.records) == len(expected.records)
    for a, b in zip(run.records, expected.records, strict=True):
        key = (b.layer, b.port, b.leaf, b.batch, b.call)
        assert (a.layer, a.port, a.leaf, a.batch, a.call) == key
        torch.testing.assert_close(a.tensor(), b.tensor())


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("called_before", [False, True])
def test_hooks_fire_in_a_compiled_model(
    net: Net, ids, tmp_path, recorded, fresh_dynamo, called_before: bool
) -> None:
    """Added after the first call, a plain hook would never fire, silently."""
    with torch.no_grad():
        expected = recorded(net, ids, inputs=True)
        model = torch.compile(net, fullgraph=True, backend="aot_eager")
        if called_before:
            model(ids)
        with tap.record(model, tmp_path / "r", layers="all", inputs=True) as rec:
            during = model(ids)
        after = model(ids)
    assert rec.failure is None
    assert any("compiles anew" in note for note in rec.notes)
    compare(tap.open(tmp_path / "r"), expected)
    torch.testing.assert_close(during, after)
    assert rec.tap._compiled == []


def test_a_compiled_part_of_an_eager_model(net: Net, ids, recorded, fresh_dynamo) -> None:
    with torch.no_grad():
        expected = recorded(net, ids)
        net.blocks[1] = torch.compile(net.blocks[1], backend="aot_eager")
        compare(recorded(net, ids), expected)


def test_compiled_values_are_not_rewritten_in_place(recorded, fresh_dynamo) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(inplace=True))
    x = torch.randn(2, 4)
    expected = model[0](x).detach()
    with torch.no_grad():
        run = recorded(torch.compile(model, backend="aot_eager"), x)
    torch.testing.assert_close(run["0"].output, expected)
    assert run["0"].output.min() < 0


def test_inductor_keeps_one_graph(net: Net, ids, tmp_path, fresh_dynamo) -> None:
    with torch.no_grad():
        plain = net(ids)
        model = torch.compile(net, fullgraph=True)
        with tap.record(model, tmp_path / "r") as rec:
            out = model(ids)
    torch.testing.assert_close(out, plain)
    assert rec.failure is None
    assert tap.open(tmp_path / "r").layers == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_generation_is_one_record_a_step(llama, tmp_path) -> None:
    ids = torch.tensor([[1, 2, 3]])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = llama.generate(ids, **options)
    with tap.record(llama, tmp_path / "r", layers=["blocks", "lm_head"]) as rec:
        out = llama.generate(ids, **options)
    assert torch.equal(out, plain)
    assert rec.failure is None
    run = tap.open(tmp_path / "r")
    records = run["model.layers.0"].records
    assert [r.call for r in records] == [0, 1, 2, 3]
    assert [r.shape[1] for r in records] == [3, 1, 1, 1]
    assert run.manifest.inputs["input_ids"] == [[1, 2, 3]]


def test_accelerate_cpu_offload(llama, tmp_path, recorded) -> None:
    accelerate = pytest.importorskip("accelerate")
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = recorded(llama, ids, layers="blocks", inputs=True)
        plain = llama(ids).logits
        accelerate.cpu_offload(llama, execution_device=torch.device("cpu"))
        with tap.record(llama, tmp_path / "r", layers="blocks", inputs=True) as rec:
            out = rec.run(ids, early_stop=True)
    assert torch.equal(out.logits, plain)
    compare(tap.open(tmp_path / "r"), expected)
