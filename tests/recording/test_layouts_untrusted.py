"""Trees and names from elsewhere: nothing runs, nothing leaves its folder, all have a sentence."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tensortap.errors import LayoutError, TapError
from tensortap.recording import Manifest, Row, Structure, Writer
from tensortap.recording import open as open_recording
from tensortap.recording.layouts import ExportOptions, get, import_tree
from tensortap.recording.layouts.files import safe_name


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, (f"touch {self.marker}",))


def tree(path: Path) -> Path:
    path.mkdir()
    torch.save(torch.ones(2, 2), path / "embedding_output.pt")
    return path


def refused(source: Path, tmp_path: Path) -> str:
    """The sentence of an import that fails, which leaves no recording behind."""
    with pytest.raises(TapError) as caught:
        import_tree(source, str(tmp_path / "never"))
    assert not (tmp_path / "never").exists()
    return str(caught.value)


@pytest.mark.parametrize("name", ["layer_0_output.pt", "metadata.pt"])
@pytest.mark.parametrize("plain_pickle", [True, False])
def test_code_in_a_pt_never_runs(tmp_path: Path, name: str, plain_pickle: bool) -> None:
    source = tree(tmp_path / "tree")
    marker = tmp_path / "was-here"
    if plain_pickle:
        (source / name).write_bytes(pickle.dumps(Evil(marker)))
    else:
        torch.save(Evil(marker), source / name)
    text = refused(source, tmp_path)
    assert name in text
    assert "holds Python code; tensortap never runs code from a file" in text
    assert not marker.exists()


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"PK\x03\x04 broken", b"\x80\x02}q\x00.", b"\x80\x04\x95"]
)
def test_corrupt_pt_is_named(tmp_path: Path, content: bytes) -> None:
    source = tree(tmp_path / "tree")
    (source / "layer_0_output.pt").write_bytes(content)
    text = refused(source, tmp_path)
    assert "layer_0_output.pt" in text
    assert "corrupt" in text or "expected a bare tensor" in text


def test_truncated_pt_is_named(tmp_path: Path) -> None:
    source = tree(tmp_path / "tree")
    whole = source / "layer_0_output.pt"
    torch.save(torch.ones(1000), whole)
    whole.write_bytes(whole.read_bytes()[:2000])
    assert "layer_0_output.pt is corrupt" in refused(source, tmp_path)


def test_pt_that_is_no_tensor(tmp_path: Path) -> None:
    source = tree(tmp_path / "tree")
    torch.save({"a": torch.ones(1)}, source / "layer_0_output.pt")
    text = refused(source, tmp_path)
    assert "layer_0_output.pt holds a dict, expected a bare tensor" in text


def test_sparse_pt_has_its_sentence(tmp_path: Path) -> None:
    source = tree(tmp_path / "tree")
    torch.save(torch.eye(3).to_sparse(), source / "layer_0_output.pt")
    assert "to_dense" in refused(source, tmp_path)


@pytest.mark.parametrize("layout", ["pt", "npy"])
def test_link_out_of_the_tree(tmp_path: Path, layout: str) -> None:
    source = tree(tmp_path / "tree") if layout == "pt" else tmp_path / "tree"
    source.mkdir(exist_ok=True)
    outside = tmp_path / "secret"
    torch.save(torch.ones(1), outside)
    name = "layer_0_output.pt" if layout == "pt" else "mode_a_layer_0.npy"
    (source / name).symlink_to(outside)
    assert f"{name} leads out of its folder" in refused(source, tmp_path)


def test_npy_with_objects(tmp_path: Path) -> None:
    source = tmp_path / "tree"
    source.mkdir()
    array = np.array([Evil(tmp_path / "was-here")], dtype=object)
    np.save(source / "mode_a_layer_0.npy", array, allow_pickle=True)
    text = refused(source, tmp_path)
    assert "mode_a_layer_0.npy" in text
    assert "never unpickles" in text
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x01\x00\x10\x00{'a': __import__}",
        b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f4', 'fortran_order': False, 'shape': (10, 10), }"
        + b" " * 12
        + b"\n",
    ],
)
def test_corrupt_npy_is_named(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "tree"
    source.mkdir()
    (source / "mode_a_layer_0.npy").write_bytes(content)
    assert "mode_a_layer_0.npy" in refused(source, tmp_path)


def test_npy_of_text(tmp_path: Path) -> None:
    source = tmp_path / "tree"
    source.mkdir()
    np.save(source / "mode_a_layer_0.npy", np.array(["x"]))
    assert "which torch cannot hold" in refused(source, tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000])
def test_bad_statistics(tmp_path: Path, text: str) -> None:
    source = tmp_path / "tree"
    source.mkdir()
    np.save(source / "mode_a_layer_0.npy", np.ones(2))
    (source / "mode_a_stats.json").write_text(text)
    assert "mode_a_stats.json is corrupt" in refused(source, tmp_path)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ('{"dtype": "float32", "batches": [{"epoch": 0, "batch": 0, "shape": [9]}]}', "axis 0"),
        ('{"dtype": "float32", "batches": [{"epoch": 0}]}', "damaged"),
        ('{"dtype": "float32", "batches": [{"epoch": 0, "batch": 0, "shape": [-2]}]}', "damaged"),
        ('{"dtype": "load", "batches": [{"epoch": 0, "batch": 0, "shape": [2]}]}', "dtype 'load'"),
        ('{"dtype": "int8", "batches": [{"epoch": 0, "batch": 0, "shape": [2]}]}', "described as"),
    ],
)
def test_statistics_that_do_not_fit(tmp_path: Path, about: str, said: str) -> None:
    source = tmp_path / "tree"
    source.mkdir()
    np.save(source / "mode_a_layer_0.npy", np.ones(2, np.float32))
    (source / "mode_a_stats.json").write_text(f'{{"layers": {{"0": {about}}}}}')
    assert said in refused(source, tmp_path)


def test_corrupt_npz(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"not a zip")
    assert "x.npz is corrupt or no .npz file" in refused(tmp_path / "x.npz", tmp_path)
    with zipfile.ZipFile(tmp_path / "y.npz", "w") as archive:
        archive.writestr("mode_a_output.npy", b"\x93NUMPY broken")
    assert "mode_a_output.npy in" in refused(tmp_path / "y.npz", tmp_path)


def test_mode_that_climbs_out(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for mode in ("../../evil", "b"):
            with archive.open(f"mode_{mode}_output.npy", "w") as file:
                np.lib.format.write_array(file, np.ones(2))
    text = refused(tmp_path / "x.npz", tmp_path)
    assert "'../../evil' tries to leave its folder" in text


@pytest.mark.parametrize("layout", ["pt", "npy", "npz"])
def test_names_of_a_recording_cannot_write_outside(tmp_path: Path, layout: str) -> None:
    evil = "../../evil"
    manifest = Manifest(mode=evil, structure=Structure())
    writer = Writer(str(tmp_path / "a" / "b" / "run"), manifest)
    writer.add(Row(evil, "output"), torch.ones(2))
    writer.close()
    out = tmp_path / "a" / "b" / "out"
    with pytest.raises(LayoutError, match="tries to leave its folder"):
        get(layout).export(open_recording(tmp_path / "a" / "b" / "run"), out, ExportOptions())
    assert not list(tmp_path.glob("**/*evil*"))


def test_safe_names() -> None:
    assert safe_name("model.layers.3", "layer") == "model.layers.3"
    assert safe_name("a/b\\c:d", "layer") == "a_b_c_d"
    long = safe_name("x" * 5000, "layer")
    assert len(long) <= 200
    assert long != safe_name("x" * 5001, "layer")
    for bad in ("..", "../x", "a/../b", "/etc", ".hidden", "~root", "a\x00b", "\\\\host"):
        with pytest.raises(LayoutError, match="tries to leave its folder"):
            safe_name(bad, "layer")


def test_odd_names_come_back(tmp_path: Path) -> None:
    writer = Writer(str(tmp_path / "run"), Manifest())
    names = ["a/b", "embedding", "root", "", "x" * 3000]
    for order, name in enumerate(names):
        writer.add(Row(name, "output", order=order), torch.full((2,), float(order)))
    writer.close()
    get("pt").export(open_recording(tmp_path / "run"), tmp_path / "out", ExportOptions())
    import_tree(tmp_path / "out", str(tmp_path / "again"))
    again = open_recording(tmp_path / "again")
    assert again.layers == names
    assert [float(again[name].output[0]) for name in names] == [0, 1, 2, 3, 4]


def test_a_tensor_that_cannot_be_loaded_is_skipped(tmp_path: Path) -> None:
    for name in ("a", "b"):
        writer = Writer(str(tmp_path / name), Manifest(mode="m"), budget=4)
        writer.add(Row(f"{name}0", "output", order=0), torch.ones(4))
        writer.add(Row(f"{name}1", "output", order=1), torch.zeros(4))
        writer.close()
    recording = open_recording(tmp_path / "a")
    del recording._holders[str(recording["a1"].records[0].tensor_id)]
    for layout in ("pt", "npy"):
        result = get(layout).export(recording, tmp_path / layout, ExportOptions())
        assert [item.layer for item in result.skipped] == ["a1"]
        assert "is in none of the segments" in result.skipped[0].reason
        assert len(result.files) == 2


def test_nothing_to_import(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "There is nothing to import in" in refused(tmp_path / "empty", tmp_path)
    assert "does not exist" in refused(tmp_path / "none", tmp_path)
    writer = Writer(str(tmp_path / "run"), Manifest())
    writer.close()
    assert "already a recording" in refused(tmp_path / "run", tmp_path)


def test_ambiguous_tree_asks(tmp_path: Path) -> None:
    source = tree(tmp_path / "tree")
    np.save(source / "mode_a_layer_0.npy", np.ones(2))
    assert "--layout npy or --layout pt" in refused(source, tmp_path)


def test_unwritable_place(tmp_path: Path) -> None:
    source = tree(tmp_path / "tree")
    (tmp_path / "file").write_text("x")
    with pytest.raises(TapError, match="Cannot"):
        import_tree(source, str(tmp_path / "file" / "run"))
    import_tree(source, str(tmp_path / "run"))
    with pytest.raises(LayoutError, match="Cannot create the folder"):
        get("pt").export(
            open_recording(tmp_path / "run"), tmp_path / "file" / "out", ExportOptions()
        )
