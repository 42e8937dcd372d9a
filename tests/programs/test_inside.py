"""Objects that hold compiled models: found, tapped where they are held, and left as they were."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tap
from programs.models import MODELS
from tensortap.errors import OptionError, RecordingError, SelectionError
from tensortap.taps.inside import find_parts
from tensortap.taps.leaves import flatten


@pytest.fixture(scope="module")
def demo() -> Any:
    return MODELS["demo"]()


@pytest.fixture(scope="module")
def traced(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    model, args, _ = demo
    path = tmp_path_factory.mktemp("traced") / "model.pt"
    torch.jit.trace(model, args).save(str(path))
    return str(path)


def hooked(model: nn.Module, *args: Any) -> dict[str, list[Tensor]]:
    heard: dict[str, list[Tensor]] = {}

    def listen(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            heard.setdefault(name, []).extend(
                t.clone() for _, t in flatten(output) if t is not None
            )

        return hook

    handles = [module.register_forward_hook(listen(name)) for name, module in model.named_modules()]
    with torch.no_grad():
        model(*args)
    for handle in handles:
        handle.remove()
    return heard


# Seed 001, word for word: `model.models[0].model` is a RecursiveScriptModule.


@dataclass
class Outputs:
    logits: Tensor | None = None


class ModelWrapper:
    def __init__(self) -> None:
        self.model: Any = None

    def load(self, path: str) -> None:
        self.model = torch.jit.load(path)


class NeuronMiniMaxM2ForCausalLM:
    def __init__(self, path: str) -> None:
        self.path = path
        self.models = [ModelWrapper()]

    def load(self, path: str) -> None:
        self.models[0].load(path)

    def __call__(self, ids: Tensor) -> Outputs:
        self.models[0].model(ids)
        return Outputs()

    def generate(self, ids: Tensor, steps: int = 2) -> Tensor:
        for _ in range(steps):
            token = self.models[0].model(ids)[:, -1].argmax(-1)
            ids = torch.cat([ids, token[:, None]], 1)
        return ids


@pytest.fixture()
def neuron(traced: str) -> NeuronMiniMaxM2ForCausalLM:
    model = NeuronMiniMaxM2ForCausalLM(traced)
    model.load(traced)
    return model


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_layer_of_a_part_that_cannot_be_recorded_goes_by_its_whole_name(tmp_path: Path) -> None:
    class Holder:
        def __init__(self) -> None:
            self.part = torch.jit.script(Spare())

        def __call__(self, x: Tensor) -> Tensor:
            return self.part(x)

    wanted = "'part.spare' cannot be recorded: the compiled model never calls it"
    with pytest.raises(SelectionError, match=wanted):
        tap.record(Holder(), tmp_path / "run", layers="part.spare").start()


def test_the_document_s_own_object_is_recorded_layer_by_layer(
    neuron: NeuronMiniMaxM2ForCausalLM, demo: Any, tmp_path: Path
) -> None:
    model, args, _ = demo
    assert type(neuron.models[0].model) is torch.jit.RecursiveScriptModule
    with tap.record(neuron, tmp_path / "run", layers="all") as rec:
        assert rec.run(*args).logits is None
    run = tap.open(tmp_path / "run")
    wanted = hooked(model, *args)
    assert set(run.layers) == {f"models.0.model{'.' * bool(name)}{name}" for name in wanted}
    for name, tensors in wanted.items():
        found = run["models.0.model" + (f".{name}" if name else "")]
        assert torch.equal(found.output, tensors[0]), name
    manifest = run.manifest
    assert {"layer": "", "port": "output", "leaf": ".logits", "count": 1}.items() <= dict(
        next(row for row in manifest.skipped if row["leaf"] == ".logits")
    ).items()
    assert "None" in next(r["reason"] for r in manifest.skipped if r["leaf"] == ".logits")
    assert any("None where a tensor could be: .logits" in note for note in manifest.notes)
    assert manifest.self_checks and all(check["passed"] for check in manifest.self_checks)
    assert "models.0.model" in manifest.target["parts"]


def test_it_compares_with_the_eager_model(
    neuron: NeuronMiniMaxM2ForCausalLM, demo: Any, tmp_path: Path
) -> None:
    model, args, _ = demo
    with tap.record(model, tmp_path / "eager") as rec:
        rec.run(*args)
    with tap.record(neuron, tmp_path / "neuron") as rec:
        rec.run(*args)
    result = tap.compare(tmp_path / "eager", tmp_path / "neuron")
    assert result.same and len(result.layers) == 2
    assert all(row.verdict == "identical" for row in result.layers)


@pytest.mark.parametrize("way", ["call", "part", "generate"])
def test_it_is_heard_however_it_is_called(
    neuron: NeuronMiniMaxM2ForCausalLM, demo: Any, tmp_path: Path, way: str
) -> None:
    _, (ids,), _ = demo
    expected = neuron.generate(ids)
    with tap.record(neuron, tmp_path / "run", layers=["models.0.model.blocks.1", "**.head"]):
        if way == "call":
            neuron(ids)
        elif way == "part":
            neuron.models[0].model(ids)
        else:
            assert torch.equal(neuron.generate(ids), expected)
    run = tap.open(tmp_path / "run")
    assert run.layers == ["models.0.model.blocks.1", "models.0.model.head"]
    assert len(run["models.0.model.head"].records) == (2 if way == "generate" else 1)
    assert run.manifest.inputs["digest"] is not None


def test_it_is_as_it_was_afterwards(
    neuron: NeuronMiniMaxM2ForCausalLM, demo: Any, tmp_path: Path
) -> None:
    _, (ids,), _ = demo
    part = neuron.models[0].model
    expected = part(ids)
    before = set(vars(part))
    with (
        pytest.raises(ZeroDivisionError),
        tap.record(neuron, tmp_path / "run", layers="all") as rec,
    ):
        assert torch.equal(part(ids), expected)
        rec.run(1 / 0)
    assert neuron.models[0].model is part and set(vars(part)) == before
    assert torch.equal(part(ids), expected)


def test_an_object_that_is_not_callable_says_what_to_call(traced: str, tmp_path: Path) -> None:
    class Held:
        def __init__(self) -> None:
            self.model = torch.jit.load(traced)

    held = Held()
    ids = MODELS["demo"]()[1][0]
    with tap.record(held, tmp_path / "run") as rec:
        with pytest.raises(OptionError, match=r"Held cannot be called.*'model'"):
            rec.run(ids)
        held.model(ids)
    assert tap.open(tmp_path / "run").layers == ["model.blocks.0", "model.blocks.1"]


def test_an_object_that_holds_nothing_is_a_sentence(tmp_path: Path) -> None:
    class Empty:
        pass

    with pytest.raises(OptionError, match="Empty"):
        tap.record(Empty(), tmp_path / "run")


def test_no_match_names_near_layers_of_the_part(
    neuron: NeuronMiniMaxM2ForCausalLM, tmp_path: Path
) -> None:
    with pytest.raises(SelectionError, match=r"models\.0\.model\.head"):
        tap.record(neuron, tmp_path / "run", layers="models.0.model.haed")


# Looking for parts.

Pair = namedtuple("Pair", "left right")


class Slotted:
    __slots__ = ("empty", "model")

    def __init__(self, model: Any) -> None:
        self.model = model


@pytest.fixture(scope="module")
def script() -> Any:
    return torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.ones(2, 4))


class Holder:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __call__(self, x: Tensor) -> Any:
        return self.run(self, x)


def test_parts_are_found_in_every_kind_of_container(script: Any) -> None:
    def made() -> Any:
        return copy.deepcopy(script)

    module = nn.Module()
    module.child = made()
    module.plain = [made()]
    holder = Holder(
        attribute=made(),
        listed=[1, [made()]],
        tupled=(made(), 2),
        pair=Pair(None, made()),
        mapped={"a": {3: made()}},
        slotted=Slotted(made()),
        module=module,
    )
    assert {part.name for part in find_parts(holder)} == {
        "attribute",
        "listed.1.0",
        "tupled.0",
        "pair.right",
        "mapped.a.3",
        "slotted.model",
        "module.child",
        "module.plain.0",
    }


def test_looking_reads_no_property_and_ends_on_cycles(script: Any) -> None:
    class Trap:
        touched = False

        def __init__(self) -> None:
            self.me = self
            self.inner = [self, {"again": self}]
            self.inner.append(self.inner)
            self.found = script

        @property
        def secret(self) -> Any:
            Trap.touched = True
            raise AssertionError("a property was read")

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__"):
                Trap.touched = True
            raise AttributeError(name)

    assert [part.name for part in find_parts(Trap())] == ["found"]
    assert not Trap.touched


def test_objects_that_refuse_every_question_are_passed_over(script: Any) -> None:
    class Sullen:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    class Lazy:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("loaded")

    parts = find_parts(Holder(sullen=Sullen(), lazy=Lazy(), found=script))
    assert [part.name for part in parts] == ["found"]


def test_a_part_held_twice_is_one_with_its_first_name(script: Any) -> None:
    (part,) = find_parts(Holder(first=script, second=[script]))
    assert part.name == "first" and part.names == ("first", "second.0")


def test_an_eager_model_and_nonsense_hold_nothing() -> None:
    assert find_parts(nn.Sequential(nn.Linear(2, 2))) == []
    assert find_parts(3) == [] and find_parts(None) == [] and find_parts([[], {}]) == []


# Modules that hold compiled parts.


class Mixed(nn.Module):
    def __init__(self, script: Any) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.middle = script
        self.exit = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.middle(self.entry(x)))


def test_eager_layers_and_parts_are_recorded_in_one_order(script: Any, tmp_path: Path) -> None:
    model = Mixed(copy.deepcopy(script)).eval()
    x = torch.randn(2, 4)
    expected = model(x)
    with tap.record(model, tmp_path / "run", layers="all", inputs=True):
        assert torch.equal(model(x), expected)
    run = tap.open(tmp_path / "run")
    assert run.layers == ["entry", "middle.0", "middle.1", "middle", "exit", ""]
    with torch.no_grad():
        entry = model.entry(x)
    assert torch.equal(run["entry"].output, entry)
    assert torch.equal(run["middle.0"].input, entry)
    assert torch.equal(run["middle"].output, model.middle(entry))
    assert torch.equal(run[""].output, expected)
    assert run["entry"].records[0].provenance == "hook"
    assert run["middle.0"].records[0].provenance == "scope"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (model, model.entry))


def test_only_the_part_can_be_selected(script: Any, tmp_path: Path) -> None:
    model = Mixed(copy.deepcopy(script)).eval()
    with tap.record(model, tmp_path / "run", layers="middle.*") as rec:
        rec.run(torch.randn(2, 4))
    run = tap.open(tmp_path / "run")
    assert run.layers == ["middle.0", "middle.1"]
    assert run.manifest.inputs["digest"] is not None


# Parts that cannot be diverted are replaced where they are held.


@torch.jit.script
def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_a_part_is_replaced_wherever_it_is_held_and_put_back(tmp_path: Path) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        return self.one(self.listed[0](self.pair.left(x)))

    holder = Holder(one=doubled, listed=[doubled], pair=Pair(doubled, 1), run=run)
    pair = holder.pair
    x = torch.randn(3)
    with tap.record(holder, tmp_path / "run", layers="one") as rec:
        assert holder.one is not doubled and isinstance(holder.one, torch.jit.ScriptFunction)
        assert torch.equal(rec.run(x), x * 8)
    assert holder.one is doubled and holder.listed == [doubled] and holder.pair is pair
    records = tap.open(tmp_path / "run")["one"].records
    assert len(records) == 3
    for record, factor in zip(records, (2, 4, 8), strict=True):
        assert torch.equal(record.tensor(), x * factor)


def test_it_is_put_back_when_attaching_fails(tmp_path: Path) -> None:
    holder = Holder(one=doubled, pair=None)
    outer = (doubled, holder)
    lonely = [part for part in find_parts(outer) if part.name == "0"]
    assert len(lonely) == 1 and len(lonely[0].holders) == 2
    with (
        pytest.raises((OptionError, RecordingError), match="tuple"),
        tap.record(outer, tmp_path / "run", layers="all"),
    ):
        pass
    assert holder.one is doubled


def test_an_exported_program_s_module_inside_is_tapped(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.randn(2, 4)
    holder = Holder(
        net=torch.export.export(model, (x,)).module(), run=lambda self, value: self.net(value)
    )
    with tap.record(holder, tmp_path / "run", layers="net.*") as rec:
        rec.run(x)
    run = tap.open(tmp_path / "run")
    assert run.layers == ["net.0", "net.1", "net.2"]
    assert torch.equal(run["net.2"].output, model(x))


def test_an_onnx_session_inside_is_tapped(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.randn(2, 4)
    torch.onnx.export(model, (x,), tmp_path / "m.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    name = session.get_inputs()[0].name

    def run(self: Any, value: Tensor) -> Any:
        return self.sessions["main"].run(None, {name: value.numpy()})

    holder = Holder(sessions={"main": session}, run=run)
    plain = run(holder, x)[0]
    with tap.record(holder, tmp_path / "run", layers="all") as rec:
        assert (rec.run(x)[0] == plain).all()
    found = tap.open(tmp_path / "run")["sessions.main.0"].output
    assert torch.allclose(found, model[0](x), atol=1e-6)
    assert (run(holder, x)[0] == plain).all() and "run" not in vars(session)


def test_openvino_s_compiled_model_inside_gives_its_outputs_and_says_why(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.randn(2, 4)
    compiled = openvino.compile_model(openvino.convert_model(model, example_input=x), "CPU")
    holder = Holder(net=compiled, run=lambda self, value: self.net([value.numpy()]))
    with tap.record(holder, tmp_path / "run", layers="net") as rec:
        output = rec.run(x)
    assert holder.net is compiled
    run = tap.open(tmp_path / "run")
    assert run.layers == ["net"]
    assert (run["net"].output.numpy() == output[0]).all()
    assert any("Hand over the openvino.Model" in note for note in run.manifest.notes)


class Reads(nn.Module):
    """An embedding at its head, as TorchScript holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor, extra: Tensor) -> Tensor:
        output: Tensor = self.out(self.table(ids) + extra)
        return output


