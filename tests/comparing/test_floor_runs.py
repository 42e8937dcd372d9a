"""`--floor auto`: a floor that is made of the reference's own target, and what is said of it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.comparing.precision import floor_mode
from tensortap.errors import TargetError
from tensortap.targets import Target, load_target
from tensortap.targets.floor_run import make_floor
from tensortap.targets.modes.request import Request
from tensortap.targets.perturbing import perturbed
from tensortap.targets.running import Settings, run_target

DEMO = "tensortap.demo:build"
CODE = """
import torch
from torch import nn

def build(scale=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 8))
    with torch.no_grad():
        model[3].weight.mul_(scale)
    return model, torch.randn(8, 16)
"""


def record(target: str, path: Path, *sets: str, mode: str | None = None) -> tap.Recording:
    """A recording as the command line makes it, with the command in its manifest."""
    request = Request(
        target, Settings(layers=("all",), inputs=True), options={"seq_len": 12}, sets=sets
    )
    if target != DEMO:
        request = Request(target, request.settings, sets=sets)
    loaded = request.load(mode)
    return run_target(loaded, str(path), request.settled(mode), lambda *_: None).recording


def test_a_floor_in_the_candidates_precision(tmp_path: Path) -> None:
    left = record(DEMO, tmp_path / "fp32", mode="fp32")
    right = record(DEMO, tmp_path / "bf16", mode="bf16")
    found = tap.compare(left, right, floor="auto")
    assert found.same
    # the floor is the candidate once more, so that no layer is above it
    ratios = [part.floor_ratio for row in found.layers for part in row.parts]
    assert all(ratio in (None, pytest.approx(1.0)) for ratio in ratios)
    (note,) = [text for text in found.notes if "floor" in text]
    assert f"tensortap record {DEMO} --seq-len 12 --mode bf16" in note
    assert found.floor.startswith("measured") and "--mode bf16" in found.floor
    assert not any("other inputs" in text for text in found.warnings)


def test_a_floor_in_the_same_precision_is_perturbed(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(CODE)
    spec = f"{file}:build"
    left = record(spec, tmp_path / "a")
    bad = record(spec, tmp_path / "b", "scale=1.00001")
    found = tap.compare(left, bad, floor="auto")
    assert found.first_divergence is not None and found.first_divergence.layer == "3"
    assert any("--perturb" in text for text in found.notes)
    ratio = found["3"].parts[-1].floor_ratio
    assert ratio is not None and 5 < ratio < 500
    good = record(spec, tmp_path / "c", "scale=1.0000001")  # one rounding
    assert tap.compare(left, good, floor="auto").same
    floor = make_floor(left, None)
    place = Path(floor.recording.path)
    assert place.exists() and floor.recording.manifest.target["spec"] == spec
    del floor
    assert not place.exists()  # nothing is left when nobody holds it


def test_recording_against_with_a_floor_that_is_made(tmp_path: Path) -> None:
    left = record(DEMO, tmp_path / "fp32", mode="fp32")
    target = load_target(DEMO, {"mode": "bf16", "seq_len": 12})
    settings = Settings(layers=("all",), against=left.path, floor="auto", full=True)
    outcome = run_target(target, str(tmp_path / "live"), settings, lambda *_: None)
    found = outcome.comparison
    assert found.same and "--mode bf16" in found.floor
    plain = record(DEMO, tmp_path / "bf16", mode="bf16")
    for name in plain.layers:  # making the floor changes nothing of the run
        assert torch.equal(plain[name].output, outcome.recording[name].output)


def test_a_recording_from_python_names_no_target(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    for name, scale in (("a", 1.0), ("b", 1.5)):
        with torch.no_grad(), tap.record(model, tmp_path / name, layers="all") as rec:
            model(x * scale)
            rec.step()
    with pytest.raises(
        TargetError, match=r"does not say which target .* tensortap record .*--perturb"
    ):
        tap.compare(tmp_path / "a", tmp_path / "b", floor="auto")


def test_a_target_that_is_gone_is_said_with_the_command(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(CODE)
    left = record(f"{file}:build", tmp_path / "a")
    right = record(f"{file}:build", tmp_path / "b", "scale=2.0")
    file.unlink()
    with pytest.raises(TargetError) as caught:
        tap.compare(left, right, floor="auto")
    command = f"tensortap record {shlex.quote(f'{file}:build')} --perturb"
    assert command in str(caught.value) and "could not be made" in str(caught.value)
    assert "net.py" in str(caught.value).partition("Make it")[0]


@pytest.mark.parametrize(
    ("reference", "candidate", "mode", "expected"),
    [
        ("float32", "float32", None, None),
        ("float32", "bfloat16", None, "bf16"),
        ("bfloat16", "bfloat16", None, None),
        ("bfloat16", "float32", None, None),
        ("float16", "bfloat16", "mine", "bf16"),
        ("float32", "int8", "int8", "int8"),
        ("float32", "int8", "static", "fake:w8a8"),
        ("float32", "fake int4", "fake:w4a8", "fake:w4a8"),
        ("float32", "float8_e4m3fn", None, "fp8wo"),
    ],
)
def test_the_mode_of_a_floor(
    tmp_path: Path, reference: str, candidate: str, mode: str | None, expected: str | None
) -> None:
    dtype = getattr(torch, reference)
    model = nn.Linear(4, 4).to(dtype)
    with torch.no_grad(), tap.record(model, tmp_path / "run", layers="all") as rec:
        model(torch.randn(2, 4).to(dtype))
        rec.step()
    assert floor_mode(tap.open(tmp_path / "run"), candidate, mode) == expected


def test_perturbing_moves_by_single_steps_and_leaves_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity()).bfloat16()
    x = torch.randn(64, 8).bfloat16()
    x[0, 0], x[0, 1] = torch.inf, torch.nan
    seen = []
    model[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    state = torch.get_rng_state()
    hooks = [len(m._forward_pre_hooks) for m in model]
    for _ in range(2):
        with perturbed(Target(model, x)) as target, torch.no_grad():
            target(target.batches[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(m._forward_pre_hooks) for m in model] == hooks
    assert torch.equal(seen[-1].isfinite(), x.isfinite())
    # the hook of the test came first; what the layer computes with shows in its output
    with perturbed(Target(model, x)) as target, torch.no_grad():
        moved = target(target.batches[0])
    plain = model(x)
    assert not torch.equal(moved[1:], plain[1:])
    error = (moved[1:].float() - plain[1:].float()).norm() / plain[1:].float().norm()
    assert 2**-11 < error < 2**-7
