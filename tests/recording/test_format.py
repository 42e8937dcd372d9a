"""The format on disk: readable with nothing but safetensors, lazy, deduplicated, of every dtype."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import tensortap as tap
from tensortap.recording import Manifest, Row, Writer
from tensortap.recording.schema import FORMAT, HEADER_KEY

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
]


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return b""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def write(path: Path, tensors: dict[str, torch.Tensor], **options) -> Writer:
    writer = Writer(str(path), Manifest(), **options)
    for order, (name, tensor) in enumerate(tensors.items()):
        writer.add(Row(name, "output", order=order), tensor)
    writer.close()
    assert writer.failure is None
    return writer


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(), (0,), (1,), (3, 5), (2, 0, 4), (7, 11, 13)]
    tensors = {str(shape): sample(dtype, shape) for shape in shapes}
    write(tmp_path / "r", tensors)
    run = tap.open(tmp_path / "r")
    for name, tensor in tensors.items():
        back = run[name].output
        assert back.dtype == dtype
        assert back.shape == tensor.shape
        assert bits(back) == bits(tensor)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=4), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_any_sequence_of_tensors_comes_back(tmp_path_factory, plan) -> None:
    path = tmp_path_factory.mktemp("r")
    tensors = {}
    for index, (dtype, shape, flip) in enumerate(plan):
        tensor = sample(dtype, tuple(shape))
        tensors[str(index)] = tensor.transpose(0, -1) if flip and shape else tensor
    write(path / "r", tensors)
    run = tap.open(path / "r")
    assert run.layers == list(tensors)
    for name, tensor in tensors.items():
        assert bits(run[name].output) == bits(tensor)
        assert run[name].output.shape == tensor.shape


def test_safetensors_alone_reads_a_segment(tmp_path) -> None:
    write(tmp_path / "r", {"a": torch.ones(3), "b": torch.arange(5)})
    (segment,) = (tmp_path / "r").glob("segment-r000-*.safetensors")
    with safe_open(segment, "pt") as file:
        document = json.loads(file.metadata()[HEADER_KEY])
        row = dict(zip(document["row_fields"], document["rows"][1], strict=True))
        assert document["sites"][row["site"]]["layer"] == "b"
        assert torch.equal(file.get_tensor(f"r000.{row['tensor']:08d}"), torch.arange(5))
        columns = document["summary_columns"]
        means = file.get_tensor("summaries")[:, columns.index("mean")]
        assert means.tolist() == [1.0, 2.0]


def test_the_manifest_says_what_it_should(net, ids, recorded) -> None:
    manifest = json.loads(Path(recorded(net, ids).path, "recording.json").read_text())
    assert manifest["format"] == FORMAT
    assert manifest["status"] == "complete"
    assert manifest["torch"] == torch.__version__
    assert manifest["target"]["class"].endswith("Net")
    assert manifest["target"]["parameters"] == sum(p.numel() for p in net.parameters())
    assert manifest["structure"]["blocks"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert manifest["structure"]["embedding"] == "embedding"
    assert manifest["structure"]["final_norm"] == "final_norm"
    assert manifest["inputs"]["digest"]
    assert manifest["inputs"]["input_ids"] == ids.tolist()


def test_equal_inputs_have_equal_digests_and_others_not(net, ids, recorded) -> None:
    first, again, other = (recorded(net, x).manifest.inputs["digest"] for x in (ids, ids, ids + 1))
    assert first == again != other


def test_the_manifest_and_the_schema_agree(net, ids, recorded) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(Path("docs/recording.schema.json").read_text())
    run = recorded(net, ids, inputs=True)
    jsonschema.validate(json.loads(Path(run.path, "recording.json").read_text()), schema)
    with safe_open(next(Path(run.path).glob("*.safetensors")), "pt") as file:
        document = json.loads(file.metadata()[HEADER_KEY])
    segment = {**schema["$defs"]["segment"], "$defs": schema["$defs"]}
    jsonschema.validate(document, segment)


def test_content_seen_again_is_stored_once(tmp_path) -> None:
    tensor = torch.randn(1000)
    writer = write(tmp_path / "r", {str(i): tensor.clone() for i in range(50)})
    run = tap.open(tmp_path / "r")
    assert len({record.tensor_id for record in run.records}) == 1
    assert run.nbytes < 10 * tensor.numel() * 4 + 300_000
    assert writer.failure is None


def test_equal_bytes_of_another_dtype_or_shape_are_kept_apart(tmp_path) -> None:
    zero = torch.zeros(8)
    write(tmp_path / "r", {"f": zero, "i": zero.view(torch.int32), "s": zero.view(2, 4)})
    run = tap.open(tmp_path / "r")
    assert run["i"].output.dtype == torch.int32
    assert run["s"].output.shape == (2, 4)
    assert run["f"].output.shape == (8,)


def test_a_segment_is_sealed_a_second_after_its_first_record(tmp_path) -> None:
    writer = Writer(str(tmp_path / "r"), Manifest(), seal_after=0.2)
    writer.add(Row("a", "output"), torch.ones(3))
    deadline = time.monotonic() + 10
    while not list((tmp_path / "r").glob("segment-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    run = tap.open(tmp_path / "r")
    assert run.status == "recording"
    assert any("still being written" in note for note in run.notes)
    assert torch.equal(run["a"].output, torch.ones(3))
    writer.close()


def test_small_segments_are_merged_and_refer_across_segments(tmp_path) -> None:
    writer = Writer(str(tmp_path / "r"), Manifest(), histograms=True)
    tensors = [torch.randn(100) for _ in range(4)]
    for batch in range(4):
        for order, tensor in enumerate([tensors[0], tensors[batch]]):
            writer.add(Row(f"l{order}", "output", batch=batch, order=2 * batch + order), tensor)
        writer.flush()
    assert len(list((tmp_path / "r").glob("segment-*"))) == 4
    before = tap.open(tmp_path / "r")
    unmerged = [(r.layer, r.batch, r.tensor(), r.summary) for r in before.records]
    writer.close()
    assert len(list((tmp_path / "r").glob("segment-*"))) == 1
    after = tap.open(tmp_path / "r")
    for record, (layer, batch, tensor, summary) in zip(after.records, unmerged, strict=True):
        assert (record.layer, record.batch) == (layer, batch)
        assert torch.equal(record.tensor(), tensor)
        assert record.summary.to_dict() == summary.to_dict()
        assert record.summary.histogram is not None


def test_a_crash_between_merging_and_removing_shows_no_row_twice(tmp_path) -> None:
    writer = Writer(str(tmp_path / "r"), Manifest())
    for order in range(3):
        writer.add(Row(f"l{order}", "output", order=order), torch.randn(10))
        writer.flush()
    copies = {p: p.read_bytes() for p in (tmp_path / "r").glob("segment-*")}
    writer.close()
    for path, content in copies.items():
        if not path.exists():
            path.write_bytes(content)
    assert len(list((tmp_path / "r").glob("segment-*"))) == 3
    assert len(tap.open(tmp_path / "r").records) == 3


def test_many_rows_spread_over_segments_when_the_header_is_full(tmp_path) -> None:
    tensors = {f"a.rather.long.layer.name.{i}.{'x' * 50}": torch.tensor([i]) for i in range(3000)}
    write(tmp_path / "r", tensors)
    run = tap.open(tmp_path / "r")
    assert run.layers == list(tensors)
    assert all(run[name].output.item() == i for i, name in enumerate(tensors))


def test_opening_reads_no_tensor(tmp_path) -> None:
    write(tmp_path / "r", {str(i): torch.randn(1 << 20) for i in range(16)})
    start = time.perf_counter()
    run = tap.open(tmp_path / "r")
    tensor = run["7"].output
    assert time.perf_counter() - start < 0.25, "64 MB were read to open one layer"
    assert tensor.shape == (1 << 20,)


def test_writing_to_a_loaded_tensor_does_not_reach_the_disk(tmp_path) -> None:
    write(tmp_path / "r", {"a": torch.ones(10)})
    tap.open(tmp_path / "r")["a"].output.zero_()
    assert torch.equal(tap.open(tmp_path / "r")["a"].output, torch.ones(10))


def test_summaries_alone(net, ids, recorded) -> None:
    full = recorded(net, ids, inputs=True, histograms=True)
    lean = recorded(net, ids, inputs=True, histograms=True, keep="summary")
    assert lean.layers == full.layers
    for a, b in zip(lean.records, full.records, strict=True):
        assert a.summary.to_dict() == b.summary.to_dict()
        assert not a.stored
        with pytest.raises(tap.TapError, match="summary alone"):
            a.tensor()


def test_a_recording_in_a_notebook_is_a_table_with_everything_escaped(tmp_path) -> None:
    write(tmp_path / "r", {"<b>bold</b>": torch.tensor([1.0, float("nan")])})
    html = tap.open(tmp_path / "r")._repr_html_()
    assert "<td>&lt;b&gt;bold&lt;/b&gt;</td>" in html and "<b>" not in html
    assert "<td>1</td><td>0</td></tr>" in html


def test_a_record_as_json(tmp_path) -> None:
    write(tmp_path / "r", {"a": torch.tensor([1.0, 3.0])})
    data = json.loads(json.dumps(tap.open(tmp_path / "r").records[0].to_dict()))
    assert (data["layer"], data["shape"], data["summary"]["mean"]) == ("a", [2], 2.0)


def test_a_remote_folder_works_like_a_local_one(net, ids) -> None:
    path = f"memory://tests/{os.getpid()}/{time.monotonic_ns()}"
    with torch.no_grad(), tap.record(net, path, layers="all", inputs=True) as rec:
        net(ids)
    assert rec.failure is None
    run = tap.open(path)
    assert torch.equal(run["head"].input, run["final_norm"].output)
    with pytest.raises(tap.TapError, match="already holds"):
        tap.record(net, path)


def test_aliases_and_near_names(tmp_path) -> None:
    writer = Writer(str(tmp_path / "r"), Manifest())
    writer.add(Row("model.layers.3", "output", alias="attention"), torch.ones(2))
    writer.close()
    run = tap.open(tmp_path / "r")
    assert torch.equal(run["attention"].output, torch.ones(2))
    with pytest.raises(tap.TapError, match=r"no layer 'model\.layer\.3'.*'model\.layers\.3'"):
        run["model.layer.3"]
    with pytest.raises(tap.TapError, match=r"no input in this recording, only: output"):
        _ = run["attention"].input
