"""The model does not notice: losses, gradients, random state and hooks, eager and compiled."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from monitor_models import Returns, Small, batches, hooks_of, no_warnings, small, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tap

FULL = {"record_type": "epoch_full"}
EVERYTHING = {"all": {**FULL}, "head": {"alias": "h"}}


def build(tmp_path, model, layers=EVERYTHING, batch_indices=(0, 2), epochs=(1, 2), **options):
    return tap.Monitor(model, layers, epochs, tmp_path / "out", batch_indices, **options)


@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_training_is_the_same_bit_for_bit(tmp_path, limit) -> None:
    """With dropout, so that the random state matters."""
    plain = small()
    torch.manual_seed(3)
    expected = train(plain)
    state = torch.get_rng_state()
    model = small()
    monitor = build(tmp_path, model, memory_limit=limit)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = train(model, monitor)
        monitor.remove_hooks()
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("training", [True, False])
def test_fused_encoder_layers_compute_what_they_did(tmp_path, training) -> None:
    """In eval mode a hook inside would turn the fused path off, and change the last bits."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    model.train(training)
    x = torch.randn(3, 7, 16)
    with torch.no_grad():
        expected = model(x)
    layers = ["0.layers.0", "0.layers.0.linear1", "0"]
    monitor = build(tmp_path, model, layers, [0], [1])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    found = monitor.get_single_data()
    assert torch.equal(found["0"]["data"][(1, 0)], expected)
    assert list(found) == (
        ["0", "0.layers.0", "0.layers.0.linear1"] if training else ["0", "0.layers.0"]
    )
    if training:
        monitor.remove_hooks()
    else:
        with pytest.warns(tap.TapWarning, match="one fused operation"):
            monitor.remove_hooks()
    assert hooks_of(model) == 0


def test_hooks_go_and_those_of_others_stay(tmp_path) -> None:
    model = small()
    calls = []
    other = model.head.register_forward_hook(lambda m, a, out: calls.append(1))
    monitor = build(tmp_path, model)
    assert hooks_of(model) > 1
    train(model, monitor, epochs=[1])
    monitor.remove_hooks()
    monitor.remove_hooks()
    assert hooks_of(model) == 1 and len(calls) == 3
    other.remove()


def test_we_hear_what_comes_out_behind_other_hooks(tmp_path) -> None:
    model = small().eval()
    monitor = build(tmp_path, model, ["head"], [0], [1])
    model.head.register_forward_hook(lambda m, a, out: out * 0 + 5)
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    result = model(batches()[0])
    assert torch.equal(monitor.get_single_outputs()["head"][0], result.detach())
    monitor.remove_hooks()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_is_no_call(tmp_path, reentrant) -> None:
    class Saves(Small):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return self.head(x)

    torch.manual_seed(0)
    model = Saves()
    monitor = build(tmp_path, model, {"layers.0.ffn": {**FULL}}, None, [1])
    data = [batch.requires_grad_() for batch in batches()]
    with no_warnings():
        train(model, monitor, epochs=[1], data=data)
        monitor.remove_hooks()
    rows = tap.open(tmp_path / "out")["layers.0.ffn"].records
    assert [(row.batch, row.call) for row in rows] == [(0, 0), (1, 0), (2, 0)]


def test_copies_and_pickles_of_the_model_are_silent(tmp_path) -> None:
    model = small()
    monitor = build(tmp_path, model, {"head": {**FULL}}, None, [1])
    twin, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    twin(batches()[0])
    stored(batches()[0])
    assert monitor.get_epoch_data() == {}
    model(batches()[0])
    assert len(monitor.get_epoch_buffers()["head"]) == 1
    monitor.remove_hooks()


def test_modes_of_the_user_see_nothing_of_ours(tmp_path) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen = []
    for monitored in (False, True):
        model = small().eval()
        monitor = build(tmp_path, model) if monitored else None
        if monitor:
            monitor.set_epoch(1)
            monitor.set_batch_idx(0)
        with Counts() as counts:
            model(batches()[0])
        seen.append(counts.seen)
        if monitor:
            assert monitor.get_single_data()
            monitor.remove_hooks()
    assert seen[0] == seen[1]


