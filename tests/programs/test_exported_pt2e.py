"""Programs that were quantised by PT2E: a layer's output is what its own node made."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from forked_commands import Commands
from programs.eager_calls import run_all, same
from tensortap.errors import SelectionError
from tensortap.taps.programs.base import Options
from tensortap.taps.programs.exported.kind import ExportProgram, open_exported

pytest.importorskip("torchao")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.act = nn.ReLU()
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU()
        self.two = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.act(self.norm(self.one(x)))).mean((2, 3))


class Mixer(nn.Module):
    """Convolves without calling its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(nn.functional.conv2d(x, self.conv.weight, self.conv.bias)) * 2


def quantised(model: nn.Module, args: Any, folder: Path) -> tuple[fx.GraphModule, Path, Path]:
    """The converted graph, the float program's file and the quantised program's."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model.eval(), args)
        torch.export.save(exported, folder / "float.pt2")
        quantizer = X86InductorQuantizer().set_global(
            get_default_x86_inductor_quantization_config()
        )
        prepared = prepare_pt2e(exported.module(), quantizer)
        prepared(*args)
        converted = convert_pt2e(prepared)
        torch.export.save(torch.export.export(converted, args), folder / "int8.pt2")
    return converted, folder / "float.pt2", folder / "int8.pt2"


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path, Path]:
    torch.manual_seed(0)
    args = (torch.randn(4, 8),)
    return (args, *quantised(Model(), args, tmp_path_factory.mktemp("pt2e")))


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path, Path]:
    torch.manual_seed(0)
    args = (torch.randn(2, 3, 8, 8),)
    model = Convolutions()
    for _ in range(3):
        model(torch.randn(8, 3, 8, 8) + 1)  # so that the batch norm does something
    return (args, *quantised(model, args, tmp_path_factory.mktemp("pt2e")))


class Values(fx.Interpreter):
    """Every node's value, and the layer that the node stands in."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.last: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        for path, _ in (n.meta.get("nn_module_stack") or {}).values():
            if path and n.op == "call_function":
                self.last[path] = value.clone()
        return value


NAMES = [
    *("layers.0.up", "layers.0.act", "layers.0.down", "layers.0"),
    *("layers.1.up", "layers.1.act", "layers.1.down", "layers.1", "head"),
]


@pytest.mark.parametrize("form", ["module", "file"])
def test_every_layer_is_what_its_node_makes(linear: Any, form: str) -> None:
    args, converted, _, file = linear
    program = open_exported(converted if form == "module" else file, Options())
    assert [place.name for place in program.places] == [*NAMES, ""]
    assert all(place.gone is None for place in program.places)
    assert {place.provenance for place in program.places} == {"scope"}
    run = run_all(program, args)
    assert [call.layer for call in run.calls] == NAMES
    reference = Values(converted)
    with torch.no_grad():
        assert same(reference.run(*args), run.output)
    for call in run.calls:
        assert [leaf for leaf, _ in call.outputs] == [""], call.layer
        assert same(call.outputs[0][1], reference.last[call.layer]), call.layer
    assert program.linears() == {}  # int8 weights are not multiplied as they are
    assert program.describe()["quantised"]


def test_a_layer_receives_what_was_dequantised(linear: Any) -> None:
    args, converted, _, _ = linear
    run = run_all(open_exported(converted, Options()), args)
    by_name = {call.layer: call for call in run.calls}
    given = by_name["layers.0.down"].inputs
    made = by_name["layers.0.act"].outputs[0][1]
    assert len(given) == 1
    assert not same(given[0][1], made)
    torch.testing.assert_close(given[0][1], made, atol=0.05, rtol=0)


def test_a_convolution_may_hold_a_batch_norm(convolutions: Any) -> None:
    _, _, _, file = convolutions
    program = open_exported(file, Options())
    known = {place.name: place for place in program.places}
    assert known["one"].provenance == known["two"].provenance == "inferred"
    assert known["act"].provenance == "scope"
    assert "--names-from" in program.notes[0]


def test_a_bias_tells_of_a_batch_norm(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(3, 4, 3, bias=False)
            self.norm = nn.BatchNorm2d(4)
            self.two = nn.Conv2d(4, 4, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.norm(self.one(x)).relu())

    _, _, file = quantised(Bare(), (torch.randn(2, 3, 8, 8),), tmp_path)
    program = open_exported(file, Options())
    known = {place.name: place for place in program.places}
    assert "folded" in str(known["one"].gone)
    assert known["two"].gone is None
    assert known["two"].provenance == "scope"
    assert program.notes == []


def test_the_float_program_says_which(convolutions: Any) -> None:
    args, _, plain, file = convolutions
    program = open_exported(file, Options(names_from=plain))
    known = {place.name: place for place in program.places}
    assert known["one"].gone == (
        "a batch norm was folded into it, so that its own output is not computed"
    )
    assert known["norm"].gone == "it was folded into the layer before it"
    assert known["two"].gone is None
    assert known["two"].provenance == "scope"
    assert [call.layer for call in run_all(program, args).calls] == ["act", "two"]


def test_a_guess_is_refused(convolutions: Any, tmp_path: Path) -> None:
    import tensortap as tap

    args, _, _, file = convolutions
    with pytest.raises(SelectionError, match="guess"):
        with tap.record(str(file), tmp_path / "a", layers="one") as recording:
            recording.run(*args)
    with tap.record(str(file), tmp_path / "b", layers="one", accept_inferred=True) as recording:
        recording.run(*args)
    assert [r.provenance for r in tap.open(tmp_path / "b")["one"].records] == ["inferred"]


@pytest.mark.slow
def test_a_quantised_file_opens_where_nothing_was_imported(linear: Any, forked: Commands) -> None:
    """Operators of the quantiser are registered by a library that the file does not name."""
    code = (
        "import sys; from pathlib import Path\n"
        "assert 'torchao' not in sys.modules\n"
        "from tensortap.taps.programs.base import Options\n"
        "from tensortap.taps.programs.exported.kind import open_exported\n"
        f"print(len(open_exported(Path({str(linear[3])!r}), Options()).places))"
    )
    done = forked.python(code)
    assert done.code == 0, done.stderr[-2000:]
    assert int(done.stdout) == len(NAMES) + 1


def test_the_float_program_is_no_quantised_one(linear: Any) -> None:
    program: ExportProgram = open_exported(linear[2], Options())
    assert not program.reading.quantised
    assert set(program.linears()) == {n for n in NAMES if n.endswith(("up", "down", "head"))}


def test_a_layer_that_convolves_among_other_things_is_no_convolution(tmp_path: Path) -> None:
    torch.manual_seed(0)
    args = (torch.randn(2, 3, 8, 8),)
    model = nn.Sequential(Mixer(), nn.Flatten())
    _, _, file = quantised(model, args, tmp_path)
    places = {place.name: place for place in open_exported(file, Options()).places}
    assert places["0"].gone is None and places["0"].provenance == "scope"
