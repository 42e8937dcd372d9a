"""Quantised and optimised ONNX models: by their float twin's names, and alone where that is sure.

What a value of a quantised graph should be is known from the graph itself: every value of the float
model has the same name there. So a layer that is named from the quantised file alone must be the
same value as the one that the float model's names lead to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx
import onnxruntime

from programs.onnx_support import Small, eager, export, heard, opened, pictures, sure
from tensortap.errors import OptionError

WAYS = ("dynamic", "static", "operators", "int4", "optimised")


@pytest.fixture(scope="module")
def small() -> Small:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture(scope="module")
def files(small: Small, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    folder = tmp_path_factory.mktemp("quantised")
    ids = torch.randint(0, 50, (2, 7))
    found = {}
    for style in ("dynamo", "torchscript"):
        path = folder / f"{style}.onnx"
        export(small, (ids,), path, style, dynamic={"ids": (0, 1)}, output_names=["logits"])
        found[style] = {way: quantise(path, way, _ids) for way in WAYS} | {"float": path}
    return found


def _ids() -> dict[str, Any]:
    return {"ids": torch.randint(0, 50, (2, 7)).numpy()}


def quantise(path: Path, way: str, draw: Callable[[], dict[str, Any]]) -> Path:
    from onnxruntime import quantization
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    out = path.with_suffix(f".{way}.onnx")
    logging.disable(logging.WARNING)
    if way == "dynamic":
        quantization.quantize_dynamic(str(path), str(out))
    elif way == "int4":
        quantizer = MatMulNBitsQuantizer(onnx.load(path), bits=4, block_size=32, is_symmetric=True)
        quantizer.process()
        quantizer.model.save_model_to_file(str(out), False)
    elif way == "optimised":
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(out), 3
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    else:

        class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
            left = 3

            def get_next(self) -> Any:
                self.left -= 1
                return draw() if self.left >= 0 else None

        form = quantization.QuantFormat
        kind = form.QDQ if way == "static" else form.QOperator
        quantization.quantize_static(str(path), str(out), Reader(), quant_format=kind)
    logging.disable(logging.NOTSET)
    return out


def distance(one: Tensor, other: Tensor) -> float:
    """Of the root mean square: of unrelated values about 1.4, of quantised ones far less."""
    assert one.shape == other.shape
    return float((one - other).pow(2).mean().sqrt() / other.pow(2).mean().sqrt())


@pytest.mark.parametrize("style", ["dynamo", "torchscript"])
@pytest.mark.parametrize("way", WAYS)
def test_by_the_names_of_the_float_model(
    way: str, style: str, small: Small, files: dict[str, dict[str, Path]]
) -> None:
    program = opened(files[style][way], names_from=files[style]["float"])
    ids = torch.randint(0, 50, (2, 7))
    expected = eager(small, ids)
    found = heard(program, ids)
    assert {p.provenance for p in program.places} == {"value-name"}
    limit = 1e-5 if way == "optimised" else 0.6
    for layer, calls in found.items():
        assert len(calls) == len(expected[layer])
        for call, tensors in zip(calls, expected[layer], strict=True):
            assert distance(call.outputs[0][1], tensors[0]) < limit, layer
    gone = {place.name for place in program.places if place.gone}
    if way == "operators":  # its values are integers
        assert len(gone) > 10 and "head" in found
    else:
        assert not gone
    plain = program.plain((ids,), {})
    tapped = program.tapped(sure(program), inputs=False, linears=[])((ids,), {}).output
    assert float((plain - tapped).abs().max()) <= 1e-5 * float(plain.abs().max())


@pytest.mark.parametrize("style", ["dynamo", "torchscript"])
@pytest.mark.parametrize("way", WAYS)
def test_alone_nothing_that_is_sure_is_wrong(
    way: str, style: str, small: Small, files: dict[str, dict[str, Path]]
) -> None:
    """Held against every value of the quantised graph, through the float model's names."""
    ids = torch.randint(0, 50, (2, 7))
    alone = opened(files[style][way])
    truth = heard(opened(files[style][way], names_from=files[style]["float"]), ids)
    found = heard(alone, ids)
    for layer in set(found) & set(truth):
        assert len(found[layer]) == len(truth[layer]), layer
        for one, other in zip(found[layer], truth[layer], strict=True):
            if layer == "head":  # before it is quantised, and behind
                assert distance(one.outputs[0][1], other.outputs[0][1]) < 0.05
            else:
                assert torch.equal(one.outputs[0][1], other.outputs[0][1]), layer
    least = {
        "dynamo": {"dynamic": 8, "static": 20, "operators": 0, "int4": 8, "optimised": 0},
        "torchscript": {"dynamic": 20, "static": 25, "operators": 0, "int4": 20, "optimised": 29},
    }
    assert len(found) >= least[style][way]


