"""Models of ONNX's own suite: each is recorded bit for bit, or refused with a sentence.

The whole suite has some thousands; here is what was once refused or taken wrongly, and a few of
each folder beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
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
from tensortap.errors import OptionError, TargetError

_DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
_NODES = (
    "abs", "add_uint64", "batchnorm_epsilon", "bitshift_left_uint64", "cast_FLOAT_to_STRING",
    "clip", "clip_default_int8_max", "constant_pad", "convinteger_with_padding", "cumsum_1d",
    "dropout_default_mask_ratio", "equal_string", "gemm_default_scalar_bias", "identity_opt",
    "identity_sequence", "if", "if_opt", "if_seq", "label_encoder", "layer_normalization_2d_axis0",
    "loop11", "loop13_seq", "loop16_seq_none", "lstm_defaults", "max_uint64",
    "optional_get_element_sequence", "optional_has_element_empty_optional_input",
    "pow_bcast_scalar", "scan9_sum", "sequence_insert_at_back", "sequence_map_add_2_sequences",
    "shape", "split_to_sequence_1", "stft", "string_concat", "tril_neg", "top_k",
    "unique_sorted_without_axis",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    model: Any
    inputs: list[Any]


def _read(raw: Any, kind: str | None) -> Any:
    """A value as onnx wrote it, as numpy has it."""
    if isinstance(raw, bytes):
        proto = {"sequence_type": onnx.SequenceProto, "optional_type": onnx.OptionalProto}
        message = proto.get(kind or "", onnx.TensorProto)()
        message.ParseFromString(raw)
        raw = message
    if isinstance(raw, onnx.SequenceProto):
        return numpy_helper.to_list(raw)
    if isinstance(raw, onnx.OptionalProto):
        return numpy_helper.to_optional(raw)
    return numpy_helper.to_array(raw) if isinstance(raw, onnx.TensorProto) else raw


def _cases() -> Iterator[Case]:
    from onnx.backend.test.case.node import collect_testcases

    for folder in ("simple", "pytorch-operator", "pytorch-converted"):
        for path in sorted((_DATA / folder).iterdir())[::3]:
            if (path / "model.onnx").is_file():
                model = onnx.load(path / "model.onnx")
                files = sorted((path / "test_data_set_0").glob("input_*.pb"))
                infos = [info.type.WhichOneof("value") for info in model.graph.input]
                given = [
                    _read(file.read_bytes(), kind) for file, kind in zip(files, infos, strict=False)
                ]
                yield Case(path.name, model, given)
    wanted = {f"test_{name}" for name in _NODES} | {f"test_ai_onnx_ml_{name}" for name in _NODES}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    for case in found:
        if case.name in wanted or case.name.startswith("test_ai_onnx_ml_label_encoder"):
            case.model.ir_version = min(case.model.ir_version, 12)
            yield Case(case.name, case.model, [_read(x, None) for x in case.data_sets[0][0]])


def _plain(path: Path, inputs: list[Any]) -> dict[str, Any] | None:
    """What ONNX Runtime itself returns; None where it cannot run the model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(str(path), options)
        names = [item.name for item in session.get_inputs()]
        found = session.run(None, dict(zip(names, inputs, strict=False)))
    except Exception:  # a class of errors for each of its codes
        return None
    return dict(zip((item.name for item in session.get_outputs()), found, strict=True))


def _recorded(path: Path, out: Path, *args: Any, **kwargs: Any) -> tap.Recorder:
    with tap.record(path, out, layers="all") as rec:
        rec.run(*args, **kwargs)
    return rec


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(other, torch.Tensor):
        other = other.numpy()
    if one is None or other is None or isinstance(one, dict):
        return bool(one == other) or one is other
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype.kind in "OU":
        return one.shape == other.shape and bool((one == other).all())
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def test_what_the_runtime_runs_is_recorded_bit_for_bit(tmp_path: Path) -> None:
    ran, wrong = 0, []
    for index, case in enumerate(_cases()):
        path = tmp_path / f"{index}.onnx"
        onnx.save(case.model, path)
        expected = _plain(path, case.inputs)
        if expected is None:
            try:  # numpy has less than ONNX Runtime, so some run here alone
                _recorded(path, tmp_path / str(index), *case.inputs)
            except (TargetError, OptionError) as error:
                assert str(error).endswith("."), case.name
            continue
        with tap.record(path, tmp_path / str(index), layers="all") as rec:
            output = rec.run(*case.inputs)
        found = output if len(expected) > 1 else dict.fromkeys(expected, output)
        if not all(_same(expected[name], found[name]) for name in expected):
            wrong.append(case.name)
        tap.open(tmp_path / str(index))
        ran += 1
    assert wrong == []
    assert ran > 60


