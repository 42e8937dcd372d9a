"""AOTInductor: an exported program compiled with taps, and packages that are compiled already."""

from __future__ import annotations

import struct
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import tensortap as tap
from programs.eager_calls import compare_calls, eager_calls, run_all
from tensortap.errors import OptionError, SelectionError, TargetError
from tensortap.taps.programs.aoti import KIND, AotiProgram
from tensortap.taps.programs.base import Options
from tensortap.taps.programs.exported.arguments import Binder
from tensortap.taps.programs.kinds import open_program
from tensortap.taps.programs.opaque.program import OpaqueProgram


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(x))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model = Model().eval()
    path = tmp_path_factory.mktemp("aoti") / "m.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(model, (torch.randn(4, 8),), strict=False), path)
    return model, path


def test_names_are_those_of_the_export(saved: tuple[nn.Module, Path]) -> None:
    program = open_program(saved[1], Options(runtime="aoti"))
    assert isinstance(program, AotiProgram)
    assert [(place.name, place.type) for place in program.places] == [
        ("linear", "Linear"),
        ("act", "SiLU"),
        ("", "Model"),
    ]
    assert not program.exact
    assert set(program.linears()) == {"linear"}
    assert not KIND.recognises(saved[1])  # without --runtime it is an exported program
    assert open_program(saved[1]).runtime == "export"


def elf(sections: int) -> bytes:
    """The head of a library that says how long the library is."""
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 0x28, 64)
    struct.pack_into("<HH", head, 0x3A, 64, sections)
    return bytes(head)


@pytest.mark.parametrize(
    ("member", "content", "words"),
    [
        ("x.so", b"no code", "no whole library"),
        ("x.so", elf(sections=3), "no whole library"),
        ("x.so", b"", "no whole library"),
        ("x.cpp", b"int main() {}", "no compiled code"),
    ],
)
def test_a_damaged_package_is_a_sentence(
    member: str, content: bytes, words: str, tmp_path: Path
) -> None:
    """Torch would load them, and the process would be gone."""
    path = tmp_path / "bad.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"bad/data/aotinductor/model/{member}", content)
    assert KIND.recognises(path)
    with pytest.raises(TargetError, match=f"cannot be loaded.*{words}"):
        open_program(path)


def test_a_package_whose_bytes_were_changed(tmp_path: Path) -> None:
    path = tmp_path / "bad.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bad/data/aotinductor/model/x.so", elf(sections=0))
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"ELF") + 20] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(TargetError, match="is damaged"):
        open_program(path)


def test_a_packages_arguments_are_told_by_their_nesting() -> None:
    """Positional ones have lost their names; keywords and the keys of dicts have kept theirs."""
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    spec = pytree.tree_structure(((x, {"a": y}), {"mask": z}))
    binder = Binder.of_spec(spec, "The package")
    assert [argument.name for argument in binder.arguments] == ["0", "1.a", "mask"]
    for args, kwargs in (
        ((x, {"a": y}), {"mask": z}),
        ((), {"0": x, "1.a": y, "mask": z}),
        ((x,), {"1": {"a": y}, "mask": z}),
    ):
        assert binder.bind(args, kwargs) == ((x, {"a": y}), {"mask": z})
    with pytest.raises(TargetError, match=r"The package was not given '1'\. It takes: 0, 1, mask"):
        binder.bind((x,), {"mask": z})


@pytest.mark.slow
def test_the_compiled_program_is_heard(saved: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, path = saved
    x = torch.randn(4, 8)
    output, eager = eager_calls(model, (x,))
    program = open_program(path, Options(runtime="aoti"))
    assert isinstance(program, AotiProgram)
    with tap.record(program, tmp_path / "aoti", layers="all") as recording:
        found = recording.run(x)
    torch.testing.assert_close(found, output, rtol=0, atol=1e-5 * float(output.abs().max()))
    run = tap.open(tmp_path / "aoti")
    assert run.layers == ["linear", "act", ""]
    for layer, leaves in eager:
        expected = leaves[0][1]
        limit = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(run[layer].output, expected, rtol=0, atol=limit)
    assert {record.provenance for record in run["act"].records} == {"scope"}
    checks = run.manifest.self_checks
    assert {check["check"] for check in checks} == {"output", "linear"}
    assert all(check["passed"] for check in checks)

    # The package itself gives its outputs alone.
    package = Path(program._folder.name) / "1.pt2"  # what the self-check ran first
    opaque = open_program(package)
    assert isinstance(opaque, OpaqueProgram) and opaque.runtime == "aoti"
    assert [place.name for place in opaque.places] == [""]
    torch.testing.assert_close(opaque.plain((x,), {}), output)
    assert [argument.name for argument in opaque.arguments or ()] == ["0"]
    torch.testing.assert_close(opaque.plain((), {"0": x}), output)
    with pytest.raises(TargetError, match=r"takes no argument 'x'\. It takes: 0"):
        opaque.plain((), {"x": x})
    for layers in ("blocks", "all"):
        recorder = tap.record(package, tmp_path / layers, layers=layers)
        assert recorder.layers == [""]
        assert [note for note in recorder.notes if "--runtime aoti" in note] == [opaque.nameless]
    with pytest.raises(SelectionError, match=r"'linear' selects nothing.*--runtime aoti"):
        tap.record(package, tmp_path / "linear", layers="linear")
    with pytest.raises(OptionError, match="--names-from means nothing to a package of AOTI"):
        tap.record(package, tmp_path / "named", names_from=path)
    live = open_program(torch._inductor.aoti_load_package(str(package)))
    assert live.runtime == "aoti"
    assert compare_calls(live, run_all(live, (x,)), []) == {
        "whole": [],
        "partly": [],
        "gone": [],
        "wrong": [],
    }
