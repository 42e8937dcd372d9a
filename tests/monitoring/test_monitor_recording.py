"""The run is a tensortap recording too: every command works on it, and old runs are kept."""

from __future__ import annotations

import json

import pytest
import torch
from monitor_models import batches, files, hooks_of, no_warnings, small, train
from test_monitor_saving import script

import tensortap as tap
from forked_commands import Commands, Ran
from schemas import DOCS
from tensortap.errors import OptionError, RecordingExistsError

FULL = {"record_type": "epoch_full"}
LAYERS = {"layers.0.self_attn": {"alias": "attention"}, "layers.*": {**FULL}, "head": {**FULL}}


def record(path, seed=0, epochs=(1, 2), **options):
    model = small(seed)
    torch.manual_seed(5)
    monitor = tap.Monitor(model, LAYERS, epochs, path, [0], **options)
    train(model, monitor)
    monitor.remove_hooks()
    return monitor


def test_the_recording_says_where_and_when(tmp_path) -> None:
    record(tmp_path / "run", mode="fp32")
    run = tap.open(tmp_path / "run")
    assert run.layers == ["layers.0.self_attn", "layers.0", "layers.1", "head"]
    assert {row.alias for row in run["layers.0.self_attn"].records} == {"attention"}
    assert [(r.leaf, r.epoch, r.batch) for r in run["layers.0.self_attn"].records] == [
        ("[0]", 1, 0),
        ("[1]", 1, 0),
        ("[0]", 2, 0),
        ("[1]", 2, 0),
    ]
    assert [(r.epoch, r.batch, r.call) for r in run["head"].records] == [
        (epoch, batch, 0) for epoch in (1, 2) for batch in (0, 1, 2)
    ]
    assert {r.port for layer in run.layers for r in run[layer].records} == {"output"}
    saved = torch.load(tmp_path / "run" / "epoch_head_epoch2.pt", weights_only=True)
    rows = [row for row in run["head"].records if row.epoch == 2]
    assert torch.equal(torch.cat([row.tensor() for row in rows]), saved["output"])
    manifest = run.manifest
    assert manifest.status == "complete" and manifest.mode == "fp32"
    assert manifest.target["class"].endswith("Small") and manifest.target["training"]
    about = manifest.selection["monitor"]
    assert about["epochs"] == [1, 2] and about["batches"] == [0]
    assert about["layers"]["layers.0.self_attn"]["alias"] == "attention"
    assert "epoch_head_epoch1.pt" in manifest.selection["files"]
    assert len(manifest.inputs["batches"]) == 6, "a digest of each batch that was recorded"
    schema = json.loads((DOCS / "recording.schema.json").read_text())
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads((tmp_path / "run" / "recording.json").read_text()), schema)


def test_commands_work_on_it_and_runs_compare_epoch_by_epoch(tmp_path, forked: Commands) -> None:
    def command(*words: object) -> Ran:
        return forked.run([str(word) for word in words], tmp_path)

    record(tmp_path / "a")
    record(tmp_path / "b")
    record(tmp_path / "c", seed=1)
    shown = command("show", tmp_path / "a", "--json")
    assert shown.code == 0, shown.stderr
    assert {row["layer"] for row in json.loads(shown.stdout)["layers"]} >= {"head", "layers.1"}
    assert command("check", tmp_path / "a").code == 0
    same = command("compare", tmp_path / "a", tmp_path / "b", "--json")
    assert same.code == 0 and json.loads(same.stdout)["same"]
    other = command("compare", tmp_path / "a", tmp_path / "c", "--json")
    assert other.code == 1 and not json.loads(other.stdout)["same"]
    picture = tmp_path / "picture.png"
    done = command("plot", tmp_path / "a", "head", "-o", picture)
    assert done.code == 0 and picture.stat().st_size > 1000, done.stderr


def test_a_difference_in_the_second_epoch_is_found_there(tmp_path) -> None:
    record(tmp_path / "a")
    model = small()
    torch.manual_seed(5)
    monitor = tap.Monitor(model, LAYERS, [1, 2], tmp_path / "b", [0])

    def spoil(epoch: int) -> None:
        if epoch == 1:
            with torch.no_grad():
                model.head.weight.mul_(1.5)

    train(model, monitor, after_epoch=spoil)
    monitor.remove_hooks()
    result = tap.compare(tmp_path / "a", tmp_path / "b")
    assert not result.same
    (row,) = [row for row in result.layers if row.layer == "head"]
    assert row.main.diverged_at[0][:2] == (2, 0)


