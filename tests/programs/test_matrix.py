"""One model a runtime, recorded as a user would and held against eager; `make matrix` does all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensortap as tap
from programs.cells import RUNTIMES, Cannot, Verdict, judge, prepare, record, record_eager
from programs.models import MODELS

NEEDS = {
    "pt2e": ("torchao",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "onnx_int8": ("onnx", "onnxruntime", "onnxscript"),
    "openvino": ("openvino",),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cell(model: str, runtime: str, folder: Path) -> Verdict:
    for package in NEEDS.get(runtime, ()):
        pytest.importorskip(package)
    artefact, built = prepare(model, runtime, folder)
    eager = record_eager(model, folder / "eager")
    found = record(artefact, built, folder / "found")
    inside = artefact.inside(eager) if artefact.inside else None
    return judge(eager, found, RUNTIMES[runtime], inside)


# model, runtime, layers recorded of layers that eager has
CELLS = [
    ("demo", "traced", 28, 28),
    ("awkward", "traced", 13, 16),
    ("awkward", "scripted", 16, 16),
    ("branching", "scripted", 5, 5),
    ("demo", "frozen", 15, 28),
    ("awkward", "export", 15, 16),
    ("demo", "pt2e", 28, 28),
    ("demo", "onnx", 28, 28),
    ("awkward", "onnx_int8", 13, 16),
    ("demo", "openvino", 28, 28),
    ("awkward", "instrument_trace", 16, 16),
    ("awkward", "instrument_export", 16, 16),
    pytest.param("branching", "compile", 5, 5, marks=pytest.mark.slow),
    pytest.param("awkward", "aoti", 15, 16, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("model, runtime, recorded, expected", CELLS)
def test_a_runtime_records_what_it_holds_and_nothing_else(
    model: str, runtime: str, recorded: int, expected: int, tmp_path: Path
) -> None:
    found = cell(model, runtime, tmp_path)
    assert found.wrong == [] and found.failed_checks == []
    assert (found.recorded, found.expected) == (recorded, expected), found.missing
    assert sum(len(names) for names in found.missing.values()) == expected - recorded
    assert "no reason was given" not in found.missing
    if RUNTIMES[runtime].quantised:
        assert 0 < found.largest < 0.1
    else:
        assert found.largest <= RUNTIMES[runtime].tolerance


def test_every_column_of_the_matrix_is_among_them() -> None:
    tested = {(item.values if hasattr(item, "values") else item)[1] for item in CELLS}
    assert tested == set(RUNTIMES)


def test_a_model_that_cannot_be_scripted_says_why(tmp_path: Path) -> None:
    with pytest.raises(Cannot, match=r"torch\.jit\.script: "):
        prepare("demo", "scripted", tmp_path)


def test_a_wrong_layer_is_found_out(tmp_path: Path) -> None:
    """The judge itself: another layer's values under a layer's name are wrong."""
    eager = record_eager("demo", tmp_path / "eager")
    model, args, _ = MODELS["demo"]()
    first, second = model.blocks[0].mlp, model.blocks[1].mlp
    first.up, second.up = second.up, first.up
    with tap.record(model, tmp_path / "swapped", layers="all") as rec:
        rec.run(*args)
    found = judge(eager, tap.open(tmp_path / "swapped"), RUNTIMES["onnx"])
    assert found.recorded < found.expected
    assert any(text.startswith("blocks.0.mlp.up: call 0: off by") for text in found.wrong)
