"""What a user gets wrong gets a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from blame_models import Chain, batch, gain, make, recorded
from torch import Tensor, nn

import tensortap as tap


@pytest.fixture
def path(tmp_path: Path) -> str:
    return recorded(tmp_path / "ref", make(Chain), batch())


def test_a_model_needs_inputs(tmp_path: Path) -> None:
    path = recorded(tmp_path / "blocks", make(Chain), batch(), layers="blocks")
    with pytest.raises(tap.TapError, match="give the inputs that the reference was recorded with"):
        tap.blame(path, make(Chain))


def test_a_target_has_inputs(path: str) -> None:
    with pytest.raises(tap.TapError, match="A Target has its own inputs"):
        tap.blame(path, tap.Target(make(Chain), batch()), batch())


def test_other_shapes_are_said(path: str) -> None:
    with pytest.raises(tap.TapError, match=r"has the shape \[3, 6, 5\] in the reference and \[2,"):
        tap.blame(path, make(Chain), batch(rows=2))


def test_other_token_ids_are_refused(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8)
            self.body = make(Chain)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.body(self.table(input_ids))

    model = Words().eval()
    ids = torch.arange(8).view(1, 8)
    path = recorded(tmp_path / "words", model, ids)
    with pytest.raises(tap.TapError, match="other token ids"):
        tap.blame(path, model, ids + 1)


def test_other_inputs_are_refused_or_warned_about(path: str, tmp_path: Path) -> None:
    with pytest.raises(tap.TapError, match="inputs are not those that"):
        tap.blame(path, make(Chain), batch(5))
    blocks = recorded(tmp_path / "blocks", make(Chain), batch(), layers="blocks")
    result = tap.blame(blocks, make(Chain), batch(5))
    assert any("not the same bytes" in warning for warning in result.warnings)


def test_options_of_a_wrong_kind(path: str) -> None:
    with pytest.raises(tap.TapError, match="layers must be a pattern"):
        tap.blame(path, make(Chain), batch(), layers=3)  # type: ignore[arg-type]
    with pytest.raises(tap.TapError, match=r"budget: .a. is no size"):
        tap.blame(path, make(Chain), batch(), budget="a")  # type: ignore[arg-type]


def test_a_recording_of_summaries_is_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path / "ref", make(Chain), batch(), keep="summary")
    with pytest.raises(tap.TapError, match="only summaries"):
        tap.blame(path, make(Chain), batch())


def test_another_model_is_refused(path: str) -> None:
    with pytest.raises(tap.TapError, match="No layer of the candidate"):
        tap.blame(path, nn.Sequential(nn.Linear(8, 8)), batch())


def test_a_map_that_leads_nowhere_is_said(path: str) -> None:
    with pytest.raises(tap.TapError, match="leads to no layer of the candidate"):
        tap.blame(path, make(Chain), batch(), map=r"blocks\.(\d)=>levels.\1")


def test_a_map_pairs_names(path: str) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gain(make(Chain), "blocks.2.up")

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    result = tap.blame(path, Other(), batch(), map=r"(.+)=>inner.\1")
    assert result.culprit == "inner.blocks.2.up"


def test_layers_that_were_not_recorded_are_said(tmp_path: Path) -> None:
    path = recorded(tmp_path / "ref", make(Chain), batch(), layers="blocks")
    with pytest.raises(tap.TapError, match="None of the 1 layers"):
        tap.blame(path, make(Chain), batch(), layers="head")
    some = tap.blame(path, gain(make(Chain), "blocks.1.up"), batch(), layers=["blocks.1", "head"])
    assert some.culprit == "blocks.1"
    assert any("1 of 2 selected layers" in note for note in some.notes)


def test_no_layer_of_that_name(path: str) -> None:
    with pytest.raises(tap.TapError, match=r"There is no layer 'blocks\.9'"):
        tap.blame(path, make(Chain), batch(), final="blocks.9")


def test_a_final_layer_without_numbers(tmp_path: Path) -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = make(Chain)
            self.pick = Pick()

        def forward(self, x: Tensor) -> Tensor:
            return self.pick(self.body(x))

    model = Picks()
    path = recorded(tmp_path / "ref", model, batch())
    with pytest.raises(tap.TapError, match="holds no floating-point tensor"):
        tap.blame(path, model, batch(), final="pick")
    # By default the last output that has numbers is taken.
    assert tap.blame(path, model, batch()).final == "body"


class Pick(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_torchscript_is_refused(path: str) -> None:
    scripted = torch.jit.trace(make(Chain), batch())
    with pytest.raises(tap.TapError, match="needs an eager"):
        tap.blame(path, scripted, batch())


def test_no_recording(tmp_path: Path) -> None:
    with pytest.raises(tap.TapError, match="There is no recording at"):
        tap.blame(tmp_path / "nothing", make(Chain), batch())