def _model(nodes: Any, inputs: Any, outputs: Any, **more: Any) -> Any:
    graph = helper.make_graph(nodes, "g", inputs, outputs, **more)
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _info(name: str, kind: int, shape: Any) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


@pytest.mark.parametrize("kind", ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"])
def test_floats_of_eight_bits_go_in_and_out(kind: str, tmp_path: Path) -> None:
    number = getattr(TensorProto, f"FLOAT8{kind.upper()}")
    nodes = [
        helper.make_node("Cast", ["x"], ["y"], "there", to=number),
        helper.make_node("Cast", ["z"], ["back"], "back", to=TensorProto.FLOAT),
    ]
    outputs = [_info("y", number, [2, 3]), _info("back", TensorProto.FLOAT, [3])]
    inputs = [_info("x", TensorProto.FLOAT, [2, 3]), _info("z", number, [3])]
    onnx.save(_model(nodes, inputs, outputs), tmp_path / "m.onnx")
    x = torch.randn(2, 3)
    z = torch.tensor([0.5, 1.0, -2.0]).to(getattr(torch, f"float8_{kind}"))
    with tap.record(tmp_path / "m.onnx", tmp_path / "run", layers="all") as rec:
        output = rec.run(x, z)
    assert output["y"].dtype == z.dtype
    assert torch.equal(output["y"].float(), x.to(z.dtype).float())
    assert torch.equal(output["back"], z.float())
    again = tap.open(tmp_path / "run")["there"].output
    assert again.dtype == z.dtype and torch.equal(again.float(), output["y"].float())


def test_numbers_sequences_and_none_as_numpy_has_them(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Clip", ["x", "low"], ["y"], "clip"),
        helper.make_node("SequenceInsert", ["many", "y"], ["more"], "insert"),
        helper.make_node("OptionalHasElement", ["maybe"], ["there"], "asks"),
    ]
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [-1])
    many = helper.make_sequence_type_proto(tensor)
    inputs = [
        _info("x", TensorProto.FLOAT, [-1]),
        _info("low", TensorProto.FLOAT, []),
        helper.make_value_info("many", many),
        helper.make_value_info("maybe", helper.make_optional_type_proto(tensor)),
    ]
    outputs = [helper.make_value_info("more", many), _info("there", TensorProto.BOOL, [])]
    onnx.save(_model(nodes, inputs, outputs), tmp_path / "m.onnx")
    x = np.array([-1.0, 2.0], np.float32)
    with tap.record(tmp_path / "m.onnx", tmp_path / "run", layers="all") as rec:
        output = rec.run(x, np.float32(0.5), [x, x[:1]])
    assert [item.tolist() for item in output["more"]] == [[-1, 2], [-1], [0.5, 2]]
    assert not output["there"]
    run = tap.open(tmp_path / "run")
    assert torch.equal(run["clip"].output, torch.tensor([0.5, 2.0]))
    assert run["insert"].records[-1].leaf == "[2]"
    with pytest.raises(OptionError, match=r"'many' is no sequence of tensors: got a Tensor"):
        _recorded(
            tmp_path / "m.onnx", tmp_path / "no", x=torch.zeros(2), low=0.5, many=torch.zeros(2)
        )


