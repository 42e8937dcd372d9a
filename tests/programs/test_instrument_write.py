"""Instrumented models as files: every format returns what the eager model computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tap
from programs.heard import heard, write
from programs.models import MODELS
from support import Net
from tensortap.errors import OptionError, TargetError
from tensortap.taps.instrument.exported import ExportSource
from tensortap.taps.instrument.flat import flatten_model
from tensortap.taps.instrument.formats import format_of
from tensortap.taps.instrument.wrapper import instrument
from tensortap.taps.instrument.write import check, files_of
from tensortap.taps.instrument.write import write as write_source
from tensortap.taps.leaves import flatten
from tensortap.taps.programs.base import Options
from tensortap.taps.programs.kinds import open_program

SUFFIX = {"torchscript": "pt", "pt2": "pt2", "onnx": "onnx", "openvino": "xml", "aoti": "pt2"}
CASES = [
    ("awkward", "torchscript"),
    ("llama", "torchscript"),
    ("mixtral", "torchscript"),
    ("t5", "torchscript"),
    ("awkward", "pt2"),
    ("llama", "pt2"),
    ("awkward", "onnx"),
    ("awkward", "openvino"),
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_every_tap_of_every_format(name: str, form: str, tmp_path: Path) -> None:
    for needed in {"onnx": ["onnxruntime", "onnxscript"], "openvino": ["openvino"]}.get(form, []):
        pytest.importorskip(needed)
    if name != "awkward":
        pytest.importorskip("transformers")
    model, args, kwargs = MODELS[name]()
    expected = heard(model, *args, **kwargs)
    path = tmp_path / f"model.{SUFFIX[form]}"
    written = write(model, args, kwargs, path, layers="all", to=form)
    assert check(written, args, kwargs) == []
    program = open_program(path, Options(manifest=written.manifest_file))
    layers = [place.name for place in program.places if place.name]
    run = program.tapped(layers, inputs=False, linears=[])(args, kwargs)
    calls = [(call.layer, leaf, tensor) for call in run.calls for leaf, tensor in call.outputs]
    assert [(layer, leaf) for layer, leaf, _ in calls] == [row[:2] for row in expected]
    for (layer, _, got), (*_, tensor) in zip(calls, expected, strict=True):
        allowed = 0.0 if form in ("torchscript", "pt2") else 1e-5 * float(tensor.abs().max())
        assert float((got - tensor).abs().max()) <= allowed, layer
    with torch.no_grad():
        own = model(*args, **kwargs)
    assert [leaf for leaf, _ in flatten(run.output)] == [leaf for leaf, _ in flatten(own)]


@pytest.mark.slow
def test_aot_inductor(tmp_path: Path) -> None:
    model = Net(blocks=1).eval().requires_grad_(False)
    ids = torch.arange(6).view(1, 6)
    written = write(model, (ids,), {}, tmp_path / "model.pt2", layers="all", to="aoti")
    assert check(written, (ids,), {}) == []


def test_a_recording_of_the_file_is_the_eager_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, args, kwargs = MODELS["llama"]()
    with torch.no_grad(), tap.record(model, tmp_path / "eager", layers=["blocks", ""]) as rec:
        rec.run(*args, **kwargs)
    written = write(model, args, kwargs, tmp_path / "model.pt")
    with tap.record(written.manifest_file, tmp_path / "script") as rec:
        rec.run(*args, **kwargs)
    result = tap.compare(tmp_path / "eager", tmp_path / "script")
    assert {(row.layer, row.verdict) for row in result.layers} == {
        ("model.layers.0", "identical"),
        ("model.layers.1", "identical"),
        ("", "identical"),
    }


class Liar(nn.Module):
    """Computes something else for a compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        x = self.linear(x)
        return x * 2 if torch.jit.is_tracing() or twice else x


