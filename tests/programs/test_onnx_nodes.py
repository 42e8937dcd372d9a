"""ONNX files without layers' names: every node is a layer, by the file's own names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import tensortap as tap
from programs.onnx_support import opened
from tensortap.errors import SelectionError

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def network(named: bool = True, bug: int | None = None) -> Any:
    """Convolutions as Paddle writes them; a `bug` makes one channel of one of them larger."""
    draw = np.random.default_rng(0)
    weights, nodes = [], []
    value, channels = "x", 3
    for index in range(4):
        weight = (draw.standard_normal((8, channels, 3, 3)) / np.sqrt(9 * channels)).astype("f4")
        weight[0] *= 1.05 if bug == index else 1.0
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        kinds = [("Conv", [value, f"w{index}"], {"pads": [1] * 4})]
        kinds.append(("Relu" if index % 2 else "Sigmoid", [f"conv{index}"], {}))
        for (kind, reads, more), made in zip(kinds, (f"conv{index}", f"act{index}"), strict=True):
            name = f"p2o.{kind}.{index}" if named else ""
            nodes.append(helper.make_node(kind, reads, [made], name, **more))
        value, channels = f"act{index}", 8
    weights.append(numpy_helper.from_array(draw.standard_normal((8, 5)).astype("f4"), "head"))
    for kind, reads, made in (
        ("GlobalAveragePool", [value], "pooled"),
        ("Flatten", ["pooled"], "flat"),
        ("MatMul", ["flat", "head"], "logits"),
    ):
        nodes.append(helper.make_node(kind, reads, [made], f"p2o.{kind}.0" if named else ""))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 5])
    return model_of(nodes, [x], [logits], weights)


def model_of(nodes: Any, inputs: Any, outputs: Any, weights: Any = (), **more: Any) -> Any:
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 17), *more.pop("opsets", ())]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, **more)


def recorded(path: Path, out: Path, **options: Any) -> tap.Recorder:
    with tap.record(path, out, **{"layers": "all", **options}) as rec:
        rec.run(X)
    return rec


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The float model, one with a bug, and three ways to quantise it."""
    from onnxruntime import quantization

    folder = tmp_path_factory.mktemp("nodes")
    found = {}
    for kind in ("float", "bug", "dynamic", "qdq", "operators"):
        found[kind] = folder / f"{kind}.onnx"
    onnx.save(network(), found["float"])
    onnx.save(network(bug=1), found["bug"])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        left = 4

        def get_next(self) -> Any:
            self.left -= 1
            return {"x": torch.randn_like(X).numpy()} if self.left >= 0 else None

    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    source = str(found["float"])
    quantization.quantize_dynamic(source, str(found["dynamic"]))
    for kind, form in (("qdq", "QDQ"), ("operators", "QOperator")):
        kind_of = getattr(quantization.QuantFormat, form)
        quantization.quantize_static(source, str(found[kind]), Reader(), quant_format=kind_of)
    logging.disable(logging.NOTSET)
    return found


def test_every_node_is_a_layer_and_the_output_is_the_models_own(
    files: dict[str, Path], tmp_path: Path
) -> None:
    with tap.record(files["float"], tmp_path / "run", layers="all") as rec:
        output = rec.run(X)
        rec.step()
        later = rec.run(X * 2)  # of the same shape, so without a check
    session = onnxruntime.InferenceSession(str(files["float"]))
    plain = [session.run(None, {"x": x.numpy()})[0] for x in (X, X * 2)]
    assert [output.numpy().tobytes(), later.numpy().tobytes()] == [p.tobytes() for p in plain]
    run = tap.open(tmp_path / "run")
    names = [node.name for node in onnx.load(files["float"]).graph.node]
    assert list(run.layers) == [*names, ""]
    assert run["p2o.Conv.1"].type == "Conv" and run["p2o.Conv.1"].provenance == "value-name"
    conv = run["p2o.Conv.1"].output
    weight = torch.from_numpy(numpy_helper.to_array(onnx.load(files["float"]).graph.initializer[1]))
    expected = torch.conv2d(run["p2o.Sigmoid.0"].output, weight, padding=1)
    assert torch.allclose(conv, expected, atol=1e-5)
    assert [check.passed for check in rec.tap.self_checks] == [True]
    assert any("node by node" in note and "--names-from" in note for note in rec.notes)


