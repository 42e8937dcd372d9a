"""Crashes, full disks, large models, and files that are not what they claim."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tap
from forked_commands import Commands
from tensortap.recording import Manifest, Row, Writer


def python(code: str, *args: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


RECORD_FOREVER = """
    import sys, torch, tensortap as tap
    from torch import nn
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Identity() for _ in range(5)])
    with tap.record(model, sys.argv[1], layers="leaves", budget=8 << 20) as rec:
        print("started", flush=True)
        step = 0
        while True:
            model(torch.full((1000, 50), float(step)))
            rec.step()
            step += 1
"""


@pytest.mark.parametrize("delay", [0.1, 1.3, 2.0])
def test_kill_at_any_moment_leaves_every_finished_segment_readable(tmp_path, delay: float) -> None:
    process = python(RECORD_FOREVER, str(tmp_path / "r"))
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run = tap.open(tmp_path / "r")
    assert run.status == "recording"
    assert any("not closed" in note for note in run.notes)
    if delay > 1.2:
        assert len(run.records) > 0
    for record in run.records:
        expected = torch.full((1000, 50), float(record.batch))
        assert torch.equal(record.tensor(), expected), record


def test_an_interpreter_that_ends_without_closing_keeps_what_was_taken(
    tmp_path, forked: Commands
) -> None:
    code = """
        import sys, torch, tensortap as tap
        model = torch.nn.Linear(2, 2)
        rec = tap.record(model, sys.argv[1], layers="all").start()
        model(torch.ones(1, 2))
    """
    assert forked.python(textwrap.dedent(code), tmp_path / "r").code == 0
    run = tap.open(tmp_path / "r")
    assert (run.status, run.layers) == ("recording", [""])


@pytest.mark.parametrize("keep", ["tensors", "sketch", "summary"])
def test_so_does_one_that_ends_behind_a_compiled_model(tmp_path, forked: Commands, keep) -> None:
    """Also when a child of it has ended before, which has no part in the recording."""
    code = """
        import os, sys, torch, tensortap as tap
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        model = torch.compile(net, backend="eager")
        rec = tap.record(model, sys.argv[1], layers="all", inputs=True, keep=sys.argv[2]).start()
        for _ in range(2):
            model(torch.ones(1, 2))
        if not os.fork():
            sys.exit()
        os.wait()
    """
    assert forked.python(textwrap.dedent(code), tmp_path / "r", keep).code == 0
    run = tap.open(tmp_path / "r")
    assert run.status == "recording"
    assert {name: len(run[name].records) for name in run.layers} == {"0": 4, "1": 4, "": 4}


def test_ten_times_the_budget_fits_in_the_budget(tmp_path) -> None:
    """Peak extra memory while recording 640 MB with a budget of 64 MB."""
    code = """
        import resource, sys, torch, tensortap as tap
        from torch import nn
        model = nn.Sequential(*[nn.Identity() for _ in range(2)])
        x = torch.randn(2, 1 << 20)
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        with tap.record(model, sys.argv[1] + "/warm", layers="leaves") as rec:
            rec.run(torch.ones(4))
        before = peak()
        budget = 64 << 20
        with tap.record(model, sys.argv[1] + "/r", layers="leaves", budget=budget) as rec:
            for step in range(80):
                x[0, 0] = step
                rec.run(x)
                rec.step()
        assert rec.failure is None, rec.failure
        print(peak() - before, sum(r.nbytes for r in tap.open(sys.argv[1] + "/r").records))
    """
    process = python(code, str(tmp_path))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    extra, recorded = map(int, out.split())
    assert recorded >= 10 * (64 << 20)
    assert extra <= 64 << 20, f"{extra / 2**20:.0f} MiB beyond what was there before"


def test_histograms_stay_within_the_budget_too(tmp_path) -> None:
    code = """
        import resource, sys, torch, tensortap as tap
        from torch import nn
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        options = {"layers": "leaves", "histograms": True, "budget": 64 << 20}
        with torch.no_grad():
            with tap.record(model, sys.argv[1] + "/warm", **options) as rec:
                rec.run(torch.ones(4, 4))
            before = peak()
            with tap.record(model, sys.argv[1] + "/r", **options) as rec:
                for step in range(300):
                    rec.run(torch.full((4, 4), float(step)))
                    rec.step()
        assert rec.failure is None, rec.failure
        print(peak() - before)
    """
    process = python(code, str(tmp_path))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert int(out) <= 64 << 20
    assert all(r.summary.histogram is not None for r in tap.open(tmp_path / "r").records[:50])


def test_content_too_large_for_a_snapshot_is_stored_once_too(tmp_path) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with tap.record(model, tmp_path / "r", layers="all", inputs=True, budget=1 << 20) as rec:
        rec.run(torch.randn(1 << 20))
    assert rec.failure is None
    assert len({r.tensor_id for r in tap.open(tmp_path / "r").records}) == 1


def test_flush_waits_for_the_disk_and_checks_say_what_is_not_whole(net, ids, tmp_path) -> None:
    with tap.record(net, tmp_path / "r", keep="summary") as rec:
        net(ids)
        rec.flush()
        run = tap.open(tmp_path / "r")
        assert len(run.records) == 3
        assert [f.kind for f in run.check()] == ["incomplete"]
    (segment,) = (tmp_path / "r").glob("segment-*")
    segment.write_bytes(segment.read_bytes()[:-100])
    with pytest.raises(tap.TapError, match="nothing to check"):
        tap.open(tmp_path / "r", partial=True).check()


def test_a_tensor_larger_than_the_budget_is_streamed(tmp_path) -> None:
    model = nn.Sequential(nn.Identity())
    big = torch.randn(3, 1 << 20)
    view = big.t()
    with tap.record(model, tmp_path / "r", layers="leaves", budget=4 << 20, histograms=True) as rec:
        for x in (big, view):
            rec.run(x)
            rec.step()
    assert rec.failure is None
    first, second = tap.open(tmp_path / "r")["0"].records
    assert torch.equal(first.tensor(), big)
    assert torch.equal(second.tensor(), view)
    whole = tap.summarize(big)
    assert first.summary.mean == pytest.approx(whole.mean, rel=1e-9)
    assert first.summary.std == pytest.approx(whole.std, rel=1e-9)
    assert first.summary.count == big.numel()


DISK_FULL = """
    import resource, sys, warnings, torch, tensortap as tap
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(1000, 64)
    plain = model(x)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with tap.record(model, sys.argv[1], layers="all", strict=len(sys.argv) > 2) as rec:
            for _ in range(100):
                assert torch.equal(rec.run(x + 0), plain)
                x = x.roll(1, 0); plain = model(x)
    said = [str(w.message) for w in caught if issubclass(w.category, tap.TapWarning)]
    assert len(said) == 1, said
    print(said[0])
    assert rec.failure
