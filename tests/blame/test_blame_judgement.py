"""Blame says of the final output what compare says of two recordings of the same runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blame_models import Chain, Gain, Masked, Shared, batch, gain, make, recorded
from torch import Tensor, nn

import tensortap as tap

KINDS: list[Callable[..., nn.Module]] = [Chain, Shared]
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class OneToken(Gain):
    """One token of the layer's output is wrong, all others are right."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner[0](*args, **kwargs).clone()
        out[..., 2, :] *= self.factor
        return out


class OneChannel(Gain):
    """One channel of the layer's output is wrong, all others are right."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner[0](*args, **kwargs).clone()
        out[..., 1] *= self.factor
        return out


class OneNumber(Gain):
    """A single number of the layer's output is not one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner[0](*args, **kwargs).clone()
        out.view(-1)[3] = math.nan
        return out


def _instead(kind: type[Gain], layer: str, factor: float) -> Callable[[nn.Module], nn.Module]:
    def changed(model: nn.Module) -> nn.Module:
        parent, _, leaf = layer.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, leaf, kind(model.get_submodule(layer), factor))
        return model

    return changed


BUGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "clean": lambda model: model,
    **{f"{1 + f:g} times": _instead(Gain, "blocks.1.down", 1 + f) for f in (0.001, 0.01, 0.1, 0.5)},
    "the head, a little": _instead(Gain, "head", 1.003),
    "the head, more": _instead(Gain, "head", 1.03),
    "one token": _instead(OneToken, "blocks.3.down", 3.0),
    "one token of the head": _instead(OneToken, "head", 1.1),
    "one channel of the head": _instead(OneChannel, "head", 1.2),
    "one NaN": _instead(OneNumber, "head", 1.0),
    "two that hide each other": lambda model: _instead(Gain, "blocks.2.down", 0.7)(
        _instead(Gain, "blocks.0.down", 1.3)(model)
    ),
}


def _pair(
    kind: Callable[..., nn.Module], bug: str, precision: str, path: Path
) -> tuple[str, str, nn.Module, list[Tensor]]:
    """The reference's recording, the candidate's, and the candidate with its inputs."""
    model, dtype = make(kind), PRECISIONS[precision]
    candidate = BUGS[bug](copy.deepcopy(model))
    for module in candidate.modules():
        if isinstance(module, Gain):
            module.inner[0].to(dtype)
    candidate.to(dtype)
    reference = recorded(path / "reference", model, batch(), batch(1))
    own = recorded(path / "candidate", candidate, batch().to(dtype), batch(1).to(dtype))
    return reference, own, candidate, [batch().to(dtype), batch(1).to(dtype)]