def test_a_bug_in_one_convolution_is_named_by_its_node(
    files: dict[str, Path], tmp_path: Path
) -> None:
    for kind in ("float", "bug"):
        recorded(files[kind], tmp_path / kind)
    assert tap.compare(tmp_path / "float", tmp_path / "bug").first_divergence.layer == "p2o.Conv.1"


@pytest.mark.parametrize("kind", ["dynamic", "qdq", "operators"])
def test_a_quantised_file_is_compared_with_its_float_file(
    kind: str, files: dict[str, Path], tmp_path: Path
) -> None:
    recorded(files["float"], tmp_path / "float")
    rec = recorded(files[kind], tmp_path / kind)
    result = tap.compare(tmp_path / "float", tmp_path / kind)
    assert result.first_divergence is None
    paired = [layer for layer in result.layers if layer.verdict == "within"]
    assert len(paired) >= 9
    codes = any("scale times (code less zero point)" in note for note in rec.notes)
    assert codes == (kind == "operators")


@pytest.mark.parametrize("kind", ["dynamic", "qdq"])
def test_names_come_from_the_nodes_of_the_float_file(
    kind: str, files: dict[str, Path], tmp_path: Path
) -> None:
    program = opened(files[kind], names_from=files["float"])
    assert {place.name for place in program.places if not place.gone} >= {
        "p2o.Conv.0",
        "p2o.MatMul.0",
    }
    assert any("values are named by its nodes" in note for note in program.notes)
    assert not any("To have names" in note for note in program.notes)


@pytest.mark.parametrize(
    ("layers", "count"),
    [
        ("p2o.Conv.*", 4), ("p2o.Conv.{1-2}", 2), ("type:Relu", 2), ("leaves", 11),
        ("re:.*Sigmoid.*", 2), ("p2o.Flatten.0", 1), ("all,!p2o.Conv.*", 8),
    ],
)  # fmt: skip
def test_patterns_and_words_choose_nodes(
    layers: str, count: int, files: dict[str, Path], tmp_path: Path
) -> None:
    recorded(files["float"], tmp_path / "run", layers=layers)
    assert len(tap.open(tmp_path / "run").layers) == count


def test_without_a_choice_the_nodes_are_taken(files: dict[str, Path], tmp_path: Path) -> None:
    with tap.record(files["float"], tmp_path / "run") as rec:
        rec.run(X)
    assert len(tap.open(tmp_path / "run").layers) == 11
    with pytest.raises(SelectionError, match=r"p2o\.Conv\.9"):
        tap.record(files["float"], tmp_path / "no", layers="p2o.Conv.9")


def test_what_is_chosen_changes_no_value(files: dict[str, Path], tmp_path: Path) -> None:
    recorded(files["float"], tmp_path / "all")
    recorded(files["float"], tmp_path / "one", layers="p2o.Relu.3", inputs=True)
    whole, alone = tap.open(tmp_path / "all"), tap.open(tmp_path / "one")
    assert torch.equal(whole["p2o.Relu.3"].output, alone["p2o.Relu.3"].output)
    assert torch.equal(whole["p2o.Conv.3"].output, alone["p2o.Relu.3"].input)


def test_names_are_the_nodes_else_the_values_and_each_once() -> None:
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"], "block"),
        helper.make_node("Relu", ["d"], ["e"], "block.part"),
        helper.make_node("Relu", ["e"], ["f"], ".odd..name."),
        helper.make_node("Split", ["f"], ["g", "h"], "parts", axis=0),
        helper.make_node("Add", ["g", "h"], ["y"], "b"),
    ]
    program = opened(model_of(nodes, [info("x", 1, [2])], [info("y", 1, [1])]))
    names = [place.name for place in program.places]
    # The last bears the name of a value that was taken for a node's; a holder has its kind added.
    assert names[:7] == ["first", "b", "c", "block.Relu", "block.part", "odd.name", "parts"]
    assert names[7:] == ["y", ""]
    run = program.tapped(["parts"], inputs=False, linears=[])((torch.tensor([1.0, 2.0]),), {})
    assert [leaf for leaf, _ in run.calls[0].outputs] == ["[0]", "[1]"]


