"""What sinks get of a step, and that it arrives in the real libraries."""

from __future__ import annotations

import importlib.metadata
import io
import json
import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tensortap as tap
from tensortap.errors import MissingExtraError, OptionError
from tensortap.monitoring.sinks import (
    FunctionSink,
    Sinks,
    StdoutSink,
    TensorBoardSink,
    WandbSink,
    base,
    register_sink,
    sink_names,
    sink_of,
    sinks_of,
    values_of,
)
from tensortap.monitoring.sinks.values import without_scalars
from tensortap.monitoring.step import Step
from tensortap.numerics.summary import WIDTH
from tensortap.recording.schema import Site

NAN, INF = math.nan, math.inf
Tensors = list[tuple[tuple[str, Any, str], torch.Tensor]]


def step_of(tensors: Tensors, batch: int = 0, **scalars: float) -> Step:
    """A step in which these tensors were heard, in this order."""
    rows, sites, calls = [], [], []
    seen: dict[Any, int] = {}
    for (layer, port, leaf), tensor in tensors:
        rows.append(tap.summarize(tensor).to_row())
        sites.append(Site(layer, port, leaf, shape=tuple(tensor.shape)))
        calls.append(seen.get((layer, port, leaf), 0))
        seen[layer, port, leaf] = calls[-1] + 1
    return Step(0, batch, tuple(sites), tuple(calls), np.array(rows), scalars)


BLOCK = ("blocks.0", "output", "")
WEIGHT = ("blocks.0", "param", ".weight")


def gradient(*values: float, leaf: str = ".weight") -> Any:
    return ("blocks.0", "grad_param", leaf), torch.tensor(values)


# What sinks get


def test_every_statistic_of_a_place_has_a_name() -> None:
    values = values_of(step_of([(BLOCK, torch.tensor([0.0, 0.0, 3.0, -1.0]))]))
    assert values == pytest.approx(
        {
            "output/blocks.0/rms": math.sqrt(2.5),
            "output/blocks.0/mean": 0.5,
            "output/blocks.0/std": 1.5,
            "output/blocks.0/absmax": 3.0,
            "output/blocks.0/nan": 0.0,
            "output/blocks.0/inf": 0.0,
            "output/blocks.0/dead": 0.5,
        }
    )


def test_undefined_numbers_are_left_out_and_bad_counts_never() -> None:
    values = values_of(step_of([(BLOCK, torch.tensor([NAN, NAN, INF, -INF]))]))
    assert values == {
        "output/blocks.0/nan": 2.0,
        "output/blocks.0/inf": 2.0,
        "output/blocks.0/dead": 0.0,
    }
    empty = values_of(step_of([(BLOCK, torch.empty(0))]))
    assert empty == {"output/blocks.0/nan": 0.0, "output/blocks.0/inf": 0.0}


def test_calls_of_a_step_count_as_one_tensor() -> None:
    first, second = torch.tensor([1.0, NAN]), torch.tensor([3.0, 5.0])
    values = values_of(step_of([(BLOCK, first), (BLOCK, second)]))
    assert values["output/blocks.0/nan"] == 1
    assert values["output/blocks.0/mean"] == pytest.approx(3.0)
    assert values["output/blocks.0/absmax"] == 5.0


def test_leaves_and_the_root_are_named() -> None:
    one = torch.ones(1)
    values = values_of(
        step_of([(("attn", "output", "[0]"), one), (("", "output", ".logits"), one)])
    )
    assert "output/attn[0]/rms" in values
    assert "output/(root).logits/rms" in values


def test_the_gradient_norm_is_over_all_parameters() -> None:
    values = values_of(step_of([gradient(3.0, 0.0), gradient(4.0, leaf=".bias")]))
    assert values["grad_norm"] == pytest.approx(5.0)
    assert values["grad_param/blocks.0.weight/l2"] == pytest.approx(3.0)
    assert "grad_norm" not in values_of(step_of([(BLOCK, torch.ones(1))]))


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_gradient_with_bad_values_has_no_norm_but_counts(bad: float) -> None:
    values = values_of(step_of([gradient(3.0, bad), gradient(4.0, leaf=".bias")]))
    assert "grad_norm" not in values
    assert values["grad_param/blocks.0.weight/nan"] + values["grad_param/blocks.0.weight/inf"] == 1