@pytest.mark.parametrize("with_floor", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("kind", KINDS)
def test_blame_and_compare_agree(
    kind: Callable[..., nn.Module], bug: str, precision: str, with_floor: bool, tmp_path: Path
) -> None:
    reference, own, candidate, inputs = _pair(kind, bug, precision, tmp_path)
    floor = None
    if with_floor:
        dtype = PRECISIONS[precision]
        clean = make(kind).to(dtype)
        floor = recorded(tmp_path / "floor", clean, batch().to(dtype), batch(1).to(dtype))
    compared = tap.compare(reference, own, floor=floor)
    blamed = tap.blame(reference, candidate, inputs, floor=floor)
    _agree(compared, blamed)


def _agree(compared: tap.Comparison, blamed: tap.Blame) -> None:
    row = compared[blamed.final]
    part = next(p for p in row.parts if p.port == "output" and p.leaf == blamed.final_leaf)
    assert blamed.final_verdict == row.verdict
    assert blamed.final_why == part.why
    if part.difference is not None and not part.difference.disagreeing:
        assert blamed.final_error == pytest.approx(part.error, rel=1e-6)
    first = compared.first_divergence
    before = None if first is None or first.layer == row.layer else first.layer
    assert blamed.first_divergence == before
    if row.verdict == "diverged":
        assert not blamed.same
        assert "nobody" not in blamed.sentence
        if blamed.culprit is None:
            assert f"diverged: {part.why}" in blamed.sentence
    elif blamed.culprit is None:
        assert blamed.same
    if blamed.sentence.startswith("nobody"):
        assert compared.same
    bits, ours = compared.first_bit_difference, blamed.first_bit_difference
    assert (bits is None) == (ours is None)
    if bits is not None and ours is not None:
        assert (bits.layer, bits.maker) == (ours.layer, ours.maker)


def test_blame_says_what_a_recording_against_the_reference_says(tmp_path: Path) -> None:
    """`record --against` judges the same pair while the model runs."""
    for bug in ("clean", "1.01 times", "one token of the head", "one NaN"):
        model = make(Chain)
        candidate = BUGS[bug](copy.deepcopy(model))
        reference = recorded(tmp_path / f"{bug} reference", model, batch())
        recorder = tap.record(
            candidate, tmp_path / f"{bug} own", layers="all", inputs=True, against=reference
        )
        with recorder, torch.no_grad():
            recorder.run(batch())
        row = recorder.comparison[""]
        blamed = tap.blame(reference, candidate, batch())
        assert blamed.final_verdict == row.verdict
        assert blamed.final_why == row.why
        bits = recorder.comparison.first_bit_difference
        ours = blamed.first_bit_difference
        assert (None if bits is None else bits.layer) == (None if ours is None else ours.layer)


def test_a_final_output_that_is_off_in_another_leaf_is_not_well(tmp_path: Path) -> None:
    class Two(Chain):
        wrong = False

        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return {"good": out, "other": out * (1.5 if self.wrong else 1.0)}

    model = make(Two)
    reference = recorded(tmp_path / "reference", model, batch())
    candidate = copy.deepcopy(model)
    candidate.wrong = True
    own = recorded(tmp_path / "own", candidate, batch())
    assert tap.compare(reference, own)[""].verdict == "diverged"
    blamed = tap.blame(reference, candidate, batch())
    assert blamed.final_leaf == "['other']"
    assert blamed.final_verdict == "diverged" and not blamed.same


def test_what_diverges_on_the_way_is_said(tmp_path: Path) -> None:
    """A layer that diverged is named also where nothing is left of it at the end."""

    class Unread(Chain):
        def forward(self, x: Tensor) -> Tensor:
            self.blocks[0](self.stem(x))
            return self.head(self.stem(x))

    model = make(Unread)
    reference = recorded(tmp_path / "reference", model, batch())
    blamed = tap.blame(reference, gain(model, "blocks.0.up"), batch())
    assert blamed.same and blamed.first_divergence == "blocks.0.up"
    assert "blocks.0.up diverged before it" in blamed.sentence


def test_where_the_bits_part_is_said(tmp_path: Path) -> None:
    """In the same precision a bug below the floor is named, and not called proven."""
    model = make(Chain, blocks=6).bfloat16()
    reference = recorded(tmp_path / "reference", model, batch().bfloat16())
    candidate = copy.deepcopy(model)
    with torch.no_grad():
        candidate.blocks[4].up.weight[3, 2] += 0.01
    own = recorded(tmp_path / "own", candidate, batch().bfloat16())
    assert tap.compare(reference, own).same
    blamed = tap.blame(reference, candidate, batch().bfloat16())
    assert blamed.first_bit_difference is not None
    assert blamed.first_bit_difference.layer == "blocks.4.up"
    assert blamed.to_dict()["first_bit_difference"]["layer"] == "blocks.4.up"
    assert "blocks.4.up" in blamed.sentence


def test_in_another_precision_bits_tell_nothing(tmp_path: Path) -> None:
    model = make(Chain)
    reference = recorded(tmp_path / "reference", model, batch())
    blamed = tap.blame(reference, copy.deepcopy(model).bfloat16(), batch().bfloat16())
    assert blamed.first_bit_difference is None
    assert blamed.to_dict()["first_bit_difference"] is None
    assert blamed.sentence.startswith("nobody's fault")


def test_the_steps_of_the_reference_are_met(tmp_path: Path) -> None:
    """The reference's own epochs and batches, whatever their numbers are."""
    model = make(Masked)
    with (
        tap.record(model, tmp_path / "reference", layers="all", inputs=True) as rec,
        torch.no_grad(),
    ):
        rec.moment(epoch=2, batch=7)
        rec.run(batch())
        rec.moment(epoch=3, batch=1)
        rec.run(batch(1))
    blamed = tap.blame(tmp_path / "reference", gain(model, "blocks.1.up"), [batch(), batch(1)])
    assert blamed.culprit == "blocks.1.up"
    assert not blamed.warnings and blamed.final_verdict == "diverged"
