"""How far many modes are, and how long they still take: functions of what was seen."""

from __future__ import annotations

import io
import threading
import time

import pytest

from tensortap.reporting import progress as progress_module
from tensortap.reporting.progress import ModesLine
from tensortap.reporting.time_left import ModesTracker, RunningMode, clock, time_left
from tensortap.targets.modes.results import ModeStep


class TestTimeLeft:
    def test_nothing_is_said_before_anything_tells(self) -> None:
        assert time_left([], [RunningMode(5.0)], 3, 1) is None
        assert time_left([], [RunningMode(5.0, loaded=2.0, at=2.0, batches=10)], 0, 1) is None
        assert time_left([], [], 2, 1) is None

    def test_batches_tell_of_their_mode_and_of_those_that_wait(self) -> None:
        # 2 s to load, 1 s a batch, 10 batches: 12 s; 4 batches are done
        running = RunningMode(6.0, loaded=2.0, at=6.0, batch=4, batches=10)
        assert time_left([], [running], 0, 1) == pytest.approx(6.0)
        assert time_left([], [running], 2, 1) == pytest.approx(6.0 + 2 * 12.0)

    def test_a_batch_under_way_does_not_look_slow(self) -> None:
        running = RunningMode(6.9, loaded=2.0, at=6.0, batch=4, batches=10)
        assert time_left([], [running], 0, 1) == pytest.approx(5.1)

    def test_modes_that_finished_tell_of_those_that_wait(self) -> None:
        assert time_left([10.0, 20.0], [], 2, 1) == pytest.approx(30.0)
        loading = RunningMode(5.0)
        assert time_left([10.0, 20.0], [loading], 0, 1) == pytest.approx(10.0)
        assert time_left([10.0], [RunningMode(25.0)], 0, 1) == 0.0

    def test_side_by_side(self) -> None:
        assert time_left([10.0], [], 4, 2) == pytest.approx(20.0)
        assert time_left([10.0], [RunningMode(4.0), RunningMode(2.0)], 1, 2) == pytest.approx(16.0)
        slow = RunningMode(2.0, loaded=0.0, at=2.0, batch=1, batches=50)
        quick = RunningMode(2.0, loaded=0.0, at=2.0, batch=1, batches=2)
        assert time_left([], [slow, quick], 0, 2) == pytest.approx(98.0)

    def test_clock(self) -> None:
        assert [clock(s) for s in (0.2, 42, 61.6, 3723)] == ["0:00", "0:42", "1:02", "1:02:03"]


def seen(tracker: ModesTracker, *steps: tuple[float, str, str, int | None]) -> None:
    names = ["kept", "a", "b", "c"]
    for now, mode, state, batch in steps:
        batches = None if batch is None else 10
        step = ModeStep(mode, names.index(mode) + 1, 4, state, batch, batches)  # type: ignore[arg-type]
        tracker.see(step, now)


class TestTracker:
    def test_the_line(self) -> None:
        tracker = ModesTracker()
        for name in ("kept", "a", "b", "c"):
            seen(tracker, (0.0, name, "waiting", None))
        seen(tracker, (0.0, "kept", "kept", None), (0.0, "a", "loading", None))
        assert tracker.text(1.0) == "mode 2 of 4 · a · loading"
        seen(tracker, (2.0, "a", "running", 0), (5.0, "a", "running", 3))
        # 12 s a mode: 7 left of this one, and two more
        assert tracker.text(5.0) == "mode 2 of 4 · a · batch 4 of 10 · 0:31 left"
        assert tracker.done == pytest.approx(1.3 / 4)
        seen(tracker, (12.0, "a", "running", 10), (14.0, "a", "recorded", None))
        seen(tracker, (14.0, "b", "loading", None), (14.5, "b", "failed", None))
        assert tracker.text(14.5) == "3 of 4 modes done"
        assert tracker.left(14.5) == pytest.approx(14.0)  # what failed early tells nothing

    def test_two_at_a_time(self) -> None:
        tracker = ModesTracker(jobs=2)
        seen(tracker, (0.0, "a", "loading", None), (0.0, "b", "loading", None))
        seen(tracker, (1.0, "a", "running", 0), (2.0, "a", "running", 1))
        # 11 s a mode, 9 left of both, and one more behind each
        assert tracker.text(2.0) == "modes 2, 3 of 4 · a batch 2 of 10 · b loading · 0:20 left"


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "QUIET", 0.01)
    monkeypatch.setattr(progress_module, "EVERY", 0.01)
    written = threading.Event()

    class Told(io.StringIO):
        def write(self, text: str) -> int:
            if "mode 2 of 4" in text:
                written.set()
            return super().write(text)

    err = Told()
    monkeypatch.setattr("sys.stderr", err)
    with ModesLine() as line:
        line(ModeStep("a", 2, 4, "loading"))
        assert written.wait(10)
    assert err.getvalue().startswith("Recording: mode 2 of 4 · a · loading, ")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress_module, "QUIET", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    with ModesLine() as line:
        line(ModeStep("a", 2, 4, "loading"))
        line(ModeStep("a", 2, 4, "running", 3, 10))
        until = time.monotonic() + 10
        while "batch 4 of 10" not in err.getvalue() and time.monotonic() < until:
            time.sleep(0.02)
    assert "mode 2 of 4 · a · batch 4 of 10" in err.getvalue()


def test_nothing_in_the_first_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with ModesLine() as line:
        line(ModeStep("a", 1, 1, "loading"))
    assert capsys.readouterr().err == ""
