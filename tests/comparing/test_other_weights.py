"""Two runs, or a run and a live model, whose weights are not the same: it is said which."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.demo import DemoModel
from tensortap.reporting.blame_rows import rows_of
from tensortap.taps.fingerprint import fingerprints


def make_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DemoModel(101, 64, 4, 4).eval().requires_grad_(False)


def record(model: nn.Module, path: Path) -> Path:
    with torch.no_grad(), tap.record(model, path, layers="all", inputs=True):
        model(input_ids())
    return path


def input_ids() -> torch.Tensor:
    return torch.randint(0, 101, (2, 16), generator=torch.Generator().manual_seed(1))


def test_compare_says_whose_weights_differ(tmp_path: Path) -> None:
    model, other = make_model(), make_model()
    other.get_submodule("blocks.2.mlp.down").weight.mul_(1.02)  # type: ignore[operator]
    runs = record(model, tmp_path / "a"), record(other, tmp_path / "b")
    note = "1 layer has other weights than in the reference: blocks.2.mlp.down."
    assert note in tap.compare(*runs).notes
    again = tap.compare(runs[0], record(make_model(), tmp_path / "c"))
    assert again.same and not any("other weights" in note for note in again.notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_weights_are_not_others(dtype: torch.dtype, tmp_path: Path) -> None:
    low = record(make_model().to(dtype), tmp_path / "b")
    result = tap.compare(record(make_model(), tmp_path / "a"), low)
    assert not any("other weights" in note for note in result.notes)


def test_blame_does_not_call_other_weights_rounding(tmp_path: Path) -> None:
    """Another checkpoint: every layer was trained a little further."""
    reference, other = record(make_model(), tmp_path / "a"), make_model()
    generator = torch.Generator().manual_seed(3)
    for module in other.modules():
        if isinstance(module, nn.Linear):
            module.weight.add_(1e-3 * torch.randn(module.weight.shape, generator=generator))
    blame = tap.blame(reference, other, {"input_ids": input_ids()})
    assert len(blame.weights) > 20
    assert "rounding" not in blame.sentence
    assert "are not the reference's" in blame.sentence


def test_blame_says_that_the_culprit_has_other_weights(tmp_path: Path) -> None:
    reference, other = record(make_model(), tmp_path / "a"), make_model()
    layer = other.get_submodule("blocks.2.mlp.down")
    nn.init.normal_(layer.weight, std=0.2, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    blame = tap.blame(reference, other, {"input_ids": input_ids()})
    assert blame.culprit == "blocks.2.mlp.down"
    assert blame.sentence.endswith("; its weights are not the reference's")
    same = tap.blame(reference, copy.deepcopy(make_model()), {"input_ids": input_ids()})
    assert same.weights == ()


def test_fingerprints_change_nothing_and_leave_out_what_cannot_be_read() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, device="meta"))
    state = torch.get_rng_state()
    found = fingerprints(model)
    assert list(found) == ["0", "1"]
    assert torch.equal(state, torch.get_rng_state())
    model[1].running_mean.fill_(1)  # type: ignore[union-attr]
    assert fingerprints(model)["1"] != found["1"]
    strided = nn.Linear(6, 4)
    strided.weight = nn.Parameter(torch.randn(6, 4).T)
    dense = copy.deepcopy(strided)
    dense.weight = nn.Parameter(strided.weight.detach().contiguous())
    assert fingerprints(strided) == fingerprints(dense)


def test_a_tensor_beyond_what_a_float_counts_is_read_inside() -> None:
    """50331647 is not a float32, and 1000 is not a bfloat16: a place must not be rounded."""
    large = nn.Module()
    large.weight = nn.Parameter(torch.zeros(1).expand(3 << 24), requires_grad=False)
    assert set(fingerprints(large)) == {""}
    layer = nn.Linear(1000, 3, bias=False)
    known = fingerprints(layer)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert fingerprints(layer) == known
    finally:
        torch.set_default_dtype(torch.float32)


def test_rows_of_blame_do_not_call_other_weights_rounding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    x = torch.randn(8, 16)
    with torch.no_grad(), tap.record(model, tmp_path / "a", layers="all", inputs=True):
        model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3 * torch.randn_like(parameter)
    notes = {row.note for row in rows_of(tap.blame(tmp_path / "a", model, x))}
    assert any("other weights" in note for note in notes)
    assert not any("rounding" in note for note in notes)
