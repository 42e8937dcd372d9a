"""`compare --device`, `summary --device`, and what `doctor` says of devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import Run

import tensortap.numerics.backend as choosing
from tensortap.cli.doctor import doctor

needs_no_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")


def test_the_cpu_as_a_device(run: Run, modes: Path) -> None:
    for words in (
        ("compare", modes / "fp32", modes / "bug"),
        ("compare", modes / "fp32", modes / "bug", "blocks.4"),
        ("compare", modes, "bug", "--no-save"),
        ("compare", modes, "--no-save"),
        ("summary", modes),
    ):
        plain = run(*words, "--json")
        placed = run(*words, "--json", "--device", "cpu")
        assert (placed.code, placed.json) == (plain.code, plain.json), words
    assert run("compare", modes / "fp32", modes / "bug", "--json").json["measured_on"] == "cpu"


@pytest.mark.parametrize("device", ["gpu0", "meta", pytest.param("cuda", marks=needs_no_cuda)])
def test_a_device_that_is_not_there(run: Run, modes: Path, device: str) -> None:
    for words in (
        ("compare", modes / "fp32", modes / "bug"),
        ("compare", modes / "fp32", modes / "bug", "blocks.4"),
        ("compare", modes, "--no-save"),
        ("summary", modes),
    ):
        result = run(*words, "--device", device)
        assert result.code == 2, words
        assert result.out == ""
        assert f"tensortap: The device '{device}' " in result.err
        assert "Leave --device out to compare on the CPU." in result.err


@needs_no_cuda
def test_a_target_says_the_same(run: Run, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn, ones\n"
        "def build(device='cpu'):\n"
        "    return nn.Linear(2, 2).to(device), ones(1, 2)\n"
    )
    for target in ("tensortap.demo:build", f"{tmp_path / 'own.py'}:build"):
        result = run("record", target, "-o", tmp_path / "run", "--device", "cuda")
        assert result.code == 2
        assert "The device 'cuda' cannot be used here: torch" in result.err
        assert "Install a CUDA build of torch" in result.err


@needs_no_cuda
def test_doctor_says_why_there_is_no_gpu(run: Run) -> None:
    cuda = run("doctor", "--json").json["cuda"]
    assert cuda["devices"] == []
    assert f"torch {torch.__version__} is built without CUDA" in cuda["why"]
    assert cuda["triton"]["works"] is None
    assert cuda["pinned"] == {"works": None, "why": "there is no CUDA device"}
    text = run("doctor").out
    assert f"no device: {cuda['why']}" in text
    assert "kernels" not in text and "on cuda" not in text


@pytest.mark.parametrize(
    ("forced", "kernels", "backend", "why"),
    [
        (None, True, "triton", "Triton is installed"),
        (None, None, "reference", "Triton cannot be imported"),
        ("reference", True, "reference", "TENSORTAP_BACKEND is set"),
    ],
)
@needs_no_cuda
def test_doctor_says_what_computes_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    forced: str | None,
    kernels: bool | None,
    backend: str,
    why: str,
) -> None:
    monkeypatch.setattr(choosing, "_forced", lambda: forced)
    monkeypatch.setattr(choosing, "_kernels", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    doctor()
    assert f"on cuda        {backend}: {why}\n" in capsys.readouterr().out
    doctor(json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["numerics"]["cuda"] == {"backend": backend, "why": why}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_doctor_tries_the_gpu(run: Run) -> None:
    cuda = run("doctor", "--json").json["cuda"]
    assert cuda["devices"][0]["name"] == torch.cuda.get_device_name(0)
    assert 0 < cuda["devices"][0]["free_gib"] <= cuda["devices"][0]["memory_gib"]
    assert cuda["triton"]["works"], cuda["triton"]["why"]
    assert cuda["triton"]["version"]
    assert cuda["pinned"]["works"], cuda["pinned"]["why"]
    assert "on cuda        triton: Triton is installed" in run("doctor").out