def test_summaries_alone(tmp_path) -> None:
    record(tmp_path / "full")
    record(tmp_path / "run", keep="summary")
    run, full = tap.open(tmp_path / "run"), tap.open(tmp_path / "full")
    for layer in full.layers:
        for one, two in zip(run[layer].records, full[layer].records, strict=True):
            assert one.summary.mean == pytest.approx(two.summary.mean)
            assert one.summary.count == two.summary.count
    assert files(tmp_path / "run") == files(tmp_path / "full")


def test_none_is_listed_as_skipped(tmp_path) -> None:
    model = small(weights=False)
    monitor = tap.Monitor(model, ["layers.0.self_attn"], [1], tmp_path, [0])
    train(model, monitor, epochs=[1])
    monitor.remove_hooks()
    (skipped,) = tap.open(tmp_path).manifest.skipped
    assert skipped == {
        "layer": "layers.0.self_attn",
        "port": "output",
        "leaf": "[1]",
        "reason": "None stands where a tensor could",
        "count": 1,
    }


def test_an_earlier_run_is_moved_aside_whole(tmp_path) -> None:
    path = tmp_path / "run"
    first = record(path)
    first.save_custom_output([1], "deep/mine.pt")  # too late to be listed: it stays
    names = {p.name for p in path.iterdir()} - {"deep"}
    (path / "notes.txt").write_text("somebody's")
    with pytest.warns(tap.TapWarning, match=r"earlier run: it was moved to .*earlier-1"):
        record(path, seed=1, epochs=[1])
    assert {p.name for p in (path / "earlier-1").iterdir()} == names
    assert files(path, "epoch_*epoch2*") == [], "nothing of the old run is left among the new"
    assert (path / "notes.txt").exists() and (path / "deep" / "mine.pt").exists()
    assert len(tap.open(path)["head"].records) == 3
    assert len(tap.open(path / "earlier-1")["head"].records) == 6
    with pytest.warns(tap.TapWarning, match="earlier-2"):
        record(path)
    assert len(tap.open(path / "earlier-2")["head"].records) == 3
    with no_warnings():
        record(path, overwrite=True)
    assert not (path / "earlier-3").exists()


def test_custom_outputs_move_with_their_run(tmp_path) -> None:
    for number in range(2):
        model = small()
        monitor = tap.Monitor(model, LAYERS, [1], tmp_path / "run", [0])
        train(model, monitor, epochs=[1])
        monitor.save_custom_output([number], "deep/mine.pt")
        monitor.remove_hooks()
    assert torch.load(tmp_path / "run" / "deep" / "mine.pt") == [1]
    assert torch.load(tmp_path / "run" / "earlier-1" / "deep" / "mine.pt") == [0]


def test_a_run_without_data_leaves_no_trace(tmp_path) -> None:
    with no_warnings():
        for _ in range(2):
            tap.Monitor(small(), ["head"], [1], tmp_path, [0]).remove_hooks()
    assert [p.name for p in tmp_path.iterdir()] == ["recording.json"]


def test_a_recording_that_is_no_monitors_is_not_touched(tmp_path) -> None:
    model = small()
    with tap.record(model, tmp_path / "run", layers="all"):
        model(batches()[0])
    for options in ({}, {"overwrite": True}):
        with pytest.raises(RecordingExistsError, match="no Monitor made"):
            tap.Monitor(model, ["head"], [1], tmp_path / "run", [0], **options)
    assert hooks_of(model) == 0 and tap.open(tmp_path / "run").layers


def test_two_monitors_of_one_folder(tmp_path) -> None:
    model = small()
    first = tap.Monitor(model, LAYERS, [1], tmp_path, [0])
    train(model, first, epochs=[1])
    with pytest.warns(tap.TapWarning, match="Another monitor was still writing"):
        second = tap.Monitor(model, LAYERS, [1], tmp_path, [0])
    assert first.closed and not second.closed
    train(model, second, epochs=[1])
    second.remove_hooks()
    assert hooks_of(model) == 0
    assert files(tmp_path) == files(tmp_path / "earlier-1") != []


