"""What a layout holds comes back bit for bit, in every dtype."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tensortap.errors import LayoutError, OptionError
from tensortap.recording import Manifest, Row, Structure, Writer
from tensortap.recording import open as open_recording
from tensortap.recording.layouts import ExportOptions, Layout, get, import_tree, register
from tensortap.recording.layouts import names as layout_names
from tensortap.recording.layouts.arrays import from_numpy, numpy_twin, to_numpy

STRUCTURE = Structure(("model.layers.0", "model.layers.1"), "model.embed", "model.norm")
NAMES = {
    "model.embed": "embedding",
    "model.layers.0": "layer_0",
    "model.layers.1": "layer_1",
    "model.norm": "final_norm",
}
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def any_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Values of every kind, NaNs with odd payloads among them."""
    count = int(np.prod(shape))
    raw = torch.from_numpy(
        np.random.default_rng(3).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    )
    return raw.bool().view(shape) if dtype == torch.bool else raw.view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def make(
    path: Path, *, dtype: torch.dtype = torch.float32, batches: int = 1, **manifest: object
) -> Path:
    settings = {"structure": STRUCTURE, "mode": "fp32", **manifest}
    writer = Writer(str(path), Manifest(**settings))  # type: ignore[arg-type]
    order = 0
    for batch in range(batches):
        for layer in NAMES:
            for port in ("input", "output"):
                tensor = (
                    any_bits(dtype, (batch + 1, 16, 8))
                    if batch == 0
                    else any_bits(dtype, (2, 16, 8))
                )
                row = Row(layer, port, "[0]", type="Block", batch=batch, order=order)  # type: ignore[arg-type]
                writer.add(row, tensor)
                order += 1
    writer.close()
    assert writer.failure is None
    return path