class Chain(nn.Module):
    """Containers that end in the ReLU which a static quantiser drops."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x) - 0.5


@pytest.mark.parametrize("style", ["dynamo", "torchscript"])
def test_a_dropped_relu_is_not_what_was_before_it(style: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Chain().eval()
    x = torch.randn(64, 8) * 2
    path = export(model, (x,), tmp_path / "m.onnx", style, input_names=["x"])
    quantised = quantise(path, "static", lambda: {"x": (torch.randn(64, 8) * 2).numpy()})
    held = {node.op_type for node in onnx.load(quantised).graph.node}
    assert "Relu" not in held  # else this is no test
    expected = eager(model, x)
    for options in ({}, {"names_from": path}):
        program = opened(quantised, **options)
        if not options and program.notes and "node by node" in program.notes[0]:
            continue  # no scope is left: the names are its nodes' own
        for layer, calls in heard(program, x).items():
            for call, tensors in zip(calls, expected[layer], strict=True):
                assert distance(call.outputs[0][1], tensors[0]) < 0.1, (layer, options)
    places = {place.name: place for place in opened(quantised, names_from=path).places}
    assert all(places[f"parts.{index}.0"].gone is None for index in range(3))
    assert "left it out" in (places["parts.0.1"].gone or "")
    assert "left it out" in (places["parts.0"].gone or "")


class Gated(nn.Module):
    """Linears side by side, with biases: a quantiser sorts their products before their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gate(x).sigmoid())


@pytest.mark.parametrize("style", ["dynamo", "torchscript"])
def test_linears_side_by_side_have_their_names(style: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated()).eval()
    x = torch.randn(2, 5, 8)
    path = export(model, (x,), tmp_path / "m.onnx", style, input_names=["x"])
    found = heard(opened(quantise(path, "static", lambda: {"x": x.numpy()})), x)
    expected = eager(model, x)
    assert set(found) >= {name for name, _ in model.named_modules() if name.count(".") == 1}
    for layer, calls in found.items():
        assert distance(calls[0].outputs[0][1], expected[layer][0][0]) < 0.1, layer


@pytest.mark.parametrize("style", ["dynamo", "torchscript"])
@pytest.mark.parametrize("way", ["static", "optimised"])
def test_convolutions(style: str, way: str, tmp_path: Path) -> None:
    model = pictures()
    x = torch.randn(4, 3, 8, 8)
    path = export(model, (x,), tmp_path / "m.onnx", style, input_names=["x"])
    made = quantise(path, way, lambda: {"x": torch.randn(4, 3, 8, 8).numpy()})
    expected = eager(model, x)
    for options in ({}, {"names_from": path}):
        program = opened(made, **options)
        if not options and program.notes and "node by node" in program.notes[0]:
            continue  # no scope is left: the names are its nodes' own
        for layer, calls in heard(program, x).items():
            alone = layer == "relu" and len(calls) == 1  # of which only the first call is sure
            for call, tensors in zip(calls, expected[layer], strict=not alone):
                assert distance(call.outputs[0][1], tensors[0]) < 0.15, (layer, options)


def test_the_wrong_float_model_is_refused(
    files: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    quantised = files["dynamo"]["dynamic"]
    other = export(nn.Linear(4, 4), (torch.randn(2, 4),), tmp_path / "o.onnx", "torchscript")
    with pytest.raises(OptionError, match=r"no layers' names|is not the model"):
        opened(quantised, names_from=other)
    with pytest.raises(OptionError, match="is not the model that"):
        opened(quantised, names_from=files["torchscript"]["float"])
    with pytest.raises(OptionError, match="does not exist"):
        opened(quantised, names_from=tmp_path / "no.onnx")
    by_nodes = opened(quantised, names_from=files["dynamo"]["optimised"])
    assert any("no layers' names either" in note for note in by_nodes.notes)