class Host(nn.Module):
    def __init__(self, core: Any) -> None:
        super().__init__()
        self.before, self.core = nn.Linear(4, 4), core

    def forward(self, ids: Tensor, extra: Tensor) -> Tensor:
        output: Tensor = self.core(ids, self.before(extra))
        return output


def test_a_module_that_holds_an_embedding_in_torchscript(tmp_path: Path) -> None:
    """What the eager layer gives the part has a graph behind it; it is checked all the same."""
    torch.manual_seed(0)
    host = Host(torch.jit.script(Reads().eval())).eval()
    with tap.record(host, tmp_path / "run", layers="all") as recorder:
        output = recorder.run(torch.tensor([1, 2]), torch.randn(2, 4))
    run = tap.open(tmp_path / "run")
    assert run.layers == ["before", "core.table", "core.out", "core", ""]
    assert torch.equal(run["core"].output, output)
    checks = {(c["layer"], c["check"]): c["passed"] for c in run.manifest.self_checks}
    assert checks[("core", "output")]
    assert output.requires_grad


class Asked:
    """Says to whoever asks for an attribute what no one expects."""

    def __init__(self, script: Any) -> None:
        self.script = script

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor = self.script(x)
        return output


def test_an_object_is_asked_for_nothing_that_it_makes_up(tmp_path: Path) -> None:
    held = Asked(torch.jit.script(nn.Sequential(nn.Linear(4, 4))))
    with tap.record(held, tmp_path / "run", layers="all") as recorder:
        recorder.run(torch.randn(2, 4))
    assert "script.0" in tap.open(tmp_path / "run").layers


def test_a_manifest_that_is_no_path_is_a_sentence(tmp_path: Path) -> None:
    wrapped = tap.instrument(nn.Sequential(nn.Linear(4, 4)), layers="all")
    wrapped(torch.randn(2, 4))
    with pytest.raises(OptionError, match=r"got a Manifest. Write it first.*manifest\.save"):
        tap.record(wrapped, tmp_path / "run", manifest=wrapped.manifest)
