"""The command as its own process: start-up, signals, pipes, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import Run

import tensortap
from tensortap.recording import open as open_recording

SLOW = """
import time, torch
class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def forward(self, x):
        y = self.layer(x)
        print("ran", flush=True)
        time.sleep(0.05)
        return y
def build():
    return Slow(), [torch.ones(1, 2)] * 10_000
"""


def environment(**more: str) -> dict[str, str]:
    source = str(Path(tensortap.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, **more}


def command(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tensortap", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(**more),
        timeout=120,
    )


def test_help_is_quick_and_imports_little() -> None:
    script = (
        "import sys, time; start = time.perf_counter()\n"
        "from tensortap.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as error: assert not error.code\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'rich.table'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy)); print('seconds:', time.perf_counter() - start)"
    )
    best = 9.0
    for _ in range(3):  # the machine may be busy with other tests
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment()
        )
        assert "record" in result.stdout
        assert "heavy: []" in result.stdout
        best = min(best, float(result.stdout.rsplit("seconds:", 1)[1]))
    assert best < 0.5


@pytest.mark.parametrize(
    "verb", ["record", "show", "check", "plot", "export", "import", "doctor", "demo"]
)
def test_every_verb_has_help_and_json(verb: str, run: Run) -> None:
    result = run(verb, "--help")
    assert result.code == 0
    assert "--json" in result.out


def test_a_session_end_to_end(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "fp32"
    recorded = command("record", "tensortap.demo:build", "-o", run, "-l", "blocks", "--inputs")
    assert (recorded.returncode, recorded.stdout[:18]) == (0, "Recorded 8 layers,")
    shown = command("show", run, COLUMNS="30", FORCE_COLOR="", TERM="dumb")
    assert shown.returncode == 0
    assert "NaN  Inf" in shown.stdout
    assert "\x1b" not in shown.stdout
    missing = command("show", run, "blocks.99")
    assert missing.returncode == 2
    assert missing.stdout == ""
    assert missing.stderr.startswith("tensortap: There is no layer 'blocks.99'")
    assert "Traceback" not in missing.stderr


def test_usage_errors_exit_2() -> None:
    for arguments in (
        ["nonsense"],
        ["show"],
        ["show", "x", "--nonsense"],
        ["check", "x", "--max-mean", "q"],
    ):
        result = command(*arguments)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


def test_version() -> None:
    assert command("--version").stdout.strip() == f"tensortap {tensortap.__version__}"


def test_interrupt_closes_the_recording(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    arguments = ["record", f"{tmp_path}/slow.py:build", "-o", f"{tmp_path}/run", "--no-early-stop"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tensortap", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stderr is not None
    ran = 0
    while ran < 3:  # what a target prints goes to stderr, so that stdout is data alone
        line = process.stderr.readline()
        assert line, "the command ended by itself"
        ran += line == "ran\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1].startswith("tensortap: interrupted")
    assert "Traceback" not in errors
    recording = open_recording(tmp_path / "run")
    assert recording.status == "failed"
    assert len(recording["layer"].records) >= 2


def test_broken_pipe_is_quiet(demo: Path) -> None:
    script = f"{sys.executable} -m tensortap show {demo} --json --each | head -c 1"
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment()
    )
    assert result.stdout == "{"
    assert result.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout(demo: Path) -> None:
    script = f"{sys.executable} -m tensortap show {demo} > /dev/full"
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment()
    )
    assert result.returncode == 2
    assert result.stderr == "tensortap: No space left on device.\n"


def test_a_recorder_that_fails_exits_2(tmp_path: Path) -> None:
    """No file may grow over 64 KiB: what a full disk does to the writer."""
    record = f"{sys.executable} -m tensortap record tensortap.demo:build -o {tmp_path}/run"
    result = subprocess.run(
        ["bash", "-c", f"ulimit -f 64; {record}"], capture_output=True, text=True, env=environment()
    )
    assert result.returncode == 2
    assert "tensortap: The recording to" in result.stderr
    assert "File too large" in result.stderr
    assert "Traceback" not in result.stderr
    assert open_recording(tmp_path / "run").status == "failed"


def test_plain_ascii_terminal(demo: Path) -> None:
    result = command("show", demo, "blocks.1", PYTHONIOENCODING="ascii")
    assert result.returncode == 0
    assert "OUTPUT" in result.stdout


def test_traceback_on_request(tmp_path: Path) -> None:
    result = command("show", tmp_path / "none", TENSORTAP_TRACEBACK="1")
    assert "Traceback" in result.stderr
    assert "NotARecordingError" in result.stderr


def test_progress_line_when_it_takes_long(tmp_path: Path) -> None:
    script = (
        "import time\n"
        "from tensortap.reporting import progress as p\n"
        "p.QUIET, p.EVERY = 0.05, 0.05\n"
        "with p.progress('Working') as advance:\n"
        "    for i in range(10):\n"
        "        advance(i, 10); time.sleep(0.05)\n"
        "with p.progress('Quick') as advance: advance(1, 1)\n"
    )
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment()
    )
    assert result.stdout == ""
    assert "Working: " in result.stderr
    assert " of 10" in result.stderr
    assert "Quick" not in result.stderr
    assert time.monotonic() - start < 30


def test_an_unexpected_error_is_a_line_and_exits_2(tmp_path: Path) -> None:
    """1 would say that there is a finding; the line says what to do about it."""
    script = (
        "import sys\n"
        "from tensortap.cli import common\n"
        "def verb(): raise KeyError('what\\x1b[31m')\n"
        "import typer; app = typer.Typer(); app.command()(common.guarded(verb)); app([])\n"
    )
    run = [sys.executable, "-c", script]
    result = subprocess.run(run, capture_output=True, text=True, env=environment())
    assert result.returncode == 2
    assert "Traceback" not in result.stderr and "\x1b" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "unexpected KeyError" in result.stderr and "report it to" in result.stderr
    shown = {**environment(), "TENSORTAP_TRACEBACK": "1"}
    result = subprocess.run(run, capture_output=True, text=True, env=shown)
    assert "Traceback" in result.stderr


def test_json_has_no_letters_that_drive_a_terminal() -> None:
    from tensortap.cli.common import json_text

    bad = "\x1b[31m \x7f \x9b2J \u202eabc \u2066 \u200f \U000e0041 \u2028"
    text = json_text({bad: [bad, "é 中 😀"]}, indent=1)
    assert json.loads(text) == {bad: [bad, "é 中 😀"]}
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "é 中 😀" in text
