"""What Monitor holds and hands out: the document's structure, and nothing that is still alive."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections import OrderedDict, namedtuple

import pytest
import torch
from monitor_models import Returns, Small, batches, no_warnings, small, train
from torch import nn

import tensortap as tap
from tensortap.errors import OptionError

FULL = {"record_type": "epoch_full"}


def monitored(tmp_path, model, layers, batch_indices=(0, 2), epochs=(1,), **options):
    return tap.Monitor(model, layers, epochs, tmp_path / "out", batch_indices, **options)


def heard(tmp_path, make, value=None, *, config=None, record_type="single"):
    """The one output of a layer that returns what `make` says."""
    model = Returns(make)
    layers = {"part": {"record_type": record_type, **(config or {})}}
    monitor = monitored(tmp_path, model, layers, [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    model(torch.arange(6.0).view(2, 3) if value is None else value)
    get = monitor.get_single_data if record_type == "single" else monitor.get_epoch_data
    info = get()["part"]
    monitor.remove_hooks()
    return info["data"][(1, 0)], info["output_shape"]


def test_the_documents_structure(tmp_path) -> None:
    model = small()
    layers = {
        "layers.0.self_attn": {"alias": "attention", "record_type": "single"},
        "layers.1.ffn": {"alias": None, "record_type": "epoch_full"},
    }
    monitor = monitored(tmp_path, model, layers)
    seen = []

    def look(epoch: int) -> None:
        seen.append((monitor.get_single_data(), monitor.get_epoch_data()))

    train(model, monitor, epochs=[1, 2], after_epoch=look)
    monitor.remove_hooks()
    single, full = seen[0]
    assert list(single) == ["attention"] and list(full) == ["layers.1.ffn"]
    info = single["attention"]
    assert set(info) == {"layer", "alias", "output_shape", "data"}
    assert info["layer"] == "layers.0.self_attn" and info["alias"] == "attention"
    assert info["output_shape"] == [[4, 5, 8], [4, 5, 5]]
    assert list(info["data"]) == [(1, 0), (1, 2)]
    output = info["data"][(1, 0)]
    assert isinstance(output, tuple) and [tuple(t.shape) for t in output] == [(4, 5, 8), (4, 5, 5)]
    info = full["layers.1.ffn"]
    assert info["layer"] == "layers.1.ffn" and info["alias"] is None
    assert info["output_shape"] == [4, 5, 8]
    assert list(info["data"]) == [(1, 0), (1, 1), (1, 2)]
    assert seen[1] == ({}, {}), "epoch 2 is not recorded"


def test_values_are_those_of_the_layer(tmp_path) -> None:
    model, twin = small().eval(), small().eval()
    monitor = monitored(tmp_path, model, {"layers.0.ffn": {}, "layers.1": FULL}, [1])
    expected: dict = {"layers.0.ffn": [], "layers.1": []}
    for name, found in expected.items():
        twin.get_submodule(name).register_forward_hook(
            lambda m, a, out, found=found: found.append(out.detach().clone())
        )
    monitor.set_epoch(1)
    for index, batch in enumerate(batches()):
        monitor.set_batch_idx(index)
        assert torch.equal(model(batch), twin(batch))
    (single,) = monitor.get_single_outputs()["layers.0.ffn"]
    assert torch.equal(single, expected["layers.0.ffn"][1])
    buffers = monitor.get_epoch_buffers()
    assert list(buffers) == ["layers.1"]
    for got, want in zip(buffers["layers.1"], expected["layers.1"], strict=True):
        assert torch.equal(got, want)
    monitor.remove_hooks()


def test_layers_are_named_by_alias_or_name(tmp_path) -> None:
    model = small()
    layers = {"layers.0": {"alias": "a"}, "layers.1": {}, "head": {"alias": "h", **FULL}}
    monitor = monitored(tmp_path, model, layers, [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    model(batches()[0])
    assert list(monitor.get_single_data()) == ["a", "layers.1"]
    for names in (["a"], ["layers.0"], "a", ("layers.0", "a")):
        assert list(monitor.get_single_data(layers=names)) == ["a"]
    assert list(monitor.get_epoch_data(["head"])) == ["h"]
    assert monitor.get_epoch_data(["a"]) == {}, "a is monitored, and not over the epoch"
    for method in (
        monitor.get_single_data,
        monitor.get_epoch_data,
        monitor.save_single_outputs,
        monitor.save_epoch_outputs,
        monitor.get_epoch_buffers,
    ):
        with pytest.raises(OptionError, match=r"Not monitored: \['b'\]. Monitored are \['a'"):
            method(["a", "b"])
    monitor.remove_hooks()


def test_what_is_handed_out_is_a_copy(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model, {"layers.0.self_attn": {}, "head": FULL}, [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    model(batches()[0])
    for get in (monitor.get_single_data, monitor.get_epoch_data):
        before = get()
        (key,) = before
        changed = get()
        value = changed[key]["data"][(1, 0)]
        (value[0] if isinstance(value, tuple) else value).fill_(7)
        changed[key]["output_shape"].append(9)
        changed[key]["data"].clear()
        after = get()
        assert after[key]["output_shape"] == before[key]["output_shape"]
        a, b = after[key]["data"][(1, 0)], before[key]["data"][(1, 0)]
        a, b = (a[0], b[0]) if isinstance(a, tuple) else (a, b)
        assert torch.equal(a, b)
    with pytest.raises(AttributeError):
        monitor.single_data = {}
    assert list(monitor.single_data) == ["layers.0.self_attn"]
    assert list(monitor.epoch_data["head"]["data"]) == [(1, 0)]
    monitor.remove_hooks()


def test_nothing_later_changes_what_was_taken(tmp_path) -> None:
    """In-place operations, writes past the version counter, and the next batch."""

    class Spoils(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            y = self.linear(x)
            y.mul_(100)
            y.data.add_(5)
            y.detach().numpy()[:] = -1
            return y

    model = Spoils()
    monitor = monitored(tmp_path, model, ["linear"], [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    x = torch.randn(2, 3)
    expected = model.linear(x).detach()
    model(x)
    monitor.set_batch_idx(1)
    model(torch.randn(2, 3))
    assert torch.equal(monitor.get_single_data()["linear"]["data"][(1, 0)], expected)
    monitor.remove_hooks()


def test_no_graph_and_no_foreign_storage_is_held(tmp_path) -> None:
    whole = torch.randn(1000, 3, requires_grad=True)
    output, _ = heard(tmp_path, lambda x: (whole * 1)[::500])
    assert output.shape == (2, 3) and output.untyped_storage().nbytes() == 24
    assert not output.requires_grad and output.grad_fn is None and output.is_contiguous()
    transposed, _ = heard(tmp_path, lambda x: x.t())
    assert torch.equal(transposed, torch.arange(6.0).view(2, 3).t()) and transposed.is_contiguous()


def test_tuples_with_none(tmp_path) -> None:
    model = small(weights=False)
    monitor = monitored(tmp_path, model, {"layers.0.self_attn": FULL}, None)
    monitor.set_epoch(1)
    for index, batch in enumerate(batches()):
        monitor.set_batch_idx(index)
        model(batch)
    info = monitor.get_epoch_data()["layers.0.self_attn"]
    assert info["output_shape"] == [[4, 5, 8], None]
    assert info["data"][(1, 1)][1] is None
    (path,) = monitor.save_epoch_outputs()
    saved = torch.load(path, weights_only=True)
    assert saved["output_shape"] == [[12, 5, 8], None]
    assert saved["output"][0].shape == (12, 5, 8) and saved["output"][1] is None
    assert saved["statistics"][0]["count"] == 12 * 40 and saved["statistics"][1] is None
    monitor.remove_hooks()


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Box:
    value: torch.Tensor
    rest: object = None


X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("make", "kind", "shape"),
    [
        (lambda x: x, torch.Tensor, [2, 3]),
        (lambda x: (x,), tuple, [[2, 3]]),
        (lambda x: [x, (x, None)], list, [[2, 3], [[2, 3], None]]),
        (lambda x: {"a": x, "b": None}, dict, {"a": [2, 3], "b": None}),
        (lambda x: OrderedDict(a=x), dict, {"a": [2, 3]}),
        (lambda x: Pair(x, x), tuple, [[2, 3], [2, 3]]),
        (lambda x: Box(x), dict, {"value": [2, 3], "rest": None}),
        (lambda x: (x, 3, "word", object()), tuple, [[2, 3], None, None, None]),
        (lambda x: x.sum(), torch.Tensor, []),
        (lambda x: x.to_sparse(), torch.Tensor, [2, 3]),
        (lambda x: x > 2, torch.Tensor, [2, 3]),
    ],
)
def test_every_kind_of_output_has_a_treatment(tmp_path, make, kind, shape) -> None:
    output, output_shape = heard(tmp_path, make)
    assert type(output) is kind
    assert output_shape == shape
    (path,) = (tmp_path / "out").glob("*.pt")
    saved = torch.load(path, weights_only=True)
    assert type(saved["output"]) is kind and saved["output_shape"] == shape
    if kind is torch.Tensor:
        assert torch.equal(output, make(X).to_dense())


def test_values_that_are_no_tensors_stay_and_objects_are_named(tmp_path) -> None:
    output, _ = heard(tmp_path, lambda x: (x, 3, "word", object(), 1.5, True))
    assert output[1:] == (3, "word", "<object>", 1.5, True)


def test_a_model_output_is_a_dict_of_what_it_holds(tmp_path) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    make = lambda x: outputs.BaseModelOutput(last_hidden_state=x)  # noqa: E731
    output, shape = heard(tmp_path, make)
    assert list(output) == ["last_hidden_state"] and shape == {"last_hidden_state": [2, 3]}
    for leaf in (".last_hidden_state", "['last_hidden_state']", "[0]", 0):
        picked, shape = heard(tmp_path, make, config={"leaf": leaf})
        assert torch.equal(picked, X) and shape == [2, 3]


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        ("[0]", X),
        (0, X),
        ("[1]['deep']", X + 1),
        ("[1].deep", X + 1),
        ("[-1]", X + 2),
        (-1, X + 2),
    ],
)
def test_a_leaf_picks_one_item(tmp_path, leaf, expected) -> None:
    make = lambda x: (x, {"deep": x + 1}, x + 2)  # noqa: E731
    output, shape = heard(tmp_path, make, config={"leaf": leaf})
    assert torch.equal(output, expected) and shape == [2, 3]
    (row,) = tap.open(tmp_path / "out")["part"].records
    assert torch.equal(row.tensor(), expected)


def test_a_leaf_that_is_none_is_said(tmp_path) -> None:
    model = small(weights=False)
    layers = {"layers.0.self_attn": {"leaf": "[1]"}, "head": {}}
    monitor = monitored(tmp_path, model, layers, [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    with pytest.warns(tap.TapWarning, match="need_weights=True"):
        model(batches()[0])
    assert list(monitor.get_single_data()) == ["head"]
    monitor.remove_hooks()


def test_meta_tensors_are_said_and_not_kept(tmp_path) -> None:
    model = Returns(lambda x: x.to("meta"))
    monitor = monitored(tmp_path, model, ["part"], [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    with pytest.warns(tap.TapWarning, match="fake or meta tensors, which hold no values"):
        model(X)
    monitor.remove_hooks()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_a_tuple_of_what_they_hold(tmp_path, layout) -> None:
    parts = [torch.ones(2, 3), torch.zeros(4, 3)]
    model = Returns(lambda x: torch.nested.nested_tensor(parts, layout=layout))
    monitor = monitored(tmp_path, model, ["part"], [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    model(X)
    found = monitor.get_single_data()["part"]
    assert found["output_shape"] == [[2, 3], [4, 3]]
    for kept, part in zip(found["data"][(1, 0)], parts, strict=True):
        assert torch.equal(kept, part)
    monitor.remove_hooks()


def test_inference_tensors_come_out_as_ordinary_ones(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    monitor = monitored(tmp_path, model, {"0": FULL}, None)
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    with torch.inference_mode():
        model(X)
        data = monitor.get_epoch_data()
    output = data["0"]["data"][(1, 0)]
    weight = nn.Parameter(torch.ones(3))
    (output * weight).sum().backward()
    assert weight.grad is not None
    monitor.remove_hooks()


def test_a_layer_called_twice_keeps_its_last_call_and_records_both(tmp_path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(3, 3)

        def forward(self, x):
            return self.shared(self.shared(x))

    model = Twice()
    monitor = monitored(tmp_path, model, {"shared": FULL}, None)
    monitor.set_epoch(1)
    results = []
    for index in range(2):
        monitor.set_batch_idx(index)
        results.append(model(X + index).detach())
    data = monitor.get_epoch_data()["shared"]["data"]
    assert list(data) == [(1, 0), (1, 1)]
    assert torch.equal(data[(1, 0)], results[0]) and torch.equal(data[(1, 1)], results[1])
    monitor.remove_hooks()
    rows = tap.open(tmp_path / "out")["shared"].records
    assert [(r.batch, r.call) for r in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert torch.equal(rows[0].tensor(), model.shared(X).detach())
    saved = torch.load(tmp_path / "out" / "epoch_shared_epoch1.pt", weights_only=True)
    assert torch.equal(saved["output"], torch.cat(results))
    assert saved["statistics"]["count"] == 12, "the last call of each batch, and no other"


def test_sample_every_and_condition(tmp_path) -> None:
    model = small()
    asked = []

    def condition(layer, output):
        asked.append((layer, tuple(output.shape), output.requires_grad))
        return not (layer == "head" and len(asked) > 2)

    layers = {"layers.0": FULL, "head": {"alias": "h"}}
    monitor = monitored(
        tmp_path, model, layers, [0, 1, 2], sample_every=2, condition=condition, epochs=[1]
    )
    monitor.set_epoch(1)
    for index, batch in enumerate(batches(5)):
        monitor.set_batch_idx(index)
        model(batch)
    assert list(monitor.get_epoch_data()["layers.0"]["data"]) == [(1, 0), (1, 2), (1, 4)]
    assert list(monitor.get_single_data()["h"]["data"]) == [(1, 0)]
    assert asked[0] == ("layers.0", (4, 5, 8), False) and asked[1][0] == "head"
    monitor.remove_hooks()
    rows = tap.open(tmp_path / "out")["head"].records
    assert [row.batch for row in rows] == [0]


def test_a_condition_that_raises_is_said_once_and_the_output_is_kept(tmp_path) -> None:
    model = small()

    def condition(layer, output):
        raise KeyError("no such thing")

    monitor = monitored(tmp_path, model, ["head"], [0, 1], condition=condition)
    monitor.set_epoch(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(2):
            monitor.set_batch_idx(index)
            model(batches()[0])
    assert ["condition raised KeyError" in str(w.message) for w in caught] == [True]
    assert len(monitor.get_single_outputs()["head"]) == 2
    monitor.remove_hooks()


def test_a_condition_that_runs_the_model_is_not_heard(tmp_path) -> None:
    model = small().eval()

    def condition(layer, output):
        model(batches()[1])
        output.zero_()
        return True

    monitor = monitored(tmp_path, model, ["head"], [0], condition=condition)
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    expected = small().eval()(batches()[0])
    assert torch.equal(model(batches()[0]), expected)
    monitor.remove_hooks()
    assert len(tap.open(tmp_path / "out")["head"].records) == 1


def test_a_forgotten_epoch_is_said_at_the_first_forward(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model, {"head": FULL}, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batches()[0])
        model(batches()[0])
    (warning,) = caught
    assert issubclass(warning.category, tap.TapWarning)
    assert "before set_epoch was called" in str(warning.message)
    assert warning.filename == __file__
    assert monitor.get_epoch_data() == {}
    monitor.remove_hooks()


def test_a_forgotten_batch_is_said_and_counted(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model, {"layers.0": FULL, "head": {}}, [1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in (1, 2):
            monitor.set_epoch(epoch)
            for batch in batches():
                model(batch)
            if epoch == 1:
                assert list(monitor.get_epoch_data()["layers.0"]["data"]) == [
                    (1, 0),
                    (1, 1),
                    (1, 2),
                ]
                assert list(monitor.get_single_data()["head"]["data"]) == [(1, 1)]
    (warning,) = caught
    assert "set_batch_idx was not called" in str(warning.message)
    monitor.remove_hooks()


def test_a_part_that_is_called_alone_is_counted_by_its_own_calls(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model, {"layers.0": FULL}, None)
    monitor.set_epoch(1)
    with pytest.warns(tap.TapWarning, match="set_batch_idx was not called"):
        for batch in batches():
            model.layers[0](batch)
    assert list(monitor.get_epoch_data()["layers.0"]["data"]) == [(1, 0), (1, 1), (1, 2)]
    monitor.remove_hooks()


def test_a_batch_said_before_the_first_epoch_holds_and_not_in_the_next(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model, ["head"], [2], epochs=[1, 2])
    monitor.set_batch_idx(2)
    monitor.set_epoch(1)
    with no_warnings():
        model(batches()[0])
    assert list(monitor.get_single_data()["head"]["data"]) == [(1, 2)]
    monitor.set_epoch(2)
    assert monitor.current_batch_idx is None
    with pytest.warns(tap.TapWarning, match="set_batch_idx was not called"):
        model(batches()[0])
    monitor.remove_hooks()


def test_the_same_epoch_again_changes_nothing(tmp_path) -> None:
    """A loop that says the epoch before every batch loses nothing."""
    model = small()
    monitor = monitored(tmp_path, model, {"head": FULL}, None)
    for index, batch in enumerate(batches()):
        monitor.set_epoch(1)
        monitor.set_batch_idx(index)
        model(batch)
    assert len(monitor.get_epoch_buffers()["head"]) == 3
    monitor.remove_hooks()


def test_pauses(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model, {"head": FULL}, None)
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    with monitor.paused():
        model(batches()[0])
        monitor.pause()
        monitor.resume()
        model(batches()[0])
    assert monitor.get_epoch_data() == {}
    model(batches()[0])
    assert len(monitor.get_epoch_buffers()["head"]) == 1
    monitor.pause()
    monitor.set_batch_idx(1)
    model(batches()[0])
    monitor.resume()
    monitor.resume()
    assert len(monitor.get_epoch_buffers()["head"]) == 1
    monitor.remove_hooks()


def test_clearing(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model, {"layers.0": {}, "head": FULL}, [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    model(batches()[0])
    monitor.clear_epoch_data()
    assert monitor.get_epoch_data() == {} and list(monitor.get_single_data()) == ["layers.0"]
    monitor.clear_current_epoch_data()
    assert monitor.get_single_data() == {} == monitor.get_single_outputs()
    monitor.clear_current_epoch_data()
    monitor.remove_hooks()
    assert not list((tmp_path / "out").glob("*.pt")), "what was cleared is not saved"
    assert tap.open(tmp_path / "out").layers == ["layers.0", "head"], "but it was recorded"


def test_nothing_is_heard_after_the_hooks_are_gone_and_data_can_be_read(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model, {"head": FULL}, None)
    train(model, monitor, epochs=[1])
    monitor.remove_hooks()
    assert monitor.closed
    monitor.set_batch_idx(7)
    model(batches()[0])
    assert list(monitor.get_epoch_data()["head"]["data"]) == [(1, 0), (1, 1), (1, 2)]
    monitor.remove_hooks()
    monitor.set_epoch(2)
    assert monitor.get_epoch_data() == {}


def test_a_debug_log_says_what_fired(tmp_path, caplog) -> None:
    model = small()
    monitor = monitored(tmp_path, model, {"head": {"alias": "h"}}, [0])
    with caplog.at_level(logging.DEBUG, logger="tensortap.monitor"):
        train(model, monitor, epochs=[1, 2])
    monitor.remove_hooks()
    assert "'h' fired in epoch 1, batch 0, call 0" in caplog.text
    assert "'h' fired in epoch 1, batch 1: not kept" in caplog.text
    assert "'h' fired in epoch 2: not kept" in caplog.text


def test_silence_is_said_when_the_hooks_are_removed(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model, ["head"], [0], epochs=[9])
    train(model, monitor, epochs=[1])
    with pytest.warns(tap.TapWarning, match=r"Nothing was recorded .* epochs \[9\]"):
        monitor.remove_hooks()

    class Direct(Small):
        def forward(self, x):
            return self.head.forward(self.layers[0](x))

    model = Direct()
    monitor = monitored(tmp_path, model, ["head", "layers.0"], [0], overwrite=True)
    train(model, monitor, epochs=[1])
    with pytest.warns(tap.TapWarning, match=r"Nothing was heard from 1 of 2 layers: 'head'"):
        monitor.remove_hooks()
    assert "'head'" in tap.open(tmp_path / "out").manifest.notes[0]
