"""`show --follow`: a run in another process, while it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import Run

from tensortap.errors import DamagedError
from tensortap.monitoring.follow import Follower, State
from tensortap.monitoring.live import LIVE, Live, LiveAlarm, live_text, read_live, write_live
from tensortap.monitoring.step import Step
from tensortap.numerics.summary import WIDTH
from tensortap.recording.schema import Manifest, Site
from tensortap.recording.writer import Writer

WRITES = """
import sys, time, torch
from torch import nn
import tensortap as tap

path, steps, wrong = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with tap.watch(model, path, layers="all", every=1) as watch:
    for step in range(steps):
        x = torch.randn(4, 4)
        if step == wrong:
            x[0, 0] = float("nan")
        loss = model(x).square().mean()
        loss.backward()
        watch.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
"""


def start(*words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def writes(path: Path, steps: int, wrong: int = -1) -> subprocess.Popen[str]:
    return start("-c", WRITES, str(path), str(steps), str(wrong))


def raw(scale: float, nan: int = 0, count: int = 8) -> np.ndarray:
    row = np.zeros(WIDTH)
    row[[0, 1]] = count, nan
    row[8], row[9], row[10], row[11] = scale, -scale, scale, scale
    row[12] = scale * (count - nan) ** 0.5
    return row


def test_a_follower_that_came_first_sees_the_run_begin_go_on_and_end(tmp_path: Path) -> None:
    path = tmp_path / "run"
    follower = start("-m", "tensortap", "show", "--follow", str(path), "--json")
    training = writes(path, 30)
    out, err = follower.communicate(timeout=120)
    assert training.wait(30) == 0, training.communicate()[1]
    assert follower.returncode == 0, err
    assert "yet: waiting" in err and "complete" in err
    steps = [json.loads(line) for line in out.splitlines()]
    assert len(steps) >= 2
    assert [step["batch"] for step in steps] == sorted({step["batch"] for step in steps})
    last = steps[-1]
    assert last["scalars"]["loss"] > 0
    ports = {(row["layer"], row["port"]) for row in last["layers"]}
    assert {("0", "output"), ("2", "grad_output"), ("0", "param")} <= ports
    assert all("Traceback" not in text for text in (out, err))


def test_a_run_with_nan_ends_with_exit_code_1_and_its_alarm(tmp_path: Path) -> None:
    path = tmp_path / "run"
    training = writes(path, 25, wrong=12)
    follower = start("-m", "tensortap", "show", "--follow", str(path), "--json")
    out, err = follower.communicate(timeout=120)
    assert training.wait(30) == 0
    assert follower.returncode == 1, err
    alarm = json.loads(out.splitlines()[-1])["alarms"][0]
    assert (alarm["layer"], alarm["batch"]) == ("0", 12)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a terminal")
def test_on_a_terminal_a_table_and_ctrl_c_leaves_the_last_one(tmp_path: Path) -> None:
    import pty

    path = tmp_path / "run"
    with _open_run(path):
        main, side = pty.openpty()
        follower = subprocess.Popen(
            [sys.executable, "-m", "tensortap", "show", "--follow", str(path)],
            stdout=side,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"},
        )
        os.close(side)
        seen = _read_until(main, b"blocks.0", 60)
        assert b"step 3" in seen
        follower.send_signal(signal.SIGINT)
        rest = _read_until(main, b"", 20)
        assert follower.wait(20) == 0
        assert b"blocks.0" in rest, "the last table stays"
        assert follower.stderr is not None
        assert b"Traceback" not in follower.stderr.read()


class _open_run:
    """A run that is being written: a first step, and a live.json."""

    def __init__(self, path: Path) -> None:
        self.writer = Writer(str(path), Manifest(selection={"watch": {}}))
        step = Step(0, 3, (Site("blocks.0", "output"),), (0,), raw(2.0)[None], {"loss": 0.5})
        write_live(self.writer.store, live_text(step, [], every=1, rate=2.0))

    def __enter__(self) -> Writer:
        return self.writer

    def __exit__(self, *_: object) -> None:
        self.writer.close()


def _read_until(file: int, word: bytes, seconds: float) -> bytes:
    """What a terminal was told, up to a word; up to its end without one."""
    import select

    seen, until = b"", time.monotonic() + seconds
    while time.monotonic() < until and (not word or word not in seen):
        if select.select([file], [], [], 0.2)[0]:
            try:
                part = os.read(file, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            seen += part
    return seen


def test_a_run_that_never_begins_is_said_in_words(run: Run, tmp_path: Path) -> None:
    result = run("show", "--follow", tmp_path / "nothing", "--timeout", "0.2")
    assert result.code == 2
    assert "none began within 0.2 s" in result.err
    assert run("show", "--follow", tmp_path, "--timeout", "-1").code == 2
    assert run("show", "--follow", tmp_path, "--each").code == 2


def test_without_live_json_the_sealed_segments_are_followed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = Writer(str(path), Manifest(selection={"watch": {}}))
    site, loss = writer.site(Site("a", "output")), writer.site(Site("loss", "scalar"))
    row = raw(1.0)
    for step in range(3):
        writer.summary_line(site, (2 * step, 0, step, 0), raw(step + 1.0))
        row[7] = 5 - step
        writer.summary_line(loss, (2 * step + 1, 0, step, 0), row)
    writer.flush()
    state = Follower(str(path)).look()
    assert state.live is not None and state.status == "recording"
    assert (state.live.batch, state.live.rows[0].rms) == (2, 3.0)
    assert state.live.scalars == {"loss": 3.0}
    writer.close()
    result = run("show", "--follow", path, "--json")
    assert result.code == 0
    assert json.loads(result.out)["batch"] == 2


def test_a_failed_run_ends_with_exit_code_1(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with _open_run(path) as writer:
        writer.close("failed", failure="training raised ValueError")
    result = run("show", "--follow", path)
    assert result.code == 1
    assert "step 3" in result.out and "loss 0.5" in result.out
    assert "training raised ValueError" in result.err


def test_layers_and_ports_are_chosen(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    sites = (Site("blocks.0", "output"), Site("blocks.1", "output"), Site("blocks.1", "param"))
    writer = Writer(str(path), Manifest(selection={"watch": {}}))
    step = Step(1, 9, sites, (0, 0, 0), np.stack([raw(1.0)] * 3))
    write_live(writer.store, live_text(step, [], every=1, rate=2.0))
    writer.close()

    def shown(*words: str) -> list[tuple[str, str]]:
        rows = json.loads(run("show", "--follow", path, "--json", *words).out)["layers"]
        return [(row["layer"], row["port"]) for row in rows]

    assert shown("--port", "param") == [("blocks.1", "param")]
    assert shown("--layers", "*.0") == [("blocks.0", "output")]
    assert shown("--layers", "all", "--layers", "!*.0", "--port", "output") == [
        ("blocks.1", "output")
    ]
    assert run("show", "--follow", path, "--port", "nowhere").code == 2


def test_silence_is_noticed_and_healthy_means_finite(tmp_path: Path) -> None:
    now = [1000.0]
    path = tmp_path / "run"
    writer = Writer(str(path), Manifest(selection={"watch": {}}))
    live = Live(0, 1, 1000.0, 1, 100.0)
    write_live(writer.store, json.dumps(live.to_dict()))
    follower = Follower(str(path), clock=lambda: now[0])
    assert not follower.look().silent
    now[0] += 20
    assert not follower.look().silent
    now[0] += 20
    state = follower.look()
    assert state.silent and state.silence == 40
    slow = Live(0, 1, 1000.0, 1, 0.01)
    assert not State("recording", slow, silence=40).silent, "a step of 100 s takes 100 s"
    writer.close()
    alarm = LiveAlarm("grad_norm > 100", "a", "output", "", 1, 200.0, "large")
    assert not State("complete", live, alarms=(alarm,)).unhealthy
    assert State("complete", Live(0, 1, 0.0, 1, 1.0, scalars={"loss": float("nan")})).unhealthy
    assert State("failed").unhealthy


GOOD = Live(0, 1, 1000.0, 1, 2.0, scalars={"loss": 1.0}).to_dict()
ROW = {"layer": "a", "port": "output", "leaf": "", "count": 1, "nan": 0, "posinf": 0, "neginf": 0}
ROW |= {"zeros": 0, **dict.fromkeys(("mean", "std", "min", "max", "absmax", "l2", "rms"), 1.0)}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        "[" * 100_000,
        json.dumps({**GOOD, "batch": -1}),
        json.dumps({**GOOD, "batch": True}),
        json.dumps({**GOOD, "scalars": {"loss": "low"}}),
        json.dumps({**GOOD, "layers": {}}),
        json.dumps({**GOOD, "layers": [{**ROW, "port": "harbour"}]}),
        json.dumps({**GOOD, "layers": [{**ROW, "count": 1.5}]}),
        json.dumps({**GOOD, "layers": [{**ROW, "layer": 3}]}),
        json.dumps({**GOOD, "alarms": [{}]}),
        json.dumps({key: value for key, value in GOOD.items() if key != "time"}),
        "\udcff",
    ],
    ids=range(14),
)
def test_a_foreign_live_json_is_a_sentence(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "run"
    Writer(str(path), Manifest()).close()
    (path / LIVE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DamagedError, match=r"live\.json is corrupt"):
        read_live(path)
    result = run("show", "--follow", path)
    assert result.code == 2
    assert result.err.startswith("tensortap: ")


def test_a_row_that_is_whole_is_read_back(tmp_path: Path) -> None:
    (tmp_path / LIVE).write_text(json.dumps({**GOOD, "layers": [ROW]}))
    live = read_live(tmp_path)
    assert live is not None
    assert live.to_dict() == {**GOOD, "layers": [ROW]}
    assert read_live(tmp_path / "elsewhere") is None


def test_an_overwritten_run_does_not_keep_the_old_live_json(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with _open_run(path):
        assert (path / LIVE).exists()
    Writer(str(path), Manifest(), overwrite=True).close()
    assert not (path / LIVE).exists()
