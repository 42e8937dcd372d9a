"""Comparing on a GPU: the answers of the CPU, in bounded memory."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from placed import check_same, make_runs
from torch import nn

import tensortap as tap
from tensortap.comparing import carrier
from tensortap.comparing.carrier import Carrier
from tensortap.comparing.metrics import _registered
from tensortap.errors import OptionError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MB = 1 << 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("placed"))


@pytest.fixture
def large(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Two recordings of 24 layers of 16 MB, in all 768 MB."""
    base = torch.randn(2048, 4096)
    model = nn.ModuleList(nn.Identity() for _ in range(24))
    paths = {}
    for name, noise in (("reference", 0.0), ("candidate", 0.01)):
        paths[name] = tmp_path / name
        with tap.record(model, paths[name], layers="leaves"):
            for number, layer in enumerate(model):
                layer((base * (1 + number) + noise * base.flip(0)).to(torch.bfloat16))
    yield paths
    for path in paths.values():
        shutil.rmtree(path)


def same_but_for_the_device(ours: dict, theirs: dict) -> None:
    assert ours.pop("measured_on") == "cuda:0"
    assert theirs.pop("measured_on") == "cpu"
    check_same(ours, theirs)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_every_dtype_hole_and_layout_as_on_the_cpu(
    runs: dict[str, Path], device: str | torch.device
) -> None:
    both = runs["reference"], runs["candidate"]
    same_but_for_the_device(
        tap.compare(*both, device=device).to_dict(), tap.compare(*both).to_dict()
    )


@pytest.mark.parametrize("third", ["floor", "truth"])
def test_floor_and_truth_as_on_the_cpu(runs: dict[str, Path], third: str) -> None:
    both, options = (runs["reference"], runs["candidate"]), {third: runs[third]}
    same_but_for_the_device(
        tap.compare(*both, device="cuda", **options).to_dict(),
        tap.compare(*both, **options).to_dict(),
    )


def test_a_folder_of_modes_as_on_the_cpu(runs: dict[str, Path]) -> None:
    folder = runs["reference"].parent
    ours = tap.compare_modes(folder, "reference", device="cuda")
    theirs = tap.compare_modes(folder, "reference")
    check_same(ours.to_dict(), theirs.to_dict())
    for one, other in zip(ours.modes, theirs.modes, strict=True):
        assert one.comparison is not None and other.comparison is not None
        same_but_for_the_device(one.comparison.to_dict(), other.comparison.to_dict())


def test_rules_presets_and_causes_as_on_the_cpu(runs: dict[str, Path]) -> None:
    both = runs["reference"], runs["candidate"]
    for options in (
        {"rules": [".*: p99 < 1e-3 and cosine > 0.999"]},
        {"preset": "documents"},
        {"layers": "in_bfloat16"},
        {"layers": "holes"},
    ):
        ours = tap.compare(*both, device="cuda", **options)
        same_but_for_the_device(ours.to_dict(), tap.compare(*both, **options).to_dict())


def test_an_added_metric_gets_tensors_of_the_device_or_what_it_can_read(
    runs: dict[str, Path],
) -> None:
    seen = []

    def there(reference: torch.Tensor, candidate: torch.Tensor) -> float:
        seen.append(reference.device.type)
        return float((candidate - reference).abs().sum())

    def by_numpy(reference: torch.Tensor, candidate: torch.Tensor) -> float:
        return float(candidate.numpy().flat[0] - reference.numpy().flat[0])

    tap.register_metric("there", there)
    tap.register_metric("by_numpy", by_numpy)
    try:
        options = {"layers": "in_float32", "metrics": ["there", "by_numpy"]}
        both = runs["reference"], runs["candidate"]
        ours = tap.compare(*both, device="cuda", **options)["in_float32"].main
        assert seen == ["cuda"]
        theirs = tap.compare(*both, **options)["in_float32"].main
        assert ours is not None and theirs is not None
        check_same(dict(ours.added), dict(theirs.added))
        assert not any(math.isnan(value) for _, value in ours.added)
    finally:
        _registered.pop("there")
        _registered.pop("by_numpy")


def test_the_devices_memory_is_bounded(large: dict[str, Path]) -> None:
    both = large["reference"], large["candidate"]
    tap.compare(*both, layers="0", device="cuda")  # kernels and their scratch
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    place = Carrier(torch.device("cuda:0"), held=128 * MB)
    found = tap.compare(*both, device=place)
    place.close()
    # what is held, the pair that is read, and what the arithmetic needs beside it
    assert torch.cuda.max_memory_allocated() - before < (128 + 32 + 160) * MB
    assert torch.cuda.memory_allocated() - before < 4 * MB
    same_but_for_the_device(found.to_dict(), tap.compare(*both).to_dict())
    assert not [note for note in found.notes if "CPU" in note]


def test_what_does_not_fit_is_compared_on_the_cpu_and_said(large: dict[str, Path]) -> None:
    both = large["reference"], large["candidate"]
    place = Carrier(torch.device("cuda:0"), largest=MB)
    found = tap.compare(*both, device=place, layers="{0-2}")
    place.close()
    plain = tap.compare(*both, layers="{0-2}")
    assert [row.to_dict() for row in found.layers] == [row.to_dict() for row in plain.layers]
    assert [note for note in found.notes if "cuda:0 has no room for them" in note]


def test_memory_that_others_hold_is_no_traceback(large: dict[str, Path]) -> None:
    both = large["reference"], large["candidate"]
    place = Carrier(torch.device("cuda:0"))
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 24 * MB) / whole)
    try:
        found = tap.compare(*both, device=place, layers="{0-3}")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        place.close()
    plain = tap.compare(*both, layers="{0-3}")
    check_same([r.to_dict() for r in found.layers], [r.to_dict() for r in plain.layers])
    assert [note for note in found.notes if "cuda:0 has no room for them" in note]


def test_many_pieces_with_a_busy_device(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read is what was sent, however far the device is behind."""
    monkeypatch.setattr(carrier, "PIECE", 7000)
    place = Carrier(torch.device("cuda:0"), held=200_000)
    run = tap.open(runs["candidate"])
    wrong = []
    for record in run.records:
        torch.cuda._sleep(200_000)
        there = place.tensor(record)
        torch.cuda._sleep(200_000)
        expected = record.tensor()
        plain = there.view(torch.uint8) if there.dim() else there
        other = expected.view(torch.uint8) if expected.dim() else expected
        wrong.append((plain.cpu().nan_to_num() != other.nan_to_num()).any())
    place.close()
    assert not any(wrong)


def test_a_gpu_that_is_not_there_is_a_sentence(runs: dict[str, Path]) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(OptionError, match=f"'cuda:{count + 6}' cannot be used here: there") as said:
        tap.compare(runs["reference"], runs["candidate"], device=f"cuda:{count + 6}")
    assert torch.cuda.get_device_name(0) in str(said.value)


def test_the_command_line(runs: dict[str, Path]) -> None:
    def tensortap(*words: object) -> str:
        command = [sys.executable, "-m", "tensortap", *map(str, words)]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode in (0, 1), ran.stderr
        return ran.stdout

    words = ("compare", runs["reference"], runs["candidate"], "--json")
    ours, theirs = tensortap(*words, "--device", "cuda"), tensortap(*words)
    same_but_for_the_device(json.loads(ours), json.loads(theirs))
    told = tensortap("doctor")
    assert torch.cuda.get_device_name(0) in told
    assert "kernels work" in told
    assert "copies from pinned memory work" in told
