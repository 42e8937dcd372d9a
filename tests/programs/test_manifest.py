"""The manifest of an instrumented model: written, read again, and never believed blindly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas import validate
from tensortap.errors import DamagedError, OptionError, TapError, TargetError
from tensortap.recording.schema import Structure
from tensortap.taps.programs.opaque.manifest import (
    Entry,
    Manifest,
    OutputLeaf,
    Part,
    digest,
    is_manifest,
    manifest_beside,
    manifest_path,
)

MANIFEST = Manifest(
    model="nets.Net",
    entries=(
        Entry("blocks.0", "Block", "", 0, (2, None, 8), "float32"),
        Entry("blocks.1", "Block", "[0]", 0, (2, 6), "bfloat16"),
        Entry("blocks.1", "Block", "['ä']", 0, (), "int64"),
        Entry("blocks.0", "Block", "", 1, (2, None, 8), "float32"),
    ),
    output=(OutputLeaf(".loss", False), OutputLeaf(".logits")),
    inputs=("input_ids",),
    notes=("A note.",),
)


def saved(folder: Path, manifest: Manifest = MANIFEST, name: str = "model.taps.json") -> Path:
    return manifest.save(folder / name)


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    whole = replace(
        MANIFEST,
        parts=(Part("a.0.pt", ("blocks.0",), "00"), Part("a.1.pt", ("blocks.1",), "11")),
        plain="plain.pt",
        structure=Structure(("blocks.0", "blocks.1"), "tokens", None),
    )
    for manifest in (MANIFEST, whole):
        path = saved(tmp_path, manifest)
        assert Manifest.load(path) == manifest
        validate(json.loads(path.read_text()), "manifest")
    assert [item.name for item in tmp_path.iterdir()] == ["model.taps.json"]


def test_a_part_of_it_has_the_entries_of_its_layers_in_their_order() -> None:
    part = MANIFEST.of(["blocks.0"])
    assert [(entry.layer, entry.call) for entry in part.entries] == [
        ("blocks.0", 0),
        ("blocks.0", 1),
    ]
    assert MANIFEST.layers == ("blocks.0", "blocks.1")
    assert part.output == MANIFEST.output


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "other"}, 'has no "format"'),
        ({"version": "1"}, "'version' is '1', expected a whole number"),
        ({"version": True}, "'version' is True"),
        ({"model": 3}, "'model' is 3, expected text"),
        ({"entries": {}}, "'entries' is no list"),
        ({"entries": [3]}, "an item of 'entries' is no object"),
        ({"inputs": [None]}, "'inputs' is None, expected text"),
        ({"output": [{"leaf": "", "tensor": 1}]}, "expected true or false"),
        ({"plain": "../secret.pt"}, "the name of a file beside it"),
        ({"plain": "C:x"}, "the name of a file beside it"),
        (
            {"parts": [{"file": "/etc/passwd", "layers": [], "digest": ""}]},
            "the name of a file beside it",
        ),
        (
            {"parts": [{"file": "a.pt", "layers": ["blocks.0"], "digest": ""}]},
            "do not hold each of its layers once",
        ),
        ({"model": "x" * 5000}, "expected text"),
        ({"notes": ["\ud800"]}, "holds half a character"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "model.taps.json"
    path.write_text(json.dumps({**MANIFEST.to_dict(), **change}))
    with pytest.raises(TargetError) as caught:
        Manifest.load(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shape": [2, -1]}, "the shape"),
        ({"shape": [True]}, "the shape"),
        ({"shape": [1] * 65}, "'shape' is no list of at most 64"),
        ({"port": "input"}, "the port 'input'"),
        ({"call": 1.5}, "'call' is 1.5"),
        ({"dtype": "float7"}, "the dtype 'float7'"),
        ({"dtype": "__class__"}, "the dtype '__class__'"),
        ({"layer": None}, "'layer' is None"),
    ],
)
def test_an_entry_that_is_wrong_is_named(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    data = MANIFEST.to_dict()
    entries = list(data["entries"])
    data["entries"] = [entries[0], {**entries[1], **change}]
    path = tmp_path / "model.taps.json"
    path.write_text(json.dumps(data))
    with pytest.raises((TargetError, DamagedError)) as caught:
        Manifest.load(path)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_what_is_no_manifest_is_a_sentence(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "model.taps.json"
    path.write_bytes(text)
    with pytest.raises(TargetError, match="cannot be used"):
        Manifest.load(path)


def test_missing_large_and_newer_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="cannot be read: No such file"):
        Manifest.load(tmp_path / "none.taps.json")
    path = saved(tmp_path, replace(MANIFEST, version=2))
    with pytest.raises(OptionError, match=r"version 2; .*up to version 1"):
        Manifest.load(path)
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)  # a hole: it takes no room
    with pytest.raises(TapError, match="more than the 67108864"):
        Manifest.load(path)


def test_calls_out_of_order_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, replace(MANIFEST, entries=MANIFEST.entries[::-1]))
    with pytest.raises(TargetError, match=r"the calls of the layer 'blocks\.0' are out of order"):
        Manifest.load(path)


def test_it_lies_beside_its_artefact(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert manifest_path(tmp_path / "model.pt") == path
    assert manifest_beside(tmp_path / "model.onnx") == path
    assert manifest_beside(tmp_path / "model.12.pt") == path
    assert manifest_beside(tmp_path / "model.x.pt") is None
    assert manifest_beside(tmp_path / "other.pt") is None
    assert is_manifest(path)
    assert not is_manifest(tmp_path / "model.json")


def test_one_that_names_other_artefacts_is_not_its_own(tmp_path: Path) -> None:
    part = Part("model.onnx", MANIFEST.layers, "00")
    path = saved(tmp_path, replace(MANIFEST, parts=(part,)))
    assert manifest_beside(tmp_path / "model.onnx") == path
    assert manifest_beside(tmp_path / "model.pt") is None


def test_the_digest_sees_size_head_and_tail(tmp_path: Path) -> None:
    path = tmp_path / "a"
    found = set()
    for text in (b"", b"a", b"ab", b"a" + bytes(3 << 20), b"a" + bytes(3 << 20) + b"b"):
        path.write_bytes(text)
        found.add(digest(path))
    assert len(found) == 5
