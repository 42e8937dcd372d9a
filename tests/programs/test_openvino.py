"""OpenVINO models against eager hooks: layer by layer, call by call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tap
from programs.models import MODELS
from tensortap.errors import OptionError, SelectionError
from tensortap.taps.leaves import flatten
from tensortap.taps.programs.base import HeardCall, Options, Program
from tensortap.taps.programs.kinds import open_program

openvino = pytest.importorskip("openvino")


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)

        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), k, v


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj, self.act = nn.Linear(2 * width, width), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(width), Attention(width, 4)
        self.norm2, self.mlp = Norm(width), Mlp(width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, k, v = self.attention(self.norm1(x))
        x = x + y
        return x + self.mlp(self.norm2(x)), k, v


class Llama(nn.Module):
    """Four layers: 55 calls of modules, those of layers and attentions returning three tensors."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, 50, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.embed(ids)
        caches: list[Tensor] = []
        for layer in self.layers:
            x, k, v = layer(x)
            caches += [k, v]
        return self.head(self.norm(x)), caches


def hooked(model: nn.Module, args: Any, kwargs: Any) -> dict[str, list[list[Tensor]]]:
    """What every call of every module returned."""
    heard: dict[str, list[list[Tensor]]] = {}

    def listen(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = [tensor.clone() for _, tensor in flatten(output) if tensor is not None]
            heard.setdefault(name, []).append(tensors)

        return hook

    handles = [m.register_forward_hook(listen(n)) for n, m in model.named_modules() if n]
    with torch.no_grad():
        model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return heard


def close(found: Tensor, wanted: Tensor) -> bool:
    if found.shape != wanted.shape:
        return False
    return float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def run_all(
    program: Program, args: Any, kwargs: Any, *, inputs: bool = False
) -> dict[str, list[HeardCall]]:
    names = [p.name for p in program.places if p.name and not p.gone and p.provenance == "scope"]
    run = program.tapped(names, inputs=inputs, linears=())(args, kwargs)
    calls: dict[str, list[HeardCall]] = {}
    for call in run.calls:
        calls.setdefault(call.layer, []).append(call)
    assert set(calls) == set(names)
    return calls


def wrong(calls: dict[str, list[HeardCall]], wanted: dict[str, list[list[Tensor]]]) -> list[str]:
    """Layers of which something that was heard is not what eager returned."""
    bad = []
    for name, heard in calls.items():
        eager = wanted.get(name, [])
        fits = len(eager) == len(heard) and all(
            any(close(value, tensor) for tensor in tensors)
            for call, tensors in zip(heard, eager, strict=True)
            for _, value in call.outputs
            if value is not None
        )
        if not fits:
            bad.append(name)
    return bad


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    model = Llama().eval().requires_grad_(False)
    ids = torch.randint(0, 50, (2, 7))
    return model, ids, openvino.convert_model(model, example_input=ids)


def test_all_55_calls_of_a_llama_are_what_hooks_hear(llama: Any) -> None:
    model, ids, converted = llama
    program = open_program(converted)
    wanted = hooked(model, (ids,), {})
    calls = run_all(program, (ids,), {})
    assert sum(len(item) for item in calls.values()) == 55 == sum(map(len, wanted.values()))
    assert wrong(calls, wanted) == []
    for name in ("layers.0", "layers.3.attention"):
        leaves = dict(calls[name][0].outputs)
        assert sorted(leaves) == ["?0", "?1", "?2"]
        assert close(leaves["?0"], wanted[name][0][0])  # the main one comes first
    assert [leaf for leaf, _ in calls["embed"][0].outputs] == [""]


def test_other_shapes_run_too(llama: Any) -> None:
    model, _, converted = llama
    ids = torch.randint(0, 50, (1, 11))
    program = open_program(converted)
    assert program.arguments is not None
    assert [(a.name, a.dtype, a.shape) for a in program.arguments] == [
        ("ids", torch.int64, (None, None))
    ]
    assert wrong(run_all(program, (), {"ids": ids}), hooked(model, (ids,), {})) == []


def test_it_is_recorded_and_compares_with_eager(llama: Any, tmp_path: Path) -> None:
    model, ids, converted = llama
    openvino.save_model(converted, tmp_path / "m.xml", compress_to_fp16=False)
    for name, source in (("eager", model), ("xml", tmp_path / "m.xml")):
        with tap.record(source, tmp_path / name, layers="all", inputs=True) as rec:
            rec.run(ids)
    run = tap.open(tmp_path / "xml")
    assert run.manifest.self_checks and all(c["passed"] for c in run.manifest.self_checks)
    checked = {c["layer"] for c in run.manifest.self_checks if c["check"] == "linear"}
    assert len(checked) == 4 * 7 + 1
    assert {run[name].records[0].provenance for name in run.layers if name} == {"scope"}
    result = tap.compare(tmp_path / "eager", tmp_path / "xml")
    bad = [row.layer for row in result.layers if row.verdict not in ("identical", "within")]
    assert bad == [] and len(result.layers) >= 55
    assert run.manifest.target["precision"] == "f32"
    assert any("float32" in note for note in run.manifest.notes)


def test_the_default_selection_finds_the_blocks(llama: Any, tmp_path: Path) -> None:
    _, ids, converted = llama
    with tap.record(converted, tmp_path / "run") as rec:
        rec.run(ids)
    assert tap.open(tmp_path / "run").layers == [f"layers.{index}" for index in range(4)]


def test_weights_in_float16_are_known_as_the_model_computes_with_them(
    llama: Any, tmp_path: Path
) -> None:
    model, ids, converted = llama
    openvino.save_model(converted, tmp_path / "half.xml")
    program = open_program(tmp_path / "half.xml")
    linears = program.linears()
    weight, bias = linears["layers.1.mlp.down_proj"]
    ours = model.layers[1].mlp.down_proj
    assert torch.equal(weight, ours.weight.half().float())
    assert bias is not None and torch.equal(bias, ours.bias.half().float())
    runner = program.tapped([], inputs=False, linears=list(linears))
    for call in runner((ids,), {}).calls:
        weight, bias = linears[call.layer]
        assert call.operand is not None
        assert close(call.outputs[0][1], nn.functional.linear(call.operand, weight, bias))


def test_values_stay_when_the_next_run_begins(llama: Any) -> None:
    _, ids, converted = llama
    runner = open_program(converted).tapped(["layers.0"], inputs=False, linears=())
    first = runner((ids,), {})
    kept = first.calls[0].outputs[0][1]
    copy = kept.clone()
    for _ in range(3):
        runner((torch.randint(0, 50, ids.shape),), {})
    assert torch.equal(kept, copy)


@pytest.mark.parametrize("name", ["demo", "resnet", "awkward"])
def test_our_models(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    program = open_program(openvino.convert_model(model, example_input=kwargs or args))
    wanted = hooked(model, args, kwargs)
    calls = run_all(program, args, kwargs)
    assert wrong(calls, wanted) == []
    missing = {layer for layer in wanted if layer not in calls}
    expected = {
        "demo": set(),
        # Convolutions are folded into their batch norms, and the rest does nothing.
        "resnet": {
            "stem.0",
            "stages.0.conv1",
            "stages.0.conv2",
            "stages.0.shortcut",
            "stages.1.conv1",
            "stages.1.conv2",
            "stages.1.shortcut.0",
            "stages.2.conv1",
            "stages.2.conv2",
            "stages.2.shortcut",
            "dropout",
        },
        # `entry`'s bias is added together with the 1.0 behind it.
        "awkward": {"entry", "same", "unused", "named.score"},
    }
    assert missing == expected[name]
    gone = {place.name: place.gone for place in program.places if place.gone}
    assert set(gone) <= missing
    if name == "awkward":
        assert "fused" in str(gone["entry"])
        assert [len(calls[layer]) for layer in ("shared", "act")] == [3, 2]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.GELU()
        self.norm = nn.LayerNorm(8)
        nn.init.normal_(self.norm.weight)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.linear(self.linear(x))
        x = self.act(self.norm(x))
        x = self.act(self.block(self.block(x)))
        y = self.norm(x)
        return y, x, self.linear(y)


def test_modules_that_run_again_have_a_call_for_each() -> None:
    torch.manual_seed(0)
    model, x = Twice().eval().requires_grad_(False), torch.randn(2, 8)
    program = open_program(openvino.convert_model(model, example_input=x))
    wanted = hooked(model, (x,), {})
    calls = run_all(program, (x,), {})
    assert {name: len(item) for name, item in calls.items()} == {
        "linear": 3,
        "norm": 2,
        "act": 2,
        "block.0": 2,
        "block.1": 2,
    }
    assert wrong(calls, wanted) == []
    # One that ran its own modules twice would look the same.
    assert next(p for p in program.places if p.name == "block").provenance == "inferred"


class Group(nn.Module):
    """As ALBERT: a layer called again and again, that does something with what never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.group = Masked()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for _ in range(3):
            x = self.group(x, mask)
        return x + 1


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.Tanh()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.act(self.linear(x)) * mask.exp()


def test_what_is_shared_by_all_calls_does_not_make_them_one() -> None:
    torch.manual_seed(0)
    model, args = Group().eval().requires_grad_(False), (torch.randn(2, 8), torch.randn(2, 8))
    program = open_program(openvino.convert_model(model, example_input=args))
    assert next(p for p in program.places if p.name == "group").provenance == "inferred"
    calls = run_all(program, args, {})
    assert len(calls["group.linear"]) == 3
    assert wrong(calls, hooked(model, args, {})) == []


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x[:, 0].mul_(2.0)
        return x


def test_a_layer_that_writes_into_a_part_of_its_value_is_not_what_it_was_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Writes(), nn.Linear(8, 4)).eval().requires_grad_(False)
    x = torch.randn(2, 8)
    program = open_program(openvino.convert_model(model, example_input=x))
    places = {place.name: place for place in program.places}
    assert "writes into a part of its own value" in (places["0"].gone or "")
    calls = run_all(program, (x,), {})
    assert {"0.linear", "1"} <= set(calls) and wrong(calls, hooked(model, (x,), {})) == []


class Turns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, 4, 4).transpose(0, 1)


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turns, self.linear = Turns(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.turns(x).sum(-1))


def test_a_layer_whose_last_operation_went_into_its_reader_is_gone() -> None:
    torch.manual_seed(0)
    model, x = Summed().eval().requires_grad_(False), torch.randn(4, 4, 4)
    program = open_program(openvino.convert_model(model, example_input=x))
    places = {place.name: place for place in program.places}
    assert "rewrote what reads it" in (places["turns"].gone or "")
    calls = run_all(program, (x,), {})
    assert "linear" in calls and wrong(calls, hooked(model, (x,), {})) == []


class Parallel(nn.Module):
    """Whether `act` ran twice, or once on two tensors, the graph does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.left(x)) + self.act(self.right(x))


def test_a_guess_is_said_to_be_one() -> None:
    model, x = Parallel().eval(), torch.randn(2, 4)
    program = open_program(openvino.convert_model(model, example_input=x))
    provenance = {place.name: place.provenance for place in program.places}
    assert provenance == {"left": "scope", "right": "scope", "act": "inferred", "": "hook"}


class Tail(nn.Module):
    """A cast that does nothing comes last: OpenVINO leaves it out, and gives its name to the norm's
    last product."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.entry, self.norm = nn.Linear(4, 4), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.entry(x)).to(torch.float32)


def test_a_layer_whose_last_operation_lost_its_name_is_not_mistaken() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    for norm in (Norm(4), nn.Linear(4, 3), nn.Linear(4, 3, bias=False)):
        model = Tail(norm).eval().requires_grad_(False)
        program = open_program(openvino.convert_model(model, example_input=x))
        calls = run_all(program, (x,), {})
        assert wrong(calls, hooked(model, (x,), {})) == []
        assert "entry" in calls
    gone = {p.name: p.gone for p in program.places}
    assert gone["norm"] is None  # a linear layer is known by its weight


def test_inputs_of_a_layer(llama: Any) -> None:
    model, ids, converted = llama
    given: list[Tensor] = []
    hook = model.layers[1].mlp.register_forward_pre_hook(lambda m, a: given.append(a[0].clone()))
    model(ids)
    hook.remove()
    calls = run_all(open_program(converted), (ids,), {}, inputs=True)
    ((leaf, tensor),) = calls["layers.1.mlp"][0].inputs
    assert leaf == "" and tensor is not None and close(tensor, given[0])


def test_caches_go_in_by_name_nested_or_flat() -> None:
    model, (x, past), _ = MODELS["awkward"]()
    program = open_program(openvino.convert_model(model, example_input=(x, past)))
    assert program.arguments is not None
    assert [a.name for a in program.arguments] == ["x", "past_k", "past_v"]
    wanted = model(x.clone(), past)
    for args, kwargs in (
        ((x, past), {}),
        ((x, *past), {}),
        ((), {"past_v": past[1], "x": x, "past_k": past[0]}),
        ((x,), {"past_v": past[1], "past_k": past[0]}),
    ):
        found = program.plain(args, kwargs)
        assert list(found) == ["logits", "k", "v"]
        assert all(close(found[key], wanted[key]) for key in wanted)


def test_inputs_that_do_not_fit_are_sentences(llama: Any) -> None:
    _, ids, converted = llama
    program = open_program(converted)
    with pytest.raises(OptionError, match=r"'ids' is torch.int32, .* takes torch.int64"):
        program.plain((ids.int(),), {})
    with pytest.raises(OptionError, match=r"'ids' has the shape \[7\].*\[\?, \?\]"):
        program.plain((ids[0],), {})
    with pytest.raises(OptionError, match=r"no input 'tokens'.*'ids'"):
        program.plain((), {"tokens": ids})
    with pytest.raises(OptionError, match="nothing was given for 'ids'"):
        program.plain((), {})
    with pytest.raises(OptionError, match="2 tensors were given by position where 1"):
        program.plain((ids, ids), {})


def test_other_dtypes_come_out_as_they_are() -> None:
    from openvino import opset13 as op

    x = op.parameter([-1, 3], openvino.Type.f32, name="x")
    x.output(0).set_names({"x"})
    kinds = {"bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64, "u8": torch.uint8}
    made = [op.convert(x, kind) for kind in kinds] + [
        op.greater(x, op.constant(0.5, openvino.Type.f32))
    ]
    for node, name in zip(made, (*kinds, "boolean"), strict=True):
        node.output(0).set_names({name})
    program = open_program(openvino.Model([op.result(node) for node in made], [x]))
    value = torch.tensor([[0.25, 1.5, 3.0]])
    found = program.plain((value,), {})
    for name, dtype in {**kinds, "boolean": torch.bool}.items():
        wanted = value > 0.5 if dtype == torch.bool else value.to(dtype)
        assert torch.equal(found[name], wanted), name


def test_state_goes_on_from_run_to_run_and_plain_leaves_it_alone() -> None:
    from openvino import opset13 as op

    x = op.parameter([1, 2], openvino.Type.f32, name="x")
    x.output(0).set_names({"x"})
    info = openvino.op.util.VariableInfo()
    info.data_shape, info.data_type, info.variable_id = (
        openvino.PartialShape([1, 2]),
        openvino.Type.f32,
        "sum",
    )
    variable = openvino.op.util.Variable(info)
    before = openvino.op.read_value(
        op.constant([[0.0, 0.0]], openvino.Type.f32).output(0), variable
    )
    after = op.add(before, x)
    after.set_friendly_name("__module.total/aten::add/Add")
    after.output(0).set_names({"total"})
    kept = openvino.op.assign(after, variable)
    program = open_program(openvino.Model([op.result(after)], [kept], [x], "sums"))
    assert any("state" in note for note in program.notes)
    runner = program.tapped(["total"], inputs=False, linears=())
    one = torch.ones(1, 2)
    for turn in (1.0, 2.0, 3.0):
        assert torch.equal(program.plain((one,), {}), one * turn)
        run = runner((one,), {})
        assert torch.equal(run.output, one * turn)
        assert torch.equal(run.calls[0].outputs[0][1], one * turn)


def test_layers_inside_a_branch_are_gone_with_the_reason() -> None:
    from openvino import opset13 as op

    x = op.parameter([2, 2], openvino.Type.f32, name="x")
    x.output(0).set_names({"x"})
    entry = op.relu(x)
    entry.set_friendly_name("__module.entry/aten::relu/Relu")
    entry.output(0).set_names({"entry"})
    branch = op.if_op(
        op.greater(
            op.reduce_sum(x, op.constant([0, 1])), op.constant(0.0, openvino.Type.f32)
        ).output(0)
    )
    for then in (True, False):
        inner = op.parameter([2, 2], openvino.Type.f32)
        made = op.tanh(inner) if then else op.negative(inner)
        made.set_friendly_name(f"__module.{'left' if then else 'right'}/aten::some/Op")
        body = openvino.Model([op.result(made)], [inner])
        (branch.set_then_body if then else branch.set_else_body)(body)
        if then:
            first = (inner, body.get_results()[0])
        else:
            branch.set_input(entry.output(0), first[0], inner)
            out = branch.set_output(first[1], body.get_results()[0])
    last = op.negative(out)
    last.set_friendly_name("aten::neg/Negative")
    program = open_program(openvino.Model([op.result(last)], [x]))
    gone = {place.name: place.gone for place in program.places}
    assert gone["entry"] is None
    assert "a branch (If)" in str(gone["left"]) and "a branch (If)" in str(gone["right"])


def test_models_without_scopes_give_their_outputs_and_say_what_to_do(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    converted = openvino.convert_model(torch.export.export(model, (x,)))
    with tap.record(converted, tmp_path / "run") as rec:
        rec.run(x)
    run = tap.open(tmp_path / "run")
    assert run.layers == [""] and close(run[""].output, model(x))
    assert len([n for n in run.manifest.notes if "--names-from" in n and "instrument" in n]) == 1
    with pytest.raises(SelectionError, match=r"'blocks, head' selects nothing.*--names-from"):
        tap.record(converted, tmp_path / "none", layers=["blocks", "head"])


def test_a_compiled_model_is_a_sentence(llama: Any, tmp_path: Path) -> None:
    compiled = openvino.compile_model(llama[2], "CPU")
    for model in (compiled, compiled.create_infer_request()):
        with pytest.raises(OptionError, match=r"Hand over the openvino\.Model, or the \.xml"):
            tap.record(model, tmp_path / "run")


def test_options_are_the_runtime_s(llama: Any) -> None:
    program = open_program(llama[2], Options(runtime="openvino"))
    about = program.describe()
    assert about["runtime"] == "openvino" and about["openvino"] == openvino.__version__
    assert about["parameters"] >= sum(p.numel() for p in llama[0].parameters())


class Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.plain, self.fc = nn.Conv2d(4, 4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.plain(self.act(self.bn(self.conv(x)))))
        return self.fc(x.mean((2, 3)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_of_the_older_onnx_exporter(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    torch.manual_seed(0)
    model, x = Folded().eval().requires_grad_(False), torch.randn(1, 3, 6, 6)
    model.bn.running_mean = torch.randn(4)
    torch.onnx.export(model, (x,), tmp_path / "m.onnx", dynamo=False)
    program = open_program(openvino.convert_model(tmp_path / "m.onnx"))
    places = {place.name: place for place in program.places}
    assert "folded" in str(places["conv"].gone) and "bn" not in places
    assert places["act_1"].provenance == "inferred"  # a second call, or a module of that name
    wanted, calls = hooked(model, (x,), {}), run_all(program, (x,), {})
    assert set(calls) == {"act", "plain", "fc"}
    for name, (call, *_) in calls.items():
        assert close(call.outputs[0][1], wanted[name][0][0]), name
