"""Files of the monitor: their names, what they hold, and that saving never loses anything."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from monitor_models import Returns, batches, files, hooks_of, small, train

import tensortap as tap
from forked_commands import Commands, Ran
from tensortap.errors import OptionError
from tensortap.monitoring.saving import file_names

FULL = {"record_type": "epoch_full"}
LAYERS = {"layers.0.self_attn": {"alias": "attention"}, "layers.1.ffn": {**FULL}}


def monitored(tmp_path, model, layers=LAYERS, batch_indices=(0, 2), epochs=(1,), **options):
    return tap.Monitor(model, layers, epochs, tmp_path / "out", batch_indices, **options)


def load(path):
    return torch.load(path, weights_only=True)


def test_saved_items_have_the_documents_fields(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model)
    paths, held = [], []

    def save(epoch: int) -> None:
        held.append((monitor.get_single_data(), monitor.get_epoch_data()))
        paths.append((monitor.save_single_outputs(), monitor.save_epoch_outputs()))
        monitor.clear_current_epoch_data()

    train(model, monitor, after_epoch=save)
    monitor.remove_hooks()
    out = tmp_path / "out"
    assert files(out) == [
        "epoch_layers.1.ffn_epoch1.pt",
        "single_attention_epoch1_batch0.pt",
        "single_attention_epoch1_batch2.pt",
    ]
    assert paths[0] == (
        [out / "single_attention_epoch1_batch0.pt", out / "single_attention_epoch1_batch2.pt"],
        [out / "epoch_layers.1.ffn_epoch1.pt"],
    )
    assert paths[1:] == [([], []), ([], [])], "epochs that are not recorded save nothing"
    single, full = held[0]
    item = load(paths[0][0][1])
    assert set(item) == {"epoch", "batch_idx", "layer", "alias", "output_shape", "output"}
    assert (item["epoch"], item["batch_idx"]) == (1, 2)
    assert (item["layer"], item["alias"]) == ("layers.0.self_attn", "attention")
    assert item["output_shape"] == [[4, 5, 8], [4, 5, 5]]
    for saved, wanted in zip(item["output"], single["attention"]["data"][(1, 2)], strict=True):
        assert torch.equal(saved, wanted)
    item = load(paths[0][1][0])
    assert set(item) == {
        "epoch", "batch_idx", "layer", "alias", "output_shape", "output", "statistics",
    }  # fmt: skip
    assert (item["epoch"], item["batch_idx"], item["alias"]) == (1, [0, 1, 2], None)
    whole = torch.cat(list(full["layers.1.ffn"]["data"].values()))
    assert torch.equal(item["output"], whole) and item["output_shape"] == [12, 5, 8]
    statistics = item["statistics"]
    exact = whole.double()
    assert set(statistics) == {
        "count", "nan", "posinf", "neginf", "zeros",
        "mean", "std", "min", "max", "absmax", "l2", "rms",
    }  # fmt: skip
    assert statistics["count"] == whole.numel()
    assert statistics["mean"] == pytest.approx(exact.mean().item(), rel=1e-12)
    assert statistics["std"] == pytest.approx(exact.std(correction=0).item(), rel=1e-12)
    assert statistics["min"] == exact.min().item() and statistics["max"] == exact.max().item()


def test_what_nobody_saved_is_saved_before_it_is_cleared(tmp_path) -> None:
    model = small()
    layers = {"layers.0": {"alias": "a"}, "layers.1": {"alias": "b"}, "head": {**FULL}}
    monitor = monitored(tmp_path, model, layers, [0, 1], [1, 2])

    def partly(epoch: int) -> None:
        if epoch == 1:
            assert monitor.save_single_outputs(["a"])
            assert files(tmp_path / "out") == [
                "single_a_epoch1_batch0.pt",
                "single_a_epoch1_batch1.pt",
            ]

    train(model, monitor, epochs=[1], after_epoch=partly)
    monitor.set_epoch(2)
    assert files(tmp_path / "out") == [
        "epoch_head_epoch1.pt",
        "single_a_epoch1_batch0.pt",
        "single_a_epoch1_batch1.pt",
        "single_b_epoch1_batch0.pt",
        "single_b_epoch1_batch1.pt",
    ]
    monitor.set_batch_idx(0)
    model(batches()[0])
    monitor.remove_hooks()
    assert {"epoch_head_epoch2.pt", "single_a_epoch2_batch0.pt"} <= set(files(tmp_path / "out"))


def test_saving_twice_and_again_after_more_batches(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model, {"head": {**FULL}}, None)
    monitor.set_epoch(1)
    for index, batch in enumerate(batches()):
        monitor.set_batch_idx(index)
        model(batch)
        monitor.save_epoch_outputs()
        monitor.save_epoch_outputs()
        item = load(tmp_path / "out" / "epoch_head_epoch1.pt")
        assert item["batch_idx"] == list(range(index + 1))
        assert len(item["output"]) == 4 * (index + 1)
    assert files(tmp_path / "out") == ["epoch_head_epoch1.pt"]
    monitor.remove_hooks()


def test_saving_and_clearing_inside_an_epoch_loses_nothing(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model, {"head": {**FULL}, "layers.0": {}}, [0])
    for epoch in (1, 2, 1):
        monitor.set_epoch(epoch)
        for index, batch in enumerate(batches()):
            monitor.set_batch_idx(index)
            model(batch)
            if index == 1:
                monitor.save_epoch_outputs()
                monitor.clear_epoch_data()
    monitor.remove_hooks()
    parts = ["", "_part2", "_part3", "_part4"]
    items = [load(tmp_path / "out" / f"epoch_head_epoch1{part}.pt") for part in parts]
    assert [item["batch_idx"] for item in items] == [[0, 1], [2], [0, 1], [2]]
    assert [item["statistics"]["count"] for item in items] == [80, 40, 80, 40]
    assert not torch.equal(items[0]["output"], items[2]["output"])
    singles = [f"single_layers.0_epoch1_batch0{part}.pt" for part in parts[:2]]
    assert files(tmp_path / "out", "single_*") == singles


def test_tuples_are_joined_item_by_item(tmp_path) -> None:
    model = small().eval()
    monitor = monitored(tmp_path, model, {"layers.0.self_attn": {**FULL}}, None)
    monitor.set_epoch(1)
    for index, batch in enumerate(batches()):
        monitor.set_batch_idx(index)
        model(batch)
    expected = monitor.get_epoch_buffers()["layers.0.self_attn"]
    item = load(monitor.save_epoch_outputs()[0])
    assert isinstance(item["output"], tuple) and item["output_shape"] == [[12, 5, 8], [12, 5, 5]]
    for place in (0, 1):
        whole = torch.cat([output[place] for output in expected])
        assert torch.equal(item["output"][place], whole)
        assert item["statistics"][place]["mean"] == pytest.approx(whole.double().mean().item())
    monitor.remove_hooks()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.sum(),
        lambda x: x[:, : int(x[0, 0]) + 1],
        lambda x: (x, None if x[0, 0] else x),
        lambda x: (x,) * (int(x[0, 0]) + 1),
        lambda x: x.double() if x[0, 0] else x,
        lambda x: (x, int(x[0, 0])),
    ],
    ids=["0-dim", "trailing", "none", "length", "dtype", "value"],
)
def test_batches_that_cannot_be_joined_are_a_list(tmp_path, make) -> None:
    model = Returns(make)
    monitor = monitored(tmp_path, model, {"part": {**FULL}}, None)
    monitor.set_epoch(1)
    for index in range(2):
        monitor.set_batch_idx(index)
        model(torch.full((2, 3), float(index)))
    expected = monitor.get_epoch_buffers()["part"]
    item = load(monitor.save_epoch_outputs()[0])
    assert isinstance(item["output"], list) and len(item["output"]) == 2
    assert len(item["output_shape"]) == 2
    assert str(item["output"]) == str(expected)
    assert item["statistics"]
    monitor.remove_hooks()


def test_different_batch_sizes_are_joined(tmp_path) -> None:
    model = Returns(lambda x: x * 2)
    monitor = monitored(tmp_path, model, {"part": {**FULL}}, None)
    monitor.set_epoch(1)
    for index, size in enumerate((3, 0, 1)):
        monitor.set_batch_idx(index)
        model(torch.full((size, 2), float(index)))
    item = load(monitor.save_epoch_outputs()[0])
    assert item["output"].tolist() == [[0.0, 0.0]] * 3 + [[4.0, 4.0]]
    monitor.remove_hooks()


def test_batches_are_saved_in_their_order(tmp_path) -> None:
    model = Returns(lambda x: x * 2)
    for limit in (1 << 30, 0):
        monitor = monitored(
            tmp_path, model, {"part": {**FULL}}, None, memory_limit=limit, overwrite=True
        )
        monitor.set_epoch(1)
        for index in (2, 0, 1, 2):
            monitor.set_batch_idx(index)
            model(torch.full((1, 2), float(index)))
        item = load(monitor.save_epoch_outputs()[0])
        assert item["batch_idx"] == [0, 1, 2]
        assert item["output"].tolist() == [[0, 0], [2, 2], [4, 4]]
        monitor.remove_hooks()


def test_files_never_collide_and_stay_in_the_folder(tmp_path) -> None:
    aliases = [
        "a/b",
        "a_b",
        "a b",
        "../up",
        "A",
        "a",
        "",
        "root",
        "x" * 300,
        "x" * 299,
        "名字",
        "注意力" * 40,
        "注意力" * 41,
        "\ud800",
        "\ud801",
        ".",
    ]
    names = file_names(aliases)
    assert len({name.lower() for name in names.values()}) == len(aliases)
    assert all("/" not in name and len(name.encode()) < 140 for name in names.values())
    assert names["a_b"] == "a_b" and names["名字"] == "名字" and names[""] != names["root"]
    model = small()
    layers = {
        "layers.0": {"alias": "../../up"},
        "layers.1": {"alias": ".._.._up"},
        "head": {"alias": "..:..:up"},
        "": {},
    }
    monitor = monitored(tmp_path, model, layers, [0])
    train(model, monitor, epochs=[1])
    monitor.remove_hooks()
    items = [load(path) for path in (tmp_path / "out").glob("*.pt")]
    assert sorted(item["layer"] for item in items) == ["", "head", "layers.0", "layers.1"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_numpy_files(tmp_path, limit, monkeypatch) -> None:
    monkeypatch.setattr("tensortap.monitoring.saving._CHUNK", 7)
    model = Returns(lambda x: (x.bfloat16(), {"a/b": x.to(torch.float8_e4m3fn), "n": None}, 3))
    layers = {"part": {"alias": "p"}, "": {**FULL, "alias": "all", "leaf": 0}}
    monitor = monitored(tmp_path, model, layers, [0], save_format="npy", memory_limit=limit)
    monitor.set_epoch(1)
    for index in range(2):
        monitor.set_batch_idx(index)
        model(torch.arange(6.0).view(2, 3) + index)
    monitor.save_epoch_outputs()
    monitor.remove_hooks()
    out = tmp_path / "out"
    assert files(out) == []
    described = json.loads((out / "epoch_all_epoch1.json").read_text())
    assert described["output"] == {
        "npy": "epoch_all_epoch1.npy",
        "dtype": "bfloat16",
        "stored_as": "float32",
        "shape": [4, 3],
    }
    whole = np.load(out / "epoch_all_epoch1.npy", allow_pickle=False)
    assert whole.dtype == np.float32
    assert whole.tolist() == [[0, 1, 2], [3, 4, 5], [1, 2, 3], [4, 5, 6]]
    assert described["statistics"]["count"] == 12 and described["batch_idx"] == [0, 1]
    described = json.loads((out / "single_p_epoch1_batch0.json").read_text())
    assert (described["epoch"], described["batch_idx"], described["alias"]) == (1, 0, "p")
    first, second, third = described["output"]["tuple"]
    assert third == 3 and second["n"] is None
    assert second["a/b"]["dtype"] == "float8_e4m3fn"
    assert np.load(out / first["npy"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.load(out / second["a/b"]["npy"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert described["output_shape"] == [[2, 3], {"a/b": [2, 3], "n": None}, None]


def test_numpy_keys_that_read_alike(tmp_path) -> None:
    model = Returns(lambda x: {1: x, "1": x + 1})
    monitor = monitored(tmp_path, model, ["part"], [0], save_format="npy")
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    model(torch.zeros(2))
    (path,) = monitor.save_single_outputs()
    described = json.loads(path.read_text())
    found = [np.load(path.parent / item["npy"]).tolist() for item in described["output"].values()]
    assert found == [[0, 0], [1, 1]] and len(described["output_shape"]) == 2
    monitor.remove_hooks()


def test_names_of_files_are_the_documented_ones_per_record_type(tmp_path) -> None:
    """`single_` and `epoch_` tell keys apart that differ in case alone."""
    model = small()
    alias = "注意力" * 40
    layers = {
        "head": {"alias": "A"},
        "layers.0": {"alias": "a", **FULL},
        "layers.1": {"alias": alias},
    }
    monitor = monitored(tmp_path, model, layers, [0])
    train(model, monitor, epochs=[1])
    monitor.remove_hooks()
    found = files(tmp_path / "out")
    assert found[:2] == ["epoch_a_epoch1.pt", "single_A_epoch1_batch0.pt"]
    assert len(found) == 3 and found[2].startswith("single_注意力")


def test_numpy_statistics_are_json(tmp_path) -> None:
    model = Returns(lambda x: x * float("nan"))
    monitor = monitored(tmp_path, model, {"part": {**FULL}}, None, save_format="npy")
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    model(torch.ones(2, 2))
    (path,) = monitor.save_epoch_outputs()
    statistics = json.loads(path.read_text(), parse_constant=pytest.fail)["statistics"]
    assert statistics["nan"] == 4 and statistics["mean"] is None
    monitor.remove_hooks()


def test_custom_outputs_stay_inside(tmp_path) -> None:
    model = small()
    monitor = monitored(tmp_path, model)
    path = monitor.save_custom_output({"x": torch.ones(2)}, "custom_head.pt")
    assert path == tmp_path / "out" / "custom_head.pt"
    assert load(path)["x"].tolist() == [1, 1]
    monitor.save_custom_output([1, 2], Path("deep") / "er" / "list.pt")
    assert load(tmp_path / "out" / "deep" / "er" / "list.pt") == [1, 2]
    monitor.save_custom_output([3], "custom_head.pt")
    assert load(path) == [3], "a name that was used before is replaced"
    for name in ("stats", ".hidden", "ends.", "a.tar.gz", "统计"):
        assert load(monitor.save_custom_output({"n": name}, name)) == {"n": name}
    (tmp_path / "out" / "link").symlink_to(tmp_path)
    (tmp_path / "out" / "leads.pt").symlink_to(tmp_path / "elsewhere.pt")
    outside = [
        "../x.pt",
        "/tmp/x.pt",
        str(tmp_path / "x.pt"),
        str(tmp_path / "out" / "x.pt"),
        "link/x.pt",
        "leads.pt",
        "deep/../../x.pt",
        ".",
    ]
    for name in outside:
        with pytest.raises(OptionError, match="leads outside the output folder"):
            monitor.save_custom_output(1, name)
    for name, says in (
        ("", "must be a file's name"),
        (None, "must be a file's name"),
        (b"x.pt", "must be a file's name"),
        ("deep", "is a folder"),
        ("recording.json", "is a file of the recording"),
        ("segment-r000-000000.safetensors", "is a file of the recording"),
        ("a\0b", "is no file name"),
        ("custom_head.pt/x.pt", "Cannot make the folder"),
        ("x" * 300, "is no file name|File name too long"),
        ("earlier-1/x.pt", "lies where earlier runs are moved to"),
    ):
        with pytest.raises(OptionError, match=says):
            monitor.save_custom_output(1, name)
    with pytest.raises(OptionError, match=r"cannot be saved to 'f.pt'"):
        monitor.save_custom_output(lambda: 1, "f.pt")
    assert not (tmp_path / "out" / "f.pt").exists()
    assert not list((tmp_path / "out").glob(".tensortap-*")), "no half file is left behind"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    monitor.remove_hooks()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    with pytest.raises(tap.TapError, match="Cannot write"):
        monitored(tmp_path, small())


@pytest.mark.parametrize("save_format", ["pt", "npy"])
def test_a_full_disk_is_said_and_training_runs_on(tmp_path, save_format, forked: Commands) -> None:
    """A real limit on the size of files, in a process of its own."""
    code = """
    import resource, signal, sys, warnings
    import torch, tensortap as tap
    from monitor_models import small, train
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    model = small()
    layers = {"head": {"record_type": "epoch_full"}, "layers.0": {}}
    monitor = tap.Monitor(model, layers, [1], sys.argv[1], [0], save_format=sys.argv[2])
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = train(model, monitor)
        monitor.remove_hooks()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(len(losses), *sorted({str(w.message) for w in caught}), sep=chr(10))
    """
    done = script(forked, code, tmp_path / "out", save_format)
    assert done.code == 0, done.stderr
    assert done.stdout.startswith("9\n")
    where = tmp_path / "out"
    assert f"The outputs of 'head' could not be saved to {where}: File too large." in done.stdout
    assert files(tmp_path / "out") == []


def script(forked: Commands, code: str, *words: object) -> Ran:
    return forked.python(textwrap.dedent(code), *words, paths=[Path(__file__).parent])


def test_an_interpreter_that_ends_keeps_what_was_recorded(tmp_path, forked: Commands) -> None:
    code = """
    import sys, tensortap as tap
    from monitor_models import small, train
    model = small()
    monitor = tap.Monitor(model, {"head": {"record_type": "epoch_full"}}, [1], sys.argv[1])
    train(model, monitor, epochs=[1])
    if sys.argv[2] == "raise":
        raise RuntimeError("the loss is gone")
    """
    for how, status in (("end", "complete"), ("raise", "failed")):
        done = script(forked, code, tmp_path / how, how)
        assert done.code == (how == "raise"), done.stderr
        assert files(tmp_path / how) == ["epoch_head_epoch1.pt"]
        run = tap.open(tmp_path / how, partial=True)
        assert run.manifest.status == status and len(run["head"].records) == 3
    assert run.manifest.failure == "the run raised RuntimeError: the loss is gone"


def test_a_killed_process_leaves_its_recording_and_no_scratch(tmp_path, forked: Commands) -> None:
    code = """
    import os, sys, time, tensortap as tap
    from monitor_models import small, train
    model = small()
    layers = {"head": {"record_type": "epoch_full"}}
    monitor = tap.Monitor(model, layers, [1, 2], sys.argv[1], memory_limit=0)
    train(model, monitor, epochs=[1, 2])
    time.sleep(2)
    os.kill(os.getpid(), 9)
    """
    done = script(forked, code, tmp_path / "out")
    assert done.code == -9, done.stderr
    assert files(tmp_path / "out", "epoch*") == ["epoch_head_epoch1.pt"]
    assert len(tap.open(tmp_path / "out", partial=True)["head"].records) == 6
    with pytest.warns(tap.TapWarning, match="holds an earlier run: it was moved to"):
        monitored(tmp_path, small()).remove_hooks()
    assert files(tmp_path / "out" / "earlier-1") == ["epoch_head_epoch1.pt"]


def test_leaving_by_an_exception(tmp_path) -> None:
    model = small()
    with pytest.raises(ZeroDivisionError), monitored(tmp_path, model) as monitor:
        train(model, monitor, epochs=[1])
        raise ZeroDivisionError("the loop broke")
    assert hooks_of(model) == 0
    assert len(files(tmp_path / "out")) == 3
    run = tap.open(tmp_path / "out", partial=True)
    assert run.manifest.status == "failed"
    assert run.manifest.failure == "the run raised ZeroDivisionError: the loop broke"
    assert len(run["layers.1.ffn"].records) == 3