def test_two_monitors_of_one_model(tmp_path) -> None:
    model = small()
    monitors = [tap.Monitor(model, LAYERS, [1], tmp_path / name, [0]) for name in "ab"]
    for monitor in monitors:
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
    model(batches()[0])
    for monitor in monitors:
        monitor.remove_hooks()
    assert tap.compare(tmp_path / "a", tmp_path / "b").same
    assert hooks_of(model) == 0


def test_another_process_is_not_disturbed(tmp_path, forked: Commands) -> None:
    monitor = tap.Monitor(small(), LAYERS, [1], tmp_path, [0])
    code = """
    import sys, tensortap as tap
    from monitor_models import small
    tap.Monitor(small(), ["head"], [1], sys.argv[1], [0])
    """
    done = script(forked, code, tmp_path)
    assert done.code == 1
    assert "RecordingExistsError: Another process is recording to" in done.stderr
    monitor.remove_hooks()
    assert script(forked, code, tmp_path).code == 0


def test_configuration_as_in_the_document(tmp_path) -> None:
    config = {
        "monitor_layers": {
            "layers.0.self_attn": {"alias": "attention_weights", "record_type": "single"},
            "layers.1.ffn": {"alias": "ffn", "record_type": "epoch_full"},
        },
        "monitor_epochs": [1, 5],
        "monitor_batches": [0],
        "monitor_output_dir": str(tmp_path / "said"),
        "learning_rate": 0.1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "config.toml").write_text(
        "monitor_epochs = [1, 5]\nmonitor_batches = [0]\n"
        f'monitor_output_dir = "{tmp_path / "toml"}"\n'
        '[monitor_layers."layers.1.ffn"]\nalias = "ffn"\nrecord_type = "epoch_full"\n'
    )
    for source, folder, options in (
        (config, "said", {}),
        (tmp_path / "config.json", "json", {"output_dir": tmp_path / "json"}),
        (str(tmp_path / "config.toml"), "toml", {"sample_every": 2}),
    ):
        model = small()
        monitor = tap.Monitor.from_config(model, source, **options)
        assert monitor.epochs_to_record == [1, 5] and monitor.output_dir == tmp_path / folder
        train(model, monitor, epochs=[1])
        assert list(monitor.get_epoch_data()) == ["ffn"]
        assert len(monitor.get_epoch_buffers()["ffn"]) == (2 if options.get("sample_every") else 3)
        monitor.remove_hooks()
    incomplete = {"monitor_layers": ["head"], "monitor_epochs": [1], "monitor_batches": [0]}
    with pytest.raises(OptionError, match="no 'monitor_output_dir'"):
        tap.Monitor.from_config(small(), incomplete)
    with pytest.raises(OptionError, match="monitor_epoch"):
        tap.Monitor.from_config(small(), {**incomplete, "monitor_epoch": [1]}, tmp_path)


def test_watch_is_at_hand(tmp_path) -> None:
    model = small()
    with tap.Monitor.watch(model, tmp_path / "watch", layers="blocks", every=1) as watcher:
        train(model, epochs=[1])
    assert watcher.failure is None
    assert tap.open(tmp_path / "watch").layers


def test_ranks_write_side_by_side(tmp_path, monkeypatch) -> None:
    """A launcher says the rank before the group is joined."""
    monitors = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        model = small()
        monitors.append(tap.Monitor(model, {"head": {**FULL}}, [1], tmp_path / "run"))
        if rank == 0:  # in one process the second would close the first
            train(model, monitors[0], epochs=[1])
            monitors[0].remove_hooks()
    train(model, monitors[1], epochs=[1])
    monitors[1].remove_hooks()
    assert files(tmp_path / "run") == ["epoch_head_epoch1.pt", "epoch_head_epoch1_rank1.pt"]
    assert len(tap.open(tmp_path / "run")["head"].records) == 6


def test_an_epoch_that_comes_again_counts_its_calls_on(tmp_path) -> None:
    model = small()
    monitor = tap.Monitor(model, {"head": {**FULL}}, [1, 2], tmp_path)
    train(model, monitor, epochs=[1, 2, 1])
    monitor.remove_hooks()
    moments = [(r.epoch, r.batch, r.call) for r in tap.open(tmp_path)["head"].records]
    assert len(set(moments)) == len(moments) == 9
    assert moments[0] == (1, 0, 0) and (1, 0, 1) in moments and (2, 0, 1) not in moments
