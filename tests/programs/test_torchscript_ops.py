"""TorchScript op by op, and functions."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tensortap as tap
from programs.models import MODELS
from tensortap.errors import OptionError
from tensortap.taps.programs.base import Kind, Options, Program
from tensortap.taps.programs.torchscript.kind import KIND as TORCHSCRIPT
from tensortap.taps.programs.torchscript.ops import KIND


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.rand(4))
        self.freqs: Tensor
        self.register_buffer("freqs", torch.rand(4))

    def forward(self, x: Tensor, turns: int = 2) -> Tensor:
        for _ in range(turns):
            x = torch.relu_(self.lin(x)) * self.scale
        low, high = torch.max(x, 1)
        return self.norm(x + self.freqs) + low.unsqueeze(1) + high.unsqueeze(1)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval().requires_grad_(False)


def test_ops_are_numbered_and_layers_have_their_names(model: Model) -> None:
    kind: Kind = KIND
    program = kind.program(torch.jit.script(model), Options(runtime="ops"))
    assert isinstance(program, Program)
    places = {place.name: place for place in program.places}
    assert places["lin"].provenance == "weight" and places["lin"].type == "Linear"
    assert places["norm"].provenance == "weight"
    assert [n for n in places if n.startswith("ops.")] == [
        "ops.0001.relu",
        "ops.0002.mul",
        "ops.0003.max",
        "ops.0004.add",
        "ops.0006.unsqueeze",
        "ops.0007.add",
        "ops.0008.unsqueeze",
        "ops.0009.add",
    ]
    assert all(p.provenance == "value-name" for n, p in places.items() if n.startswith("ops."))


def test_each_op_is_heard_as_it_ran(model: Model) -> None:
    program = KIND.program(torch.jit.script(model), Options())
    x = torch.randn(3, 4)
    names = [place.name for place in program.places]
    run = program.tapped(names, inputs=True, linears=["lin"])((x,), {"turns": 2})
    assert torch.equal(run.output, model(x))
    assert [call.layer for call in run.calls][:6] == ["lin", "ops.0001.relu", "ops.0002.mul"] * 2
    first, relu, scaled = run.calls[:3]
    product = model.lin(x)
    assert torch.equal(first.outputs[0][1], product)  # not what relu_ made of it
    assert torch.equal(first.operand, x) and torch.equal(first.inputs[0][1], x)
    assert torch.equal(relu.outputs[0][1], product.relu())
    assert torch.equal(relu.inputs[0][1], product)
    assert torch.equal(scaled.outputs[0][1], product.relu() * model.scale)
    assert [leaf for leaf, _ in scaled.inputs] == [""]  # the weight is no input
    pair = next(call for call in run.calls if call.layer == "ops.0003.max")
    assert [leaf for leaf, _ in pair.outputs] == ["[0]", "[1]"]
    assert set(program.linears()) == {"lin"}


@pytest.mark.parametrize("name", ["demo", "resnet", "awkward"])
def test_layers_that_ops_are_named_after_are_right(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    expected: dict[str, list[Tensor]] = {}
    for layer, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) and not list(module.children()):
            module.register_forward_hook(
                lambda m, a, o, n=layer: expected.setdefault(n, []).append(o.clone())
            )
    script = torch.jit.trace(model, args, strict=False, check_trace=False)
    program = KIND.program(script, Options())
    expected.clear()
    output = model(*args)
    names = [p.name for p in program.places if p.provenance == "weight"]
    run = program.tapped(names, inputs=False, linears=list(program.linears()))(args, kwargs)
    heard: dict[str, list[Tensor]] = {}
    for call in run.calls:
        heard.setdefault(call.layer, []).append(call.outputs[0][1])
        if call.layer in program.linears():
            wanted = nn.functional.linear(call.operand, *program.linears()[call.layer])
            torch.testing.assert_close(call.outputs[0][1], wanted)
    assert len(heard) >= 8 and set(heard) == set(names)
    for layer, tensors in heard.items():
        assert len(tensors) == len(expected[layer]), layer
        for left, right in zip(tensors, expected[layer], strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)
    assert type(output) is type(run.output)


def test_a_function_has_ops_and_no_layers(tmp_path: Path) -> None:
    def double(x: Tensor, by: float = 2.0) -> Tensor:
        return torch.sin(x) * by

    program = TORCHSCRIPT.program(torch.jit.script(double), Options())
    assert [place.name for place in program.places] == ["ops.0000.sin", "ops.0001.mul", ""]
    assert [(a.name, a.required) for a in program.arguments or ()] == [("x", True), ("by", False)]
    x = torch.randn(3)
    run = program.tapped(["ops.0000.sin"], inputs=True, linears=[])((x,), {"by": 3.0})
    assert torch.equal(run.output, torch.sin(x) * 3)
    assert torch.equal(run.calls[0].outputs[0][1], torch.sin(x))
    assert program.divert(lambda args, kwargs: None) is None


def test_the_runtime_is_chosen_by_name(model: Model, tmp_path: Path) -> None:
    torch.jit.script(model).save(tmp_path / "m.pt")
    x = torch.randn(2, 4)
    with tap.record(tmp_path / "m.pt", tmp_path / "run", layers="all", runtime="ops") as rec:
        rec.run(x)
    run = tap.open(tmp_path / "run")
    assert "ops.0002.mul" in run.layers
    assert run["ops.0002.mul"].records[0].provenance == "value-name"
    assert run["lin"].records[0].provenance == "weight"
    with pytest.raises(OptionError, match="no runtime 'opps'"):
        tap.record(tmp_path / "m.pt", tmp_path / "other", runtime="opps").__enter__()
