"""Names for OpenVINO models without any, from the files that they were converted from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from programs.models import MODELS
from programs.test_openvino import hooked, wrong
from tensortap.errors import OptionError
from tensortap.taps.programs.base import HeardCall, Options
from tensortap.taps.programs.kinds import open_program

openvino = pytest.importorskip("openvino")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, args, _ = MODELS["demo"]()
    path = tmp_path_factory.mktemp("exported") / "demo.pt2"
    torch.export.save(torch.export.export(model, args, strict=False), path)
    return path


def check(converted: Any, sibling: Path) -> None:
    model, args, _ = MODELS["demo"]()
    program = open_program(converted, Options(names_from=sibling))
    names = [place.name for place in program.places if place.name and not place.gone]
    assert {p.provenance for p in program.places if p.name} == {"value-name"}
    assert {p.name: p.type for p in program.places}["head"] == "Linear"
    linears = program.linears()
    assert len(linears) == 13
    wanted = hooked(model, args, {})
    calls: dict[str, list[HeardCall]] = {}
    for call in program.tapped(names, inputs=False, linears=list(linears))(args, {}).calls:
        calls.setdefault(call.layer, []).append(call)
    assert set(calls) == set(wanted) and wrong(calls, wanted) == []
    parameters = dict(model.named_parameters())
    assert all(torch.equal(w, parameters[f"{name}.weight"]) for name, (w, _) in linears.items())


def test_from_an_exported_program(
    exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    converted = openvino.convert_model(torch.export.load(exported))
    caplog.clear()
    check(converted, exported)
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert loud == []  # OpenVINO tells of each operator that it does not decompose
    openvino.save_model(converted, tmp_path / "demo.xml", compress_to_fp16=False)
    args = MODELS["demo"]()[1]
    with tap.record(tmp_path / "demo.xml", tmp_path / "run", names_from=exported) as rec:
        rec.run(*args)
    run = tap.open(tmp_path / "run")
    assert run.layers == ["blocks.0", "blocks.1"]
    assert run["blocks.0"].records[0].provenance == "value-name"


def test_from_an_onnx_file(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model, args, _ = MODELS["demo"]()
    path = tmp_path / "demo.onnx"
    torch.onnx.export(model, args, path, dynamo=True, verbose=False)
    check(openvino.convert_model(path), path)


def test_another_model_s_names_are_refused(exported: Path, tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    small = torch.export.export(other, (torch.randn(2, 4),))
    torch.export.save(small, tmp_path / "other.pt2")
    converted = openvino.convert_model(small)
    with pytest.raises(OptionError, match="not the model that this one was converted from"):
        open_program(converted, Options(names_from=exported))
    with pytest.raises(OptionError, match="does not exist"):
        open_program(converted, Options(names_from=tmp_path / "none.pt2"))
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(OptionError, match="is neither"):
        open_program(converted, Options(names_from=tmp_path / "x.bin"))
