"""Warnings as errors, calls that compute nothing, and a run that moves to another folder."""

from __future__ import annotations

import copy
import enum
import os
import pickle
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from monitor_models import Returns, batches, files, hooks_of, no_warnings, small, train
from torch import nn

import tensortap as tap

FULL = {"record_type": "epoch_full"}
X = torch.ones(2, 3)


def tiny():
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


def begun(tmp_path, model, layers=("0",), **options):
    monitor = tap.Monitor(model, layers, [1], tmp_path / "out", [0], **options)
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    return monitor


def writers():
    return [t for t in threading.enumerate() if t.name.startswith("tensortap-writer")]


# Warnings as errors.


def test_an_earlier_run_and_warnings_as_errors_leave_nothing_behind(tmp_path) -> None:
    first = tiny()
    monitor = begun(tmp_path, first)
    first(X)
    monitor.remove_hooks()
    model, before = tiny(), len(writers())
    with no_warnings(), pytest.raises(tap.TapWarning, match="holds an earlier run"):
        tap.Monitor(model, ["0"], [1], tmp_path / "out", [0])
    assert hooks_of(model) == 0 and len(writers()) == before
    with no_warnings():  # the folder is free again, and holds nothing
        tap.Monitor(model, ["0"], [1], tmp_path / "out", [0]).remove_hooks()


def test_closing_is_done_before_a_warning_is_raised(tmp_path) -> None:
    model = tiny()
    monitor = begun(tmp_path, model, ["0", "1"])
    model(X)
    (tmp_path / "out" / "single_0_epoch1_batch0.pt").mkdir()  # nothing can be saved there
    with no_warnings(), pytest.raises(tap.TapWarning, match="'0' could not be saved"):
        monitor.remove_hooks()
    assert tap.open(tmp_path / "out").manifest.status == "complete"
    assert torch.load(tmp_path / "out" / "single_1_epoch1_batch0.pt", weights_only=True)
    with no_warnings():
        monitor.remove_hooks()


@pytest.mark.parametrize("way", ["wrapper", "with"])
def test_the_users_own_exception_is_what_comes_out(tmp_path, way) -> None:
    model = tiny()
    monitor = tap.Monitor(model, ["0"], [1], tmp_path / "out", [0])

    def train(epoch_callback, batch_callback):
        epoch_callback(1)
        batch_callback(0)
        model(X)
        (tmp_path / "out" / "single_0_epoch1_batch0.pt").mkdir()  # nothing can be saved there
        raise KeyError("mine")

    with no_warnings(), pytest.raises(KeyError, match="mine"):
        if way == "wrapper":
            tap.MonitoredTrainer(monitor).wrap_training_function(train)()
        with monitor:
            train(monitor.set_epoch, monitor.set_batch_idx)
    assert hooks_of(model) == 0
    assert tap.open(tmp_path / "out", partial=True).manifest.status == "failed"


def test_a_warning_in_a_hook_comes_out_as_itself_and_drops_no_layer(tmp_path) -> None:
    model = tiny()
    monitor = tap.Monitor(model, {"0": {}, "1": FULL}, [1], tmp_path / "out", [0], memory_limit=30)
    with no_warnings():
        with pytest.raises(tap.TapWarning, match=r"^The model ran before set_epoch"):
            model(X)
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        with pytest.raises(tap.TapWarning, match=r"^The monitor holds"):
            model(X)
        model(X)
        assert list(monitor.get_single_data()) == ["0"]
        assert torch.equal(monitor.get_epoch_data()["1"]["data"][(1, 0)], model(X))
        monitor.remove_hooks()


def test_a_second_interrupt_while_it_saves(tmp_path, monkeypatch) -> None:
    model = tiny()
    monitor = begun(tmp_path, model)
    model(X)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        monitor.close("the run raised KeyboardInterrupt")
    manifest = tap.open(tmp_path / "out", partial=True).manifest
    assert manifest.status == "failed" and hooks_of(model) == 0


# Calls that compute no values.


def trace(model):
    return torch.jit.trace(model, X)


def graph(model):
    return torch.jit._get_trace_graph(model, X)  # what ONNX export and TensorBoard call


def fake(model):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        return torch.func.functional_call(
            model, {n: mode.from_tensor(p) for n, p in model.named_parameters()}, torch.ones(2, 3)
        )