def test_a_default_device_of_the_user_changes_nothing(tmp_path) -> None:
    model = small()
    monitor = build(tmp_path, model, {"head": {**FULL}}, None, [1])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    with torch.device("meta"):
        model(batches()[0] if False else torch.ones(2, 3, 8, device="cpu"))
    assert monitor.get_epoch_buffers()["head"][0].device.type == "cpu"
    monitor.remove_hooks()


def test_an_exception_in_the_model_leaves_what_came_before(tmp_path) -> None:
    def fails(x):
        if x[0, 0] > 1:
            raise ValueError("no more")
        return x * 2

    model = Returns(fails)
    with (
        pytest.raises(ValueError, match="no more"),
        build(tmp_path, model, {"part": {**FULL}}, None, [1]) as monitor,
    ):
        monitor.set_epoch(1)
        for index in range(4):
            monitor.set_batch_idx(index)
            model(torch.full((2, 2), float(index)))
    assert hooks_of(model) == 0
    saved = torch.load(tmp_path / "out" / "epoch_part_epoch1.pt", weights_only=True)
    assert saved["batch_idx"] == [0, 1]
    assert tap.open(tmp_path / "out", partial=True).manifest.failure == (
        "the run raised ValueError: no more"
    )


def test_a_failure_of_ours_is_said_once_and_training_runs_on(tmp_path, monkeypatch) -> None:
    model = small()
    monitor = build(tmp_path, model, {"head": {**FULL}, "layers.0": {}}, [0, 1], [1])
    monkeypatch.setattr("tensortap.monitoring.monitor.summarize", lambda t: 1 / 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(train(model, monitor, epochs=[1])) == 3
    (warning,) = [w for w in caught if issubclass(w.category, tap.TapWarning)]
    assert "could not keep 'head' (ZeroDivisionError" in str(warning.message)
    assert len(monitor.get_single_outputs()["layers.0"]) == 2
    monitor.remove_hooks()


def test_threads_may_share_a_model(tmp_path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = small().eval()
    monitor = build(tmp_path, model, {"head": {**FULL}}, None, [1])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: model(batches()[0]), range(20)))
    monitor.remove_hooks()
    rows = tap.open(tmp_path / "out")["head"].records
    assert sorted(row.call for row in rows) == list(range(20))


# Compiled models.


class Mixed(nn.Module):
    """Outputs of several forms, one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.bare = nn.MultiheadAttention(8, 2, batch_first=True)
        self.pack = Returns.Part(lambda x: {"a": x * 2, "b": [x, None], "n": 3})
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.attn(x, x, x)[0] + self.bare(x, x, x, need_weights=False)[0]
        return self.linear(self.linear(self.pack(x)["a"]))


COMPILED = {
    "attn": {"alias": "attention"},
    "attn.out_proj": {**FULL},
    "bare": {**FULL},
    "pack": {**FULL},
    "linear": {**FULL},
    "": {**FULL, "alias": "whole"},
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["before", "after", "in place"])
def test_compiled_models_are_heard_whole(tmp_path, backend, how) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    twin = Mixed()
    model = copy.deepcopy(twin)
    if how == "before":
        model = torch.compile(model, backend=backend, fullgraph=True)
        model(batches()[0])  # compiled code that knows no hooks
    layers = {k: v for k, v in COMPILED.items() if k != "attn.out_proj"}
    monitor = build(tmp_path, model, layers, [1], [1])
    if how == "after":
        model = torch.compile(model, backend=backend, fullgraph=True)
    elif how == "in place":
        model.compile(backend=backend, fullgraph=True)
    reference = build(tmp_path / "twin", twin, layers, [1], [1])
    with no_warnings():
        for each, heard in ((model, monitor), (twin, reference)):
            for epoch in (1, 2):
                heard.set_epoch(epoch)
                for index, batch in enumerate(batches()):
                    heard.set_batch_idx(index)
                    each(batch).sum().backward()
                if epoch == 1:
                    heard.first = (heard.get_single_data(), heard.get_epoch_data())
            heard.remove_hooks()
    for ours, theirs in zip(monitor.first, reference.first, strict=True):
        assert list(ours) == list(theirs)
        for key in ours:
            assert ours[key]["output_shape"] == theirs[key]["output_shape"]
            torch.testing.assert_close(
                tensors(ours[key]["data"]), tensors(theirs[key]["data"]), msg=key
            )
    assert monitor.first[0]["attention"]["output_shape"] == [[4, 5, 8], [4, 5, 5]]
    assert monitor.first[1]["bare"]["data"][(1, 0)][1] is None
    assert isinstance(monitor.first[1]["pack"]["data"][(1, 0)]["b"], list)
    run = tap.open(tmp_path / "out")
    assert [(r.batch, r.call) for r in run["linear"].records][:3] == [(0, 0), (0, 1), (1, 0)]
    model(batches()[0])
    assert not monitor._hears() and len(monitor.get_epoch_data()) == 0


def tensors(value):
    """Only the tensors, in order: numbers do not come out of a graph."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_serves_every_epoch(tmp_path, backend) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.compile(small(layers=1), fullgraph=True, backend=backend)
    monitor = build(
        tmp_path, model, {"layers.0.self_attn": {"leaf": 0}, "head": {**FULL}}, [0], [2]
    )
    torch._dynamo.utils.counters.clear()
    train(model, monitor, epochs=[1, 2, 3])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    monitor.remove_hooks()
    saved = torch.load(tmp_path / "out" / "epoch_head_epoch2.pt", weights_only=True)
    assert saved["output"].shape == (12, 5, 2)
    item = torch.load(tmp_path / "out" / "single_layers.0.self_attn_epoch2_batch0.pt")
    assert item["output_shape"] == [4, 5, 8]


