"""ONNX files of strangers: nothing outside the model's folder is read, no foreign code is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
from onnx import TensorProto, helper, numpy_helper

from programs.onnx_support import heard, opened
from tensortap.errors import OptionError, TapError, TargetError

WEIGHT = np.arange(16, dtype=np.float32).reshape(4, 4)


def model_of(nodes: list[Any] | None = None, weights: list[Any] | None = None, **more: Any) -> Any:
    nodes = nodes or [
        helper.make_node("MatMul", ["x", "w"], ["/lin/MatMul_output_0"], "/lin/MatMul")
    ]
    nodes.append(helper.make_node("Relu", [nodes[-1].output[0]], ["y"], "/Relu"))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(WEIGHT, "w")] if weights is None else weights,
        **more,
    )
    domains = {node.domain for node in nodes if node.domain}
    imports = [helper.make_opsetid("", 20), *(helper.make_opsetid(d, 1) for d in sorted(domains))]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def outside(location: str, name: str = "w", dims: tuple[int, ...] = (4, 4), **more: Any) -> Any:
    """A weight that is said to lie in a file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def save(model: Any, folder: Path) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_weights_beside_the_model_are_read(tmp_path: Path) -> None:
    path = save(model_of(weights=[outside("weights.bin", offset=64, length=64)]), tmp_path)
    (tmp_path / "weights.bin").write_bytes(bytes(64) + WEIGHT.tobytes())
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    program = opened(path)
    x = torch.randn(2, 4)
    expected = x @ torch.from_numpy(WEIGHT)
    assert torch.allclose(heard(program, x)["lin"][0].outputs[0][1], expected)
    assert torch.equal(program.linears()["lin"][0], torch.from_numpy(WEIGHT).T)
    assert torch.allclose(program.plain((x,), {}), expected.relu())
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def attacks(secret: Path) -> dict[str, Any]:
    """Models that try to read a file outside of their folder, each in another place."""
    leak = outside(str(secret))
    constant = helper.make_node("Constant", [], ["w"])
    constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(leak)
    product = helper.make_node("MatMul", ["x", "w"], ["/lin/MatMul_output_0"])
    branch = helper.make_graph(
        [helper.make_node("Identity", ["inner"], ["out"])], "b", [],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [outside("../secret.bin", "inner")],
    )  # fmt: skip
    fork = helper.make_node("If", ["flag"], ["z"], then_branch=branch, else_branch=branch)
    flag = numpy_helper.from_array(np.array(True), "flag")
    sparse = onnx.SparseTensorProto(dims=[4, 4])
    sparse.values.CopyFrom(outside("../secret.bin", "w", (16,)))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.arange(16, dtype=np.int64)))
    function = model_of()
    held = helper.make_function("local", "F", [], ["w"], [constant], [helper.make_opsetid("", 20)])
    function.functions.append(held)
    return {
        "absolute": model_of(weights=[leak]),
        "upwards": model_of(weights=[outside("../secret.bin")]),
        "upwards in the middle": model_of(weights=[outside("sub/../../secret.bin")]),
        "backslashes": model_of(weights=[outside("..\\secret.bin")]),
        "a drive": model_of(weights=[outside("C:\\secret.bin")]),
        "a link": model_of(weights=[outside("link.bin")]),
        "a linked folder": model_of(weights=[outside("linked/secret.bin")]),
        "a hard link": model_of(weights=[outside("hard.bin")]),
        "an attribute": model_of([constant, product], []),
        "a branch": model_of([fork], [flag]),
        "a sparse weight": model_of(sparse_initializer=[sparse]),
        "a function": function,
        "memory": model_of(weights=[outside("*/_ORT_MEM_ADDR_/*", offset=4096, length=64)]),
        "no name": model_of(weights=[outside("")]),
    }


@pytest.mark.parametrize("name", list(attacks(Path("/x"))))
def test_files_outside_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(WEIGHT.tobytes())
    folder = tmp_path / "model"
    path = save(attacks(secret)[name], folder)
    (folder / "link.bin").symlink_to(secret)
    (folder / "linked").symlink_to(tmp_path)
    (folder / "hard.bin").hardlink_to(secret)
    (folder / "sub").mkdir()
    with pytest.raises(TargetError) as caught:
        opened(path)
    told = str(caught.value)
    assert "lies in" in told
    assert any(
        reason in told
        for reason in ("file is not read", "is not there", "without a name", "hard links")
    ), told


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"offset": 1000}, "truncated"),
        ({"offset": 0, "length": 1 << 40}, "truncated"),
        ({"length": 32}, "needs 64 bytes"),
        ({"offset": -4}, "offset '-4'"),
        ({"length": "many"}, "length 'many'"),
    ],
)
def test_sizes_are_checked(more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = save(model_of(weights=[outside("w.bin", **more)]), tmp_path)
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    with pytest.raises(TargetError, match=reason):
        opened(path)


def test_a_model_in_hand_must_hold_its_weights(tmp_path: Path) -> None:
    model = model_of(weights=[outside("w.bin")])
    with pytest.raises(TargetError, match="does not say where they are"):
        opened(model)
    x = torch.randn(2, 4)
    assert torch.allclose(
        heard(opened(model_of()), x)["lin"][0].outputs[0][1], x @ torch.from_numpy(WEIGHT)
    )


def test_custom_operators_are_refused_unless_named(tmp_path: Path) -> None:
    foreign = helper.make_node("Evil", ["x"], ["z"], domain="my.own")
    path = save(model_of([foreign]), tmp_path)
    with pytest.raises(TargetError, match=r"my\.own::Evil.*--custom-ops"):
        opened(path)
    with pytest.raises(OptionError, match="does not exist"):
        opened(path, custom_ops=(tmp_path / "no.so",))
    fake = tmp_path / "fake.so"
    fake.write_bytes(b"no library")
    with pytest.raises(TargetError, match="ONNX Runtime does not take"):
        opened(path, custom_ops=(fake,)).plain((torch.randn(2, 4),), {})
    inner = helper.make_graph(
        [helper.make_node("Evil", ["x"], ["o"], domain="my.own")], "b", [],
        [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)],
    )  # fmt: skip
    flag = numpy_helper.from_array(np.array(True), "flag")
    fork = helper.make_node("If", ["flag"], ["z"], then_branch=inner, else_branch=inner)
    with pytest.raises(TargetError, match="Evil"):
        opened(save(model_of([fork], [flag]), tmp_path))


def test_functions_of_the_model_itself_are_allowed(tmp_path: Path) -> None:
    call = helper.make_node("Twice", ["x"], ["z"], domain="my.own")
    model = model_of([call])
    model.functions.append(
        helper.make_function(
            "my.own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])],
            [helper.make_opsetid("", 20)],
        )
    )  # fmt: skip
    x = torch.randn(2, 4)
    assert torch.equal(opened(save(model, tmp_path)).plain((x,), {}), (x * 2).relu())


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "flipped", "of another kind"])
def test_a_damaged_file_is_a_sentence(damage: str, tmp_path: Path) -> None:
    good = model_of().SerializeToString()
    flipped = bytearray(good)
    flipped[3:40] = bytes(255 - byte for byte in flipped[3:40])
    content = {
        "empty": b"",
        "text": b"this is no model at all, but long enough to be one",
        "cut": good[: len(good) // 2],
        "flipped": bytes(flipped),
        "of another kind": b"PK\3\4" + bytes(200),
    }[damage]
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(TapError) as caught:
        opened(path).plain((torch.randn(2, 4),), {})
    assert str(path) in str(caught.value)
