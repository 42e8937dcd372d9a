"""The files of an OpenVINO model: recognised without running them, and refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tensortap.errors import TargetError
from tensortap.taps.programs.kinds import open_program
from tensortap.taps.programs.openvino.kind import KIND
from tensortap.taps.programs.openvino.names import Spot, best_name, parse, weight_name

openvino = pytest.importorskip("openvino")

BOMB = """<?xml version="1.0"?>
<!DOCTYPE net [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<net name="&b;" version="11"><layers/></net>"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh()).eval()
    path = tmp_path_factory.mktemp("saved") / "model.xml"
    converted = openvino.convert_model(model, example_input=torch.randn(2, 4))
    openvino.save_model(converted, path, compress_to_fp16=False)
    return path


def copied(saved: Path, folder: Path) -> Path:
    for suffix in (".xml", ".bin"):
        (folder / f"model{suffix}").write_bytes(saved.with_suffix(suffix).read_bytes())
    return folder / "model.xml"


def test_a_model_s_file_is_recognised_by_its_root(saved: Path, tmp_path: Path) -> None:
    assert KIND.recognises(saved)
    for text in ("<html><net/></html>", "no xml", "", "<", BOMB):
        other = tmp_path / "other.xml"
        other.write_text(text)
        assert not KIND.recognises(other)
    assert not KIND.recognises(tmp_path / "none.xml")


def test_a_file_runs_as_the_model_did(saved: Path) -> None:
    program = open_program(saved)
    assert {place.name for place in program.places} == {"", "0", "1"}
    assert {p.name: p.type for p in program.places if p.name} == {"0": "Linear", "1": "Tanh"}
    assert program.describe()["file"] == str(saved)
    weight, bias = program.linears()["0"]
    x = torch.randn(3, 4)
    assert torch.allclose(program.plain((x,), {}), (x @ weight.T + bias).tanh(), atol=1e-6)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "declares a document type"),
        ("<html></html>", "root element is <html>, expected <net>. Write one with"),
        ("<net><layers>", r"no well-formed XML \(.*\): it was cut off.*openvino.save_model"),
        ("", "no well-formed XML"),
        ('<net><data offset="-8" size="16"/></net>', "before the start"),
    ],
)
def test_what_is_no_model_is_a_sentence(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "model.xml"
    path.write_text(text)
    with pytest.raises(TargetError, match=why):
        open_program(path)


def test_weights_that_are_missing_or_cut_are_sentences(saved: Path, tmp_path: Path) -> None:
    path = copied(saved, tmp_path)
    weights = path.with_suffix(".bin")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    with pytest.raises(TargetError, match=rf"too short: .* claims {len(whole)} bytes .* has"):
        open_program(path)
    weights.unlink()
    with pytest.raises(TargetError, match=r"expected 'model\.bin' beside it"):
        open_program(path)


def test_a_model_that_openvino_cannot_read_is_a_sentence(saved: Path, tmp_path: Path) -> None:
    path = copied(saved, tmp_path)
    path.write_text(path.read_text().replace('type="Tanh"', 'type="Unheard"'))
    with pytest.raises(TargetError, match=r"cannot read .*model\.xml"):
        open_program(path)


@pytest.mark.parametrize(
    ("name", "spot"),
    [
        (
            "__module.layers.0.mlp/aten::linear/MatMul",
            Spot("layers.0.mlp", "aten::linear/MatMul", 0),
        ),
        ("__module.act/aten::relu_/Relu_12", Spot("act", "aten::relu_/Relu", 12)),
        ("aten::add/Add_1", Spot("", "aten::add/Add", 1)),
        ("/layers.0/att/q_proj/MatMul_2", Spot("layers.0.att.q_proj", "MatMul", 2, False)),
        ("/blk/blk.0/Gemm", Spot("blk.0", "Gemm", 0, False)),
        ("/fc/Gemm/WithoutBiases", Spot("fc", "Gemm/WithoutBiases", 0, False)),
        ("/Add", Spot("", "Add", 0, False)),
        ("Constant_4448", None),
        ("linear_6/aten.linear.default/MatMul", None),
        ("node_linear_4", None),
        ("", None),
    ],
)
def test_what_a_friendly_name_tells(name: str, spot: Spot | None) -> None:
    assert parse(name) == spot


def test_names_of_weights_and_values() -> None:
    assert weight_name("self.head.weight_compressed") == "head.weight"
    assert weight_name("embed.weight") == "embed.weight"
    assert weight_name("onnx::MatMul_31") is None and weight_name("Constant_4") is None
    assert best_name({"12", "past_k"}) == "past_k" and best_name({"7"}) == "7"
    assert best_name(set()) is None
