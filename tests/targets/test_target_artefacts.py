"""Model files, and objects that hold compiled models, as targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tensortap.errors import OptionError, TargetError
from tensortap.taps.programs.base import Options, Program
from tensortap.taps.programs.kinds import open_program
from tensortap.targets import Target, load_target
from tensortap.targets.artefacts import is_artefact


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    traced: Any = torch.jit.trace(Model().eval(), torch.ones(2, 3), check_trace=False)
    traced.save(folder / "model.pt")
    save_file({"x": torch.ones(2, 3)}, folder / "in.safetensors")
    return folder


def test_a_file_is_a_program_with_its_inputs(folder: Path) -> None:
    target = load_target(str(folder / "model.pt"), inputs_from=[folder / "in.safetensors"] * 2)
    assert isinstance(target.model, Program)
    assert target.name == str(folder / "model.pt")
    assert len(target.batches) == 2
    expected = torch.jit.load(folder / "model.pt")(torch.ones(2, 3))
    assert torch.equal(target(target.batches[1]), expected)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("nowhere.pt2", True),
        ("models/nowhere.ONNX", True),
        ("nowhere.taps.json", True),
        ("nowhere.json", False),
        ("model.py:build", False),
        ("package.module:build", False),
        ("hf:model.pt", False),
        ("{f}/in.safetensors", True),
        ("{f}", False),
        ("{f}/model.pt:build", False),
    ],
)
def test_what_names_a_file(folder: Path, spec: str, expected: bool) -> None:
    assert is_artefact(spec.replace("{f}", str(folder))) is expected


def test_a_file_of_another_kind_says_so(folder: Path, tmp_path: Path) -> None:
    torch.save({"first.weight": torch.ones(2, 3)}, tmp_path / "weights.pt")
    with pytest.raises(TargetError) as caught:
        load_target(str(tmp_path / "weights.pt"), inputs_from=[folder / "in.safetensors"])
    assert "weights.pt" in str(caught.value)
    (tmp_path / "rubbish.pt").write_bytes(b"\x00" * 100)
    with pytest.raises(TargetError, match=r"rubbish\.pt"):
        load_target(str(tmp_path / "rubbish.pt"), inputs_from=[folder / "in.safetensors"])
    (tmp_path / "model.bin").touch()
    (tmp_path / "model.xml").touch()
    with pytest.raises(TargetError, match=r"holds the weights of .*model\.xml"):
        load_target(str(tmp_path / "model.bin"))


def test_the_manifest_beside_a_model_is_found(folder: Path, tmp_path: Path) -> None:
    import tensortap as tap
    from tensortap.taps.programs.opaque.manifest import manifest_path

    model = Model().eval()
    wrapped = tap.instrument(model, layers="all")
    traced: Any = torch.jit.trace(wrapped, torch.ones(2, 3), check_trace=False)
    traced.save(tmp_path / "model.pt")
    wrapped.manifest.save(manifest_path(tmp_path / "model.pt"))
    given = [folder / "in.safetensors"]
    target = load_target(str(tmp_path / "model.pt"), inputs_from=given)
    assert any("model.taps.json" in note for note in target.notes)
    with tap.record(target.model, tmp_path / "run", layers="all") as recorder:
        recorder.run(*target.batches[0].args, **target.batches[0].kwargs)
    run = tap.open(tmp_path / "run")
    assert torch.equal(run["first"].output, model.first(torch.ones(2, 3)))
    assert torch.equal(run[""].output, model(torch.ones(2, 3)))


class Nested(nn.Module):
    def forward(self, x: torch.Tensor, past: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        for item in past:
            x = x * item["key"] + item["value"]
        return x


@pytest.mark.parametrize("form", ["names", "positions"])
def test_nested_inputs_go_by_the_names_of_the_program(tmp_path: Path, form: str) -> None:
    values = [torch.full((2,), float(i + 2)) for i in range(5)]
    past = [{"key": values[1], "value": values[2]}, {"key": values[3], "value": values[4]}]
    exported = torch.export.export(Nested(), (values[0], past))
    torch.export.save(exported, tmp_path / "model.pt2")
    names = [argument.name for argument in open_program(tmp_path / "model.pt2").arguments or ()]
    assert len(names) == 5 and names[0] == "x"
    keys = names if form == "names" else map(str, range(5))
    save_file(dict(zip(keys, values, strict=True)), tmp_path / "in.safetensors")
    spec = str(tmp_path / "model.pt2")
    target = load_target(spec, inputs_from=[tmp_path / "in.safetensors"])
    assert torch.equal(target(target.batches[0]), Nested()(values[0], past))


class Holder:
    """What a serving stack hands out: the compiled part is somewhere inside."""

    def __init__(self, path: Path) -> None:
        self.models = [type("Wrapper", (), {"model": torch.jit.load(path)})()]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.models[0].model(x)
        return out


class TestModels:
    def test_what_may_be_a_targets_model(self, folder: Path) -> None:
        program = open_program(folder / "model.pt")
        scripted = torch.jit.load(folder / "model.pt")
        for model in (program, scripted, Holder(folder / "model.pt"), torch.relu):
            target = Target(model, torch.ones(2, 3))
            assert isinstance(target(target.batches[0]), torch.Tensor)

    @pytest.mark.parametrize(
        "model", [3, "model.pt", None, nn.Linear, [], {}, torch.ones(1), object()]
    )
    def test_what_may_not(self, model: Any) -> None:
        with pytest.raises(TargetError, match=r"expected a torch\.nn\.Module, a compiled model"):
            Target(model, torch.ones(1))

    def test_names_for_an_object_that_holds_one_are_taken(
        self, folder: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "serving.py").write_text(
            "import torch\n"
            "class Holder:\n"
            "    def __init__(self):\n"
            f"        self.models = [torch.jit.load({str(folder / 'model.pt')!r})]\n"
            "    def __call__(self, x):\n"
            "        return self.models[0](x)\n"
            "def build():\n"
            "    return Holder(), torch.ones(2, 3)\n"
        )
        spec = f"{tmp_path / 'serving.py'}:build"
        options = Options(accept_inferred=True, self_check=False)
        assert load_target(spec, compiled=options).batches


class TestInputs:
    def build(self, tmp_path: Path, returned: str = "model, torch.zeros(1, 3)") -> str:
        (tmp_path / "my_model.py").write_text(
            "import torch\nfrom torch import nn\n"
            "model = nn.Sequential(nn.Linear(3, 2))\n"
            f"def build(): return {returned}\n"
        )
        return f"{tmp_path / 'my_model.py'}:build"

    def test_a_functions_inputs_are_replaced(self, folder: Path, tmp_path: Path) -> None:
        save_file({"input": torch.ones(2, 3)}, tmp_path / "in.safetensors")
        spec = self.build(tmp_path)
        target = load_target(spec, inputs_from=[tmp_path / "in.safetensors"])
        assert torch.equal(target.batches[0].kwargs["input"], torch.ones(2, 3))
        assert target(target.batches[0]).shape == (2, 2)
        with pytest.raises(OptionError, match=r"'input' is missing; 'x' is unknown"):
            load_target(spec, inputs_from=[folder / "in.safetensors"])

    def test_its_own_run_gets_them(self, tmp_path: Path) -> None:
        np.save(tmp_path / "in.npy", np.ones((4, 3), np.float32))
        run = "tap.Target(model, torch.zeros(1, 3), run=lambda m, b: m(b.args[0]).sum(0))"
        spec = self.build(tmp_path, f"__import__('tensortap').{run.removeprefix('tap.')}")
        target = load_target(spec, inputs_from=[tmp_path / "in.npy"])
        assert target(target.batches[0]).shape == (2,)

    def test_dtype_casts_what_came_from_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "in.json").write_text(json.dumps([[1.0, 2.0, 3.0]]))
        spec = self.build(tmp_path)
        target = load_target(spec, {"dtype": "bf16"}, inputs_from=[tmp_path / "in.json"])
        assert target(target.batches[0]).dtype == torch.bfloat16
