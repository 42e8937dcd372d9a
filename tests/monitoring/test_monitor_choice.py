"""What Monitor refuses, and in which words; which layers a list, a dict or a pattern means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from monitor_models import Returns, hooks_of, small, train
from torch import nn

import tensortap as tap
from tensortap.errors import OptionError


def build(tmp_path, layers=("head",), epochs=(1,), batches=(0,), **options):
    return tap.Monitor(small(), layers, epochs, tmp_path / "out", batches, **options)


def refused(tmp_path, *args, **options) -> str:
    with pytest.raises(ValueError) as caught:
        build(tmp_path, *args, **options)
    assert isinstance(caught.value, OptionError)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_the_documents_order_of_arguments(tmp_path) -> None:
    monitor = tap.Monitor(small(), ["head"], [1, 5], str(tmp_path / "a" / "b"), [0, 3])
    assert (tmp_path / "a" / "b").is_dir()
    assert monitor.epochs_to_record == [1, 5] and monitor.batch_indices == [0, 3]
    monitor.remove_hooks()
    monitor = tap.Monitor(
        model=small(),
        layers_to_monitor={"head": {"record_type": "epoch_full"}},
        epochs_to_record=[1],
        output_dir=str(tmp_path / "c"),
    )
    assert monitor.batch_indices is None
    monitor.remove_hooks()


def test_epochs_must_not_be_empty(tmp_path) -> None:
    assert "epochs_to_record must not be empty" in refused(tmp_path, epochs=[])


@pytest.mark.parametrize("batches", [None, []])
def test_single_needs_batch_indices(tmp_path, batches) -> None:
    text = refused(tmp_path, {"head": {}, "layers.0": {"record_type": "epoch_full"}}, [1], batches)
    assert "batch_indices must be given" in text
    assert "['head']" in text


def test_layers_that_do_not_exist_are_named_with_all_that_do(tmp_path) -> None:
    model = small()
    text = refused(tmp_path, ["head", "haed", "layers.7.ffn"])
    assert text.startswith(
        "The following layers specified in 'layers_to_monitor' do not exist in the model: "
        "['haed', 'layers.7.ffn']"
    )
    for name, _ in model.named_modules():
        assert repr(name) in text


@pytest.mark.parametrize(
    "layers",
    [
        {"head": {"alias": "xxx"}, "layers.0": {"alias": "xxx", "record_type": "epoch_full"}},
        {"layers.*": {"alias": "xxx"}},
        {"layers.0": {"alias": "xxx"}, "layers.{1}": {"alias": "xxx"}},
    ],
)
def test_duplicate_aliases(tmp_path, layers) -> None:
    text = refused(tmp_path, layers)
    assert text == "Duplicate alias 'xxx' in layers_to_monitor."


def test_an_alias_may_not_be_the_name_of_another_layer(tmp_path) -> None:
    text = refused(tmp_path, {"head": {"alias": "layers.0"}, "layers.0": {}})
    assert text == "Duplicate alias 'layers.0' in layers_to_monitor."
    build(tmp_path, {"head": {"alias": "layers.0"}, "layers.0": {"alias": "head"}}).remove_hooks()


@pytest.mark.parametrize("kind", ["full", "", None, 1, "Single"])
def test_unknown_record_types(tmp_path, kind) -> None:
    text = refused(tmp_path, {"head": {"record_type": kind}})
    assert f"Unknown record_type {kind!r}" in text
    assert "'single'" in text and "'epoch_full'" in text


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([], "layers_to_monitor is empty"),
        ({}, "layers_to_monitor is empty"),
        (None, "must be a list of layer names"),
        (7, "must be a list of layer names"),
        ([3], "must be a name"),
        ({3: {}}, "must be a name"),
        ({"head": "epoch_full"}, "must be a dict such as"),
        ({"head": {"alais": "x"}}, "unknown key: 'alais'. Known keys: 'alias', 'record_type'"),
        ({"head": {"alias": 3}}, "must be a text or None"),
        ({"head": {"alias": ""}}, "must be a text or None"),
        ({"head": {"leaf": "weights"}}, "'[0]', '.logits' or the number 0, got 'weights'"),
        ({"head": {"leaf": "[0"}}, "got '[0'"),
        ({"head": {"leaf": True}}, "got True"),
        (["layers"], "only holds other modules and is never called"),
        (["head", "!head"], "leaves no layer"),
        (["layers.{0"], "brace without its partner"),
    ],
)
def test_malformed_layers(tmp_path, layers, says) -> None:
    assert says in refused(tmp_path, layers)


@pytest.mark.parametrize("value", [["1"], [1.5], [True], [-1], "12", 3, None, [None], {1: 2}])
@pytest.mark.parametrize("which", ["epochs", "batches"])
def test_epochs_and_batches_are_whole_numbers(tmp_path, value, which) -> None:
    if which == "batches" and value is None:
        return
    text = refused(tmp_path, **{which: value})
    assert {"epochs": "epochs_to_record", "batches": "batch_indices"}[which] in text
    assert "whole numbers" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"save_format": "npz"}, "save_format must be 'pt' or 'npy'"),
        ({"condition": 3}, "condition must be a function"),
        ({"sample_every": 0}, "sample_every must be a whole number from 1"),
        ({"sample_every": 1.5}, "sample_every must be"),
        ({"memory_limit": -1}, "memory_limit must be a whole number from 0"),
        ({"keep": "all"}, "keep must be"),
    ],
)
def test_malformed_options(tmp_path, options, says) -> None:
    assert says in refused(tmp_path, **options)


@pytest.mark.parametrize("folder", [None, 3, "", "s3://bucket/run"])
def test_malformed_output_dir(folder) -> None:
    with pytest.raises(OptionError, match="output_dir must be"):
        tap.Monitor(small(), ["head"], [1], folder, [0])


def test_no_folder_can_be_made_where_a_file_is(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    model = small()
    with pytest.raises(tap.TapError, match="Cannot create output_dir"):
        tap.Monitor(model, ["head"], [1], tmp_path / "file" / "out", [0])
    with pytest.raises(tap.TapError, match="Cannot create output_dir"):
        tap.Monitor(model, ["head"], [1], tmp_path / "file", [0])
    assert hooks_of(model) == 0


def test_a_model_is_a_module(tmp_path) -> None:
    with pytest.raises(OptionError, match=r"model must be a torch.nn.Module, got str"):
        tap.Monitor("model", ["head"], [1], tmp_path, [0])


def test_scripted_layers_take_no_hooks(tmp_path) -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(OptionError, match="'0' is TorchScript"):
        tap.Monitor(model, ["0"], [1], tmp_path, [0])


def test_numbers_of_other_kinds_are_numbers(tmp_path) -> None:
    monitor = build(tmp_path, epochs=range(1, 3), batches={np.int64(0), torch.tensor(2)})
    assert monitor.epochs_to_record == [1, 2] and monitor.batch_indices == [0, 2]
    monitor.set_epoch(np.int64(1))
    monitor.set_batch_idx(torch.tensor(2))
    assert (monitor.current_epoch, monitor.current_batch_idx) == (1, 2)
    for wrong in ("1", 1.5, True, -1, None):
        with pytest.raises(OptionError, match="epoch must be a whole number from 0"):
            monitor.set_epoch(wrong)
        with pytest.raises(OptionError, match="batch_idx must be a whole number from 0"):
            monitor.set_batch_idx(wrong)
    monitor.remove_hooks()


@pytest.mark.parametrize(
    ("layers", "kept"),
    [
        (["layers.*"], ["layers.0", "layers.1"]),
        ("blocks", ["layers.0", "layers.1"]),
        (["head", "head"], ["head"]),
        (["layers.*.ffn", "!layers.1.**"], ["layers.0.ffn"]),
        (["type:MultiheadAttention", "head"], ["layers.0.self_attn", "layers.1.self_attn", "head"]),
        (["layers.0,head"], ["layers.0", "head"]),
        ({"layers.*": None, "head": {}}, ["layers.0", "layers.1", "head"]),
        (["_orig_mod.head"], ["head"]),
        (["_orig_mod"], [""]),
        (["head._orig_mod"], ["head"]),
        (["", "head"], ["", "head"]),
    ],
)
def test_patterns_are_allowed(tmp_path, layers, kept) -> None:
    monitor = build(tmp_path, layers)
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    monitor.model(torch.randn(2, 3, 8))
    assert list(monitor.get_single_data()) == kept
    monitor.remove_hooks()


def test_an_exact_name_beats_a_pattern_wherever_it_stands(tmp_path) -> None:
    layers = {
        "layers.0": {"alias": "first"},
        "layers.*": {"record_type": "epoch_full"},
    }
    for each in (layers, dict(reversed(layers.items()))):
        monitor = build(tmp_path, each, overwrite=True)
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        monitor.model(torch.randn(2, 3, 8))
        assert list(monitor.get_single_data()) == ["first"]
        assert list(monitor.get_epoch_data()) == ["layers.1"]
        monitor.remove_hooks()


def test_names_of_compiled_models_are_those_of_the_model(tmp_path) -> None:
    model = torch.compile(small(), backend="eager")
    monitor = tap.Monitor(model, ["head", "_orig_mod.layers.0"], [1], tmp_path, [0])
    train(model, monitor, epochs=[1], after_epoch=lambda e: found.extend(monitor.single_data))
    assert found == ["layers.0", "head"]


found: list[str] = []


def test_names_with_what_compile_adds_find_the_data(tmp_path) -> None:
    model = torch.compile(small(), backend="eager")
    names = ["_orig_mod.head", "_orig_mod"]
    assert set(names) < {name for name, _ in model.named_modules()}
    monitor = tap.Monitor(model, names, [1], tmp_path, [0])
    train(model, monitor, epochs=[1])
    assert list(monitor.get_single_data(["_orig_mod.head"])) == ["head"]
    assert list(monitor.get_single_data("_orig_mod")) == [""]
    monitor.remove_hooks()


@pytest.mark.parametrize("layers", [5, [5], [["head"]], ["haed"]])
def test_layers_that_are_not_monitored(tmp_path, layers) -> None:
    monitor = build(tmp_path)
    with pytest.raises(OptionError, match=r"Not monitored: \[.*Monitored are \['head'\]"):
        monitor.get_single_data(layers)
    monitor.close("enough")


def test_epochs_and_batches_come_back_as_they_were_given(tmp_path) -> None:
    monitor = build(tmp_path, epochs=(5, 1, 5), batches=range(3, 0, -1))
    assert monitor.epochs_to_record == [5, 1, 5] and monitor.batch_indices == [3, 2, 1]
    monitor.close("enough")


def test_a_layer_whose_name_begins_as_an_exclusion(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.add_module("!q", nn.Linear(2, 2))
    monitor = tap.Monitor(model, ["!q"], [1], tmp_path, [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    model(torch.ones(1, 2))
    assert list(monitor.get_single_data()) == ["!q"]
    monitor.remove_hooks()


def test_a_tied_layer_can_be_named_either_way(tmp_path) -> None:
    model = nn.Sequential()
    model.first = nn.Linear(3, 3)
    model.second = model.first
    monitor = tap.Monitor(model, ["second"], [1], tmp_path, [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    model(torch.ones(1, 3))
    assert monitor.get_single_data()["second"]["layer"] == "second"
    monitor.remove_hooks()


def test_a_leaf_that_is_not_there_is_said_and_training_runs_on(tmp_path) -> None:
    model = Returns(lambda x: (x, x))
    layers = {"part": {"leaf": "[5]", "record_type": "epoch_full"}, "": {}}
    monitor = tap.Monitor(model, layers, [1], tmp_path, [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    with pytest.warns(tap.TapWarning, match=r"could not keep 'part' \(no item 5 in a tuple of 2\)"):
        model(torch.ones(2))
    assert monitor.get_epoch_data() == {} and list(monitor.get_single_data()) == [""]
    monitor.remove_hooks()
