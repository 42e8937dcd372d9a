"""Comparing at a place: the CPU as a device, the bounds, and what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from placed import check_same, make_runs
from torch import nn

import tensortap as tap
from schemas import validate
from tensortap.comparing import carrier
from tensortap.comparing.carrier import Carrier
from tensortap.comparing.place import HERE
from tensortap.errors import DamagedError, OptionError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("placed"))


def compared(runs: dict[str, Path], device: object = None, **options: object) -> tap.Comparison:
    return tap.compare(runs["reference"], runs["candidate"], device=device, **options)


def thirds(runs: dict[str, Path]) -> dict[str, Path]:
    return {"floor": runs["floor"], "truth": runs["truth"]}


def test_the_cpu_is_the_default(runs: dict[str, Path]) -> None:
    plain = compared(runs, **thirds(runs)).to_dict()
    assert compared(runs, "cpu", **thirds(runs)).to_dict() == plain
    assert plain["measured_on"] == "cpu"
    validate(plain, "comparison")
    verdicts = {row["layer"]: row["verdict"] for row in plain["layers"]}
    assert verdicts["holes"] == "diverged"  # so that the runs do hold what they should
    assert verdicts["equal"] == "identical"
    assert verdicts["reference_only"] == "missing"


@pytest.mark.parametrize("held", [None, 1 << 20, 100_000, 0])
def test_a_carrier_brings_what_is_there(
    runs: dict[str, Path], held: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "PIECE", 7000)  # many pieces, and none ends with a row
    place = Carrier(CPU, held=held)
    most = 0

    def watch(*_: int) -> None:
        nonlocal most
        most = max(most, place.held)

    found = compared(runs, place, **thirds(runs), progress=watch).to_dict()
    place.close()
    check_same(found, compared(runs, **thirds(runs)).to_dict())
    assert found["notes"] == compared(runs, **thirds(runs)).to_dict()["notes"]
    largest = 4 * 40 * 96 * 8
    assert 0 < most <= max(held if held is not None else 1 << 30, largest)
    assert place.held == 0


def test_what_is_held_is_brought_once_for_all_modes(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, brought = Carrier(CPU), []
    load = place._lanes.load
    monkeypatch.setattr(place._lanes, "load", lambda r: brought.append(r.tensor_id) or load(r))
    run = tap.open(runs["reference"])
    first = tap.compare(run, runs["candidate"], device=place)
    held, times = place.held, len(brought)
    assert held == sum(entry.nbytes for entry in place._held.values())
    again = tap.compare(run, first.candidate, device=place)
    assert place.held <= 2 * held
    assert len(brought) < 2 * times  # the reference's were there
    place.close()
    assert again.to_dict() == first.to_dict()


def test_what_is_too_large_is_compared_here_and_said(runs: dict[str, Path]) -> None:
    place = Carrier(CPU, largest=5000)
    found = compared(runs, place)
    place.close()
    plain = compared(runs)
    assert [row.to_dict() for row in found.layers] == [row.to_dict() for row in plain.layers]
    assert [note for note in found.notes if "ran on the CPU: cpu has no room for them" in note]
    assert not place.notes()  # said once


def test_memory_that_runs_out_is_given_back_before_the_cpu_is_asked() -> None:
    place, asked = Carrier(CPU), []

    def once(at: object) -> str:
        asked.append(at)
        if len(asked) == 1:
            raise torch.cuda.OutOfMemoryError
        return "done"

    def never(at: object) -> str:
        if at is not HERE:
            raise torch.cuda.OutOfMemoryError
        return "here"

    assert place.run(once) == "done"
    assert asked == [place, place]
    assert place.notes() == []
    assert place.run(never) == "here"
    assert "One comparison of tensors ran on the CPU" in place.notes()[0]
    place.close()


def test_a_dtype_that_the_device_does_not_know_is_compared_here() -> None:
    place = Carrier(CPU)

    def work(at: object) -> str:
        if at is not HERE:
            raise NotImplementedError("\"sub_cuda\" not implemented for 'Odd'")
        return "here"

    def broken(at: object) -> str:
        raise RuntimeError("a bug")

    assert place.run(work) == "here"
    assert "'Odd'" in place.notes()[0]
    with pytest.raises(RuntimeError, match="a bug"):
        place.run(broken)
    place.close()


def test_a_recording_that_lies_elsewhere_is_carried_too(runs: dict[str, Path]) -> None:
    fsspec = pytest.importorskip("fsspec")
    remote = fsspec.filesystem("memory")
    remote.put(str(runs["candidate"]), "/carried", recursive=True)
    record = tap.open("memory://carried")["in_float32"].records[0]
    assert record.file is None
    place = Carrier(CPU)
    try:
        assert torch.equal(place.tensor(record), tap.open(runs["candidate"])["in_float32"].output)
    finally:
        place.close()
        remote.rm("/carried", recursive=True)


def test_a_file_that_is_cut_off_meanwhile_is_damaged(tmp_path: Path) -> None:
    model = nn.Identity()
    with tap.record(model, tmp_path / "run", layers="all"):
        model(torch.randn(1000))
    record = tap.open(tmp_path / "run")[""].records[0]
    assert record.file is not None
    file, start = record.file
    place = Carrier(CPU)
    with file.open("r+b") as handle:
        handle.truncate(start + 100)
    with pytest.raises(DamagedError, match="cut off while it was read"):
        place.tensor(record)
    assert place.held == 0
    place.close()


def test_records_of_equal_bytes_keep_their_shapes(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Flatten(0), nn.Identity()])
    with tap.record(model, tmp_path / "run", layers="leaves"):
        whole = torch.randn(3, 4)
        model[0](whole)
        model[1](whole)
    place = Carrier(CPU)
    for layer in tap.open(tmp_path / "run").values():
        (record,) = layer.records
        assert torch.equal(place.tensor(record), record.tensor())
    place.close()


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("gpu0", "torch knows no such device. Name cpu, cuda, or cuda:1"),
        ("meta", "holds no values that could be compared"),
        pytest.param(
            "cuda",
            "Install a CUDA build of torch",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA"),
        ),
        pytest.param(
            "cuda:7",
            r"torch \S+ is built without CUDA",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA"),
        ),
        pytest.param(
            "xpu",
            "torch .* says: ",
            marks=pytest.mark.skipif(torch.xpu.is_available(), reason="there is an XPU"),
        ),
    ],
)
def test_a_device_that_is_not_there_is_a_sentence(
    runs: dict[str, Path], device: str, words: str
) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        compared(runs, device)
    assert str(caught.value).endswith("Leave --device out to compare on the CPU.")
    assert f"The device {device!r} " in str(caught.value)
    with pytest.raises(OptionError, match=words):
        tap.compare_modes(runs["reference"].parent, "reference", device=device)