def test_a_forgotten_batch_is_counted_in_compiled_models_too(tmp_path) -> None:
    torch._dynamo.reset()
    inner = small()
    monitor = build(tmp_path, inner, {"head": {**FULL}}, None, [1])
    model = torch.compile(inner, backend="eager", fullgraph=True)
    monitor.set_epoch(1)
    with pytest.warns(tap.TapWarning, match="set_batch_idx was not called"):
        for batch in batches():
            model(batch)
    assert list(monitor.get_epoch_data()["head"]["data"]) == [(1, 0), (1, 1), (1, 2)]
    monitor.remove_hooks()


def test_compiled_blocks_of_one_class_are_told_apart(tmp_path) -> None:
    """More of them than dynamo makes graphs of one function, which would end training."""
    from torch._dynamo import config

    limit = config.recompile_limit
    torch._dynamo.reset()
    model = small(layers=limit + 2).eval()
    twin = copy.deepcopy(model)
    for layer in model.layers:
        layer.compile(backend="eager", fullgraph=True)
    monitor = build(tmp_path, model, {"layers.*": {**FULL}}, None, [1])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    model(batches()[0])
    found = monitor.get_epoch_buffers()
    x = batches()[0]
    for index, layer in enumerate(twin.layers):
        x = layer(x)
        torch.testing.assert_close(found[f"layers.{index}"][0], x.detach())
    monitor.remove_hooks()
    assert config.recompile_limit == limit


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_memory_of_the_device_does_not_grow(tmp_path, compiled) -> None:
    torch._dynamo.reset()
    model = Small(width=256).cuda()
    data = [torch.randn(64, 32, 256, device="cuda") for _ in range(4)]
    if compiled:
        model = torch.compile(model, fullgraph=True)
    layers = {"layers.*": {**FULL}, "layers.0.self_attn": {}}
    monitor = build(tmp_path, model, layers, [0, 1], [1, 2])
    train(model, monitor, epochs=[1], data=data)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    train(model, monitor, epochs=[2], data=data * 4)
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    assert len(monitor.get_epoch_buffers()["layers.1"]) == 16
    assert all(t.device.type == "cpu" for t in monitor.get_epoch_buffers()["layers.1"])
    assert grown < 1 << 20, f"{grown} bytes; one output has 2 MiB"
    monitor.remove_hooks()
    assert tap.open(tmp_path / "out")["layers.1"].records[0].summary.count == 64 * 32 * 256