def export(source: Path, layout: str, out: Path, **options: object):
    return get(layout).export(open_recording(source), out, ExportOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_keep_every_bit(dtype: torch.dtype) -> None:
    tensor = any_bits(dtype, (16, 16))
    array = to_numpy(tensor)
    assert str(array.dtype) == numpy_twin(dtype)
    assert same(from_numpy(array, dtype, (16, 16), "here"), tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_arrays_hold_the_true_values(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.5, -2.0, 0.0, -0.0, 0.25]).to(dtype)
    assert to_numpy(tensor).tolist() == tensor.to(torch.float32).tolist()


@pytest.mark.parametrize("layout", ["pt", "npy", "npz"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    source = make(tmp_path / "run", dtype=dtype)
    export(source, layout, tmp_path / "out")
    (result,) = import_tree(tmp_path / "out", str(tmp_path / "again"))
    assert result.layout == layout
    before, after = open_recording(source), open_recording(result.path)
    assert after.status == "complete"
    assert after.manifest.structure == STRUCTURE
    held = {"pt": list(NAMES), "npy": list(STRUCTURE.blocks), "npz": ["model.layers.0"]}[layout]
    assert after.layers == held
    for name in held:
        assert same(after[name].output, before[name].output)
        assert after[name].type == "Block"
        assert after[name].first("output").leaf == "[0]"
    if layout == "npz":
        assert same(after[held[0]].input, before[held[0]].input)


def test_pt_tree_is_the_documents(tmp_path: Path) -> None:
    source = make(
        tmp_path / "run",
        inputs={"prompt": ["hello"], "input_ids": [[1, 2, 3]]},
        target={"class": "demo.Model", "config": {"hidden": 8, "kind": {"a": [1, None]}}},
    )
    result = export(source, "pt", tmp_path / "out")
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == sorted([*(f"{n}_output.pt" for n in NAMES.values()), "metadata.pt"])
    assert sorted(result.files) == names
    tensor = torch.load(tmp_path / "out" / "layer_0_output.pt")
    assert type(tensor) is torch.Tensor
    metadata = torch.load(tmp_path / "out" / "metadata.pt")
    assert set(metadata) == {"prompt", "input_ids", "statistics", "config"}
    assert metadata["prompt"] == "hello"
    assert metadata["input_ids"].tolist() == [[1, 2, 3]]
    assert metadata["config"] == {"hidden": 8, "kind": {"a": [1, None]}}
    assert list(metadata["statistics"]) == list(NAMES.values())
    stat = metadata["statistics"]["layer_0"]
    assert stat["shape"] == [1, 16, 8]
    assert stat["layer"] == "model.layers.0"
    assert {"mean", "std", "min", "max", "has_nan", "has_inf"} <= set(stat)
    assert stat["has_nan"] == bool(tensor.isnan().any())
    finite = tensor[tensor.isfinite()].double()
    assert stat["max"] == float(finite.max())


def test_pt_file_holds_its_own_bytes_alone(tmp_path: Path) -> None:
    source = make(tmp_path / "run")
    export(source, "pt", tmp_path / "out")
    assert (tmp_path / "out" / "layer_0_output.pt").stat().st_size < 16 * 8 * 4 + 3000


def test_what_a_layout_cannot_hold_is_said(tmp_path: Path) -> None:
    source = make(tmp_path / "run", batches=3)
    said = {item.what: item for item in export(source, "pt", tmp_path / "a").left_out}
    assert said["inputs"].records == 12
    assert said["later batches"].records == 8
    assert said["later batches"].layers == 4
    said = {item.what: item for item in export(source, "npy", tmp_path / "b").left_out}
    assert said["other layers"].layers == 2
    assert "later batches" not in said
    assert str(said["other layers"]) == "other layers: 6 records of 2 layers"


def test_each_reason_has_its_name(tmp_path: Path) -> None:
    writer = Writer(str(tmp_path / "run"), Manifest(mode="m"))
    rows = [
        Row("a", "output", "[0]"),
        Row("a", "output", "[1]"),
        Row("a", "output", "[0]", call=1),
        Row("a", "output", "[0]", batch=1),
        Row("a", "grad_output", "[0]"),
        Row("a", "input"),
    ]
    for order, row in enumerate(rows):
        writer.add(replace(row, order=order), torch.full((2,), float(order)))
    writer.close()
    result = export(tmp_path / "run", "pt", tmp_path / "out")
    said = {item.what: item.records for item in result.left_out}
    assert said == {
        "other leaves": 1,
        "later calls": 1,
        "later batches": 1,
        "gradients": 1,
        "inputs": 1,
    }


@pytest.mark.parametrize("layout", ["npy", "npz"])
def test_batches_are_joined_and_cut_again(tmp_path: Path, layout: str) -> None:
    source = make(tmp_path / "run", batches=3, dtype=torch.bfloat16)
    export(source, layout, tmp_path / "out")
    if layout == "npy":
        array = np.load(tmp_path / "out" / "mode_fp32_layer_0.npy")
    else:
        array = np.load(tmp_path / "out" / "first_layer_io_all_modes.npz")["mode_fp32_output"]
    assert array.shape == (5, 16, 8)
    assert array.dtype == np.float32
    import_tree(tmp_path / "out", str(tmp_path / "again"))
    before, after = open_recording(source), open_recording(tmp_path / "again")
    assert after.steps == [(0, 0), (0, 1), (0, 2)]
    pairs = zip(
        before["model.layers.0"].port("output"),
        after["model.layers.0"].port("output"),
        strict=True,
    )
    assert all(same(a.tensor(), b.tensor()) for a, b in pairs)


def test_npz_collects_modes_and_import_parts_them(tmp_path: Path) -> None:
    out = tmp_path / "io.npz"
    for mode in ("fp32", "2-1"):
        export(make(tmp_path / mode, mode=mode), "npz", out)
    assert sorted(np.load(out).files) == [
        "mode_2-1_input",
        "mode_2-1_output",
        "mode_fp32_input",
        "mode_fp32_output",
    ]
    stats = json.loads((tmp_path / "io_stats.json").read_text())
    assert set(stats) == {"timestamp", "model", "pretrained_dir", "seq_len", "modes"}
    assert stats["seq_len"] == 16
    assert {"shape", "first_10", "mean", "std", "min", "max"} <= set(stats["modes"]["2-1"]["input"])
    with pytest.raises(LayoutError, match="already holds the mode 'fp32'"):
        export(tmp_path / "fp32", "npz", out)
    export(tmp_path / "fp32", "npz", out, overwrite=True)
    results = import_tree(out, str(tmp_path / "all"))
    assert [r.path for r in results] == [str(tmp_path / "all" / m) for m in ("2-1", "fp32")]
    (one,) = import_tree(out, str(tmp_path / "one"), mode="2-1")
    assert one.mode == "2-1"
    with pytest.raises(OptionError, match=r"no mode 'int8'.*2-1, fp32"):
        import_tree(out, str(tmp_path / "none"), mode="int8")


@pytest.mark.parametrize("layout", ["npy", "npz"])
def test_what_is_told_goes_to_the_head_of_the_statistics(tmp_path: Path, layout: str) -> None:
    about = {"model": "mine", "weights": "seed 0", "pretrained_dir": "here", "limit": float("inf")}
    export(make(tmp_path / "run"), layout, tmp_path / "out", about=about)
    (path,) = (tmp_path / "out").glob("*_stats.json")
    stats = json.loads(path.read_text())
    assert [stats[key] for key in about] == ["mine", "seed 0", "here", None]
    (again,) = import_tree(tmp_path / "out", str(tmp_path / "again"))
    assert again.mode == "fp32"


def test_foreign_pt_tree(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for i, name in enumerate(
        ["layer_10", "layer_2", "final_norm", "embedding", "extra", "layer_0"]
    ):
        torch.save(torch.full((2, 3), float(i)), tree / f"{name}_output.pt")
    import_tree(tree, str(tmp_path / "run"))
    run = open_recording(tmp_path / "run")
    assert run.layers == ["embedding", "layer_0", "layer_2", "layer_10", "final_norm", "extra"]
    assert run.manifest.structure.embedding == "embedding"
    assert run.manifest.structure.final_norm == "final_norm"
    assert run.manifest.structure.blocks == tuple(f"layer_{i}" for i in range(11))
    assert run["layer_2"].output.tolist() == [[1.0] * 3] * 2
    export(tmp_path / "run", "pt", tmp_path / "back")
    assert {p.name for p in tree.iterdir()} < {p.name for p in (tmp_path / "back").iterdir()}
    import_tree(tree, str(tmp_path / "some"), only="layer_*")
    assert open_recording(tmp_path / "some").layers == ["layer_0", "layer_2", "layer_10"]
    with pytest.raises(LayoutError, match=r"is called 'block_\*'. It holds embedding, layer_0"):
        import_tree(tree, str(tmp_path / "none"), only="block_*")


def test_foreign_npy_tree_keeps_indices(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for mode in ("fp32", "2-1"):
        for i in (0, 23):
            values = np.asfortranarray(np.arange(6.0, dtype=">f8").reshape(2, 3)) + i
            np.save(tree / f"mode_{mode}_layer_{i}.npy", values)
    results = import_tree(tree, str(tmp_path / "runs"))
    assert sorted(r.mode or "" for r in results) == ["2-1", "fp32"]
    run = open_recording(tmp_path / "runs" / "fp32")
    assert run.layers == ["layer_0", "layer_23"]
    assert run["layer_23"].output.tolist() == [[23, 24, 25], [26, 27, 28]]
    export(tmp_path / "runs" / "fp32", "npy", tmp_path / "back")
    assert (tmp_path / "back" / "mode_fp32_layer_23.npy").exists()


def test_foreign_npz(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    np.savez_compressed(tmp_path / "x.npz", mode_0_input=values, mode_0_output=values * 2)
    import_tree(tmp_path / "x.npz", str(tmp_path / "run"))
    run = open_recording(tmp_path / "run")
    assert run.layers == ["layer_0"]
    assert run.manifest.mode == "0"
    assert run["layer_0"].input.tolist() == values.tolist()
    assert run["layer_0"].output.tolist() == (values * 2).tolist()


def test_subset_of_blocks_keeps_its_indices(tmp_path: Path) -> None:
    blocks = tuple(f"model.layers.{i}" for i in range(12))
    writer = Writer(str(tmp_path / "run"), Manifest(structure=Structure(blocks)))
    for order, i in enumerate((0, 11)):
        writer.add(Row(blocks[i], "output", order=order), torch.ones(2))
    writer.close()
    export(tmp_path / "run", "pt", tmp_path / "out")
    assert (tmp_path / "out" / "layer_11_output.pt").exists()
    import_tree(tmp_path / "out", str(tmp_path / "again"))
    assert open_recording(tmp_path / "again").manifest.structure.blocks == blocks


@pytest.mark.parametrize("layout", ["pt", "npy", "npz"])
@pytest.mark.parametrize("shape", [(), (0, 4), (3,)])
def test_odd_shapes(tmp_path: Path, layout: str, shape: tuple[int, ...]) -> None:
    writer = Writer(str(tmp_path / "run"), Manifest(mode="m"))
    tensor = torch.full(shape, 2.5, dtype=torch.bfloat16)
    for batch in range(2):
        writer.add(Row("", "output", batch=batch, order=batch), tensor)
    writer.close()
    export(tmp_path / "run", layout, tmp_path / "out")
    import_tree(tmp_path / "out", str(tmp_path / "again"))
    assert same(open_recording(tmp_path / "again")[""].output, tensor)


def test_overwrite_leaves_no_old_layer(tmp_path: Path) -> None:
    source = make(tmp_path / "run")
    out = tmp_path / "out"
    export(source, "pt", out)
    (out / "layer_99_output.pt").write_bytes(b"old")
    (out / "mine.txt").write_text("keep")
    with pytest.raises(LayoutError, match=r"already holds a tree.*--overwrite"):
        export(source, "pt", out)
    export(source, "pt", out, overwrite=True)
    assert not (out / "layer_99_output.pt").exists()
    assert (out / "mine.txt").exists()


def test_others_can_add_a_layout() -> None:
    class Mine:
        name = "mine"

        def detect(self, source: Path) -> bool:
            return False

    mine: Layout = Mine()  # type: ignore[assignment]
    register(mine)
    assert get("mine") is mine
    assert {"mine", "npy", "npz", "pt"} <= set(layout_names())
    with pytest.raises(LayoutError, match=r"no layout 'zip'.*npy, npz, pt"):
        get("zip")
