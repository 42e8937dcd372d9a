"""Forks, checkpoints and recorders that are dropped: what happens around a recording."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.recording.output import SegmentOutput
from tensortap.recording.store import LocalStore

LOAD = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensortap":
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
sys.path.insert(0, sys.argv[2])
import torch
model = torch.load(sys.argv[1], weights_only=False)
y = model(torch.ones(2, 8))
y.sum().backward()
compiled = torch.compile(model, backend="eager", fullgraph=True)
assert torch.equal(compiled(torch.ones(2, 8)), y)
assert torch.equal(model.generate(torch.ones(2, 8)), y)
assert model.generate.__self__ is model
print(y.sum().item())
"""
CODE = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.ReLU()
    def forward(self, x):
        return self.b(self.a(x))
    def generate(self, x):
        return self(x)
"""


def hooks(model: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model whose class lies in a file of its own, as a user's does."""
    (tmp_path / "netfile.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "netfile", raising=False)
    import netfile  # type: ignore[import-not-found]

    made: nn.Module = netfile.Net()
    return made


def _record(model: nn.Module, path: Path) -> Any:
    return tap.record(model, path, layers="all", inputs=True, grads=True)


def _summaries(model: nn.Module, path: Path) -> Any:
    return tap.record(model, path, layers="all", keep="summary")


def _watch(model: nn.Module, path: Path) -> Any:
    return tap.watch(model, path, layers="all", every=1, updates=True)


def _monitor(model: nn.Module, path: Path) -> Any:
    monitor = tap.Monitor(model, {"a": {"record_type": "single"}}, [0], path, batch_indices=[0])
    monitor.set_epoch(0)
    monitor.set_batch_idx(0)
    return monitor


WAYS = (_record, _summaries, _watch, _monitor)


@pytest.mark.parametrize("listen", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_a_saved_model_loads_without_tensortap(
    tmp_path: Path, net: nn.Module, listen: Callable[[nn.Module, Path], Any]
) -> None:
    """A checkpoint that is written meanwhile is the user's, and needs nothing of ours."""
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    with listen(net, tmp_path / "run"):
        net(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        torch.save(net, tmp_path / "net.pt")
    words = [sys.executable, "-c", LOAD, str(tmp_path / "net.pt"), str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) == pytest.approx(net(torch.ones(2, 8)).sum().item())


@pytest.mark.parametrize("listen", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_a_copy_is_a_model_of_its_own(
    tmp_path: Path, net: nn.Module, listen: Callable[[nn.Module, Path], Any]
) -> None:
    """What a copy computes is not recorded, and its `generate` runs the copy."""
    x = torch.ones(2, 8)
    with listen(net, tmp_path / "run"):
        net(x)
        for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            with torch.no_grad():
                made.a.weight.zero_()
                made.a.bias.fill_(7.0)
            assert made.generate(x).unique().tolist() == [7.0]
            assert made(x).unique().tolist() == [7.0]
    run = tap.open(tmp_path / "run")
    assert all(record.summary.max != 7.0 for layer in run.values() for record in layer.records)
    assert hooks(net) == 0


@pytest.mark.parametrize("listen", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_a_forked_child_leaves_the_recording_alone(
    tmp_path: Path, net: nn.Module, listen: Callable[[nn.Module, Path], Any]
) -> None:
    """It leaves the with block while the parent goes on, and after it has closed."""
    path = tmp_path / "run"
    recorder = listen(net, path)
    recorder.__enter__()
    net(torch.ones(2, 8))
    late, go = os.pipe()
    early = _fork(lambda: recorder.__exit__(ValueError, ValueError("child"), None))
    after = _fork(
        lambda: (os.read(late, 1), recorder.__exit__(SystemExit, SystemExit(0), None)),
    )
    assert os.waitpid(early, 0)[1] == 0
    assert tap.open(path).status == "recording"
    net(torch.ones(2, 8) * 2)
    recorder.__exit__(None, None, None)
    before = (path / "recording.json").read_bytes()
    assert tap.open(path).status == "complete"
    os.write(go, b"x")
    assert os.waitpid(after, 0)[1] == 0
    assert (path / "recording.json").read_bytes() == before
    os.close(late), os.close(go)


def _fork(act: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        act()
        code = 0
    finally:
        os._exit(code)


def test_a_forked_child_that_goes_on_as_if_it_recorded(tmp_path: Path, net: nn.Module) -> None:
    path, x = tmp_path / "run", torch.ones(2, 8)
    with tap.record(net, path, layers="all") as recorder:
        net(x)

        def act() -> None:
            recorder.step()
            net(x + 1)
            recorder.flush()
            recorder.run(x)
            recorder.close()
            assert hooks(net) == 0

        assert os.waitpid(_fork(act), 0)[1] == 0
        recorder.step()
        net(x + 2)
    run = tap.open(path)
    assert run.status == "complete"
    assert len(run.records) == 6


def test_a_dropped_recorder_lets_go_and_says_so(tmp_path: Path, net: nn.Module) -> None:
    recorder = tap.record(net, tmp_path / "run", layers="all").start()
    net(torch.ones(2, 8))
    with pytest.warns(tap.TapWarning, match=r"dropped without close\(\)"):
        del recorder
        gc.collect()
    assert hooks(net) == 0
    assert "generate" not in vars(net) or _soon(lambda: "generate" not in vars(net))
    net(torch.ones(2, 8) * 5)
    assert _soon(lambda: tap.open(tmp_path / "run").status == "failed")
    run = tap.open(tmp_path / "run")
    assert len(run.records) == 3
    assert any("dropped without close()" in note for note in run.notes)


def test_a_dropped_recorder_does_not_write_into_its_successor(
    tmp_path: Path, net: nn.Module
) -> None:
    """A cell of a notebook that is run twice: the old one goes when the new one has its name."""
    path = tmp_path / "run"
    recorder = tap.record(net, path, layers="all").start()
    net(torch.ones(2, 8))
    with pytest.warns(tap.TapWarning, match="dropped"):
        recorder = tap.record(net, path, layers="all", overwrite=True).start()
    net(torch.ones(2, 8) * 3)
    time.sleep(0.3)
    recorder.close()
    run = tap.open(path)
    assert (run.status, len(run.records)) == ("complete", 3)
    assert run["a"].first("output").batch == 0


def _soon(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + 20
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    return true()


def test_a_replaced_layer_is_heard(tmp_path: Path, net: nn.Module) -> None:
    """Under the name that it has now, and with its own type."""
    x = torch.ones(2, 8)
    with tap.record(net, tmp_path / "run", layers="all", inputs=True) as recorder:
        net(x)
        recorder.step()
        old, net.a = net.a, nn.Sequential(nn.Linear(8, 8))  # type: ignore[assignment]
        second = net(x)
        recorder.step()
        net.a = old
        third = net(x)
    assert hooks(net) == 0
    run = tap.open(tmp_path / "run")
    found = run["a"].port("output")
    assert [record.batch for record in found] == [0, 1, 2]
    assert [record.type for record in found] == ["Linear", "Sequential", "Linear"]
    assert torch.equal(found[1].tensor().relu(), second)
    assert torch.equal(found[2].tensor().relu(), third)
    assert any("replaced while the model was heard: 'a'" in note for note in run.notes)


@pytest.mark.parametrize("listen", [_watch, _monitor], ids=["watch", "monitor"])
def test_a_replaced_layer_is_heard_while_it_trains(
    tmp_path: Path, net: nn.Module, listen: Callable[[nn.Module, Path], Any]
) -> None:
    x = torch.ones(2, 8)
    with listen(net, tmp_path / "run") as watch:
        for batch in range(2):
            if batch:
                net.a = nn.Linear(8, 8)
            if isinstance(watch, tap.Monitor):
                watch.set_epoch(0)
                watch.set_batch_idx(0)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            net(x).sum().backward()
            optimizer.step()
    run = tap.open(tmp_path / "run")
    assert len(run["a"].port("output")) == 2
    if listen is _watch:
        assert len([r for r in run["a"].port("param") if r.leaf == ".weight"]) == 2
    assert hooks(net) == 0


def test_sizes_are_taken_as_text(tmp_path: Path, net: nn.Module) -> None:
    with tap.record(net, tmp_path / "run", layers="all", budget="64MiB"):
        net(torch.ones(2, 8))
    with tap.watch(net, tmp_path / "watch", budget="1 GB"):
        pass
    monitor = tap.Monitor(net, {"a": {}}, [0], tmp_path / "monitor", [0], memory_limit="32MiB")
    assert monitor.memory_limit == 32 << 20
    monitor.close()
    for wrong, text in (
        ("64 parsecs", "budget: '64 parsecs' is no size"),
        ("64KiB", "budget must be at least 1 MiB"),
        (1.5, "budget must be a number of bytes, or a text"),
    ):
        with pytest.raises(tap.TapError, match=text):
            tap.record(net, tmp_path / "other", budget=wrong)  # type: ignore[arg-type]


def test_a_descriptor_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a close that failed the number may be somebody else's file."""
    store = LocalStore(tmp_path)
    output = SegmentOutput(store, 0, 0)
    output.append(0, memoryview(b"x" * 64))
    closed: list[int] = []
    close = os.close

    def failing(fd: int) -> None:
        closed.append(fd)
        close(fd)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "close", failing)
    with pytest.raises(OSError, match="Input/output"):
        output.seal()
    output.abandon()
    monkeypatch.undo()
    assert len(closed) == 1
    assert not list(tmp_path.iterdir())