def _branches() -> Any:
    info = helper.make_tensor_value_info
    bodies = []
    for kind in ("Relu", "Neg"):
        node = helper.make_node(kind, ["x"], [f"{kind}_y"], f"inner_{kind}")
        bodies.append(helper.make_graph([node], kind, [], [info(f"{kind}_y", 1, [2])]))
    choice = helper.make_node(
        "If", ["cond"], ["chosen"], "choice", then_branch=bodies[0], else_branch=bodies[1]
    )
    last = helper.make_node("Exp", ["chosen"], ["y"], "last")
    inputs = [info("cond", TensorProto.BOOL, []), info("x", 1, [2])]
    return model_of([choice, last], inputs, [info("y", 1, [2])])


def test_the_branch_that_ran_is_heard_and_the_other_is_said_not_to_have(tmp_path: Path) -> None:
    onnx.save(_branches(), tmp_path / "m.onnx")
    with tap.record(tmp_path / "m.onnx", tmp_path / "run", layers="all") as rec:
        rec.run(np.bool_(False), torch.tensor([1.0, -2.0]))
    run = tap.open(tmp_path / "run")
    assert torch.equal(run["inner_Neg"].output, torch.tensor([-1.0, 2.0]))
    assert torch.equal(run["choice"].output, run["inner_Neg"].output)
    (note,) = [note for note in rec.notes if "inner_Relu" in note]
    assert "a branch or a loop that no run went into" in note and ".forward()" not in note


def test_what_stands_in_the_body_of_a_loop_is_a_row_with_the_reason(tmp_path: Path) -> None:
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Add", ["carried", "x"], ["more"], "inside"),
            helper.make_node("Identity", ["going"], ["on"], "keep"),
        ],
        "body",
        [info("turn", 7, []), info("going", 9, []), info("carried", 1, [2])],
        [info("on", 9, []), info("more", 1, [2])],
    )
    times = numpy_helper.from_array(np.array(3), "times")
    loop = helper.make_node("Loop", ["times", "", "x"], ["y"], "turns", body=body)
    model = model_of([loop], [info("x", 1, [2])], [info("y", 1, [2])], [times])
    onnx.save(model, tmp_path / "m.onnx")
    with tap.record(tmp_path / "m.onnx", tmp_path / "run", layers="all") as rec:
        rec.run(torch.tensor([1.0, 2.0]))
    assert torch.equal(tap.open(tmp_path / "run")["turns"].output, torch.tensor([4.0, 8.0]))
    assert "the body of the Loop 'turns', which runs it once a turn" in rec.tap.lost["inside"]


def test_the_nodes_of_the_models_own_functions_are_heard(tmp_path: Path) -> None:
    info = helper.make_tensor_value_info
    opsets = [helper.make_opsetid("", 17)]
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"], "square"),
        helper.make_node("Add", ["square", "x"], ["y"], "sum"),
    ]
    function = helper.make_function("own", "Bend", ["x"], ["y"], nodes, opsets)
    call = helper.make_node("Bend", ["x"], ["y"], "bend", domain="own")
    model = model_of(
        [call], [info("x", 1, [2])], [info("y", 1, [2])],
        opsets=[helper.make_opsetid("own", 1)], functions=[function],
    )  # fmt: skip
    onnx.save(model, tmp_path / "m.onnx")
    with tap.record(tmp_path / "m.onnx", tmp_path / "run", layers="all") as rec:
        output = rec.run(torch.tensor([1.0, 2.0]))
    assert torch.equal(output, torch.tensor([2.0, 6.0]))
    assert [slot.type for slot in rec.tap.slots] == ["Mul", "Add", ""]