def gradient(model):
    def loss(parameters):
        return torch.func.functional_call(model, parameters, X).sum()

    return torch.func.grad(loss)(dict(model.named_parameters()))


def mapped(model):
    return torch.func.vmap(model)(torch.ones(4, 2, 3))


@pytest.mark.parametrize("batch_said", [True, False])
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (trace, "while it was traced"),
        (graph, "while it was traced"),
        (fake, "with fake or meta tensors"),
        (gradient, "inside a transform of torch.func"),
        (mapped, "inside a transform of torch.func"),
    ],
)
def test_calls_without_values_are_passed_over(tmp_path, call, says, batch_said) -> None:
    model = tiny()
    monitor = tap.Monitor(model, {"0": {}, "1": FULL}, [1], tmp_path / "out", [0])
    monitor.set_epoch(1)
    if batch_said:
        monitor.set_batch_idx(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(model)
        call(model)
    said = [str(w.message) for w in caught if issubclass(w.category, tap.TapWarning)]
    assert len(said) == 1 and says in said[0], said
    assert monitor.get_single_data() == {} and monitor.get_epoch_data() == {}
    expected = model(X)
    assert torch.equal(monitor.get_epoch_data()["1"]["data"][(1, 0)], expected)
    assert monitor.get_single_data()["0"]["output_shape"] == [2, 3]
    monitor.remove_hooks()
    records = tap.open(tmp_path / "out")["1"].records
    assert [(r.epoch, r.batch, r.call) for r in records] == [(1, 0, 0)]


def test_a_traced_model_gives_what_it_gave(tmp_path) -> None:
    model = tiny()
    expected = model(X)
    monitor = begun(tmp_path, model)
    with pytest.warns(tap.TapWarning, match="while it was traced"):
        traced = trace(model)
    monitor.remove_hooks()
    assert torch.equal(traced(X), expected) and "copy_" not in str(traced.graph)


# Where and when.


@pytest.mark.parametrize("first", ["batch", "epoch"])
def test_a_batch_may_be_said_before_its_epoch(tmp_path, first) -> None:
    model = tiny()
    monitor = tap.Monitor(model, {"0": FULL}, [0, 1], tmp_path)
    with no_warnings():
        for epoch in (0, 1):
            for said in ("batch", "epoch") if first == "batch" else ("epoch", "batch"):
                monitor.set_batch_idx(7) if said == "batch" else monitor.set_epoch(epoch)
            model(X)
            assert list(monitor.get_epoch_data()["0"]["data"]) == [(epoch, 7)]
        monitor.remove_hooks()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_forgotten_batch_is_said_at_the_first_forward(tmp_path, epoch, whole) -> None:
    """In an epoch that is not recorded too: the user learns it now and not in an hour."""
    model = tiny()
    monitor = tap.Monitor(model, ["0"], [2], tmp_path, [0])
    monitor.set_epoch(epoch)
    with pytest.warns(tap.TapWarning, match="set_batch_idx was not called"):
        model(X) if whole else model[0](X)
    with no_warnings():
        model(X)
    monitor.close("enough")


def test_an_epoch_that_was_saved_and_comes_again_is_a_second_part(tmp_path) -> None:
    model = tiny()
    monitor = tap.Monitor(model, {"0": FULL, "1": {}}, [1], tmp_path, [0])
    for _ in range(2):
        monitor.set_epoch(1)
        for batch in range(2):
            monitor.set_epoch(1)  # before every batch: nothing is lost by it
            monitor.set_batch_idx(batch)
            model(X)
        assert [*monitor.get_epoch_data()["0"]["data"]] == [(1, 0), (1, 1)]
        monitor.save_epoch_outputs()
        monitor.save_single_outputs()
    monitor.set_epoch(1)
    assert monitor.get_epoch_data() == {} and monitor.get_single_data() == {}
    monitor.remove_hooks()
    assert files(tmp_path) == [
        "epoch_0_epoch1.pt",
        "epoch_0_epoch1_part2.pt",
        "single_1_epoch1_batch0.pt",
        "single_1_epoch1_batch0_part2.pt",
    ]


def test_a_run_that_changes_its_folder(tmp_path, monkeypatch) -> None:
    """Launchers do; what was given as a relative path stays where it was."""
    monkeypatch.chdir(tmp_path)
    model = small()
    layers = {"head": {}, "layers.0.ffn": FULL}
    monitor = tap.Monitor(model, layers, [1], "rel", [0], memory_limit=100)
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    with pytest.warns(tap.TapWarning, match="memory_limit") as caught:
        train(model, monitor, epochs=[1])
        custom = monitor.save_custom_output({"a": 1}, "mine")
        monitor.remove_hooks()
    assert len([w for w in caught if w.category is tap.TapWarning]) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert files(tmp_path / "rel") == [
        "epoch_layers.0.ffn_epoch1.pt",
        "single_head_epoch1_batch0.pt",
    ]
    assert custom == tmp_path / "rel" / "mine"
    assert monitor.output_dir == tmp_path / "rel"


# What holds a monitor.


def test_a_configuration_that_holds_a_monitor_can_be_copied_and_saved(tmp_path) -> None:
    """The document's `config.monitor`."""
    monitor = begun(tmp_path, tiny())
    config = SimpleNamespace(monitor=monitor, epochs=3)
    assert copy.deepcopy(config).monitor is monitor and copy.copy(monitor) is monitor
    assert pickle.loads(pickle.dumps(config)).monitor is None
    torch.save({"config": vars(config)}, tmp_path / "checkpoint.pt")
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=False)["config"]["epochs"] == 3
    monitor.close("enough")


