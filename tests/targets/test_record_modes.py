"""Many modes in one go: every row, whatever became of the mode, here and in other processes."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensortap.errors import OptionError, RecordingError, RecordingExistsError
from tensortap.recording import open as open_recording
from tensortap.recording.schema import Manifest
from tensortap.recording.writer import Writer
from tensortap.targets import load_target
from tensortap.targets.modes import worker, workers
from tensortap.targets.modes.record import record_modes
from tensortap.targets.modes.request import Request
from tensortap.targets.modes.results import ModeStep, RecordedMode
from tensortap.targets.modes.resume import differences
from tensortap.targets.modes.workers import death, threads_each

TARGET = """
import os, random, signal, threading, time
import numpy as np
import torch
from torch import nn
import tensortap as tap

MODES = ("a", "b", "load", "batch", "kill", "slow", "leave", "odd", "ctrl-c", "thread")
MODE_GROUPS = {"good": ("a", "b")}

class Net(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.mode, self.calls = mode, 0
        if mode == "b":
            self.second.weight.data.mul_(2.0)
    def forward(self, x):
        x = self.first(x)
        if self.mode == "batch" and self.calls == 1:
            raise RuntimeError("trouble in the middle")
        if self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "slow":
            time.sleep(60)
        if self.mode == "leave":
            raise SystemExit(3)
        if self.mode == "odd":
            raise GeneratorExit("neither an error nor an exit")
        if self.mode == "ctrl-c":
            raise KeyboardInterrupt
        if self.mode == "thread" and not self.calls:
            threading.Thread(target=time.sleep, args=(300,)).start()
        self.calls += 1
        return self.second(x)

def build(mode="a", samples: int = 2):
    if mode == "load":
        raise ValueError("no such weights")
    print("what a target prints")
    inputs = [torch.randn(2, 4) + random.random() + np.random.rand() for _ in range(samples)]
    if mode == "a":  # a mode that spoils torch for those behind it
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(True, warn_only=True)
    config = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    return tap.Target(Net(mode), [x.float() for x in inputs], config=config, notes=("a note",))
"""


INTERRUPTED = Path(__file__).with_name("interrupted_modes.py")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("modes") / "my_modes.py"
    path.write_text(TARGET)
    return f"{path}:build"


def tensors(path: str) -> dict[str, list[torch.Tensor]]:
    recording = open_recording(path)
    return {name: [r.tensor() for r in layer.records] for name, layer in recording.items()}


def same(left: str, right: str) -> bool:
    ours, theirs = tensors(left), tensors(right)
    return ours.keys() == theirs.keys() and all(
        torch.equal(x, y) for name in ours for x, y in zip(ours[name], theirs[name], strict=True)
    )


class TestHere:
    def test_a_mode_that_fails_is_a_row_and_the_others_go_on(
        self, target: str, tmp_path: Path
    ) -> None:
        wanted = ["load", "a", "batch,leave,odd", "b"]
        found = record_modes(target, tmp_path / "runs", modes=wanted)
        assert [row.mode for row in found] == ["load", "a", "batch", "leave", "odd", "b"]
        assert [row.status for row in found] == [
            "failed", "recorded", "failed", "failed", "failed", "recorded",
        ]  # fmt: skip
        assert not found and [row.mode for row in found.failed] == ["load", "batch", "leave", "odd"]
        assert "ValueError: no such weights" in str(found["load"].problem)
        assert "The model failed in batch 1: RuntimeError: trouble" in str(found["batch"].problem)
        assert "SystemExit: 3" in str(found["leave"].problem)
        assert "GeneratorExit: neither an error nor an exit" in str(found["odd"].problem)
        assert not (tmp_path / "runs" / "load").exists()
        assert open_recording(tmp_path / "runs" / "batch").status == "failed"
        row = found["b"]
        assert (row.layers, row.records) == (2, 4)
        assert row.nbytes > 0 and row.seconds > 0
        assert "a note" in row.notes
        assert open_recording(row.path).manifest.mode == "b"
        with pytest.raises(OptionError, match="no mode 'c' among load, a, batch"):
            found["c"]
        assert "<td>batch</td>" in found._repr_html_()
        text = str(found)
        assert "recorded" in text and "load: The target" in text

    def test_every_mode_starts_from_the_same_state_and_the_caller_keeps_his(
        self, target: str, tmp_path: Path
    ) -> None:
        torch.manual_seed(7)
        random.seed(7)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        found = record_modes(target, tmp_path, modes="good", inputs=True)
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
        assert not torch.are_deterministic_algorithms_enabled()
        a, b = (open_recording(found[mode].path) for mode in "ab")
        assert torch.equal(a["first"].input, b["first"].input)
        assert torch.equal(a["first"].output, b["first"].output)
        configs = [run.manifest.target["config"]["deterministic"] for run in (a, b)]
        assert configs == [True, False]

    def test_a_seed_counts_for_every_mode(self, target: str, tmp_path: Path) -> None:
        """The function does not take it: it is set before the function is called."""
        text = TARGET.replace("samples: int = 2", "samples: int = 2, seed=None")
        (tmp_path / "seeded.py").write_text(text)
        spec = f"{tmp_path / 'seeded.py'}:build"
        found = {
            name: record_modes(spec, tmp_path / name, modes="good", options={"seed": seed})
            for name, seed in (("x", 1), ("y", 1), ("z", 2))
        }
        assert same(found["x"]["a"].path, found["y"]["a"].path)
        assert not same(found["x"]["a"].path, found["z"]["a"].path)
        assert open_recording(found["x"]["b"].path).manifest.seed == 1

    def test_groups_functions_and_built_in_modes(self, tmp_path: Path) -> None:
        def build(samples: int = 1):
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
            return net, [torch.randn(2, 4) for _ in range(samples)]

        wanted = ("fp32", "fake:w8a8:0.9999", "bf16")
        found = record_modes(
            build, tmp_path, modes=wanted, layers="all", calib=1, options={"samples": 3}
        )
        assert found, str(found)
        path = tmp_path / "fake-w8a8-0.9999"
        assert found["fake:w8a8:0.9999"].path == str(path)
        assert open_recording(path).manifest.mode == "fake:w8a8:0.9999"
        assert any("calibrated on 1" in text for text in found["fake:w8a8:0.9999"].notes)
        made = open_recording(path).manifest.selection["made_with"]
        assert made["calib"] == 1 and made["layers"] == ["all"]
        assert "build" in made["target"]

    def test_what_is_wrong_with_the_question_is_said_before_anything_runs(
        self, target: str, tmp_path: Path
    ) -> None:
        for options, said in (
            ({"modes": "nothing"}, "has no mode 'nothing'"),
            ({"jobs": 0}, "--jobs must be a whole number from 1"),
            ({"calib": 0}, "--calib must be a whole number from 1"),
            ({"calib": "3"}, "--calib must be a whole number from 1, got '3'"),
            ({"budget": 0}, "--budget must be at least 1 MiB"),
            ({"modes": []}, r"The modes are \[\], expected names or groups"),
            ({"modes": None}, "expected names or groups"),
            ({"modes": ["a", 3]}, "expected names or groups"),
            ({"keep": "all"}, "keep must be"),
            ({"resume": True, "overwrite": True}, "Give one of them"),
            ({"options": {"mode": "a"}}, "Name the modes with modes="),
        ):
            with pytest.raises(OptionError, match=said):
                record_modes(target, tmp_path / "runs", **{"modes": "a", **options})
        assert not (tmp_path / "runs").exists()

    def test_a_folder_that_cannot_be_made_is_said_before_anything_runs(
        self, tmp_path: Path
    ) -> None:
        def build(mode="x"):
            raise AssertionError("nothing must run")

        (tmp_path / "file").write_text("")
        with pytest.raises(RecordingError, match=f"runs: {tmp_path}/file is a file"):
            record_modes(build, tmp_path / "file" / "runs", modes="a,b")
        if os.geteuid():
            (tmp_path / "closed").mkdir(mode=0o500)
            with pytest.raises(RecordingError, match="no permission"):
                record_modes(build, tmp_path / "closed" / "runs", modes="a,b")

    def test_two_modes_in_one_folder_are_refused(self, tmp_path: Path) -> None:
        def build(mode="x"):
            raise AssertionError("nothing must run")

        with pytest.raises(OptionError, match=r"'a/b' and 'a-b' would both lie in .*/a-b"):
            record_modes(build, tmp_path / "runs", modes=["a/b", "a-b"])
        with pytest.raises(OptionError, match="where comparisons of modes go"):
            record_modes(build, tmp_path / "runs", modes=["comparisons"])

    def test_folders_that_are_taken_are_named_together(self, target: str, tmp_path: Path) -> None:
        record_modes(target, tmp_path, modes="good")
        with pytest.raises(RecordingExistsError) as caught:
            record_modes(target, tmp_path, modes="load,b,a")
        said = str(caught.value)
        assert f"{tmp_path}/b, {tmp_path}/a already hold recordings" in said
        assert "--resume" in said and "--overwrite" in said
        again = record_modes(target, tmp_path, modes="a", overwrite=True, inputs=True)
        assert again["a"].records == 8
        with pytest.raises(RecordingExistsError, match="is a recording itself"):
            record_modes(target, tmp_path / "a", modes="b")

    def test_a_mode_that_cannot_be_loaded_leaves_what_was_there(
        self, target: str, tmp_path: Path
    ) -> None:
        record_modes(target, tmp_path, modes="a")
        shutil.copytree(tmp_path / "a", tmp_path / "load")
        row = record_modes(target, tmp_path, modes="load", overwrite=True)["load"]
        assert row.notes == (f"What an earlier run recorded to {tmp_path}/load is still there.",)

    def test_one_model_is_gone_before_the_next_comes(self, tmp_path: Path) -> None:
        models: list[weakref.ref[torch.nn.Module]] = []

        def build(mode: str):
            assert all(model() is None for model in models)
            net = torch.nn.Sequential(torch.nn.Linear(4, 4))
            net.itself = [net]  # a cycle, as models have them
            models.append(weakref.ref(net))
            return net, torch.ones(1, 4)

        assert record_modes(build, tmp_path, modes="x,y,z", layers="all")
        assert len(models) == 3

    def test_progress_tells_every_mode_and_batch(self, target: str, tmp_path: Path) -> None:
        steps: list[ModeStep] = []
        record_modes(target, tmp_path, modes="load,a", progress=steps.append)
        assert [(s.mode, s.state, s.batch, s.batches) for s in steps] == [
            ("load", "waiting", None, None),
            ("a", "waiting", None, None),
            ("load", "loading", None, None),
            ("load", "failed", None, None),
            ("a", "loading", None, None),
            ("a", "running", 0, 2),
            ("a", "running", 1, 2),
            ("a", "running", 2, 2),
            ("a", "recorded", None, None),
        ]
        assert {(s.number, s.of) for s in steps} == {(1, 2), (2, 2)}

    def test_gradients_that_do_not_come_are_said(self, tmp_path: Path) -> None:
        class Cut(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.detach()

        def build(mode: str):
            torch.manual_seed(0)
            middle = Cut() if mode == "cut" else torch.nn.Identity()
            first, last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            return torch.nn.Sequential(first, middle, last), torch.ones(1, 4)

        found = record_modes(build, tmp_path, modes="whole,cut", layers=["0", "2"], grads=True)
        assert found, str(found)
        said = [text for text in found["cut"].notes if "gradient" in text]
        assert "No gradient came to 1 of 2 layers ('0'): something behind them" in said[-1]
        assert not any("No gradient" in text for text in found["whole"].notes)

    def test_in_memory(self, target: str) -> None:
        folder = f"memory://modes/{os.getpid()}/{time.monotonic_ns()}"
        found = record_modes(target, folder, modes="good")
        assert found and found["b"].path == f"{folder}/b"
        assert record_modes(target, folder, modes="good", resume=True)["a"].status == "kept"
        with pytest.raises(OptionError, match="the memory of this process"):
            record_modes(target, folder, modes="good", overwrite=True, jobs=2)

    def test_against_another_recording(self, target: str, tmp_path: Path) -> None:
        record_modes(target, tmp_path / "base", modes="a")
        found = record_modes(
            target, tmp_path / "runs", modes="good", against=tmp_path / "base" / "a"
        )
        assert found["a"].compared is not None and found["a"].compared["same"]
        assert found["b"].compared is not None
        assert found["b"].compared["first_divergence"] == "second"
        assert (tmp_path / "runs" / "b" / "comparison.json").is_file()
        assert "first divergence" in str(found)
        kept = record_modes(
            target, tmp_path / "runs", modes="good", against=tmp_path / "base" / "a", resume=True
        )
        assert [row.status for row in kept] == ["kept", "kept"]
        assert [(row.compared or {})["same"] for row in kept] == [True, False]
        assert [(row.compared or {})["first_divergence"] for row in kept] == [None, "second"]


class TestLeftBehind:
    """What one mode sets for the whole process, the next one and the caller do not see."""

    TARGET = """
import os
import torch
from torch import nn

MODES = "cwd device autocast threads hook environment flags precision grad a".split()
os.chdir("/")  # as files do that read others beside them

def build(mode="a"):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    seen = {"threads": torch.get_num_threads(), "environment": os.environ.get("LEFT_BEHIND")}
    seen["flags"] = torch.backends.cudnn.deterministic, torch.get_float32_matmul_precision()
    if mode == "cwd":
        os.chdir(os.path.dirname(__file__))
    if mode == "device":
        torch.set_default_device("meta")
    if mode == "autocast":
        torch.autocast("cpu", torch.bfloat16).__enter__()
    if mode == "threads":
        torch.set_num_threads(torch.get_num_threads() + 1)
    if mode == "hook":
        nn.modules.module.register_module_forward_hook(lambda module, args, output: output + 1)
    if mode == "environment":
        os.environ["LEFT_BEHIND"] = "1"
    if mode == "flags":
        torch.backends.cudnn.deterministic = True
    seen["grad"] = torch.is_grad_enabled()
    if mode == "grad":
        torch.set_grad_enabled(False)
    if mode == "precision":
        torch.set_float32_matmul_precision("medium")
    import tensortap as tap
    return tap.Target(net, [x], config={"seen": repr(seen)})
"""

    def test_by_each_mode(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / "leaving.py").write_text(self.TARGET)
        monkeypatch.chdir(tmp_path / "here")
        monkeypatch.setenv("KEPT", "1")
        threads = torch.get_num_threads()
        alone = record_modes("leaving.py:build", "alone", modes="a", layers="all")
        spoilt = record_modes("leaving.py:build", "runs", modes="all", layers="all")
        assert spoilt, str(spoilt)
        assert {path.name for path in (tmp_path / "here" / "runs").iterdir()} == {
            row.mode for row in spoilt
        }
        assert spoilt["a"].path == "runs/a"
        first = open_recording(alone["a"].path).manifest.target["config"]
        for row in spoilt:
            assert open_recording(row.path).manifest.target["config"] == first, row.mode
            if row.mode not in ("autocast", "hook"):
                assert same(row.path, alone["a"].path), row.mode
        assert not same("runs/hook", "runs/a") and not same("runs/autocast", "runs/a")
        assert Path.cwd() == tmp_path / "here"
        assert torch.get_default_device() == torch.device("cpu")
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_num_threads() == threads
        assert "LEFT_BEHIND" not in os.environ and os.environ["KEPT"] == "1"
        assert torch.get_float32_matmul_precision() == "highest" and torch.is_grad_enabled()
        assert torch.equal(torch.nn.Identity()(torch.ones(1)), torch.ones(1))

    def test_what_the_caller_has_set_stays(self, tmp_path: Path) -> None:
        """A default device, and a precision for which torch has no word."""

        def build(mode: str):
            seen.append((torch.get_default_device(), backend.matmul.fp32_precision))
            torch.set_default_device("cpu" if mode == "x" else "meta")
            backend.matmul.fp32_precision = "ieee"
            return torch.nn.Linear(4, 4, device="cpu"), torch.ones(1, 4, device="cpu")

        backend: Any = torch.backends.mkldnn
        if not hasattr(backend, "matmul"):
            pytest.skip("this torch has one precision for all backends")
        before, seen = backend.matmul.fp32_precision, []
        torch.set_default_device("meta")
        backend.matmul.fp32_precision = "bf16"
        try:
            found = record_modes(build, tmp_path, modes="x,y,z", layers="all")
            after = torch.get_default_device(), backend.matmul.fp32_precision
        finally:
            torch.set_default_device(None)
            backend.matmul.fp32_precision = before
        assert found, str(found)
        assert {*seen, after} == {(torch.device("meta"), "bf16")}

    def test_what_an_import_sets_holds_for_every_mode(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A module is imported once, before the first mode: its settings are no mode's."""
        (tmp_path / "set_once.py").write_text(
            "import os, torch\n"
            "os.environ['SET_ONCE'] = '1'\n"
            "torch.set_default_dtype(torch.float64)\n"
            "def build(mode='a'):\n"
            "    assert os.environ['SET_ONCE'] == '1'\n"
            "    return torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("SET_ONCE", "0")
        try:
            for folder in ("first", "second"):
                found = record_modes("set_once:build", folder, modes="a,b", layers="all")
                assert found, str(found)
                assert {open_recording(row.path)[""].output.dtype for row in found} == {
                    torch.float64
                }
        finally:
            torch.set_default_dtype(torch.float32)
            sys.modules.pop("set_once", None)


class TestSharedModels:
    """A function that returns the same model each time: its owner's stays what it is."""

    def test_every_mode_is_made_of_the_model_as_it_was(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).eval()
        net.table = torch.ones(2)
        net[0].weight.mark = "kept"
        x = torch.randn(3, 4)
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        wanted = ("bf16", "fp32", "fake:w8a8", "fp64")
        shared = record_modes(lambda: (net, x), tmp_path / "shared", modes=wanted, layers="all")
        own = record_modes(
            lambda: (copy.deepcopy(net), x), tmp_path / "own", modes=wanted, layers="all"
        )
        assert shared and own, str(shared)
        for row in shared:
            assert same(row.path, own[row.mode].path), row.mode
        assert not same(shared["bf16"].path, shared["fp32"].path)
        after = net.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert net.table.dtype == torch.float32
        assert "forward" not in vars(net[0])

    def test_with_a_dtype(self, tmp_path: Path) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(4, 4))
        target = load_target(lambda: (net, torch.ones(1, 4)), {"dtype": "bf16"})
        assert target.model[0].weight.dtype == torch.bfloat16
        assert net[0].weight.dtype == torch.float32

    def test_one_that_cannot_be_spared_is_refused_the_next_time(self, tmp_path: Path) -> None:
        """A function around the model would go on with the old one: it is converted in place."""
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        inner = net[0].forward
        net[0].forward = lambda x: inner(x) * 2

        found = record_modes(
            lambda: (net, torch.ones(1, 4)), tmp_path, modes="bf16,fp32", layers="all"
        )
        assert [row.status for row in found] == ["recorded", "failed"]
        assert open_recording(found["bf16"].path)["0"].output.dtype == torch.bfloat16
        assert "returned the same model again" in str(found["fp32"].problem)
        assert "the mode 'bf16'" in str(found["fp32"].problem)

    def test_what_nobody_holds_is_held_once(self) -> None:
        made: list[weakref.ref[torch.nn.Module]] = []

        def build() -> Any:
            net = torch.nn.Sequential(torch.nn.Linear(4, 4))
            made.append(weakref.ref(net))
            return net, torch.ones(1, 4)

        target = load_target(build, {"mode": "bf16"})
        assert made[0]() is None and target.model[0].weight.dtype == torch.bfloat16


class TestResume:
    def test_what_is_done_is_kept_and_the_rest_is_made(self, target: str, tmp_path: Path) -> None:
        first = record_modes(target, tmp_path, modes="a,batch")
        created = (tmp_path / "a" / "recording.json").read_bytes()
        found = record_modes(target, tmp_path, modes="a,batch,b", resume=True)
        assert [row.status for row in found] == ["kept", "failed", "recorded"]
        assert (tmp_path / "a" / "recording.json").read_bytes() == created
        assert (found["a"].layers, found["a"].records, found["a"].nbytes) == (
            first["a"].layers, first["a"].records, first["a"].nbytes,
        )  # fmt: skip
        half = open_recording(tmp_path / "batch").manifest
        assert half.status == "failed"
        os.truncate(next((tmp_path / "b").glob("segment*")), 100)
        again = record_modes(target, tmp_path, modes="b", resume=True)
        assert again["b"].status == "recorded"

    def test_other_options_are_said_and_nothing_is_lost(self, target: str, tmp_path: Path) -> None:
        record_modes(target, tmp_path, modes="a")
        before = tensors(f"{tmp_path}/a")
        found = record_modes(
            target,
            tmp_path,
            modes="good",
            resume=True,
            inputs=True,
            layers="all",
            options={"samples": 3},
        )
        assert [row.status for row in found] == ["failed", "recorded"]
        said = str(found["a"].problem)
        assert "--layers was blocks and is all" in said
        assert "--inputs was off and is on" in said
        assert "samples was not given and is 3" in said
        assert "--overwrite" in said
        assert tensors(f"{tmp_path}/a").keys() == before.keys()

    def test_code_that_changed_is_a_note(self, tmp_path: Path) -> None:
        path = tmp_path / "changing.py"
        path.write_text(TARGET)
        record_modes(f"{path}:build", tmp_path / "runs", modes="a,load")
        path.write_text(TARGET.replace('if mode == "load"', "if False"))
        found = record_modes(f"{path}:build", tmp_path / "runs", modes="a,load", resume=True)
        assert [row.status for row in found] == ["kept", "recorded"]
        assert "has changed since this mode was recorded" in found["a"].notes[0]

    def test_a_model_that_changed_is_refused_wherever_it_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In a TOML file, as a checkpoint, with its weights in a file beside it."""

        def scripted(factor: float) -> None:
            net = torch.nn.Sequential(torch.nn.Linear(2, 2))
            torch.nn.init.constant_(net[0].weight, factor)
            torch.jit.trace(net, torch.ones(1, 2)).save(tmp_path / "m.pt")

        monkeypatch.chdir(tmp_path)
        Path("m.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 2), 1\n")
        Path("tensortap.toml").write_text('[modes.ts]\ntarget = "m.pt"\n')
        Path("x.json").write_text('{"input": [[1.0, 2.0]]}')
        scripted(1.0)
        options = {"modes": "ts", "layers": "all", "inputs_from": ["x.json"]}
        assert record_modes("m.py:build", "runs", **options)
        assert record_modes("m.py:build", "runs", **options, resume=True)["ts"].status == "kept"
        scripted(2.0)
        row = record_modes("m.py:build", "runs", **options, resume=True)["ts"]
        assert "the file of the target is not the same (m.pt)" in str(row.problem)

    @pytest.mark.parametrize(
        ("spec", "file"),
        [
            ("hf:tiny", "tiny/model.safetensors"),
            ("hf:tiny", "tiny/config.json"),
            ("m.onnx", "m.onnx.data"),
            ("m.xml", "m.bin"),
            ("m.pt", "m.taps.json"),
            ("sub.m:build", "sub/m.py"),
            ("sub/m.py:build", "sub/m.py"),
        ],
    )
    def test_which_files_are_a_targets(
        self, spec: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for folder in ("tiny", "sub"):
            Path(folder).mkdir()
        for name in ("tiny/config.json", "tiny/model.safetensors", "m.onnx", "m.xml", "m.pt", file):
            Path(name).write_text("{}")
        before = Request(spec).made_with("a")
        assert differences(before, Request(spec).made_with("a")) == []
        Path(file).write_text("{1: 2}")
        after = Request(spec).made_with("a")
        name = Path(file).parent.name if spec.startswith("hf:") else spec
        said = [f"the file of the target is not the same ({name})"]
        assert differences(before, after) == ([] if file.endswith(".py") else said)
        assert before["files"] != after["files"]

    def test_a_file_of_an_option_that_changed_is_a_note(
        self, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        text = TARGET.replace("samples: int = 2", "samples: int = 2, weights=None")
        Path("m.py").write_text(text)
        Path("w.bin").write_text("1")
        options = {"modes": "a", "sets": ["weights=w.bin"]}
        assert record_modes("m.py:build", "runs", **options)
        kept = record_modes("m.py:build", "runs", **options, resume=True)["a"]
        assert not any("changed" in text for text in kept.notes)
        Path("w.bin").write_text("2")
        row = record_modes("m.py:build", "runs", **options, resume=True)["a"]
        assert row.status == "kept"
        assert "The file of the option weights, w.bin, has changed" in row.notes[0]

    def test_an_empty_recording_is_made_anew(self, target: str, tmp_path: Path) -> None:
        made = Request(target).made_with("a")
        Writer(str(tmp_path / "a"), Manifest(mode="a", selection={"made_with": made})).close()
        assert open_recording(tmp_path / "a").status == "complete"
        found = record_modes(target, tmp_path, modes="a", resume=True)["a"]
        assert (found.status, found.layers) == ("recorded", 2)

    def test_another_recording_at_the_place_of_against(self, target: str, tmp_path: Path) -> None:
        base = tmp_path / "base"
        options = {"modes": "a", "against": base / "a"}
        record_modes(target, base, modes="a")
        record_modes(target, tmp_path / "runs", **options)
        assert record_modes(target, tmp_path / "runs", **options, resume=True)["a"].status == "kept"
        record_modes(target, base, modes="a", options={"samples": 1}, overwrite=True)
        row = record_modes(target, tmp_path / "runs", **options, resume=True)["a"]
        assert "the file of --against is not the same (recording.json)" in str(row.problem)

    def test_modes_that_began_with_other_random_numbers(self, target: str, tmp_path: Path) -> None:
        torch.manual_seed(1)
        record_modes(target, tmp_path, modes="a")
        torch.manual_seed(1)
        same_state = record_modes(target, tmp_path, modes="a,load", resume=True)
        assert same_state.notes == ()
        torch.manual_seed(2)
        assert record_modes(target, tmp_path, modes="a", resume=True).notes == ()
        other = record_modes(target, tmp_path, modes="good", resume=True)
        assert [row.status for row in other] == ["kept", "recorded"]
        assert "random state was another one when a began" in other.notes[0]

    def test_a_recording_of_unknown_making_is_not_touched(
        self, target: str, tmp_path: Path
    ) -> None:
        import tensortap as tap

        net = torch.nn.Linear(4, 4)
        with tap.record(net, tmp_path / "a", layers="all"):
            net(torch.ones(1, 4))
        found = record_modes(target, tmp_path, modes="a", resume=True)
        assert "does not say with which options it was made" in str(found["a"].problem)
        assert open_recording(tmp_path / "a").layers == [""]

    def test_what_counts_as_different(self) -> None:
        def made(target: str, digest: str, **more: object) -> dict[str, object]:
            files = {"target": {"name": "m.py", "digest": digest}}
            return {"target": target, "files": files, **more}

        base = made("x/m.py:build", "1")
        assert differences(base, made("x/m.py:build", "2")) == []
        assert differences(base, made("../x/m.py:build", "1")) == []
        assert differences(base, made("y/m.py:build", "2")) == [
            "the target was 'x/m.py:build' and is 'y/m.py:build'"
        ]
        assert differences(made("t", "1", calib=2), made("t", "1")) == [
            "--calib was 2 and is not given"
        ]
        inputs = [{"inputs_from 0": {"name": "in.npz", "digest": d}} for d in "12"]
        assert differences({"files": inputs[0]}, {"files": inputs[1]}) == [
            "the file of --inputs-from is not the same (in.npz)"
        ]
        models = [{"target": {"name": "m.onnx", "digest": d}} for d in "12"]
        assert differences({"files": models[0]}, {"files": models[1]}) == [
            "the file of the target is not the same (m.onnx)"
        ]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started, to see that none is left, not even as a zombie."""
    processes: list[subprocess.Popen[bytes]] = []

    class Kept(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Kept)
    return processes


class TestProcesses:
    def test_the_same_bits_and_those_that_die_are_rows(
        self, target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], started: Any
    ) -> None:
        torch.manual_seed(11)  # the state here is that of the workers
        random.seed(11)
        here = record_modes(target, tmp_path / "one", modes="b")
        capfd.readouterr()
        steps: list[ModeStep] = []
        threads = torch.get_num_threads()
        torch.set_num_threads(2)  # one for each of two
        try:
            there = record_modes(
                target, tmp_path / "two", modes="b,kill", jobs=2, progress=steps.append
            )
        finally:
            torch.set_num_threads(threads)
        assert [row.status for row in there] == ["recorded", "failed"]
        if threads == 1:
            assert same(here["b"].path, there["b"].path)
        assert there["b"].notes == here["b"].notes and there["b"].records == 4
        assert "ended by SIGKILL (signal 9)" in str(there["kill"].problem)
        assert ModeStep("b", 1, 2, "running", 2, 2) in steps
        assert {s.state for s in steps if s.mode == "kill"} >= {"loading", "failed"}
        out, err = capfd.readouterr()
        assert out == "" and "what a target prints" in err
        assert [process.returncode for process in started] == [0, -9]
        again = record_modes(target, tmp_path / "two", modes="b", resume=True, jobs=2)
        assert again["b"].status == "kept"

    def test_what_holds_a_process_up_when_it_is_done(
        self,
        target: str,
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        started: Any,
    ) -> None:
        monkeypatch.setattr(workers, "_LINGER", 1.0)
        found = record_modes(target, tmp_path, modes="thread,ctrl-c", jobs=2)
        assert [row.status for row in found] == ["recorded", "failed"]
        assert found["thread"].records == 4
        assert str(found["ctrl-c"].problem).startswith("KeyboardInterrupt: ")
        assert "Traceback" not in capfd.readouterr().err
        assert started[0].returncode == -signal.SIGTERM

    def test_an_interrupt_ends_them_all(self, target: str, tmp_path: Path) -> None:
        """In a process of its own: an interrupt must reach nothing of pytest's."""
        done = subprocess.run(
            [sys.executable, INTERRUPTED, target, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        assert "slow" in told["left"]
        assert set(told["recorded"]) == {"slow", "load"} - set(told["left"])
        assert len(told["codes"]) == 2 and None not in told["codes"]
        assert told["codes"][0] == -signal.SIGTERM

    def test_what_cannot_be_sent_is_said(self, target: str, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match=r"<lambda>.* cannot be imported"):
            record_modes(lambda mode: None, tmp_path, modes="a", jobs=2)
        with pytest.raises(OptionError, match="an option cannot be sent there"):
            record_modes(target, tmp_path, modes="a", jobs=2, options={"x": lambda: None})
        assert list(tmp_path.iterdir()) == []

    def test_a_function_of_the_script_itself(
        self, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("__main__", "__mp_main__"):
            monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])
        file = target.removesuffix(":build")
        function = worker.MainFunction(file, "build").find()
        assert function.__module__ == "__main__"
        assert record_modes(function, tmp_path, modes="good")["a"].status == "recorded"
        monkeypatch.setattr(worker, "inside", True)
        with pytest.raises(OptionError, match="if __name__ == '__main__'"):
            record_modes(function, tmp_path, modes="good")

    def test_how_a_process_ended(self) -> None:
        assert death(-9).startswith("Its process was ended by SIGKILL (signal 9).")
        assert "run out of memory" in death(-9)
        assert death(-11) == (
            "Its process was ended by SIGSEGV (signal 11). It crashed, in code that is not "
            "Python's."
        )
        assert death(-15) == "Its process was ended by SIGTERM (signal 15)."
        assert "left with exit code 9 and did not say why" in death(9)
        assert [threads_each(*each) for each in ((8, 2), (8, 3), (2, 4), (1, 1))] == [4, 2, 1, 1]

    def test_rows_travel_whole(self) -> None:
        row = RecordedMode(
            "a", "runs/a", "recorded", None, 1.5, 2, 3, 4, ("n",), 5, ("f",), {"same": True}
        )
        assert RecordedMode.from_dict(row.to_dict()) == row
        assert row.to_dict()["self_checks"] == {"passed": 4, "failed": 1}
