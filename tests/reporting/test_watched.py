"""Looking at a watched run: the table over the steps, the check, the picture."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.cli.main import main
from tensortap.monitoring.live import LiveAlarm
from tensortap.numerics.summary import COLUMNS, WIDTH
from tensortap.recording.health import first_bad
from tensortap.recording.schema import Manifest, Port, Site, Structure
from tensortap.recording.writer import Writer
from tensortap.reporting.console import plain, print_table, written
from tensortap.reporting.step_plots import plot_steps
from tensortap.reporting.watched import scalars_table, sparkline, watched_table, ways

AT = {name: number for number, name in enumerate(COLUMNS)}


def raw(value: float, count: int = 16, *, nan: int = 0, zero: bool = False) -> np.ndarray:
    row = np.zeros(WIDTH)
    row[AT["count"]], row[AT["nan"]], row[AT["zeros"]] = count, nan, count if zero else 0
    row[AT["mean"]] = value if count == 1 else 0.0
    row[AT["std"]], row[AT["min"]], row[AT["max"]] = abs(value), -abs(value), abs(value)
    row[AT["absmax"]], row[AT["l2"]] = abs(value), abs(value) * (count - nan) ** 0.5
    if nan == count:
        row[AT["mean"] : AT["l2"]], row[AT["l2"]] = np.nan, 0.0
    return row


class Steps:
    """Writes a watched run row by row."""

    def __init__(self, path: Path, **selection: object) -> None:
        self.path = path
        names = ("blocks.0", "blocks.1")
        about = {"keep": "summary", "watch": {"every": 1}, **selection}
        manifest = Manifest(selection=about, structure=Structure(names))
        self.writer = Writer(str(path), manifest, overwrite=True)
        self.order = 0

    def add(self, layer: str, port: Port, step: int, row: np.ndarray, leaf: str = "") -> None:
        shape = () if port == "scalar" else (4, 4)
        site = self.writer.site(Site(layer, port, leaf, None, "", shape, "float32"))
        self.writer.summary_line(site, (self.order, step // 10, step, 0), row)
        self.order += 1

    def close(self) -> tap.Recording:
        self.writer.close()
        return tap.open(self.path)


def ordinary(path: Path, steps: int = 20, wrong: int | None = None) -> Steps:
    run = Steps(path)
    for step in range(steps):
        for k in range(2):
            bad = wrong is not None and step >= wrong and k == 1
            run.add(f"blocks.{k}", "output", step, raw(1.0 + k, nan=3 if bad else 0))
        for k in (1, 0):
            run.add(f"blocks.{k}", "grad_output", step, raw(0.1 / (1 + step)))
            run.add(f"blocks.{k}.fc", "param", step, raw(0.5), ".weight")
            run.add(f"blocks.{k}.fc", "param", step, raw(0.0, zero=True), ".bias")
        run.add("loss", "scalar", step, raw(20.0 / (1 + step), 1))
    return run


def shown(recording: tap.Recording) -> str:
    console = plain()
    found = ways(recording.records)
    for made in (scalars_table(found), watched_table(found)):
        if made is not None:
            print_table(console, made)
    return written(console)


def test_a_row_says_first_and_last_and_draws_the_way(tmp_path: Path) -> None:
    text = shown(ordinary(tmp_path / "run").close())
    lines = text.splitlines()
    assert lines[0].startswith("logged") and lines[2].startswith("loss")
    assert "20" in lines[2] and "█▄" in lines[2].replace(" ", "")
    ports = [line.split()[0] for line in lines if line.startswith(("output", "grad", "param"))]
    assert ports == ["output"] * 2 + ["grad_output"] * 2 + ["param"] * 4
    grad = next(line for line in lines if line.startswith("grad_output"))
    assert "0.1" in grad and "0.005" in grad
    assert "not finite" not in text.split("\n", 1)[1]


def test_what_is_not_finite_is_said_with_its_first_step(tmp_path: Path) -> None:
    text = shown(ordinary(tmp_path / "run", wrong=15).close())
    (line,) = [x for x in text.splitlines() if x.startswith("output  ") and "blocks.1" in x]
    assert "from epoch 1, batch 15" in line
    assert line.rstrip().endswith("×××××")
    assert " 15 " in line, "three NaN in each of five steps"


def test_steps_that_were_written_late_stand_where_they_belong(tmp_path: Path) -> None:
    run = Steps(tmp_path / "run")
    for step in (0, 10, 5, 6, 7):  # 5 to 7 are those before an alarm, out of the ring
        run.add("a", "output", step, raw(1.0 + step))
    (way,) = ways(run.close().records)
    assert way.values.tolist() == [1.0, 6.0, 7.0, 8.0, 11.0]
    assert way.to_dict()["last_step"] == [1, 10]


def test_calls_of_one_step_are_one_number(tmp_path: Path) -> None:
    run = Steps(tmp_path / "run")
    for step in range(2):
        run.add("a", "output", step, raw(3.0))
        run.add("a", "output", step, raw(4.0))
    (way,) = ways(run.close().records)
    assert len(way.values) == 2
    assert way.first == pytest.approx(math.sqrt((9 + 16) / 2))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0], "▁▅█"),
        ([5.0, 5.0], "▄▄"),
        ([1.0, math.nan, 2.0], "▁×█"),
        ([math.nan], "×"),
        ([1.0, 10.0, 100.0], "▁▅█"),  # a logarithmic scale
        ([], ""),
        ([-1e308, 1e308], "▄▄"),
    ],
)
def test_sparklines(values: list[float], expected: str) -> None:
    assert sparkline(values) == expected


def run_json(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return int(caught.value.code or 0), json.loads(capsys.readouterr().out)


def test_json_keeps_its_rows_and_adds_the_way(tmp_path: Path, capsys) -> None:
    ordinary(tmp_path / "run").close()
    code, data = run_json(capsys, "show", tmp_path / "run", "--json", "--port", "output")
    assert code == 0 and data["watched"]
    row = data["layers"][1]
    assert (row["layer"], row["records"], row["count"]) == ("blocks.1", 20, 320)
    assert row["rms"] == pytest.approx(2.0)
    assert row["over_steps"]["steps"] == 20
    assert (row["over_steps"]["first_step"], row["over_steps"]["last_step"]) == ([0, 0], [1, 19])
    code, data = run_json(capsys, "show", tmp_path / "run", "--json", "--batch", 3)
    assert "watched" not in data and data["layers"][0]["batch"] == 3


def test_check_names_the_first_in_time_and_not_the_first_layer(tmp_path: Path, capsys) -> None:
    run = Steps(tmp_path / "run")
    for step in range(20):
        run.add("early", "output", step, raw(1.0, nan=1 if step >= 15 else 0))
        run.add("late", "output", step, raw(1.0, nan=1 if step >= 12 else 0))
        loss = raw(1.0, 1, nan=1) if step >= 13 else raw(1.0, 1)
        run.add("loss", "scalar", step, loss)
    findings = run.close().check()
    assert [finding.layer for finding in findings] == ["early", "late", "loss"]
    first = first_bad(findings)
    assert first is not None
    assert (first.layer, first.moment) == ("late", (1, 12, 0))
    assert "epoch 1, batch 12" in first.text and "7 later records" in first.text
    assert findings[2].text.startswith("The scalar 'loss', epoch 1, batch 13, call 0 is NaN")
    code, data = run_json(capsys, "check", tmp_path / "run", "--json")
    assert code == 1
    assert data["first"]["layer"] == "late"
    with pytest.raises(SystemExit):
        main(["check", str(tmp_path / "run")])
    assert "First NaN or Inf: The output of 'late', epoch 1, batch 12" in capsys.readouterr().out


def test_parameters_and_numbers_are_judged_as_what_they_are(tmp_path: Path) -> None:
    run = Steps(tmp_path / "run")
    still = raw(0.0, zero=True)
    for step in range(4):
        run.add("fine", "param", step, still, ".bias")  # as initialised
        run.add("fine", "grad_param", step, still if step else raw(1.0), ".bias")
        run.add("frozen", "grad_param", step, still, ".weight")
        run.add("frozen", "update", step, still, ".weight")
        run.add("loss", "scalar", step, raw(5000.0, 1))
    findings = run.close().check()
    assert [(f.layer, f.kind, f.severity) for f in findings] == [("frozen", "dead", "warning")] * 2
    assert "grad_param .weight of 'frozen' is zero at all 4 moments" in findings[0].text
    assert "never moved" in findings[1].text


def test_a_dead_output_is_still_one(tmp_path: Path) -> None:
    run = Steps(tmp_path / "run")
    for step in range(3):
        run.add("a", "output", step, raw(0.0, zero=True))
    (finding,) = run.close().check()
    assert finding.kind == "dead" and "2 later records" in finding.text


def test_the_whole_run_and_one_layer_are_drawn(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    ordinary(tmp_path / "run", wrong=15).close()
    code, data = run_json(capsys, "plot", tmp_path / "run", "-o", tmp_path / "all.png", "--json")
    assert code == 0
    assert (data["steps"], data["places"]) == (20, 9)
    words = ("plot", tmp_path / "run", "blocks.1", "-o", tmp_path / "one.png", "--json")
    code, data = run_json(capsys, *words)
    assert (code, data["layer"], data["places"]) == (0, "blocks.1", 4), "what is inside it too"
    for name in ("all", "one"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_what_is_not_finite_and_of_alarms(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = Steps(tmp_path / "run")
    for step in range(3):
        run.add("a", "output", step, raw(0.0, nan=16))
        run.add("lo$$", "scalar", step, raw(1e300 if step else -1.0, 1))
    recording = run.close()
    alarms = [LiveAlarm("nan", "a", "output", "", batch, math.nan, "x") for batch in (1, 99)]
    path = tmp_path / "picture.svg"
    made = plot_steps(ways(recording.records), recording.layers, path, title="$", alarms=alarms)
    assert path.stat().st_size > 1000
    assert made.notes == ("1 alarm of steps that were not kept.",)


def test_a_layer_has_one_colour_in_all_panels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = Steps(tmp_path / "run")
    names = [f"blocks.{number}" for number in range(5)]
    for step in range(3):
        for name in names:
            run.add(name, "output", step, raw(1.0 + step))
        for name in names[1:4]:  # not all layers are in all panels
            run.add(name, "grad_output", step, raw(2.0 + step))
        run.add(names[2], "param", step, raw(3.0 + step), ".weight")
    recording = run.close()
    path = tmp_path / "picture.svg"
    plot_steps(ways(recording.records), recording.layers, path, title="")
    panels = re.findall(r'<g id="axes_\d+">.*?(?=<g id="axes_|\Z)', path.read_text(), re.DOTALL)
    line = r'<path d="(?:[ML] \S+ \S+ ?\s*){3}" clip-path="[^"]*" style="[^"]*stroke: (#\w+)'
    colours = [list(dict.fromkeys(re.findall(line, panel))) for panel in panels]
    assert len(set(colours[0])) == 5
    assert colours[1:] == [colours[0][1:4], [colours[0][2]]]


def test_batches_that_begin_anew_each_epoch_go_on_in_the_picture(tmp_path: Path, capsys) -> None:
    """A recording of summaries that nobody watched, over two epochs of three batches."""
    pytest.importorskip("matplotlib")
    model = nn.Linear(2, 2)
    with tap.record(model, tmp_path / "run", layers="all", keep="summary") as recorder:
        for epoch in range(2):
            for batch in range(3):
                recorder.moment(epoch=epoch, batch=batch)
                model(torch.ones(1, 2))
    words = ("plot", tmp_path / "run", "(root)", "-o", tmp_path / "a.png", "--json")
    assert run_json(capsys, *words)[1]["steps"] == 6
    with pytest.raises(SystemExit) as caught:
        main(["plot", str(tmp_path / "run"), "-o", str(tmp_path / "b.png")])
    assert caught.value.code == 2
    assert "no watched run" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["pt", "npy", "npz"])
def test_exporting_a_watched_run_is_a_sentence(tmp_path: Path, capsys, layout: str) -> None:
    ordinary(tmp_path / "run").close()
    with pytest.raises(SystemExit) as caught:
        main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--layout", layout])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("tensortap: ")


def test_a_run_that_was_really_watched_is_shown_checked_drawn_and_compared(
    tmp_path: Path, capsys
) -> None:
    pytest.importorskip("matplotlib")

    def train(name: str, rate: float) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        path = str(tmp_path / name)
        with tap.watch(model, path, layers="all", every=1, updates=True) as watch:
            for step in range(12):
                watch.epoch(step // 4)
                loss = model(torch.ones(3, 4)).square().mean()
                loss.backward()
                watch.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()
        return path

    a, b = train("a", 0.05), train("b", 0.06)
    data = run_json(capsys, "show", a, "--json")[1]
    assert {row["port"] for row in data["layers"]} == {
        *("scalar", "output", "grad_output", "param", "grad_param", "update")
    }
    assert {row["over_steps"]["steps"] for row in data["layers"]} == {12}
    assert run_json(capsys, "check", a, "--json")[1]["errors"] == 0
    assert run_json(capsys, "plot", a, "-o", tmp_path / "a.png", "--json")[0] == 0
    result = tap.compare(a, b)
    first = result.first_divergence
    assert first is not None and first.first_moment is not None and first.first_part is not None
    # Another learning rate: the gradients of step 0 agree, what the step did does not.
    assert (first.first_part.port, first.first_moment[:2]) == ("update", (0, 0)) or (
        first.first_part.port == "param"
    )
    assert [epoch.epoch for epoch in result.epochs] == [0, 1, 2]
