"""An option that a model has no use for is refused, wherever the model comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.errors import OptionError
from tensortap.taps.programs.base import Options
from tensortap.taps.programs.kinds import kinds, open_program
from tensortap.taps.programs.using import check_used, only_used

OPTIONS: dict[str, dict[str, Any]] = {
    "weights": {"weights": Path("w.safetensors")},
    "names_from": {"names_from": Path("float.onnx")},
    "custom_ops": {"custom_ops": (Path("ops.so"),)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files whose kind is told by their names; they are refused before they are opened."""
    folder = tmp_path_factory.mktemp("used")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    torch.jit.trace(model, torch.ones(1, 4)).save(folder / "model.pt")  # type: ignore[no-untyped-call]
    torch.export.save(torch.export.export(model, (torch.ones(1, 4),)), folder / "model.pt2")
    for name in ("model.onnx", "model.xml"):
        (folder / name).write_text("<net version='11'><layers/></net>")
    return folder


@pytest.mark.parametrize(
    ("name", "runtime", "refused"),
    [
        ("model.pt", None, ("names_from", "custom_ops")),
        ("model.pt", "ops", ("weights", "names_from", "custom_ops")),
        ("model.pt2", None, ("weights", "custom_ops")),
        ("model.pt2", "aoti", ("weights", "custom_ops")),
        ("model.xml", "openvino", ("weights", "custom_ops")),
    ],
)
def test_files(folder: Path, name: str, runtime: str | None, refused: tuple[str, ...]) -> None:
    for option in refused:
        flag = f"--{option.replace('_', '-')}"
        with pytest.raises(OptionError, match=f"^{flag} means nothing to .*Leave it out"):
            open_program(folder / name, Options(runtime=runtime, **OPTIONS[option]))


def test_every_kind_says_what_it_uses() -> None:
    for kind in kinds():
        assert kind.uses <= set(OPTIONS), kind.name
    used = set().union(*(kind.uses for kind in kinds()))
    assert used == set(OPTIONS)


def test_live_objects(folder: Path, tmp_path: Path) -> None:
    model = torch.jit.load(folder / "model.pt")  # type: ignore[no-untyped-call]
    with pytest.raises(OptionError, match=r"--custom-ops means nothing.*torch\.ops\.load_library"):
        tap.record(model, tmp_path / "run", custom_ops=["ops.so"])
    with pytest.raises(OptionError, match="--names-from means nothing to what can only be called"):
        tap.record(lambda x: x, tmp_path / "run", names_from="float.onnx")


def test_an_object_that_holds_some(folder: Path, tmp_path: Path) -> None:
    class Holder:
        def __init__(self) -> None:
            self.script = torch.jit.load(folder / "model.pt")  # type: ignore[no-untyped-call]
            self.exported = torch.export.load(folder / "model.pt2").module()

    with pytest.raises(OptionError, match="--custom-ops means nothing to any of the compiled"):
        tap.record(Holder(), tmp_path / "run", layers="all", custom_ops=["ops.so"])
    recorder = tap.record(Holder(), tmp_path / "run", layers="all", names_from=folder / "model.pt2")
    assert {"script.0", "exported.0"} <= set(recorder.layers)  # one uses it, the other need not


def test_weights_that_were_not_needed(folder: Path) -> None:
    program = open_program(folder / "model.pt", Options(**OPTIONS["weights"]))
    assert any("'w.safetensors' was not needed" in note for note in program.notes)


def test_a_manifest_has_the_names(folder: Path) -> None:
    for option in ("weights", "names_from"):
        options = Options(manifest=folder / "model.taps.json", **OPTIONS[option])
        with pytest.raises(OptionError, match="means nothing to an instrumented model"):
            open_program(folder / "model.pt", options)


def test_the_sentence_says_what_helps() -> None:
    with pytest.raises(OptionError, match=r"a model\. It is told more by --weights\. Leave it out"):
        check_used(Options(**OPTIONS["names_from"]), {"weights"}, "a model")
    check_used(Options(**OPTIONS["names_from"]), {"names_from"}, "a model")
    every = Options(**{key: value for given in OPTIONS.values() for key, value in given.items()})
    assert only_used(every, {"custom_ops"}) == Options(**OPTIONS["custom_ops"])
