"""Layers of ONNX models: each is what the eager one returned, or is gone with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from programs.models import MODELS
from programs.onnx_support import (
    STYLES,
    Small,
    assert_right,
    eager,
    export,
    heard,
    opened,
    pictures,
    sure,
)


@pytest.fixture(scope="module")
def small() -> Small:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture(scope="module")
def files(small: Small, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("small")
    ids = torch.randint(0, 50, (2, 7))
    return {
        style: export(small, (ids,), folder / f"{style}.onnx", style, dynamic={"ids": (0, 1)})
        for style in STYLES
    }


DROPPED = {f"layers.{i}.{name}" for i in range(2) for name in ("same", "drop")}


@pytest.mark.parametrize("style", STYLES)
def test_every_layer_is_what_hooks_hear(style: str, small: Small, files: dict[str, Path]) -> None:
    program = opened(files[style])
    for shape in ((2, 7), (1, 4), (3, 9)):  # dynamic shapes
        ids = torch.randint(0, 50, shape)
        expected = eager(small, ids)
        found = heard(program, ids)
        assert_right(found, expected)
        assert set(expected) - set(found) <= DROPPED
    assert len(found["shared"]) == 2


@pytest.mark.parametrize("style", STYLES)
def test_places_are_in_the_order_in_which_first_calls_end(
    style: str, small: Small, files: dict[str, Path]
) -> None:
    places = opened(files[style]).places
    order: list[str] = []
    for name, module in small.named_modules():
        module.register_forward_hook(
            lambda m, a, o, name=name: order.append(name) if name not in order else None
        )
    small(torch.randint(0, 50, (2, 7)))
    for module in small.modules():
        module._forward_hooks.clear()
    known = [place.name for place in places]
    assert known == [name for name in order if name in known]
    assert all(place.provenance == "scope" for place in places)
    if style != "torchscript":
        assert {p.name: p.type for p in places}["layers.0.mlp.up"] == "Linear"
        assert {p.name: p.type for p in places}[""] == "Small"


@pytest.mark.parametrize("style", STYLES)
def test_calls_come_as_they_end_and_linears_are_what_they_multiply(
    style: str, small: Small, files: dict[str, Path]
) -> None:
    program = opened(files[style])
    linears = program.linears()
    assert set(linears) == {n for n, m in small.named_modules() if isinstance(m, nn.Linear)}
    for name, (weight, bias) in linears.items():
        own = small.get_submodule(name)
        assert torch.equal(weight, own.weight)
        assert (bias is None) == (own.bias is None)
    ids = torch.randint(0, 50, (2, 7))
    run = program.tapped(["norm", "layers.1"], inputs=True, linears=list(linears))((ids,), {})
    with torch.no_grad():
        expected = small(ids)
    assert torch.allclose(run.output, expected, atol=1e-5)
    for call in run.calls:
        if call.layer in linears:
            product = nn.functional.linear(call.operand, *linears[call.layer])
            assert torch.allclose(product, call.outputs[0][1], atol=1e-5)
    ends = [call.layer for call in run.calls if call.layer in ("norm", "layers.1", "head")]
    assert ends == ["layers.1", "norm", "head"]
    norm = next(call for call in run.calls if call.layer == "norm")
    last = [call for call in run.calls if call.layer == "shared"][-1]
    assert [leaf for leaf, _ in norm.inputs] == [""]
    assert torch.equal(norm.inputs[0][1], last.outputs[0][1])


def test_at_every_level_of_optimisation(small: Small, files: dict[str, Path]) -> None:
    import onnxruntime

    ids = torch.randint(0, 50, (2, 7))
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        for file in files.values():
            session = onnxruntime.InferenceSession(
                str(file), options, providers=["CPUExecutionProvider"]
            )
            assert_right(heard(opened(session), ids), eager(small, ids))


def test_what_is_folded_is_gone_and_never_another_value(tmp_path: Path) -> None:
    model = pictures()
    x = torch.randn(2, 3, 8, 8)
    expected = eager(model, x)
    seen = {}
    for style in STYLES:
        program = opened(export(model, (x,), tmp_path / f"{style}.onnx", style))
        alone = ("relu",) if style == "torchscript" else ()
        assert_right(heard(program, x), expected, first_alone=alone)
        seen[style] = program
    assert set(sure(seen["dynamo-plain"])) == set(expected)
    gone = {place.name: place.gone for place in seen["dynamo"].places if place.gone}
    assert set(gone) == {"conv", "down.0"}
    assert "folded" in gone["conv"]
    assert {"bn", "down.1", "down", "relu"} <= set(sure(seen["dynamo"]))
    script = {place.name: place for place in seen["torchscript"].places}
    assert "folded into it" in (script["conv"].gone or "")
    assert "bn" not in script
    assert script["down"].provenance == "inferred"  # what was folded may stand outside of it


class Awkward(nn.Module):
    """A cache, tuples, a dict, something in place, and a part that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.unused = Pair(), nn.Linear(4, 4)
        self.act, self.last = nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        self.unused(x)
        both, flags, numbers = self.pair(x, past)
        y = self.last(x)
        kept = self.act(y) + both[0].sum(1)
        return {"logits": kept, "key": both[0], "value": both[1], "flags": flags, "ids": numbers}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor]
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        key = torch.cat([past[0], self.k(x)[:, None]], 1)
        value = torch.cat([past[1], self.v(x)[:, None]], 1)
        return (key, value), x > 0, (x * 10).long()