def test_what_was_written_is_tried(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    written = write(Liar(), (x,), {}, tmp_path / "model.pt", layers="all")
    (failure,) = check(written, (x,), {})
    assert failure.startswith("the model's own output: off by up to ")
    off = replace(written, reference=(written.reference[0] + 1e-7,))
    assert [text.split(":")[0] for text in check(off, (x,), {})][1:] == ["'linear'"]
    close = replace(off, format="onnx", output=written.output * 2)
    assert check(close, (x,), {}) == []


def test_flags_and_none_are_fixed_and_tensors_keep_their_names(tmp_path: Path) -> None:
    model, x = Liar().eval(), torch.randn(2, 4)
    wrapped = instrument(model, "all")
    flat, values = flatten_model(wrapped, (x,), {"twice": True})
    assert list(values) == ["x"]
    assert torch.equal(flat(x)[0], model(x, True))
    written = write(model, (), {"x": x, "twice": True}, tmp_path / "model.pt", layers="all")
    loaded = torch.jit.load(str(written.files[0]))
    assert torch.equal(loaded(x=x)[0], model(x, True))


def test_every_kind_of_argument_reaches_the_model() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, a: Tensor, b: Any = None, *more: Any, c: Any = None, **rest: Any) -> Any:
            parts = [t.sum() for _, t in flatten((b, more, c, rest)) if t is not None]
            return self.linear(a) + sum(parts)

    model, x = Many(), torch.randn(2, 3)
    one = torch.ones(1)
    args, kwargs = (x, {"k": one}, 3, one * 2), {"c": (one * 4, None), "d": one * 8, "e": "text"}
    flat, values = flatten_model(instrument(model, "all"), args, kwargs)
    assert list(values) == ["a", "b", "more_1", "c", "d"]
    assert torch.equal(flat(*values.values())[0], model(*args, **kwargs))


def test_names_of_files_and_formats() -> None:
    path = Path("models/net.v2.onnx")
    assert format_of(path, None) == "onnx"
    assert format_of(Path("m.PT2"), "aoti") == "aoti"
    assert [f.name for f in files_of(path, 2)] == ["net.v2.0.onnx", "net.v2.1.onnx"]
    with pytest.raises(OptionError, match="expected one of torchscript, pt2, onnx"):
        format_of(path, "neff")
    with pytest.raises(OptionError, match=r"named \.onnx, got 'm\.pt'"):
        format_of(Path("m.pt"), "onnx")
    with pytest.raises(OptionError, match="does not say which format"):
        format_of(Path("m.neff"), None)


