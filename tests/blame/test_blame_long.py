"""Blame on long models: bisection by itself, a plan before it begins, and what a Ctrl-C leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from blame_models import Chain, Shared, batch, gain, make, recorded
from long_model import BLOCKS, WRONG

import tensortap as tap
from schemas import validate
from tensortap.comparing.blame import plan as plans
from tensortap.comparing.blame.plan import Plan
from tensortap.comparing.blame.results import BlameInterrupted

HERE = Path(__file__).parent
TARGET = f"{HERE / 'long_model.py'}:build"
LINE = (sys.executable, "-m", "tensortap")


def _environment() -> dict[str, str]:
    paths = [str(HERE), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "reference"
    words = [*LINE, "record", TARGET, "-o", str(path), "--layers", "all", "--inputs"]
    subprocess.run(words, env=_environment(), check=True, capture_output=True)
    return path


def _interrupted(reference: Path, folder: Path, runs: int, *options: str) -> tuple[int, str, str]:
    """`blame` that gets a SIGINT after some runs of the model: its exit code and what it said."""
    count = folder / "count"
    words = [*LINE, "blame", str(reference), TARGET, "--mode", "wrong", "--set", f"count={count}"]
    process = subprocess.Popen(
        [*words, *options],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until:
        if count.exists() and count.stat().st_size >= runs:
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.01)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_ctrl_c_leaves_what_is_known(reference: Path, tmp_path: Path) -> None:
    code, out, err = _interrupted(reference, tmp_path, 40, "--no-bisect", "--json")
    assert code == 130, err
    assert "tensortap: interrupted." in err
    found = json.loads(out)
    validate(found, "blame")
    assert found["interrupted"] is True and found["culprit"] is None
    assert "this is partial" in found["sentence"]
    assert found["final_verdict"] == "diverged" and found["same"] is False
    assert f"blocks.{WRONG}.down" in " ".join(found["notes"])
    known = [row for row in found["layers"] if row["share"] is not None]
    assert 0 < len(known) < BLOCKS
    assert len(found["layers"]) >= BLOCKS
    assert 40 <= found["forwards"] < BLOCKS


def test_ctrl_c_before_anything_is_known_is_a_word(reference: Path, tmp_path: Path) -> None:
    code, out, _ = _interrupted(reference, tmp_path, 0)
    assert code == 130 or code == -signal.SIGINT  # before Python has its handler
    assert out == ""


def test_ctrl_c_in_python_is_a_keyboard_interrupt_with_the_answer(tmp_path: Path) -> None:
    model = make(Chain, blocks=12)
    path = recorded(tmp_path / "reference", model, batch())
    candidate = gain(model, "blocks.7.down", 1.5)
    runs: list[int] = []

    def stop(*_: object) -> None:
        runs.append(1)
        if len(runs) == 7:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    handle = candidate.register_forward_hook(stop)
    with pytest.raises(BlameInterrupted) as caught:
        tap.blame(path, candidate, batch(), bisect=False)
    handle.remove()
    found = caught.value.blame
    assert isinstance(caught.value, KeyboardInterrupt)
    assert found.interrupted and found.forwards == 7
    assert found.sentence.startswith("interrupted after 7 of at most 27 runs, so this is partial")
    assert str(found).startswith("interrupted after 7 ")
    assert "this is partial" in found.to_html()
    whole = tap.blame(path, candidate, batch())  # the model is as it was
    assert whole.culprit == "blocks.7.down"
    for row in found.first_level:
        if row.share == row.share:
            assert row.share == pytest.approx(whole[row.layer].share, abs=1e-6)


def test_an_interrupted_bisection_says_how_far_it_came(tmp_path: Path) -> None:
    model = make(Chain, blocks=16)
    path = recorded(tmp_path / "reference", model, batch())
    candidate = gain(model, "blocks.5.down", 1.5)
    runs: list[int] = []

    def stop(*_: object) -> None:
        runs.append(1)
        if len(runs) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    candidate.register_forward_hook(stop)
    with pytest.raises(BlameInterrupted) as caught:
        tap.blame(path, candidate, batch(), bisect=True)
    found = caught.value.blame
    assert found.halved is not None
    low, high = (int(name.split(".")[1]) for name in found.halved)
    assert low <= 5 <= high and high - low < 15
    assert f"halved between {found.halved[0]} and {found.halved[1]}" in found.sentence
    assert found.to_dict()["halved"] == list(found.halved)


def test_what_takes_too_long_is_bisected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(Chain, blocks=24)
    path = recorded(tmp_path / "reference", model, batch())
    candidate = gain(model, "blocks.9.down", 1.5)
    seen: list[Plan] = []
    whole = tap.blame(path, candidate, batch(), plan=seen.append)
    assert not whole.bisect and not seen[-1].bisect and not seen[-1].long
    monkeypatch.setattr(plans, "LONG", 0.0)
    few = tap.blame(path, candidate, batch(), plan=seen.append)
    assert few.bisect and seen[-1].bisect and not seen[-1].asked
    assert few.culprit == whole.culprit == "blocks.9.down"
    assert few.forwards < whole.forwards and few.forwards <= few.limit
    assert any("--no-bisect" in note for note in few.notes)
    insisted = tap.blame(path, candidate, batch(), bisect=False, plan=seen.append)
    assert not insisted.bisect and insisted.forwards == whole.forwards + 1  # one for the time
    assert "--bisect" in str(seen[-1])


def test_what_cannot_be_bisected_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LONG", 0.0)
    model = make(Shared)
    path = recorded(tmp_path / "reference", model, batch())
    found = tap.blame(path, gain(model, "blocks.2.down"), batch())
    assert not found.bisect and found.culprit == "blocks.2.down"


def test_the_plan_is_what_is_done(tmp_path: Path) -> None:
    model = make(Chain, blocks=10)
    path = recorded(tmp_path / "reference", model, batch())
    seen: list[Plan] = []
    candidate = model.bfloat16()
    found = tap.blame(path, candidate, batch().bfloat16(), plan=seen.append)
    assert abs(seen[0].runs - found.forwards) <= 3


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            Plan(1000, 1003, 14, 2.0, True, False),
            "Blame needs about 1,003 runs (33 min) to look at all 1,000 layers, and about 14 runs "
            "(28 s) to bisect them (one run takes 2 s). As the first is more than 10 min, it "
            "bisects; --no-bisect (bisect=False) looks at every layer.",
        ),
        (
            Plan(1000, 1003, 14, 2.0, False, True),
            "Blame needs about 1,003 runs (33 min) to look at all 1,000 layers (one run takes 2 "
            "s). --bisect (bisect=True) needs about 14 runs (28 s).",
        ),
        (
            Plan(80, 83, 11, 0.5, False, False),
            "Blame needs about 83 runs (42 s) to look at all 80 layers (one run takes 0.5 s).",
        ),
    ],
)
def test_a_plan_is_a_sentence(plan: Plan, said: str) -> None:
    assert str(plan) == said