def test_an_update_has_its_ratio_to_the_parameter() -> None:
    update = ("blocks.0", "update", ".weight"), torch.tensor([0.3, 0.4])
    values = values_of(step_of([(WEIGHT, torch.tensor([3.0, 4.0])), update]))
    assert values["update/blocks.0.weight/ratio"] == pytest.approx(0.1)
    assert "update/blocks.0.weight/ratio" not in values_of(step_of([update]))
    zero = values_of(step_of([(WEIGHT, torch.zeros(2)), update]))
    assert "update/blocks.0.weight/ratio" not in zero


def test_scalars_keep_their_names_save_those_that_are_ours() -> None:
    step = step_of([gradient(3.0, 4.0)], loss=0.5, grad_norm=9.0, lr=NAN)
    values = values_of(step, alarms=["nan"])
    assert values["loss"] == 0.5
    assert values["grad_norm"] == pytest.approx(5.0)
    assert values["scalar/grad_norm"] == 9.0
    assert values["alarms"] == 1.0
    assert "lr" not in values
    assert values_of(Step(0, 0, (), (), np.zeros((0, WIDTH)), {"loss": 1.0}), ()) == {"loss": 1.0}
    assert set(values) - set(without_scalars(values)) == {"loss", "scalar/grad_norm"}


# One protocol, by name


def test_a_sink_is_a_sink_a_function_or_a_text() -> None:
    sink = StdoutSink()
    assert sink_of(sink) is sink
    got: list[Any] = []
    made = sink_of(lambda values, step: got.append((values, step)))
    made.log({"a": 1.0}, 3)
    made.close()
    assert isinstance(made, FunctionSink) and got == [({"a": 1.0}, 3)]
    assert isinstance(sink_of("stdout"), StdoutSink)
    assert len(sinks_of("stdout")) == len(sinks_of(print)) == 1
    assert len(sinks_of(["stdout", print])) == 2
    assert len(sinks_of(())) == 0


@pytest.mark.parametrize("spec", ["carrier_pigeon:home", 3, StdoutSink, None])
def test_what_is_no_sink_is_refused_with_the_names_there_are(spec: object) -> None:
    with pytest.raises(OptionError, match="stdout, tensorboard, wandb"):
        sink_of(spec)


def test_others_add_sinks(monkeypatch) -> None:
    monkeypatch.setattr(base, "_MAKERS", dict(base._MAKERS))
    got: list[str] = []
    register_sink("paper", lambda text: got.append(text) or StdoutSink())
    assert "paper" in sink_names()
    assert isinstance(sink_of("paper:a:b"), StdoutSink) and got == ["a:b"]
    for name, words in (("stdout", "already"), ("two words", "one word")):
        with pytest.raises(OptionError, match=words):
            register_sink(name, lambda text: StdoutSink())


def test_packages_add_sinks_by_entry_point(monkeypatch) -> None:
    def point(name: str, value: str) -> importlib.metadata.EntryPoint:
        return importlib.metadata.EntryPoint(name, value, base.GROUP)

    home = "tensortap.monitoring.sinks.stdout"
    points = [
        point("stone", f"{home}:_made_for_a_test"),
        point("missing", "no_such_package_of_ours:Sink"),
        point("wrong", "builtins:str"),
    ]
    monkeypatch.setattr(
        f"{home}._made_for_a_test", lambda text: StdoutSink(form=text), raising=False
    )
    monkeypatch.setattr(base, "entry_points", lambda group: points)
    assert {"stone", "stdout"} <= set(sink_names())
    assert sink_of("stone:json").form == "json"
    with pytest.raises(OptionError, match="could not be imported: ModuleNotFoundError"):
        sink_of("missing")
    with pytest.raises(OptionError, match="made str"):
        sink_of("wrong")


