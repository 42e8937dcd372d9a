"""Running ONNX models: what goes in, what comes out, sessions of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import tensortap as tap
from programs.onnx_support import heard, opened, sure
from tensortap.errors import OptionError, SelectionError, TargetError
from tensortap.taps.programs.base import Program
from tensortap.taps.programs.onnx.kind import KIND

KINDS = {
    "half": (TensorProto.FLOAT16, torch.float16),
    "brain": (TensorProto.BFLOAT16, torch.bfloat16),
    "eight": (TensorProto.FLOAT8E4M3FN, torch.float8_e4m3fn),
    "double": (TensorProto.DOUBLE, torch.float64),
    "flag": (TensorProto.BOOL, torch.bool),
    "long": (TensorProto.INT64, torch.int64),
    "byte": (TensorProto.UINT8, torch.uint8),
}


def casts() -> Any:
    """A model with a layer for every type: each casts, and a bfloat16 input is cast back."""
    nodes = [
        helper.make_node("Cast", ["x"], [f"/{name}/Cast_output_0"], f"/{name}/Cast", to=kind)
        for name, (kind, _) in KINDS.items()
    ]
    nodes += [
        helper.make_node("Cast", ["b"], ["/back/Cast_output_0"], "/back/Cast", to=1),
        helper.make_node("Add", ["x", "/back/Cast_output_0"], ["sum"], "/Add"),
    ]
    outputs = [f"/{name}/Cast_output_0" for name in KINDS]
    graph = helper.make_graph(
        nodes, "casts",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3]),
            helper.make_tensor_value_info("b", TensorProto.BFLOAT16, [3]),
        ],
        [helper.make_empty_tensor_value_info(name) for name in ["sum", *outputs]],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_every_type_comes_out_as_torch_has_it() -> None:
    program = opened(casts())
    assert isinstance(program, Program)
    x, b = torch.rand(2, 3) * 4, torch.randn(3).bfloat16()
    found = heard(program, x, b)
    for name, (_, dtype) in KINDS.items():
        value = found[name][0].outputs[0][1]
        assert value is not None and value.dtype == dtype
        assert torch.equal(value.double(), x.to(dtype).double())
    assert torch.equal(found["back"][0].outputs[0][1], b.float())
    output = program.plain((x,), {"b": b})
    assert torch.equal(output["sum"], x + b.float())


def test_arguments_say_what_is_taken() -> None:
    arguments = opened(casts()).arguments
    assert [(a.name, a.dtype, a.shape, a.required) for a in arguments or ()] == [
        ("x", torch.float32, (None, 3), True),
        ("b", torch.bfloat16, (3,), True),
    ]


def test_misfits_are_named_input_by_input() -> None:
    program = opened(casts())
    good, b = torch.randn(2, 3), torch.randn(3).bfloat16()
    with pytest.raises(OptionError) as caught:
        program.plain((), {"x": good.double(), "b": torch.randn(4), "c": good})
    told = str(caught.value)
    assert "'x' is float64, and the model takes float32" in told
    assert "'b' is float32, and the model takes bfloat16" in told
    assert "'c' is no input of the model" in told
    with pytest.raises(OptionError, match=r"'x' has the shape \[2, 4\].*\[\?, 3\]"):
        program.plain((torch.randn(2, 4), b), {})
    with pytest.raises(OptionError, match=r"'b' \(bfloat16 \[3\]\) is missing"):
        program.tapped([], inputs=False, linears=[])((good,), {})
    with pytest.raises(OptionError, match="3 inputs were given by position"):
        program.plain((good, b, b), {})
    with pytest.raises(OptionError, match="'x' is no tensor: got a str"):
        program.plain(("good", b), {})


def linear(*, outputs: int = 1) -> Any:
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["/a/lin/MatMul_output_0"], "/a/lin/MatMul"),
        helper.make_node("Relu", ["/a/lin/MatMul_output_0"], ["/a/Relu_output_0"], "/a/Relu"),
        helper.make_node("Neg", ["/a/Relu_output_0"], ["y"], "/Neg"),
        helper.make_node("Exp", ["y"], ["z"], "/Exp"),
    ]
    graph = helper.make_graph(
        nodes[: 2 + outputs], "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "yz"[:outputs]],
        [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_session_inside_of_other_code_is_recorded(outputs: int, tmp_path: Path) -> None:
    session = onnxruntime.InferenceSession(
        linear(outputs=outputs).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    before = session.run(None, {"x": x})
    own = session.run

    def pipeline() -> Any:  # knows nothing of recording
        session.run(output_names=["y"], input_feed={"x": x * 2}, run_options=None)
        return session.run(None, {"x": x})

    with tap.record(session, tmp_path / "run", layers="all") as rec:
        during = pipeline()
        with pytest.raises(OptionError, match="no output 'q'"):
            session.run(["q"], {"x": x})
        rec.step()
    assert session.run == own and "run" not in session.__dict__
    assert len(during) == outputs and all(type(item) is np.ndarray for item in during)
    assert all(np.array_equal(a, b) for a, b in zip(before, during, strict=True))
    run = tap.open(tmp_path / "run")
    assert {"a.lin", "a", ""} <= set(run.layers)
    calls = [record.tensor() for record in run["a"].records]
    assert torch.equal(calls[1], torch.from_numpy(-before[0]))
    assert torch.allclose(calls[0], calls[1] * 2)


def test_plain_is_not_diverted() -> None:
    session = onnxruntime.InferenceSession(
        linear().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    program = opened(session)
    x = torch.randn(2, 4)
    expected = program.plain((x,), {})
    undo = program.divert(lambda args, kwargs: torch.zeros(1))
    assert undo is not None
    assert session.run(None, {"x": x.numpy()})[0].shape == (1,)
    assert torch.equal(program.plain((x,), {}), expected)
    undo()
    assert np.array_equal(session.run(None, {"x": x.numpy()})[0], expected.numpy())
    assert opened(linear()).divert(lambda args, kwargs: None) is None


def test_a_session_of_a_path(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(linear().SerializeToString())
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    program = opened(session)
    assert sure(program) == ["a.lin", "a"]
    assert program.describe()["file"] == str(path)
    session._model_path = None
    session._model_bytes = None
    with pytest.raises(TargetError, match="does not say which model"):
        opened(session)


def test_description() -> None:
    found = opened(linear()).describe()
    assert found["parameters"] == 16 and found["dtypes"] == {"float32": 16}
    assert found["opset"] == {"ai.onnx": 20} and found["ir_version"] == 10
    assert found["onnxruntime"] == onnxruntime.__version__
    assert found["runtime"] == "onnx" and found["class"] == "linear"


def test_what_is_accepted(tmp_path: Path) -> None:
    assert KIND.accepts(linear()) and not KIND.accepts(torch.nn.Linear(1, 1))
    assert not KIND.accepts("model.onnx") and not KIND.accepts(linear().graph)
    assert KIND.recognises(tmp_path / "x.onnx")


def test_an_exported_program_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    x = torch.randn(2, 4)
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    assert KIND.accepts(program)
    found = heard(opened(program), x)
    assert torch.allclose(found["0"][0].outputs[0][1], model[0](x), atol=1e-6)
    assert torch.allclose(found["1"][0].outputs[0][1], model(x), atol=1e-6)


def test_a_model_that_computes_nothing_gives_its_outputs(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    table = numpy_helper.from_array(np.ones(2, np.float32), "table")
    y = helper.make_tensor_value_info("table", TensorProto.FLOAT, [2])
    program = opened(
        helper.make_model(
            helper.make_graph([], "g", [x], [y], [table]),
            opset_imports=[helper.make_opsetid("", 17)],
            ir_version=8,
        )
    )
    assert [place.name for place in program.places] == [""]
    with tap.record(program, tmp_path / "run") as rec:
        output = rec.run(torch.zeros(2))
    run = tap.open(tmp_path / "run")
    assert torch.equal(run[""].output, output)
    with pytest.raises(SelectionError, match=r"'blocks' selects nothing.*computes nothing"):
        tap.record(program, tmp_path / "none", layers=["blocks"])


def test_what_fails_is_raised_and_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    table = numpy_helper.from_array(np.zeros((4, 2), np.float32), "table")
    node = helper.make_node("Gather", ["table", "ids"], ["y"], "/look/Gather")
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])
    graph = helper.make_graph([node], "g", [ids], [y], [table])
    opset = [helper.make_opsetid("", 20)]
    program = opened(helper.make_model(graph, opset_imports=opset, ir_version=10))
    capfd.readouterr()
    with pytest.raises(Exception, match="out of data bounds"):
        program.plain((torch.tensor([99]),), {})
    assert "onnxruntime" not in capfd.readouterr().err  # it would be red, colours or not
