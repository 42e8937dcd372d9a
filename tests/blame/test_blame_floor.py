"""Layers alone beside those of a floor run: bugs that rounding hides, and clean pairs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blame_models import Chain, Gain, Shared, batch, gain, make, recorded
from tiny_llama import ATTENTION, BUGS, build
from torch import nn

import tensortap as tap
from schemas import validate
from tensortap.targets.floor_target import load_floor_target, target_named
from tensortap.targets.modes.request import Request
from tensortap.targets.running import Settings, run_target

pytest.importorskip("transformers")
TARGET = f"{Path(__file__).parent / 'tiny_llama.py'}:build"
PAIRS = (("fp32", "bf16"), ("bf16", "bf16"))


def record(path: Path, mode: str, *, named: bool = True, **options: Any) -> tap.Recording:
    """A recording as the command line makes it; without its command where it is not `named`."""
    settings = Settings(layers=("all",), inputs=True, **options)
    request = Request(TARGET, settings)
    made = request.settled(mode) if named else settings
    loaded = request.load(mode)
    return run_target(loaded, str(path), made, lambda *_: None).recording


@pytest.mark.parametrize(
    ("bug", "ours", "theirs"),
    [*((bug, *pair) for bug in ("scale", "base") for pair in PAIRS), ("interleaved", *PAIRS[0])],
)
def test_a_wrong_attention_is_named_beside_a_floor_that_is_made(
    bug: str, ours: str, theirs: str, tmp_path: Path
) -> None:
    reference = record(tmp_path / "reference", ours)
    blamed = tap.blame(reference, build(bug, theirs), floor="auto")
    assert blamed.culprit == ATTENTION, blamed.sentence
    assert not blamed.same
    if blamed.against_floor is not None:
        assert blamed.against_floor.by == "alone"
        assert blamed.against_floor.made_here > 1.25 * blamed.against_floor.floor > 0
        assert "alone on the reference's inputs" in blamed.sentence
        assert blamed.made_in is not None and str(blamed.made_in.before).endswith("o_proj")
        assert all(cause.kind not in ("rounding", "noise") for cause in blamed.causes)
    validate(json.loads(blamed.to_json()), "blame")


@pytest.mark.parametrize("otherwise", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_clean_pair_blames_nobody_beside_a_floor_that_is_made(
    ours: str, theirs: str, otherwise: bool, tmp_path: Path
) -> None:
    reference = record(tmp_path / "reference", ours)
    eager = build("", theirs)
    if otherwise:  # other kernels and other sums: they err as much, in another way
        eager.model.config._attn_implementation = "eager"
        for module in eager.model.modules():
            if isinstance(module, nn.Linear):
                _split(module)
    blamed = tap.blame(reference, eager, floor="auto")
    assert blamed.culprit is None and blamed.same, blamed.sentence


def _split(linear: nn.Linear) -> None:
    """The same sums in another order."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        half = linear.in_features // 2
        first = nn.functional.linear(x[..., :half], linear.weight[:, :half])
        return first + nn.functional.linear(x[..., half:], linear.weight[:, half:])

    linear.forward = forward


@pytest.mark.parametrize("bug", ["scale", "base"])
def test_a_recorded_floor_tells_it_too(bug: str, tmp_path: Path) -> None:
    reference = record(tmp_path / "reference", "fp32")
    floor = record(tmp_path / "floor", "bf16", named=False)
    blamed = tap.blame(reference, build(bug, "bf16"), floor=floor)
    assert blamed.culprit == ATTENTION, blamed.sentence
    if blamed.against_floor is not None:
        assert blamed.against_floor.by == "recording"
        assert "off from the floor run on the same inputs" in blamed.sentence


def test_a_clean_pair_blames_nobody_beside_a_recorded_floor(tmp_path: Path) -> None:
    reference = record(tmp_path / "reference", "fp32")
    floor = record(tmp_path / "floor", "bf16", named=False)
    clean = build("", "bf16")
    assert tap.blame(reference, clean, floor=floor).same
    clean.model.config._attn_implementation = "eager"
    found = tap.blame(reference, clean, floor=floor)
    assert found.culprit is None and found.same, found.sentence


def test_a_floor_of_the_candidates_own_target_is_loaded(tmp_path: Path) -> None:
    """A target that only a manifest names is not loaded: nobody asked for its code to run."""
    reference = record(tmp_path / "reference", "fp32")
    floor = record(tmp_path / "floor", "bf16")
    assert target_named(floor) == TARGET
    bare = build("scale", "bf16")
    other = tap.blame(reference, bare, floor=floor)
    assert other.against_floor is not None and other.against_floor.by == "recording"
    named = tap.Target(bare.model, bare.inputs, name=TARGET, mode="bf16")
    own = tap.blame(reference, named, floor=floor)
    assert own.culprit == ATTENTION
    assert own.against_floor is not None and own.against_floor.by == "alone"


@pytest.mark.parametrize("bug", BUGS)
def test_in_the_same_precision_the_bits_name_it_without_a_floor(bug: str, tmp_path: Path) -> None:
    reference = record(tmp_path / "reference", "bf16")
    blamed = tap.blame(reference, build(bug, "bf16"))
    bits = blamed.first_bit_difference
    assert bits is not None and bits.maker is not None
    assert bits.maker.layer == ATTENTION
    assert ATTENTION in blamed.sentence


@pytest.mark.parametrize("kind", [Chain, Shared])
def test_small_models_stay_silent_beside_their_floor(
    kind: Callable[..., nn.Module], tmp_path: Path
) -> None:
    model = make(kind)
    path = recorded(tmp_path / "reference", model, batch())
    narrow = copy.deepcopy(model).bfloat16()
    floor = recorded(tmp_path / "floor", narrow, batch().bfloat16())
    found = tap.blame(path, narrow, batch().bfloat16(), floor=floor)
    assert found.same and found.culprit is None


def test_a_small_gain_under_rounding_is_found_beside_a_floor(tmp_path: Path) -> None:
    model = make(Chain, blocks=5)
    path = recorded(tmp_path / "reference", model, batch())
    narrow = copy.deepcopy(model).bfloat16()
    floor = recorded(tmp_path / "floor", narrow, batch().bfloat16())
    candidate = gain(narrow, "blocks.2.down", 1.01)
    assert isinstance(candidate.get_submodule("blocks.2.down"), Gain)
    found = tap.blame(path, candidate, batch().bfloat16(), floor=floor)
    assert found.culprit == "blocks.2.down", found.sentence


def test_the_floors_target_is_loaded_as_its_command_says(tmp_path: Path) -> None:
    made = record(tmp_path / "floor", "bf16", perturb=True)
    before = torch.get_rng_state()
    found = load_floor_target(made)
    assert found.perturb
    assert torch.equal(before, torch.get_rng_state())
    assert next(found.target.model.parameters()).dtype is torch.bfloat16
