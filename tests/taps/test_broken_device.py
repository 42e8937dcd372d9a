"""A device that has failed answers every question with an error: what is here is still kept."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from support import Net
from tensortap.errors import RecordingError
from tensortap.taps import eager, input_log

pytestmark = pytest.mark.filterwarnings("ignore::tensortap.TapWarning")

ERROR = "CUDA error: device-side assert triggered"


def fail(*args: Any) -> Any:
    raise RuntimeError(ERROR)


class Event:
    """Of a device that fails once these inputs are on their way."""

    def __init__(self, works: bool = False) -> None:
        self.works = works

    def query(self) -> bool:
        return self.works or fail()

    def synchronize(self) -> None:
        assert self.works or fail()


def batch(value: float, *events: Event, there: bool = False) -> Any:
    return input_log._Batch([("[0]", torch.tensor([value]))], list(events), there)


@pytest.mark.parametrize("there", [False, True])
def test_inputs_that_never_came_are_unknown(there: bool) -> None:
    log = input_log.InputLog()
    log._coming = [batch(1.0, Event(True)), batch(2.0, Event(), there=there), batch(3.0)]
    found = log.to_dict()["batches"]
    assert found[1] == "unknown" and "unknown" not in (found[0], found[2])


def test_what_a_failed_device_may_still_write_to_is_not_given_back() -> None:
    kept = []
    for event in (Event(True), Event()):
        log = input_log.InputLog()
        log._coming = [batch(1.0, event)]
        tensor = weakref.ref(log._coming[0].leaves[0][1])
        log.settle()
        del log
        gc.collect()
        kept.append(tensor() is not None)
    assert kept == [False, True]


def test_the_next_inputs_are_seen_all_the_same() -> None:
    log = input_log.InputLog()
    log._coming = [batch(1.0, Event())]
    log.see((0, 1), (torch.tensor([2.0]),), {})
    assert log.digests[0] == "unknown" and len(log.digests) == 2
    plain = input_log.InputLog()
    plain.see((0, 0), (torch.tensor([2.0]),), {})
    assert log.digests[1:] == plain.digests


def test_a_recording_closes_without_its_inputs(
    net: Net, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = input_log._fetched

    def lost(leaves: Any, *, waits: bool) -> Any:
        found = there(leaves, waits=waits)
        found.events, found.there = [Event()], True
        return found

    monkeypatch.setattr(input_log, "_fetched", lost)
    with tap.record(net, tmp_path / "run"):
        net(ids)
    run = tap.open(tmp_path / "run")
    assert run.manifest.inputs["batches"] == ["unknown"]
    assert run.status == "complete" and run.records


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("first", ["step", "flush", "close"])
@pytest.mark.parametrize("strict", [False, True])
def test_what_was_recorded_is_kept_and_the_error_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, strict: bool
) -> None:
    """Asking whether a graph is captured is what is asked of a device when a graph has run."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    run = torch.compile(model, backend="eager")
    rec = tap.record(run, tmp_path / "run", layers="leaves", strict=strict).start()
    run(x)
    rec.flush()
    monkeypatch.setattr(eager.replays, "capturing", fail)
    with pytest.raises(RecordingError, match=ERROR) if strict else pytest.warns(match=ERROR):
        run(x)
    assert ERROR in str(rec.failure)
    getattr(rec, first)()
    rec.close()
    assert hooks(model) == 0
    found = tap.open(tmp_path / "run", partial=True)
    assert found.status == "failed" and ERROR in str(found.manifest.failure)
    assert {record.layer for record in found.records} == {"0", "1"}
