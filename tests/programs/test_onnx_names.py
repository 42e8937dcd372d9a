"""Names that an ONNX graph does not quite tell: repeated calls, branches, loops, odd containers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from programs.onnx_support import STYLES, assert_right, eager, export, heard, opened, sure


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.lin(x)) * 2


class Middle(nn.Module):
    """Calls its part twice; whether it is called twice itself cannot be told from that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = Inner(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.inner(self.act(self.inner(x))))


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.middle = Inner(), Middle()
        self.once, self.lin = Middle(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.block(self.block(x)))  # at once behind each other
        x = self.lin(self.lin(x))
        return self.once(self.middle(self.middle(x)) - 0.5)


class Plain(nn.Module):
    """As the other, but its list of layers has its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.ReLU(), Plain())
        )
        self.layers = Plain()
        self.parts = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4))})

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["a"](self.layers(self.net(self.net(x))))


class Skips(nn.Module):
    """Calls a part of a part, so that the name between is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"decoder": Inner()})
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model["decoder"](x))


class Equal(nn.Module):
    """New norms have equal weights, of which an exporter keeps one."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4)))
        self.inner = nn.ModuleList([nn.LayerNorm(4)])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner[0](self.stage(x).sin()).cos())


class Clashes(nn.Module):
    """Names that are also what the TorchScript exporter calls a second call."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.act_1 = nn.ReLU(), nn.ReLU()
        self.lin, self.lin_1 = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act_1(self.lin_1(self.act(self.lin_1(x)))) + self.act(x)
        return self.act(self.lin(self.lin(y)))


class Turns(nn.Module):
    """A layer that ends in a transpose, with another behind it: exporters make one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.lin = Turn(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.turn(x).transpose(0, 1))


class Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2 + x.sin()).transpose(1, 2)


CASES = {
    "repeats": (Repeats, (2, 4)),
    "repeats of products": (Repeats, (2, 3, 4)),  # whose weights are transposed in advance
    "containers": (Containers, (2, 4)),
    "equal": (Equal, (2, 4)),
    "skips": (Skips, (2, 4)),
    "clashes": (Clashes, (2, 4)),
    "turns": (Turns, (2, 6, 3)),
}


# Layers without weights that are called again: of a file without classes, the first call alone.
ALONE = {
    "block.act",
    "middle.inner.act",
    "once.inner.act",
    "net.0.1",
    "net.1.0",
    "net.1.1.layers.1",
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", CASES)
def test_nothing_that_is_sure_is_wrong(case: str, style: str, tmp_path: Path) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    model = make().eval()
    x = torch.randn(*shape)
    program = opened(export(model, (x,), tmp_path / "model.onnx", style))
    expected = eager(model, x)
    found = heard(program, x)
    assert_right(found, expected, first_alone=ALONE if style == "torchscript" else ())
    doubts = {p.name for p in program.places if p.provenance == "inferred"}
    if case.startswith("repeats"):
        assert "middle" in doubts and "middle.inner" not in doubts
        assert len(found["middle.inner.lin"]) == 4 and len(found["lin"]) == 2
        assert ("block" in doubts) == (style != "torchscript")
        assert len(found["block.lin"]) == 3
    if case == "containers":
        assert len(found["net.0.0"]) == 2 and "layers.layers.0" in found and "layers" in found
        assert "net" in doubts
        assert "parts.a.0" in found
    if case == "equal":
        assert set(found) == set(expected)
    if case == "skips":
        assert {"model.decoder", "model.decoder.act", "head"} <= set(found)
    if case == "clashes":
        assert "act" not in found  # called before and after `act_1`, which may be the same module
    if case == "turns":
        assert ("turn" in found) == (style == "dynamo-plain")


def test_guesses_are_given_when_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Repeats().eval()
    x = torch.randn(2, 4)
    program = opened(export(model, (x,), tmp_path / "model.onnx", "torchscript"))
    assert "middle" not in sure(program) and "middle" in sure(program, guesses=True)
    assert heard(program, x, layers=["middle"])["middle"]


class Own(nn.Module):
    """`act_1` is a layer of its own here, and might as well be the second call of `act`."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.act, self.lin = nn.ReLU(), nn.Linear(4, 4)
        if own:
            self.act_1 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(self.act(x))
        return self.act_1(x) if hasattr(self, "act_1") else self.act(x)


