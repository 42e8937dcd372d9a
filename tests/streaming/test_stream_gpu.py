"""A model on a GPU against a recording, of a CPU or of the GPU itself."""

from __future__ import annotations

import pytest
import torch
from planted import BUGS, make_inputs, make_model, plant

import tensortap as tap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GAIN = next(bug for bug in BUGS if bug.name == "2 % gain")


def test_against_itself_and_with_a_bug(tmp_path) -> None:
    model, ids = make_model().cuda(), make_inputs().cuda()
    options = {"layers": "all", "inputs": True}
    with torch.no_grad(), torch.device("cuda"):
        with tap.record(model, tmp_path / "a", **options):
            expected = model(ids)
        with tap.record(model, tmp_path / "b", against=tmp_path / "a", **options) as same:
            assert torch.equal(model(ids), expected)
        broken = plant(model, GAIN)
        with tap.record(
            broken, tmp_path / "c", against=tmp_path / "a", stop=True, **options
        ) as bug:
            broken(ids)
    assert same.comparison.same and same.tally.kept == 0
    assert bug.stopped == GAIN.layer
    assert bug.comparison.first_divergence.origin == "made here"
    layer = tap.open(tmp_path / "c")[GAIN.layer]
    assert {record.port for record in layer.records if record.stored} == {"input", "output"}


def test_a_window_of_a_gpu_run(tmp_path) -> None:
    model, ids = make_model().cuda(), make_inputs().cuda()
    with torch.no_grad(), torch.device("cuda"):
        with tap.record(model, tmp_path / "a", layers="all", keep="sketch"):
            model(ids)
        window = tap.find_window(plant(model, GAIN), ids, against=tmp_path / "a")
    assert GAIN.layer in window.layers