"""


def test_a_full_disk_is_said_once_and_the_model_runs_on(tmp_path, forked: Commands) -> None:
    done = forked.python(textwrap.dedent(DISK_FULL), tmp_path / "r")
    assert done.code == 0, done.stderr
    said = done.stdout
    assert "stopped recording" in said and "File too large" in said and "runs on" in said
    run = tap.open(tmp_path / "r")
    assert run.status == "failed"
    assert any("File too large" in note for note in run.notes)
    assert not list((tmp_path / "r").glob(".*.tmp"))


def test_strict_raises_instead(tmp_path, forked: Commands) -> None:
    done = forked.python(textwrap.dedent(DISK_FULL), tmp_path / "r", "strict")
    assert done.code == 1
    assert "RecordingError: tensortap stopped recording" in done.stderr


def test_a_hook_of_ours_that_raises_never_reaches_the_model(
    net, ids, tmp_path, monkeypatch
) -> None:
    from tensortap.taps import sink

    def broken(self, *args):
        raise KeyError("a bug of ours")

    plain = net(ids)
    monkeypatch.setattr(sink.Sink, "hold", broken)
    with pytest.warns(tap.TapWarning, match="a bug of ours") as caught:
        with tap.record(net, tmp_path / "r", layers="all") as rec:
            assert torch.equal(net(ids), plain)
            assert torch.equal(net(ids), plain)
    assert len([w for w in caught if w.category is tap.TapWarning]) == 1
    assert "a bug of ours" in (rec.failure or "")
    assert tap.open(tmp_path / "r").status == "failed"


def test_a_place_that_cannot_be_written_is_refused_before_the_model_runs(net, tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(tap.TapError, match=r"Cannot create the folder .*file/r"):
        with tap.record(net, tmp_path / "file" / "r"):
            raise AssertionError("must not start")


def test_a_recording_is_not_overwritten_unasked(net, ids, tmp_path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "mine.txt").write_text("keep me")
    with tap.record(net, tmp_path / "r"):
        net(ids)
    with pytest.raises(tap.TapError, match=r"already holds a recording.*--overwrite"):
        tap.record(net, tmp_path / "r")
    with tap.record(net, tmp_path / "r", layers="head", overwrite=True):
        net(ids)
    assert tap.open(tmp_path / "r").layers == ["head"]
    assert (tmp_path / "r" / "mine.txt").read_text() == "keep me"


@pytest.fixture
def two_segments(tmp_path) -> Path:
    writer = Writer(str(tmp_path / "r"), Manifest(), seal_after=60.0)  # not by time, but by flush
    for order in range(2):
        writer.add(Row(f"l{order}", "output", order=order), torch.randn(5_000_000 * (1 + order)))
        writer.flush()
        time.sleep(0.01)
    writer.close()
    assert len(list((tmp_path / "r").glob("segment-*"))) == 2
    return tmp_path / "r"


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    if kind == "truncated data":
        content = content[: len(content) // 2]
    elif kind == "truncated header":
        content = content[:100]
    elif kind == "empty":
        content = b""
    elif kind == "huge length":
        content = struct.pack("<Q", 1 << 60) + content[8:]
    elif kind == "garbage header":
        content = content[:8] + b"\xff" * 50 + content[58:]
    else:
        header = json.loads(content[8 : 8 + length])
        document = json.loads(header["__metadata__"]["tensortap"])
        if kind == "wrong offsets":
            entry = next(v for k, v in header.items() if k.startswith("r000"))
            entry["data_offsets"][1] -= 4
        elif kind == "negative offset":
            next(v for k, v in header.items() if k.startswith("r000"))["data_offsets"][0] = -8
        elif kind == "row to nowhere":
            document["rows"][0][0] = 999
        elif kind == "summary to nowhere":
            document["rows"][0][6] = 999
        elif kind == "no rows":
            del document["rows"]
        header["__metadata__"]["tensortap"] = json.dumps(document)
        text = json.dumps(header).encode()
        content = struct.pack("<Q", len(text)) + text + content[8 + length :]
    path.write_bytes(content)


@pytest.mark.parametrize(
    "kind",
    [
        "truncated data",
        "truncated header",
        "empty",
        "huge length",
        "garbage header",
        "wrong offsets",
        "negative offset",
        "row to nowhere",
        "summary to nowhere",
        "no rows",
    ],
)
def test_a_damaged_segment_names_itself_and_the_rest_is_readable(two_segments, kind: str) -> None:
    damage(two_segments / "segment-r000-000001.safetensors", kind)
    with pytest.raises(tap.TapError, match=r"segment-r000-000001\.safetensors is .*--partial"):
        tap.open(two_segments)
    run = tap.open(two_segments, partial=True)
    assert run.layers == ["l0"]
    assert run["l0"].output.numel() == 5_000_000
    assert any("segment-r000-000001" in note for note in run.notes)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ('{"format": 99}', r"format version 99; this tensortap reads up to version 1"),
        ('{"format": "one"}', "no usable format version"),
        ("[]", "not a manifest"),
        ("{", "not JSON"),
        ('{"format": 1, "notes": 3}', "'notes' is 3, expected a list"),
        ('{"format": 1, "status": "odd"}', "'status' is the text 'odd', expected 'recording' or"),
        ('{"format": 1, "notes": [3]}', "an item of 'notes' is 3, expected text"),
        ('{"format": 1, "mode": {}}', "'mode' is an object, expected text"),
    ],
)
def test_a_wrong_manifest_is_a_sentence(tmp_path, manifest: str, message: str) -> None:
    (tmp_path / "recording.json").write_text(manifest)
    with pytest.raises(tap.TapError, match=message):
        tap.open(tmp_path)


def test_unknown_keys_of_a_later_minor_version_are_ignored(net, ids, recorded) -> None:
    path = Path(recorded(net, ids).path)
    manifest = json.loads((path / "recording.json").read_text())
    manifest["colour"] = "blue"
    (path / "recording.json").write_text(json.dumps(manifest))
    assert tap.open(path).status == "complete"


def test_what_is_no_recording_says_what_to_do(net, ids, tmp_path) -> None:
    with pytest.raises(tap.TapError, match="does not exist or is empty"):
        tap.open(tmp_path / "nowhere")
    with tap.record(net, tmp_path / "runs" / "fp32"):
        net(ids)
    with pytest.raises(tap.TapError, match="Name one of them: fp32"):
        tap.open(tmp_path / "runs")
    (tmp_path / "tree").mkdir()
    torch.save(torch.ones(1), tmp_path / "tree" / "layer_0_output.pt")
    with pytest.raises(tap.TapError, match="tensortap import"):
        tap.open(tmp_path / "tree")


def test_a_segment_that_leads_out_of_its_folder_is_refused(two_segments, tmp_path) -> None:
    segment = two_segments / "segment-r000-000001.safetensors"
    outside = tmp_path / "outside.safetensors"
    segment.replace(outside)
    segment.symlink_to(outside)
    with pytest.raises(tap.TapError, match="leads out of its folder"):
        tap.open(two_segments)


def test_nothing_in_a_recording_is_unpickled() -> None:
    source = Path(tap.__file__).parent
    own = {source / "targets" / "modes" / name for name in ("worker.py", "workers.py")}
    for path in source.rglob("*.py"):
        text = path.read_text()
        # A process that we start is asked through a pipe that nobody else holds: no file.
        if path not in own:
            assert not re.search(r"^\s*(import|from) pickle\b", text, re.MULTILINE), path
        assert "pickle.load(" not in text, path
        assert "weights_only=False" not in text, path
        assert "allow_pickle=True" not in text, path


@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_what_is_not_a_folder_is_said_to_be_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "here"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_text("not a recording")
    with pytest.raises(tap.TapError, match="is not a folder, and a recording is one"):
        tap.open(path)