@pytest.mark.parametrize("own", [True, False])
def test_a_later_call_without_weights_is_a_guess(own: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Own(own).eval(), torch.randn(2, 4)
    file = export(model, (x,), tmp_path / "model.onnx", "torchscript")
    program = opened(file)
    assert_right(heard(program, x), eager(model, x), first_alone=("act",))
    assert "Only the first call of a layer without weights ('act')" in program.notes[0]
    bold = opened(file, accept_inferred=True)
    assert {p.name: p.provenance for p in bold.places}["act"] == "inferred"
    assert len(heard(bold, x, layers=["act"])["act"]) == 2


class Forks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.yes, self.no = (nn.Linear(4, 4) for _ in range(3))
        self.deep = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if bool(x.sum() > 0):
            x = torch.relu(self.yes(x))
            if bool(x.max() > 4):
                x = self.deep(x)
        else:
            x = self.no(x)
        return x * 2


def test_branches_hand_out_their_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Forks().eval()
    x = torch.randn(3, 4)
    path = export(torch.jit.script(model), (x,), tmp_path / "m.onnx", "torchscript",
                  input_names=["x"], dynamic={"x": (0,)})  # fmt: skip
    program = opened(path)
    assert set(sure(program)) == {"first", "yes", "no", "deep"}
    run = program.tapped(sure(program), inputs=True, linears=list(program.linears()))
    seen = set()
    for scale in (1, -1, 40, -40, 0.1):
        given = torch.randn(5, 4) * scale + scale
        expected = eager(model, given)
        result = run((given,), {})
        found: dict = {}
        for call in result.calls:
            found.setdefault(call.layer, []).append(call)
        assert set(found) == set(expected)
        assert_right(found, expected)
        for call in result.calls:
            layer = model.get_submodule(call.layer)
            assert torch.allclose(layer(call.inputs[0][1]), call.outputs[0][1], atol=1e-4)
        assert torch.allclose(result.output, model(given), atol=1e-4)
        assert torch.equal(result.output, program.plain((given,), {}))
        seen.add(tuple(found))
    assert len(seen) >= 3


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        turns = 0
        while bool(x.sum() < 100) and turns < 3:
            x = self.again(x)
            turns += 1
        return x * 2


def test_a_layer_in_a_loop_is_gone(tmp_path: Path) -> None:
    model = Loops().eval()
    x = torch.randn(3, 4)
    path = export(torch.jit.script(model), (x,), tmp_path / "m.onnx", "torchscript")
    program = opened(path)
    places = {place.name: place for place in program.places}
    assert "inside a loop" in (places["again"].gone or "")
    expected = eager(model, x)
    assert_right(heard(program, x), {"first": expected["first"]})


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.yes, self.no = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = torch.cond(x.sum() > 0, lambda t: self.yes(t).relu(), lambda t: self.no(t), (x,))
        return self.first(y)


def test_branches_of_torch_cond(tmp_path: Path) -> None:
    """Nodes in them bear no scope: what they hold is known by the names of the weights."""
    torch.manual_seed(0)
    model = Conditional().eval()
    x = torch.randn(3, 4)
    program = opened(export(model, (x,), tmp_path / "m.onnx", "dynamo"))
    for given in (x, x - 9, x + 9):
        with torch.no_grad():
            first = model.first(given)
            part = "yes" if first.sum() > 0 else "no"
            expected = {"first": [[first], [model(given)]], part: [[getattr(model, part)(first)]]}
        found = heard(program, given)
        assert_right(found, expected)
        assert set(found) == {"first", part}
    known = {place.name: place.provenance for place in program.places}
    assert known["first"] == "scope" and known["yes"] == known["no"] == "weight"
