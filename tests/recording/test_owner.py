"""Who writes a recording: readers tell a run that goes on from one whose process has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.monitoring.follow import Follower
from tensortap.recording.owner import life_of, this_process
from tensortap.recording.schema import Manifest
from tensortap.recording.writer import Writer

START = """
import os, sys, torch, tensortap as tap
model = torch.nn.Linear(4, 4)
recorder = tap.record(model, sys.argv[1], layers="all").start()
model(torch.ones(2, 4))
recorder.flush()
print("ready", flush=True)
sys.stdin.read()
os._exit(9)
"""


def test_a_live_writer_and_a_dead_one(tmp_path: Path) -> None:
    """The same folder, before and after its process was killed."""
    path = tmp_path / "run"
    child = subprocess.Popen(
        [sys.executable, "-c", START, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    run = tap.open(path)
    assert run.status == "recording"
    assert f"still being written, by process {child.pid} of this machine" in run.notes[-1]
    assert not Follower(str(path)).look().over
    child.stdin.close()
    assert child.wait() == 9
    run = tap.open(path)
    assert len(run.records) == 1
    assert f"was not closed: process {child.pid}, which wrote it, has ended" in run.notes[-1]
    state = Follower(str(path)).look()
    assert state.over and state.dead and state.unhealthy
    child.stdout.close()


def test_only_the_same_machine_can_tell() -> None:
    mine = this_process()
    assert life_of(mine) == "alive"
    assert life_of({**mine, "started": mine["started"] - 60}) == "dead"  # a number given again
    assert life_of({**mine, "host": "elsewhere"}) == "unknown"
    assert life_of({**mine, "space": "another container"}) == "unknown"
    assert life_of({**mine, "pid": 2**40}) == "dead"
    assert life_of(None) == "unknown"
    assert life_of({}) == "unknown"


def test_a_recording_that_names_no_writer_says_both(tmp_path: Path) -> None:
    """As those of earlier versions do."""
    data = Manifest(tool="old").to_dict()
    del data["writer"]
    (tmp_path / "recording.json").write_text(json.dumps(data))
    notes = tap.open(tmp_path).notes
    assert "it is still being written, or its process was killed" in notes[-1]


@pytest.fixture
def few_inodes(tmp_path: Path) -> Path:
    """A file system that is full of files: no new one can be made."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "nr_inodes=9,size=8m", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    return place


@pytest.fixture(autouse=True)
def unmounted(tmp_path: Path) -> object:
    yield
    if os.path.ismount(tmp_path / "small"):
        subprocess.run(["umount", "-l", str(tmp_path / "small")], check=True)


def _fill(place: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        for number in range(100):
            (place / f"filler{number}").touch()


def test_no_inodes_left(few_inodes: Path) -> None:
    """The manifest says that it failed, though no file can be made beside it."""
    path, model = few_inodes / "run", nn.Linear(4, 4)
    with pytest.warns(tap.TapWarning, match="No space left"):
        with tap.record(model, path, layers="all") as recorder:
            _fill(few_inodes)
            model(torch.ones(2, 4))
    assert recorder.failure is not None
    run = tap.open(path)
    assert run.status == "failed"
    assert "No space left" in str(run.manifest.failure)


def test_a_disk_that_becomes_read_only(few_inodes: Path) -> None:
    """Nothing can be said any more: that the process has ended is what readers know."""
    path = few_inodes / "run"
    child = subprocess.Popen(
        [sys.executable, "-c", START, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    again = ["mount", "-o", "remount,ro", str(few_inodes)]
    if subprocess.run(again, capture_output=True).returncode != 0:
        pytest.skip("this machine does not remount")
    child.stdin.close()
    child.wait()
    child.stdout.close()
    run = tap.open(path)
    assert run.status == "recording"
    assert "has ended" in run.notes[-1]


def test_a_manifest_that_cannot_be_replaced_is_rewritten(tmp_path: Path) -> None:
    """Renaming fails onto a mount point of its own, for one: here, by a scratch in the way."""
    path = tmp_path / "run"
    writer = Writer(str(path), Manifest(notes=["long " * 100]))
    scratch = writer.store.scratch("recording.json")
    scratch.mkdir()  # which no text can be written to
    writer.close("complete")
    assert writer.failure is None
    assert tap.open(path).status == "complete"


def test_a_text_that_does_not_fit_leaves_the_old_one(few_inodes: Path) -> None:
    path = few_inodes / "run"
    writer = Writer(str(path), Manifest())
    _fill(few_inodes)
    before = (path / "recording.json").read_bytes()
    filler = few_inodes / "filler0"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(16 << 20))
    writer.close("failed", failure="x" * (1 << 19))
    assert (path / "recording.json").read_bytes() == before
    assert writer.failure is not None


def test_a_folder_that_another_recorder_took_over(tmp_path: Path) -> None:
    """The first one must not write its end into the second one's recording."""
    path = tmp_path / "run"
    first = Writer(str(path), Manifest(mode="first"))
    second = Writer(str(path), Manifest(mode="second"), overwrite=True)
    first.close()
    assert first.failure is not None and "taken over" in first.failure
    run = tap.open(path)
    assert (run.status, run.manifest.mode) == ("recording", "second")
    second.close()
    assert tap.open(path).status == "complete"