def test_a_missing_library_is_said_with_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"tensortap\[tensorboard\]"):
        sink_of("tensorboard:nowhere")
    monkeypatch.setattr("tensortap.monitoring.sinks.wandb.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"tensortap\[wandb\]"):
        sink_of("wandb")


class Failing:
    def __init__(self, at: int) -> None:
        self.at = at
        self.logged: list[int] = []
        self.closed = 0

    def log(self, values: Any, step: int) -> None:
        values.clear()
        self.logged.append(step)
        if step == self.at:
            raise RuntimeError("the disk is full")

    def close(self) -> None:
        self.closed += 1
        raise OSError("gone")


def test_a_sink_that_fails_is_dropped_and_the_others_go_on() -> None:
    bad, got = Failing(at=1), []
    sinks = Sinks([bad, FunctionSink(lambda values, step: got.append((dict(values), step)))])
    assert sinks.log({"a": 1.0}, 0) == []
    problems = sinks.log({"a": 2.0}, 1)
    assert problems == [
        "The sink Failing failed at step 1 and gets nothing more: RuntimeError: the disk is full",
        "The sink Failing could not be closed: OSError: gone",
    ]
    assert sinks.log({"a": 3.0}, 2) == []
    assert bad.logged == [0, 1] and bad.closed == 1
    assert got == [({"a": 1.0}, 0), ({"a": 2.0}, 1), ({"a": 3.0}, 2)]
    assert sinks.close() == [] and len(sinks) == 0


def test_closing_says_what_went_wrong_once() -> None:
    sinks = Sinks([Failing(at=-1)])
    assert sinks.close() == ["The sink Failing could not be closed: OSError: gone"]
    assert sinks.close() == []


# The terminal


def test_a_line_tells_the_scalars_the_ranges_and_what_is_bad(capsys) -> None:
    step = step_of(
        [
            (BLOCK, torch.tensor([2.0])),
            (("blocks.1", "output", ""), torch.tensor([4.0, NAN])),
            (("blocks.2", "output", ""), torch.tensor([NAN, INF])),
            gradient(3.0, 4.0),
        ],
        loss=0.25,
    )
    StdoutSink().log(values_of(step, alarms=()), 120)
    assert capsys.readouterr().out == (
        "step 120  loss 0.25  grad_norm 5  alarms 0  output rms 2..4  grad_param rms 3.54..3.54  "
        "nan 2 (first: output/blocks.1)  inf 1 (first: output/blocks.2)\n"
    )


def test_json_lines_hold_every_number_of_every_nth_step() -> None:
    stream = io.StringIO()
    sink = StdoutSink(every=2, form="json", stream=stream)
    values = values_of(step_of([(BLOCK, torch.tensor([2.0, NAN]))]))
    for step in range(3):
        sink.log(values, step)
    sink.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines == [{"step": 0, "values": values}, {"step": 2, "values": values}]
    assert lines[0]["values"]["output/blocks.0/nan"] == 1


@pytest.mark.parametrize("options", [{"every": 0}, {"form": "xml"}])
def test_stdout_refuses_what_it_cannot_write(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        StdoutSink(**options)


# TensorBoard


def events(folder: Path) -> Any:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return found


def bad_then_good() -> list[Step]:
    return [
        step_of([(BLOCK, torch.tensor([1.0, NAN])), gradient(3.0, 4.0)], 0, loss=2.0),
        step_of([(BLOCK, torch.tensor([NAN, NAN])), gradient(3.0, 4.0)], 10, loss=1.0),
    ]


def test_tensorboard_reads_back_what_was_logged(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    sink = sink_of(f"tensorboard:{tmp_path}/tb")
    for step in bad_then_good():
        sink.log(values_of(step), step.batch)
    sink.close()
    read = events(tmp_path / "tb")
    assert set(read.Tags()["scalars"]) == set(values_of(bad_then_good()[0]))
    loss = read.Scalars("loss")
    assert [(event.step, event.value) for event in loss] == [(0, 2.0), (10, 1.0)]
    assert [event.value for event in read.Scalars("output/blocks.0/nan")] == [1.0, 2.0]
    assert [event.step for event in read.Scalars("output/blocks.0/rms")] == [0]
    assert read.Scalars("grad_norm")[1].value == pytest.approx(5.0)


def test_a_writer_in_use_is_left_open(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    sink = sink_of(writer)
    assert isinstance(sink, TensorBoardSink)
    sink.log({"a": 1.0}, 0)
    sink.close()
    assert events(tmp_path).Scalars("a")[0].value == 1.0  # flushed
    writer.add_scalar("mine", 2.0, 1)
    writer.close()
    assert events(tmp_path).Scalars("mine")[0].value == 2.0


def test_a_writer_that_is_not_torchs_gets_scalars() -> None:
    got: list[Any] = []
    writer = SimpleNamespace(add_scalar=lambda *args: got.append(args), flush=lambda: None)
    sink = sink_of(writer)
    sink.log({"a": 1.0}, 4)
    sink.close()
    assert got == [("a", 1.0, 4)]


# Weights & Biases, offline


@pytest.fixture
def wandb(tmp_path, monkeypatch) -> Any:
    module = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    assert module.run is None
    yield module
    if module.run is not None:  # a test that failed
        module.run.finish()
    module.teardown()


def history(folder: Path) -> list[dict[str, float]]:
    """The rows of the one offline run in a folder, from its file."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service has written all when it has ended
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.nested_key[0]: json.loads(item.value_json) for item in items}
            rows.append({name: row[name] for name in row if name not in ("_timestamp", "_runtime")})
    return rows


def log_records(data: bytes) -> Any:
    """The records of a file in LevelDB's log format, behind wandb's seven bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def test_wandb_gets_a_row_a_step_in_a_run_of_its_own(wandb, tmp_path) -> None:
    sink = sink_of("wandb:tensortap-tests")
    assert isinstance(sink, WandbSink)
    for step in bad_then_good():
        sink.log(values_of(step), step.batch)
    assert wandb.run is None  # the user's place is left alone
    assert sink.run.project == "tensortap-tests"
    sink.close()
    first, second = history(tmp_path)
    expected = {f"tensortap/{name}": value for name, value in values_of(bad_then_good()[0]).items()}
    assert first == pytest.approx({**expected, "tensortap/step": 0, "_step": 0})
    assert second["tensortap/output/blocks.0/nan"] == 2
    assert (second["tensortap/step"], second["_step"]) == (10, 1)


def test_a_shared_run_keeps_the_users_own_steps(wandb, tmp_path) -> None:
    """The user counts epochs; the watch logs three times in each."""
    sink = sink_of("wandb")  # made before the run
    run = wandb.init(project="mine")
    for epoch in range(3):
        for inner in range(3):
            nan = 7.0 if inner == 1 else 0.0
            sink.log({"a": 10.0 * epoch + inner, "x/nan": nan}, 100 * epoch + inner)
            assert run.step <= epoch
        run.log({"loss": 1.0}, step=epoch)
    sink.close()
    run.log({"loss": 2.0}, step=3)  # ours does not end the user's run
    run.finish()
    rows = history(tmp_path)
    assert [row["_step"] for row in rows] == [0, 1, 2, 3]
    assert [row["loss"] for row in rows] == [1.0, 1.0, 1.0, 2.0]
    # wandb keeps a row open until the next step comes: ours go to the one that is open.
    assert [row.get("tensortap/a") for row in rows] == [12.0, 22.0, None, None]
    assert [row.get("tensortap/step") for row in rows] == [102, 202, None, None]
    assert [row["tensortap/x/nan"] for row in rows[:2]] == [7.0, 7.0]  # no 0 hides it


def test_a_run_handed_in_is_used(wandb, tmp_path) -> None:
    run = wandb.init(project="mine", reinit="create_new")
    sink = sink_of(run)
    assert isinstance(sink, WandbSink)
    sink.log({"a": 1.0}, 5)
    sink.close()
    run.log({"loss": 1.0})
    run.finish()
    (row,) = history(tmp_path)
    assert row == {"tensortap/a": 1, "tensortap/step": 5, "loss": 1, "_step": 0}