def test_what_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    model, ids = Net().eval(), torch.arange(6).view(1, 6)
    path = tmp_path / "model.pt"
    with pytest.raises(OptionError, match="does not exist"):
        write(model, (ids,), {}, tmp_path / "none" / "model.pt")
    with pytest.raises(OptionError, match=r"expected a file in the folder of .*\.taps\.json"):
        write(model, (ids,), {}, path, manifest_file=tmp_path / "names.json")
    with pytest.raises(TargetError, match="The model failed on its inputs: TypeError"):
        write(model, ("text",), {}, path)
    assert not path.exists()
    branching, args, _ = MODELS["branching"]()
    with pytest.raises(TargetError, match=r"cannot be written as pt2: .*data-dependent"):
        write(branching, args, {}, tmp_path / "model.pt2", layers="all")
    with pytest.raises(TargetError, match="None of the selected layers returned a tensor"):
        write(branching, args, {}, path, layers="right")
    write(model, (ids,), {}, path)
    with pytest.raises(OptionError, match=r"model\.pt' exists already"):
        write(model, (ids,), {}, path)
    write(model, (ids,), {}, path, overwrite=True)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net(blocks=2).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def exported(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as somebody else exported it, of varying length."""
    shapes = {"ids": {1: torch.export.Dim("length", min=2, max=64)}}
    ids = torch.arange(12).view(2, 6)
    program = torch.export.export(net, (ids,), dynamic_shapes=shapes, strict=False)
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    torch.export.save(program, path)
    return path


@pytest.mark.parametrize(("form", "split"), [("pt2", 1), ("torchscript", 2), ("onnx", 1)])
def test_an_exported_file_gets_taps_too(
    form: str, split: int, net: Net, exported: Path, tmp_path: Path
) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    names = ("blocks.0.down", "blocks.0", "blocks.1.down", "blocks.1", "head")
    source = ExportSource(exported, names)
    written = write_source(source, tmp_path / f"model.{SUFFIX[form]}", split=split)
    assert check(written, source.args, {}) == []
    assert {entry.provenance for entry in written.manifest.entries} == {"scope"}
    ids = torch.arange(12).view(2, 6)[:, : 5 if form == "pt2" else 6]  # what varied still does
    expected = [row for row in heard(net, ids) if row[0] in names]
    program = open_program(written.manifest_file)
    run = program.tapped(names, inputs=False, linears=[])((ids,), {})
    assert [call.layer for call in run.calls] == list(names)
    for call, (*_, tensor) in zip(run.calls, expected, strict=True):
        torch.testing.assert_close(call.outputs[0][1], tensor, rtol=1e-5, atol=1e-5)
    assert program.places[0].provenance == "scope"


def test_an_exported_file_without_inputs_or_layers(exported: Path, tmp_path: Path) -> None:
    program = torch.export.load(exported)
    program._example_inputs = None
    torch.export.save(program, tmp_path / "bare.pt2")
    with pytest.raises(TargetError, match="holds no example inputs"):
        ExportSource(tmp_path / "bare.pt2", "blocks")


@pytest.mark.parametrize("form", ["torchscript", "pt2", "onnx", "openvino"])
def test_the_model_without_taps_beside_it(form: str, tmp_path: Path) -> None:
    for needed in {"onnx": ["onnxruntime", "onnxscript"], "openvino": ["openvino"]}.get(form, []):
        pytest.importorskip(needed)
    model, args, kwargs = MODELS["awkward"]()
    path = tmp_path / f"model.{SUFFIX[form]}"
    written = write(model, args, kwargs, path, layers="all", to=form, plain=True)
    assert written.manifest.plain == f"model.plain.{SUFFIX[form]}"
    assert check(written, args, kwargs) == []
    with tap.record(path, tmp_path / "run", manifest=written.manifest_file) as rec:
        rec.run(*args, **kwargs)
    run = tap.open(tmp_path / "run")
    assert [(c["check"], c["passed"]) for c in run.manifest.self_checks] == [("output", True)]
    assert not any("was not checked" in note for note in run.notes)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    write(model, args, kwargs, tmp_path / f"b.{SUFFIX[form]}", layers="all", to=form, plain=True)
    other = replace(written.manifest, plain=f"b.plain.{SUFFIX[form]}")  # of another model
    other.save(written.manifest_file)
    failed = check(written, args, kwargs)
    assert failed and all(why.startswith("without taps, ") for why in failed)


def test_an_exported_program_without_taps_beside_it(tmp_path: Path) -> None:
    model, args, kwargs = MODELS["awkward"]()
    torch.export.save(torch.export.export(model, args, kwargs, strict=False), tmp_path / "m.pt2")
    source = ExportSource(tmp_path / "m.pt2", "all")
    written = write_source(source, tmp_path / "tapped.pt2", plain=True)
    assert written.manifest.plain == "tapped.plain.pt2"
    assert check(written, source.args, source.kwargs) == []


def test_fused_layers_have_no_twin(tmp_path: Path) -> None:
    """Taps take them off their fused path, whose bits are others."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
    written = write(
        model, (torch.ones(1, 3, 8),), {}, tmp_path / "model.pt", layers="leaves", plain=True
    )
    assert written.manifest.plain is None
    assert not (tmp_path / "model.plain.pt").exists()


def test_parts_of_an_older_split_go(tmp_path: Path) -> None:
    model, args, kwargs = MODELS["awkward"]()
    path = tmp_path / "model.pt"
    write(model, args, kwargs, path, layers="all", split=3)
    mine = tmp_path / "model.3.pt"
    mine.write_bytes(b"mine")
    write(model, args, kwargs, path, layers="all", split=2, overwrite=True)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"model.0.pt", "model.1.pt", "model.3.pt", "model.taps.json"}


def test_nested_inputs_by_name_for_openvino(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    model, (x, past), _ = MODELS["awkward"]()
    given = {"x": x, "past": past}
    written = write(model, (), given, tmp_path / "model.xml", layers="all")
    assert check(written, (), given) == []
    program = open_program(written.files[0], Options(manifest=written.manifest_file))
    assert [a.name for a in program.arguments or ()] == ["x", "past.0", "past.1"]
    assert check(written, (x, past), {}) == []