def test_a_condition_may_write_to_what_it_gets(tmp_path) -> None:
    model = tiny()
    monitor = begun(tmp_path, model, condition=lambda layer, output: output.zero_() is not None)
    model(X)
    assert torch.equal(monitor.get_single_data()["0"]["data"][(1, 0)], model[0](X))
    monitor.remove_hooks()


class Name(str, enum.Enum):
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


def test_keys_open_without_their_class(tmp_path) -> None:
    model = Returns(lambda x: {Name.A: x, Number.ONE: x + 1, (1, 2): x + 2, "(1, 2)": x + 3})
    monitor = begun(tmp_path, model, ["part"])
    model(X)
    (path,) = monitor.save_single_outputs()
    output = torch.load(path, weights_only=True)["output"]
    assert [(type(key), key) for key in output] == [
        (str, "a"),
        (int, 1),
        (str, "(1, 2)"),
        (str, "(1, 2)_"),
    ]
    assert torch.equal(output["(1, 2)_"], X + 3)
    monitor.remove_hooks()


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="files cannot be counted")
def test_spilled_data_takes_few_files(tmp_path) -> None:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(80)])
    monitor = tap.Monitor(model, {"*": FULL}, [1], tmp_path, memory_limit=0)
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    with pytest.warns(tap.TapWarning, match="memory_limit"):
        model(X)
    opened = open_files()
    found = monitor.get_epoch_data()
    assert open_files() - opened <= 32 and len(found) == 80
    expected = X
    for index, layer in enumerate(model):
        expected = layer(expected)
        assert torch.equal(found[str(index)]["data"][(1, 0)], expected)
    del found
    monitor.remove_hooks()


@pytest.mark.parametrize(("code", "status"), [(0, "complete"), (None, "complete"), (3, "failed")])
def test_to_leave_by_exit_is_no_failure(tmp_path, code, status) -> None:
    model = tiny()
    monitor = begun(tmp_path, model)

    def train(epoch_callback, batch_callback):
        model(X)
        sys.exit(code)

    with pytest.raises(SystemExit):
        tap.MonitoredTrainer(monitor).wrap_training_function(train)()
    assert tap.open(tmp_path / "out", partial=True).manifest.status == status


def test_an_error_from_before_the_monitor_is_not_its_failure(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("of an earlier cell"), raising=False)
    model = tiny()
    monitor = begun(tmp_path, model)
    model(X)
    monitor._at_exit()
    assert tap.open(tmp_path / "out").manifest.status == "complete"


def test_a_rank_without_a_world_is_none(tmp_path, monkeypatch) -> None:
    """Job arrays number their jobs so."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = small()
    monitor = tap.Monitor(model, ["head"], [1], tmp_path, [0])
    train(model, monitor, epochs=[1], data=batches(1))
    monitor.remove_hooks()
    assert files(tmp_path) == ["single_head_epoch1_batch0.pt"]
    assert tap.open(tmp_path).manifest.status == "complete"