@pytest.mark.parametrize("style", STYLES)
def test_caches_dicts_and_other_types(style: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Awkward().eval()
    x, past = torch.randn(2, 4), (torch.randn(2, 3, 4), torch.randn(2, 3, 4))
    names = ["x", "past.key", "past.value"]
    outputs = ["logits", "key", "value", "flags", "ids"]
    path = tmp_path / "awkward.onnx"
    program = opened(export(model, (x, past), path, style, input_names=names, output_names=outputs))
    assert [argument.name for argument in program.arguments or ()] == names
    expected = eager(model, x, past)
    with torch.no_grad():
        result = model(x, past)
    for feed in (
        {"args": (x, past), "kwargs": {}},
        {"args": (x,), "kwargs": {"past": past}},
        {"args": (), "kwargs": {"past.key": past[0], "past.value": past[1], "x": x.numpy()}},
    ):
        run = program.tapped(sure(program), inputs=False, linears=[])(feed["args"], feed["kwargs"])
        assert list(run.output) == outputs
        for name in outputs:
            assert run.output[name].dtype == result[name].dtype
            assert torch.allclose(run.output[name].double(), result[name].double(), atol=1e-6)
        found = {}
        for call in run.calls:
            found.setdefault(call.layer, []).append(call)
        assert_right(found, expected)
    assert set(expected) - set(found) == {"unused"}
    kinds = {value.dtype for _, value in found["pair"][0].outputs}
    assert kinds == {torch.float32, torch.bool, torch.int64}
    assert len(found["pair"][0].outputs) == 4
    assert (
        float(found["last"][0].outputs[0][1].min())
        < 0
        <= float(found["act"][0].outputs[0][1].min())
    )


@pytest.mark.parametrize(
    ("name", "style"),
    [("bert", "torchscript"), ("t5", "torchscript"), ("vit", "torchscript"), ("mamba", "dynamo")],
)
def test_of_transformers(name: str, style: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, args, kwargs = MODELS[name]()
    program = opened(export(model, args, tmp_path / "model.onnx", style, kwargs=kwargs))
    declared = [argument.name for argument in program.arguments or ()]
    rest = [value for key, value in kwargs.items() if key not in declared]
    given = {key: value for key, value in kwargs.items() if key in declared}
    expected = eager(model, *args, **kwargs)
    found = heard(program, *args, *rest, **given)
    assert_right(found, expected)
    lost = {type(model.get_submodule(layer)).__name__ for layer in set(expected) - set(found)}
    assert lost <= {"Dropout", "Embedding"}, lost  # embeddings of positions, which are constants
    assert len(found) > len(expected) / 2