def test_text_is_returned_and_said_not_to_be_recorded(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["y"], "text", to=TensorProto.STRING),
        helper.make_node("Cast", ["words"], ["number"], "number", to=TensorProto.FLOAT),
    ]
    inputs = [_info("x", TensorProto.FLOAT, [2]), _info("words", TensorProto.STRING, [2])]
    outputs = [_info("y", TensorProto.STRING, [2]), _info("number", TensorProto.FLOAT, [2])]
    onnx.save(_model(nodes, inputs, outputs), tmp_path / "m.onnx")
    with tap.record(tmp_path / "m.onnx", tmp_path / "run", layers="all") as rec:
        output = rec.run(torch.tensor([1.5, 2.0]), ["3", "4.5"])
    assert output["y"].tolist() == ["1.5", "2"]
    assert output["number"].tolist() == [3.0, 4.5]
    assert any("'y' of the ONNX model is text" in note for note in rec.notes)
    assert rec.tap.lost == {"text": "it makes text"}


def test_what_torch_has_no_tensor_for_is_said(tmp_path: Path) -> None:
    cast = helper.make_node("Cast", ["x"], ["y"], "pack", to=TensorProto.INT4)
    inputs, outputs = [_info("x", TensorProto.FLOAT, [2])], [_info("y", TensorProto.INT4, [2])]
    onnx.save(_model([cast], inputs, outputs), tmp_path / "m.onnx")
    with pytest.raises(TargetError, match=r"tensor\(int4\), which torch does not have"):
        _recorded(tmp_path / "m.onnx", tmp_path / "run", torch.zeros(2))
    cast = helper.make_node("Cast", ["x"], ["y"], "unpack", to=TensorProto.FLOAT)
    inputs, outputs = [_info("x", TensorProto.INT4, [2])], [_info("y", TensorProto.FLOAT, [2])]
    onnx.save(_model([cast], inputs, outputs), tmp_path / "n.onnx")
    with pytest.raises(OptionError, match="the model takes int4, which torch does not have"):
        _recorded(tmp_path / "n.onnx", tmp_path / "none", torch.zeros(2))


def test_a_long_error_is_not_cut_before_the_reason(tmp_path: Path) -> None:
    """The place in C++ goes, the reason stays; of a very long one the end stays."""
    from tensortap.taps.programs.onnx.session import reason

    node = helper.make_node("Relu", ["x"], ["y"], "n" * 900)
    model = _model([node], [_info("x", 1, [2])], [_info("y", 1, [2])])
    model.ir_version = 99
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(TargetError, match=r"Unsupported model IR version: 99") as told:
        _recorded(tmp_path / "m.onnx", tmp_path / "run", torch.zeros(2))
    assert "onnxruntime_src" not in str(told.value) and "onnx::ModelProto&&" not in str(told.value)
    text = reason(RuntimeError("[ONNXRuntimeError] : 1 : FAIL : " + "x" * 5000 + " because of y"))
    assert text.startswith("FAIL: xxx") and text.endswith("because of y") and len(text) < 1100
    text = reason(RuntimeError("/onnxruntime_src/a/b.h:46 void onnxruntime::f(const x<y()>&) Why"))
    assert text == "Why"


def test_a_session_returns_what_it_returns_without_a_recording(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["small"], "small", to=TensorProto.FLOAT8E4M3FN),
        helper.make_node("SplitToSequence", ["x"], ["many"], "many", axis=0),
        helper.make_node("Abs", ["n"], ["size"], "size"),
    ]
    many = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    inputs = [_info("x", TensorProto.FLOAT, [2, 3]), _info("n", TensorProto.UINT64, [])]
    outputs = [
        _info("small", TensorProto.FLOAT8E4M3FN, [2, 3]),
        helper.make_value_info("many", many),
        _info("size", TensorProto.UINT64, []),
    ]
    model = _model(nodes, inputs, outputs).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    feed = {"x": np.array([[1, -2, 3], [4, 5, 6]], np.float32), "n": np.array(7, np.uint64)}
    before = session.run(None, feed)
    with tap.record(session, tmp_path / "run", layers="all"):
        during = session.run(None, feed)
    assert [type(value) for value in during] == [type(value) for value in before]
    assert during[0].dtype == before[0].dtype and during[2].dtype == before[2].dtype
    assert all(_same(one, other) for one, other in zip(before, during, strict=True))
    assert tap.open(tmp_path / "run")["size"].output.dtype == torch.uint64
