"""TorchScript, scripted and traced, saved and loaded: every layer against eager forward hooks."""

import copy
import io
from typing import Any, Dict, List, NamedTuple, Optional, Tuple  # noqa: UP035

import pytest
import torch
from torch import Tensor, nn

from programs.models import MODELS, SCRIPTABLE
from tensortap.taps.leaves import flatten
from tensortap.taps.programs.base import HeardCall
from tensortap.taps.programs.torchscript.program import ScriptProgram

Call = tuple[str, list[tuple[str, Tensor | None]]]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with torch.no_grad():
        yield


def eager(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    """What forward hooks hear, copied when they hear it."""
    calls: list[Call] = []

    def hear(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            calls.append(
                (name, [(k, None if t is None else t.clone()) for k, t in flatten(output)])
            )

        return hook

    handles = [m.register_forward_hook(hear(n)) for n, m in model.named_modules() if n]
    model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    for handle in handles:
        handle.remove()
    return calls


def reloaded(module: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def traced(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
    return torch.jit.trace(model, strict=False, check_trace=False, **given)


def listened(
    program: ScriptProgram, args: tuple[Any, ...], kwargs: dict[str, Any], *, inputs: bool = False
) -> list[HeardCall]:
    """All calls; on the way: the output has the plain one's bits."""
    names = [place.name for place in program.places if place.gone is None]
    run = program.tapped(names, inputs=inputs, linears=list(program.linears()))
    heard = run(copy.deepcopy(args), copy.deepcopy(kwargs))
    plain = flatten(program.plain(copy.deepcopy(args), copy.deepcopy(kwargs)))
    found = flatten(heard.output)
    assert [leaf for leaf, _ in found] == [leaf for leaf, _ in plain]
    for (_, left), (_, right) in zip(found, plain, strict=True):
        assert (left is None) == (right is None)
        assert left is None or same(left, right)
    return list(heard.calls)


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def check_linears(program: ScriptProgram, calls: list[HeardCall]) -> None:
    linears = program.linears()
    for call in [call for call in calls if call.layer in linears]:
        assert call.operand is not None
        expected = nn.functional.linear(call.operand, *linears[call.layer])
        torch.testing.assert_close(call.outputs[0][1], expected)


def assert_exact(model: nn.Module, program: ScriptProgram, args: Any, kwargs: Any = None) -> None:
    """Scripted: the same calls in the same order, the same leaves, the same bits."""
    kwargs = kwargs or {}
    expected = eager(model, args, kwargs)
    calls = listened(program, args, kwargs)
    assert [call.layer for call in calls] == [name for name, _ in expected]
    for call, (name, leaves) in zip(calls, expected, strict=True):
        assert [leaf for leaf, _ in call.outputs] == [leaf for leaf, _ in leaves], name
        for (leaf, found), (_, tensor) in zip(call.outputs, leaves, strict=True):
            assert (found is None) == (tensor is None), (name, leaf)
            assert found is None or tensor is None or same(found, tensor), (name, leaf)
    check_linears(program, calls)


def assert_traced(
    model: nn.Module, program: ScriptProgram, args: Any, kwargs: Any
) -> tuple[dict[str, str], int]:
    """Traced: every value is one that the layer returned, the first of them the one made last."""
    expected = eager(model, args, kwargs)
    calls = listened(program, args, kwargs)
    gone = {place.name: place.gone for place in program.places if place.gone is not None}
    assert [call.layer for call in calls] == [n for n, _ in expected if n not in gone]
    left = [(name, leaves) for name, leaves in expected if name not in gone]
    for call, (name, leaves) in zip(calls, left, strict=True):
        assert call.outputs, name
        tensors = [tensor for _, tensor in leaves if tensor is not None]
        for leaf, found in call.outputs:
            assert any(found is not None and same(found, t) for t in tensors), (name, leaf)
        if len(tensors) == 1:
            assert [leaf for leaf, _ in call.outputs] == [""], name
    check_linears(program, calls)
    return gone, len(calls)


@pytest.mark.parametrize("name", SCRIPTABLE)
def test_a_scripted_model_gives_what_hooks_hear(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    assert_exact(model, ScriptProgram(reloaded(torch.jit.script(model))), args, kwargs)


EXPECTED = {  # calls of eager mode, and what a trace cannot have
    "demo": (27, {}),
    "llama": (31, {}),
    "mamba": (16, {}),
    "bert": (49, {}),
    "resnet": (35, {"stages.0.shortcut": "passes", "stages.2.shortcut": "passes"}),
    "awkward": (18, {"same": "passes", "unused": "nothing reads", "named.score": "nothing reads"}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_traced_model_gives_what_hooks_hear(name: str) -> None:
    if name not in ("demo", "resnet", "awkward"):
        pytest.importorskip("transformers")
    model, args, kwargs = MODELS[name]()
    program = ScriptProgram(reloaded(traced(model, args, kwargs)))
    gone, calls = assert_traced(model, program, args, kwargs)
    count, lost = EXPECTED[name]
    called = {call for call, _ in eager(model, args, kwargs)}
    reasons = {layer: why for layer, why in gone.items() if layer in called}
    assert set(reasons) == set(lost)
    assert all(part in reasons[layer] for layer, part in lost.items())
    assert calls == count - len(lost)


def test_a_trace_says_which_of_two_values_is_the_norms() -> None:
    """A norm's no-op cast of its input is read again behind it; it is no output of the norm."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4) + 0.5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            wide = x.to(torch.float32)
            return wide * self.weight, wide

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Norm()

        def forward(self, x: Tensor) -> Tensor:
            y, wide = self.norm(x)
            return y + wide

    model = Model().eval()
    x = torch.randn(3, 4)
    program = ScriptProgram(reloaded(torch.jit.trace(model, x)))
    (call,) = listened(program, (x,), {})
    assert [leaf for leaf, _ in call.outputs] == [""]
    assert same(call.outputs[0][1], x * model.norm.weight)
    # in half precision the cast is work of the norm's own, and what it returns
    half = torch.randn(3, 4, dtype=torch.float16)
    (call,) = listened(program, (half,), {})
    assert [leaf for leaf, _ in call.outputs] == ["?0", "?1"]
    assert same(call.outputs[0][1], half.float() * model.norm.weight)
    assert same(call.outputs[1][1], half.float())


class Pair(NamedTuple):
    first: Tensor
    rest: List[Tensor]  # noqa: UP006
    none: Optional[Tensor]  # noqa: UP045


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> Pair:
        return Pair(x + 1, [x, x * 2], None)


class Maybe(nn.Module):
    def forward(self, x: Tensor, flag: bool) -> Optional[Tensor]:  # noqa: UP045
        return x * 2 if flag else None


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Dict[str, Tuple[Tensor, Optional[Tensor]]]:  # noqa: UP006, UP045
        return {"p": (x, None), "q": (x + 1, x)}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + 1


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return self.lin(x) - 1


@torch.jit.interface
class Face(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pass


class Structures(nn.Module):
    """Every kind of structure, rewritten in place after it was returned."""

    face: Face

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.pairs, self.maybe, self.nested = Pairs(), Maybe(), Nested()
        self.face = Inner()
        self.encoder = Encoder()
        self.left = nn.ModuleList([Inner(), Inner()])
        self.right = nn.ModuleList([Inner()])
        self.drop = nn.Dropout(0.5)
        self.same = nn.Identity()

    def forward(self, x: Tensor, turns: int = 2) -> Tuple[Tensor, Pair]:  # noqa: UP006
        for _ in range(turns):
            x = self.b(self.a(x))
            x.add_(1)
        pair = self.pairs(x)
        some, none = self.maybe(x, True), self.maybe(x, False)
        if some is not None and none is None:
            x = x + some
        nested = self.nested(x)
        pair.first.zero_()
        pair.rest[0].add_(1)
        nested["q"][0].mul_(3)
        y = self.face(x) + self.encoder.encode(x)
        for layer in self.left:
            y = layer(y)
        for layer in self.right:
            y = layer(y)
        return self.same(self.drop(y)), pair


@pytest.fixture(scope="module")
def structures() -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = Structures().eval()
    return model, reloaded(torch.jit.script(model))


def test_structures_keep_their_leaves(structures: tuple[nn.Module, Any]) -> None:
    model, script = structures
    program = ScriptProgram(script)
    assert_exact(model, program, (torch.randn(2, 4),), {})
    calls = {call.layer: call for call in listened(program, (torch.randn(2, 4),), {})}
    assert [leaf for leaf, _ in calls["pairs"].outputs] == [
        ".first",
        ".rest[0]",
        ".rest[1]",
        ".none",
    ]
    assert [leaf for leaf, _ in calls["nested"].outputs][:2] == ["['p'][0]", "['p'][1]"]


@pytest.mark.parametrize(("turns", "rows"), [(0, 3), (1, 5), (4, 1)])
def test_loops_and_shapes_may_vary(
    structures: tuple[nn.Module, Any], turns: int, rows: int
) -> None:
    model, script = structures
    program = ScriptProgram(script)
    x = torch.randn(rows, 4)
    assert_exact(model, program, (x,), {"turns": turns})
    assert_exact(model, program, (x, turns))
    names = [call.layer for call in listened(program, (x, turns), {})]
    assert names[: 2 * turns] == ["a", "b"] * turns


def test_what_is_not_called_has_a_reason(structures: tuple[nn.Module, Any]) -> None:
    places = {place.name: place for place in ScriptProgram(structures[1]).places}
    assert places["encoder"].gone == "the compiled model never calls it"
    assert places["encoder.lin"].gone is None
    assert "left" not in places and places["left.0"].type == "Inner"
    assert places["same"].gone is None  # a script still has it
    assert list(places)[-1] == "" and places[""].provenance == "hook"


def test_both_branches_and_a_loop_on_data() -> None:
    model, (x,), _ = MODELS["branching"]()
    program = ScriptProgram(reloaded(torch.jit.script(model)))
    seen = set()
    for factor in (1.0, -1.0, 9.0, -9.0, 0.0):
        assert_exact(model, program, (x * factor,))
        seen |= {call.layer for call in listened(program, (x * factor,), {})}
    assert {"left", "right", "shrink"} <= seen


def test_inputs_are_taken_before_they_are_rewritten() -> None:
    class Rewrites(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return x.mul_(scale)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Rewrites()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + 1, torch.full([1], 2.0))

    x = torch.randn(3)
    for script in (torch.jit.script(Model()), torch.jit.trace(Model(), x)):
        (call,) = listened(ScriptProgram(reloaded(script)), (x,), {}, inputs=True)
        assert [leaf for leaf, _ in call.inputs] == ["?0", "?1"]
        assert same(call.inputs[0][1], x + 1)
        assert same(call.inputs[1][1], torch.full([1], 2.0))
        assert same(call.outputs[0][1], (x + 1) * 2)


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([Inner(), Inner()])
        self.again = self.first[0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.first:
            x = layer(x)
        return self.again(x)


@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_module_with_two_names_has_the_first(how: str) -> None:
    model = Sharing().eval()
    x = torch.randn(2, 4)
    module = torch.jit.script(model) if how == "script" else torch.jit.trace(model, x)
    program = ScriptProgram(reloaded(module))
    assert "again" in program.notes[0]
    assert_exact(model, program, (x,))
    (weights,) = {tuple(call.inputs) for call in listened(program, (x,), {})}
    assert weights == ()
    inputs = listened(program, (x,), {}, inputs=True)
    assert all(len(call.inputs) == 1 for call in inputs)  # a trace hands weights in as arguments


class Handed(nn.Module):
    """A trace hands the shared layer to the first block as an argument."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.first, self.second = shared, shared
        self.blocks = nn.ModuleList(
            [nn.Sequential(shared, nn.GELU()), nn.Sequential(nn.Linear(8, 8), shared)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(torch.relu(self.second(x)))
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("how", ["script", "trace"])
def test_every_call_of_a_module_with_many_names_is_heard(how: str) -> None:
    torch.manual_seed(0)
    model, x = Handed().eval(), torch.randn(3, 8)
    script = torch.jit.script(model) if how == "script" else traced(model, (x,), {})
    expected = [leaves[0][1] for name, leaves in eager(model, (x,), {}) if name == "first"]
    program = ScriptProgram(reloaded(script))
    for names in (["first"], [p.name for p in program.places if p.gone is None]):
        run = program.tapped(names, inputs=False, linears=[])((x,), {})
        found = [call.outputs[0][1] for call in run.calls if call.layer == "first"]
        assert len(found) == len(expected) == 4
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_tied_layers_that_both_run_keep_their_names_in_a_trace() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight, self.two.bias = self.one.weight, self.one.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(x)))

    model = Tied().eval()
    x = torch.randn(2, 4)
    assert_exact(model, ScriptProgram(reloaded(torch.jit.trace(model, x))), (x,))


def test_a_batch_norm_in_train_mode_moves_the_models_own_buffers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    script = torch.jit.script(copy.deepcopy(model))
    program = ScriptProgram(script)
    x = torch.randn(5, 4)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    run = program.tapped(["1"], inputs=False, linears=[])((x,), {})
    assert same(run.output, expected)
    buffers = dict(script.named_buffers())
    assert int(buffers["1.num_batches_tracked"]) == 1
    assert same(buffers["1.running_mean"], model[1].running_mean)


def test_gradients_still_flow_through_a_tapped_run() -> None:
    script = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)))
    program = ScriptProgram(script)
    x = torch.randn(2, 4)
    with torch.enable_grad():
        run = program.tapped(["0", "1"], inputs=False, linears=[])((x,), {})
        run.output.sum().backward()
    assert dict(script.named_parameters())["0.weight"].grad is not None
    assert not run.calls[0].outputs[0][1].requires_grad


def test_arguments_come_by_place_and_by_name() -> None:
    model, args, _ = MODELS["awkward"]()
    program = ScriptProgram(reloaded(torch.jit.script(model)))
    assert [a.name for a in program.arguments or ()] == ["x", "past.0", "past.1"]
    run = program.tapped(["exit"], inputs=False, linears=[])
    one, two = run(args, {}), run((), {"past": args[1], "x": args[0]})
    pieces = {"past.1": args[1][1], "past.0": args[1][0]}
    others = [run(args[:1], pieces), run((args[0], *args[1]), {})]
    for other in [two, *others]:
        assert same(one.output["logits"], other.output["logits"])
        assert same(one.output["k"], other.output["k"])
    plain = program.plain(args[:1], pieces)
    assert same(one.output["v"], plain["v"])
    with pytest.raises(RuntimeError, match="past"):
        run(args[:1], {})
    with pytest.raises(RuntimeError, match="expected at most 3"):
        run(args, {"other": 1})


def test_weights_and_what_it_says_of_itself() -> None:
    model, args, kwargs = MODELS["resnet"]()
    program = ScriptProgram(reloaded(traced(model, args, kwargs)))
    named = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert program.weights == named
    described = program.describe()
    assert described["class"] == "ResNet"
    assert described["parameters"] == sum(p.numel() for p in model.parameters())
    assert described["dtypes"] == {"float32": described["parameters"]}


def test_taps_are_on_the_chosen_layers_alone() -> None:
    model, args, kwargs = MODELS["awkward"]()
    program = ScriptProgram(torch.jit.script(model))
    run = program.tapped(["cached.q"], inputs=False, linears=["exit"])(args, kwargs)
    assert [(call.layer, call.operand is not None) for call in run.calls] == [
        ("cached.q", False),
        ("exit", True),
    ]


def test_a_compiled_hook_is_not_overheard() -> None:
    """What the next layer receives is what the hook made, which no call of a layer returned."""

    def doubled(self: Any, input: Tuple[Tensor], output: Tensor) -> Tensor:  # noqa: UP006
        return output * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Inner(), Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = Model().eval()
    model.a.register_forward_hook(doubled)
    program = ScriptProgram(reloaded(torch.jit.script(model)))
    x = torch.randn(2, 4)
    gone = {place.name: place.gone for place in program.places if place.gone}
    assert list(gone) == ["a"] and "hook" in gone["a"]
    calls = listened(program, (x,), {})
    assert [call.layer for call in calls] == ["a.lin", "b.lin", "b"]
    assert same(calls[-1].outputs[0][1], model(x))


def test_what_runs_in_a_fork_is_left_out_with_that_reason() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Inner(), Inner()

        def forward(self, x: Tensor) -> Tensor:
            future = torch.jit.fork(self.a, x)
            return self.b(x) + torch.jit.wait(future)

    program = ScriptProgram(torch.jit.script(Model()))
    places = {place.name: place.gone for place in program.places}
    assert "fork" in places["a"] and "fork" in places["a.lin"]
    assert [call.layer for call in listened(program, (torch.randn(2, 4),), {})] == ["b.lin", "b"]


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.jit.fork(self.a, x)
        y = self.b(x)
        return torch.jit.wait(later) + y + self.a(y)


class Ignored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.a(x + 1)
        return self.a(self.b(x))


@pytest.mark.parametrize("kind", [Forked, Ignored])
def test_a_layer_one_call_of_which_is_not_heard_is_gone(kind: type[nn.Module]) -> None:
    """What is heard of it would have the number of another call."""
    model, x = kind().eval(), torch.randn(2, 4)
    script = torch.jit.script(model) if kind is Forked else traced(model, (x,), {})
    program = ScriptProgram(reloaded(script))
    places = {place.name: place for place in program.places}
    assert places["a"].gone is not None
    assert places["b"].gone is None


class Leaves(nn.Module):
    """Leaves a value in an attribute, which is read, and returns another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.a(x) * 2
        return self.b(self.last)


class ReadsWhatIsLeft(nn.Module):
    def __init__(self, ignored: bool) -> None:
        super().__init__()
        self.ignored = ignored
        self.side, self.c = Leaves(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.side(x)
        z = self.c(self.side.last)
        return z if self.ignored else z + y


@pytest.mark.parametrize("ignored", [True, False])
def test_what_a_layer_leaves_in_an_attribute_is_not_what_it_returns(ignored: bool) -> None:
    model, x = ReadsWhatIsLeft(ignored).eval(), torch.randn(2, 4)
    script = torch.jit.trace(model, (x,), check_trace=False)
    places = {place.name: place for place in ScriptProgram(reloaded(script)).places}
    assert places["side"].provenance == ("inferred" if ignored else "scope")
    assert places["side.a"].gone is None and places["c"].gone is None
