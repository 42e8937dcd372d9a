"""The fixture `tap_snapshot`, used by tests of its own in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensortap
from tensortap.pytest_plugin import safe_name

pytest_plugins = ["pytester"]

SOURCE = Path(tensortap.__file__).parents[1]
PLUGIN = "tensortap.pytest_plugin"

MODEL = """
import os
import pytest, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return x + torch.tanh(self.linear(x))

def make(gain=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    with torch.no_grad():
        model[1].linear.weight.mul_(gain)
    return model

x = torch.linspace(-1, 1, 24).view(3, 8)
GAIN = float(os.environ.get("GAIN", "1"))
"""


class Project:
    """A folder with tests, and pytest to run there: in this process, or in one of its own."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pytester, self._monkeypatch = pytester, monkeypatch
        self.root = pytester.path
        (self.root / "pytest.ini").write_text("[pytest]\naddopts = -q -rA\n")

    def write(self, code: str) -> None:
        (self.root / "test_model.py").write_text(MODEL + code)

    def run(self, *arguments: str, gain: float = 1.0) -> tuple[int, str]:
        with self._monkeypatch.context() as patch:
            patch.setenv("GAIN", str(gain))
            done = self._pytester.runpytest_inprocess("-p", PLUGIN, *arguments)
        return int(done.ret), done.stdout.str()

    def run_apart(
        self, *arguments: str, path: str = str(SOURCE), **environment: str
    ) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr

    def snapshots(self) -> dict[str, int]:
        """Every snapshot, and when it was written."""
        return {
            path.parent.relative_to(self.root / "__snapshots__").as_posix(): path.stat().st_mtime_ns
            for path in (self.root / "__snapshots__").rglob("recording.json")
        }


@pytest.fixture(scope="module")
def _loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load all that a snapshot needs: pytester forgets modules that were loaded in a run of its."""
    model, paths = torch.nn.Linear(2, 2), [tmp_path_factory.mktemp("warm") for _ in range(2)]
    for number, path in enumerate(paths):
        with tensortap.record(model, path, layers="all", inputs=True):
            model(torch.full((2, 2), float(number)))
    with pytest.raises(AssertionError):
        tensortap.testing.assert_matches(*paths)


@pytest.fixture
def project(_loaded: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    return Project(pytester, monkeypatch)


def test_first_run_writes_and_fails_then_it_compares(project: Project) -> None:
    project.write("""
def test_layers(tap_snapshot):
    tap_snapshot(make(GAIN), x)
    print("went on")
""")
    code, out = project.run()
    assert code == 1
    place = "test_model/test_layers/0"
    assert f"wrote the snapshot __snapshots__/{place}" in out
    assert "run the test again" in out
    assert "went on" in out
    assert list(project.snapshots()) == [place]

    written = project.snapshots()
    code, out = project.run()
    assert code == 0, out
    assert project.snapshots() == written

    code, out = project.run(gain=1.05)
    assert code == 1
    assert f"The snapshot __snapshots__/{place} does not match. First divergence at 1" in out
    assert "Layer 1, output, epoch 0, batch 0, call 0: diverged" in out
    assert "Mismatched elements: " in out
    assert "Greatest absolute difference: " in out
    assert "--tap-update" in out
    assert "pytest_plugin.py" not in out.split("FAILURES")[1].split("short test summary")[0]
    assert project.snapshots() == written

    code, out = project.run("--tap-update", gain=1.05)
    assert code == 0, out
    assert f"tensortap: rewrote __snapshots__/{place}" in out
    assert project.snapshots() != written
    assert project.run(gain=1.05)[0] == 0
    assert project.run()[0] == 1


def test_update_leaves_alone_what_matches_or_is_not_used(project: Project) -> None:
    project.write("""
def test_same(tap_snapshot):
    tap_snapshot(make(), x)

def test_other(tap_snapshot):
    tap_snapshot(make(GAIN), x)

def test_gone(tap_snapshot):
    tap_snapshot(make(), x)
""")
    assert project.run("--tap-update")[0] == 0
    before = project.snapshots()
    assert len(before) == 3
    code, out = project.run("--tap-update", "--deselect", "test_model.py::test_gone", gain=1.05)
    assert code == 0
    changed = {name for name, time in project.snapshots().items() if before[name] != time}
    assert changed == {"test_model/test_other/0"}
    assert out.count("tensortap: rewrote") == 1


def test_ids_classes_and_several_snapshots_under_xdist(project: Project) -> None:
    pytest.importorskip("xdist")
    project.write("""
class TestBoth:
    @pytest.mark.parametrize("text", ["plain", "a/b", "a b", "../..", "ü" * 200, ""])
    def test_ids(self, tap_snapshot, text):
        tap_snapshot(make(), x)
        tap_snapshot(make(), x, name="second one")
        tap_snapshot({"out": [x, x.long()]})
""")
    code, out = project.run_apart("-p", PLUGIN, "-n", "2")
    assert code == 1
    assert out.count("tensortap: wrote") == 18
    assert "6 failed" in out
    names = {name.rsplit("/", 1)[0] for name in project.snapshots()}
    assert len(names) == 6
    assert "test_model/TestBoth.test_ids-plain" in names
    assert all(len(name) < 140 and name.isascii() for name in names)
    assert len(project.snapshots()) == 18
    assert not [p for p in project.root.rglob(".*") if "__snapshots__" in p.parts]
    code, out = project.run()
    assert code == 0, out


def test_recordings_paths_and_tensors(project: Project) -> None:
    project.write("""
import tensortap as tap

def test_recording(tap_snapshot, tmp_path):
    with tap.record(make(GAIN), tmp_path / "run", layers="all", inputs=True) as rec:
        rec.run(x)
        rec.step()
        rec.run(x * 2)
    tap_snapshot(tap.open(tmp_path / "run"))
    tap_snapshot(tmp_path / "run", name="path")
    tap_snapshot(str(tmp_path / "run"), name="text", layers="*.linear")

def test_tensors(tap_snapshot):
    tap_snapshot(x * GAIN, name="one")
    tap_snapshot([x.numpy(), {"y": x.int()}], name="more")

def test_loose(tap_snapshot):
    tap_snapshot(x * GAIN, rtol=0.1)
    tap_snapshot(make(GAIN), x, layers="0", name="first alone")
    tap_snapshot(make(GAIN), x, rules=".*: cosine > 0.9", name="rules")

def test_keywords(tap_snapshot):
    tap_snapshot(make(), kwargs={"input": x})
""")
    assert "4 failed" in project.run()[1]
    code, out = project.run()
    assert code == 0, out
    code, out = project.run(gain=1.05)
    assert code == 1
    assert re.search(r"Layer 1\.linear, output, epoch 0, batch [01], call 0: diverged", out)
    assert "Mismatched elements: 24 / 24 (100.0%)" in out
    assert "2 failed, 2 passed" in out


def test_a_layer_that_is_gone_fails(project: Project) -> None:
    project.write("""
def test_depth(tap_snapshot):
    model = make()
    tap_snapshot(model[:2] if GAIN != 1 else model, x, layers="all")

def test_fewer(tap_snapshot):
    tap_snapshot(make(), x, layers=["0", "1", "2"] if GAIN == 1 else ["0", "1"])
""")
    project.run()
    code, out = project.run(gain=2)
    assert code == 1
    assert "2 other layers are missing: 2.linear, 2" in out
    assert "Layer 2: missing, missing in the candidate." in out


def test_mistakes_are_told(project: Project) -> None:
    project.write("""
def test_twice(tap_snapshot):
    tap_snapshot(x, name="a")
    tap_snapshot(x, name="a")

def test_inputs(tap_snapshot):
    tap_snapshot(lambda y: y, x)

def test_rubbish(tap_snapshot):
    tap_snapshot(3)

def test_raises(tap_snapshot):
    tap_snapshot(make(), torch.zeros(3, 7))
""")
    code, out = project.run()
    assert code == 1
    assert "This test has a snapshot 'a' already" in out
    assert "Only a model takes inputs" in out
    assert "got int" in out
    assert list(project.snapshots()) == ["test_model/test_twice/a"]


def test_a_damaged_snapshot_is_said_and_rewritten(project: Project) -> None:
    project.write("""
def test_layers(tap_snapshot):
    tap_snapshot(make(), x)
""")
    project.run()
    (segment,) = project.root.rglob("*.safetensors")
    segment.write_bytes(segment.read_bytes()[:100])
    code, out = project.run()
    assert code == 1
    assert segment.name in out
    assert project.run("--tap-update")[0] == 0
    assert project.run()[0] == 0


def test_starting_pytest_imports_no_torch(project: Project) -> None:
    (project.root / "test_light.py").write_text("""
import sys

def test_light(request):
    assert request.config.pluginmanager.has_plugin("tensortap.pytest_plugin")
    assert not {"torch", "numpy", "safetensors", "rich"} & set(sys.modules)
""")
    # Other people's plugins may import what they like.
    code, out = project.run_apart("-p", PLUGIN, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert code == 0, out


def test_installed_and_named_are_one_plugin(project: Project, tmp_path: Path) -> None:
    """`-p`, `pytest_plugins` and the entry point together load it once."""
    site = tmp_path / "site"
    info = site / "faketap-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faketap\nVersion: 1\n")
    declared = (SOURCE.parent / "pyproject.toml").read_text()
    line = next(line for line in declared.splitlines() if "pytest_plugin" in line and "=" in line)
    (info / "entry_points.txt").write_text("[pytest11]\n" + line.replace('"', "") + "\n")
    (project.root / "conftest.py").write_text('pytest_plugins = ["tensortap.pytest_plugin"]\n')
    project.write("""
def test_layers(tap_snapshot):
    tap_snapshot(x)
""")
    path = f"{SOURCE}{os.pathsep}{site}"
    code, out = project.run_apart("--tap-update", "-p", PLUGIN, path=path)
    assert code == 0, out
    (project.root / "conftest.py").unlink()
    code, out = project.run_apart("--tap-update", path=path)  # the entry point alone
    assert code == 0, out


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_a", "test_a"),
        ("test_a[1-x]", "test_a-1-x"),
        ("TestA.test_b[0.5]", "TestA.test_b-0.5"),
    ],
)
def test_safe_names_are_readable(name: str, expected: str) -> None:
    assert safe_name(name) == expected


def test_safe_names_are_told_apart() -> None:
    names = [
        "a/b",
        "a b",
        "a_b",
        "..",
        ".",
        "",
        "x" * 300,
        "x" * 301,
        "é",
        "test[a[0]]",
        "test[a_0_]",
    ]
    safe = [safe_name(name) for name in names]
    assert len(set(safe)) == len(names)
    assert all(name and "/" not in name and not name.startswith(".") for name in safe)
