"""Frozen TorchScript: names by a checkpoint, and only where they are sure or said to be guesses."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tensortap as tap
from programs.models import MODELS
from tensortap.errors import OptionError, SelectionError
from tensortap.taps.leaves import flatten
from tensortap.taps.programs.base import Options, Program
from tensortap.taps.programs.torchscript.kind import KIND, is_frozen
from tensortap.taps.programs.weights import open_checkpoint


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with torch.no_grad():
        yield


def eager(model: nn.Module, args: Any, kwargs: Any) -> dict[str, list[Tensor]]:
    calls: dict[str, list[Tensor]] = {}

    def hear(name: str) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            calls.setdefault(name, []).append(flatten(output)[0][1].clone())

        return hook

    handles = [m.register_forward_hook(hear(n)) for n, m in model.named_modules() if n]
    model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    for handle in handles:
        handle.remove()
    return calls


def frozen(
    model: nn.Module, args: Any, kwargs: Any, folder: Path, *, inference: bool = False
) -> Path:
    given = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
    script = torch.jit.trace(model, strict=False, check_trace=False, **given).eval()
    module = torch.jit.optimize_for_inference(script) if inference else torch.jit.freeze(script)
    torch.jit.save(module, folder / "frozen.pt")
    tensors = {key: tensor.contiguous().clone() for key, tensor in model.state_dict().items()}
    save_file(tensors, folder / "weights.safetensors")
    torch.save(model.state_dict(), folder / "weights.bin")
    return folder / "frozen.pt"


def opened(folder: Path, weights: str = "weights.safetensors") -> Program:
    return KIND.program(folder / "frozen.pt", Options(weights=folder / weights))


def compared(
    program: Program, expected: dict[str, list[Tensor]], args: Any, kwargs: Any
) -> set[str]:
    """Every layer that has a value has eager's; returns the names of those that are sure."""
    named = {p.name: p for p in program.places if p.gone is None and p.name in expected}
    run = program.tapped(list(named), inputs=True, linears=list(program.linears()))(args, kwargs)
    plain = program.plain(args, kwargs)
    for (_, left), (_, right) in zip(flatten(run.output), flatten(plain), strict=True):
        assert torch.equal(left, right)
    heard: dict[str, list[Tensor]] = {}
    for call in run.calls:
        heard.setdefault(call.layer, []).append(call.outputs[0][1])
        if call.layer in program.linears():
            product = nn.functional.linear(call.operand, *program.linears()[call.layer])
            torch.testing.assert_close(call.outputs[0][1], product)
            assert torch.equal(call.inputs[0][1], call.operand)
    for name in named:
        assert len(heard[name]) == len(expected[name]), name
        for left, right in zip(heard[name], expected[name], strict=True):
            torch.testing.assert_close(left, right)
    return {name for name, place in named.items() if place.provenance == "weight"}


def shaken(model: nn.Module) -> nn.Module:
    """With norms and biases as after training: no two alike."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    pytest.importorskip("transformers")
    with torch.no_grad():
        model, args, kwargs = MODELS["llama"]()
        shaken(model)
        folder = tmp_path_factory.mktemp("llama")
        frozen(model, args, kwargs, folder)
        return eager(model, args, kwargs), args, kwargs, folder


@pytest.mark.parametrize("weights", ["weights.safetensors", "weights.bin"])
def test_a_frozen_llama_with_its_checkpoint(llama: tuple[Any, ...], weights: str) -> None:
    expected, args, kwargs, folder = llama
    program = opened(folder, weights)
    sure = compared(program, expected, args, kwargs)
    assert len(sure) == 21 and len(program.linears()) == 15
    assert {"model.embed_tokens", "model.layers.1.post_attention_layernorm", "lm_head"} <= sure
    guessed = {p.name for p in program.places if p.provenance == "inferred" and p.gone is None}
    assert {"model.layers.0", "model.layers.1.mlp", "model.layers.1.self_attn"} <= guessed
    assert "model.layers" not in {place.name for place in program.places}


def test_guesses_are_refused_unless_asked_for(llama: tuple[Any, ...], tmp_path: Path) -> None:
    expected, _, kwargs, folder = llama
    with tap.record(
        folder / "frozen.pt",
        tmp_path / "run",
        layers=["model.layers.*", "lm_head"],
        weights=folder / "weights.safetensors",
    ) as rec:
        rec.run(**kwargs)
    run = tap.open(tmp_path / "run")
    assert torch.equal(run["lm_head"].output, expected["lm_head"][0])
    assert run["lm_head"].records[0].provenance == "weight"
    assert run.layers == ["lm_head"]
    with (
        pytest.raises(SelectionError, match="would be a guess"),
        tap.record(
            folder / "frozen.pt",
            tmp_path / "other",
            layers="model.layers.0",
            weights=folder / "weights.safetensors",
        ),
    ):
        pass
    with tap.record(
        folder / "frozen.pt",
        tmp_path / "guessed",
        layers="model.layers.0",
        weights=folder / "weights.safetensors",
        accept_inferred=True,
    ) as rec:
        rec.run(**kwargs)
    record = tap.open(tmp_path / "guessed")["model.layers.0"].records[0]
    assert record.provenance == "inferred"
    assert torch.equal(record.tensor(), expected["model.layers.0"][0])


@pytest.mark.parametrize("name", ["demo", "bert"])
def test_norms_that_are_all_alike_are_guesses(name: str, tmp_path: Path) -> None:
    if name == "bert":
        pytest.importorskip("transformers")
    model, args, kwargs = MODELS[name]()
    frozen(model, args, kwargs, tmp_path)
    program = opened(tmp_path)
    sure = compared(program, eager(model, args, kwargs), args, kwargs)
    assert not [layer for layer in sure if "norm" in layer.lower()]
    assert len(sure) == {"demo": 14, "bert": 17}[name]


def test_for_inference_a_linear_is_a_product_and_a_sum(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    torch.manual_seed(0)
    model, args = Model().eval(), (torch.randn(3, 8),)
    frozen(model, args, {}, tmp_path, inference=True)
    program = opened(tmp_path)
    # That `one` ends there is seen by who reads it; the pass left no source on `two`, the last.
    assert compared(program, eager(model, args, {}), args, {}) == {"one"}
    assert {p.name: p.provenance for p in program.places}["two"] == "inferred"
    kinds = {node.kind() for node in torch.jit.load(tmp_path / "frozen.pt").graph.nodes()}
    assert "aten::matmul" in kinds and "aten::linear" not in kinds
    torch.testing.assert_close(program.linears()["one"][0], model.one.weight)


class Squashed(nn.Module):
    """Has the weights of a Linear, and does more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.nn.functional.linear(x, self.weight, self.bias))


class Moved(nn.Module):
    """Has the weights of a LayerNorm, and does more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.layer_norm(x, [8], self.weight, self.bias)
        return x.roll(1, -1)


class Scaled(nn.Module):
    """A norm of its own, which ends with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / x.abs().amax(-1, keepdim=True))


@pytest.mark.parametrize("how", ["trace", "script"])
def test_weights_do_not_say_that_a_layer_ends_with_them(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        Squashed(), nn.Linear(8, 8), Moved(), Scaled(), nn.Linear(8, 8), nn.GELU()
    )
    model.eval()
    args = (torch.randn(3, 8),)
    script = torch.jit.script(model) if how == "script" else torch.jit.trace(model, args)
    torch.jit.save(torch.jit.freeze(script), tmp_path / "frozen.pt")
    save_file(dict(model.state_dict()), tmp_path / "weights.safetensors")
    program = opened(tmp_path)
    sure = {p.name for p in program.places if p.provenance == "weight" and p.gone is None}
    assert sure == {"1", "3", "4"}
    run = program.tapped(sorted(sure), inputs=False, linears=[])(args, {})
    expected = eager(model, args, {})
    for call in run.calls:
        torch.testing.assert_close(call.outputs[0][1], expected[call.layer][0])


def test_what_was_folded_is_gone(tmp_path: Path) -> None:
    model, args, kwargs = MODELS["resnet"]()
    frozen(model, args, kwargs, tmp_path)
    program = opened(tmp_path)
    assert compared(program, eager(model, args, kwargs), args, kwargs) == {"head"}
    places = {place.name: place for place in program.places}
    for name in ("stem.0", "stem.1", "stages.1.shortcut.1"):
        assert "folded into another layer" in str(places[name].gone)


def test_a_bias_of_no_layer_means_that_something_was_folded_in(tmp_path: Path) -> None:
    """A batch norm that only shifts leaves the convolution's weight as it was."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1, bias=False)
            self.norm = nn.BatchNorm2d(4, eps=1e-30)  # nothing beside a variance of 1

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x))

    torch.manual_seed(0)
    model, args = Model().eval(), (torch.randn(1, 3, 5, 5),)
    model.norm.bias += torch.arange(4.0)
    frozen(model, args, {}, tmp_path)
    program = opened(tmp_path)
    assert all(place.gone for place in program.places if place.name == "conv")
    assert compared(program, eager(model, args, {}), args, {}) == set()


def test_tied_weights_are_never_sure(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.mid = nn.Linear(8, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.mid(self.embed(ids))))

    torch.manual_seed(0)
    model, args = Tied().eval(), (torch.tensor([[1, 2, 3]]),)
    expected = eager(model, args, {})
    frozen(model, args, {}, tmp_path)
    program = opened(tmp_path)
    assert compared(program, expected, args, {}) == {"mid"}  # the guesses are right here
    tensors = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    save_file(tensors, tmp_path / "once.safetensors")
    program = opened(tmp_path, "once.safetensors")
    assert compared(program, expected, args, {}) == {"mid"}
    assert "head" not in {place.name for place in program.places}


def test_a_shared_layer_is_called_twice(tmp_path: Path) -> None:
    model, args, kwargs = MODELS["awkward"]()
    frozen(model, args, kwargs, tmp_path)
    program = opened(tmp_path)
    sure = compared(program, eager(model, args, kwargs), args, kwargs)
    assert "shared" in sure and len(sure) == 8


def test_a_scaled_embedding_is_a_guess(tmp_path: Path) -> None:
    """Whether the scale is the layer's or its parent's cannot be seen."""

    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 3.0

    torch.manual_seed(0)
    model, args = nn.Sequential(Scaled(11, 8), nn.Linear(8, 3)).eval(), (torch.tensor([1, 2]),)
    frozen(model, args, {}, tmp_path)
    places = {place.name: place.provenance for place in opened(tmp_path).places}
    assert places["0"] == "inferred" and places["1"] == "weight"


@pytest.mark.parametrize("with_names", [True, False])
def test_a_branch_with_nothing_in_it(with_names: bool, tmp_path: Path) -> None:
    """A scripted BatchNorm checks its input in an `if` that has no `else`."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)).eval()
    nn.init.uniform_(model[1].weight)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    frozen = torch.jit.freeze(torch.jit.script(model), optimize_numerics=False)
    options = {"weights": tmp_path / "weights.pt"} if with_names else {}
    x = torch.randn(3, 4)
    with tap.record(frozen, tmp_path / "run", layers="all", **options) as recorder:
        output = recorder.run(x)
    run = tap.open(tmp_path / "run")
    assert torch.equal(run[""].output, output)
    name = "0" if with_names else next(n for n in run.layers if n.endswith(".linear"))
    assert torch.equal(run[name].output, model[0](x))


def test_without_a_checkpoint_it_is_op_by_op(llama: tuple[Any, ...], tmp_path: Path) -> None:
    expected, args, kwargs, folder = llama
    program = KIND.program(folder / "frozen.pt", Options())
    assert program.runtime == "torchscript" and "--weights" in program.notes[0]
    assert all(p.name.startswith("ops.") or not p.name for p in program.places)
    names = [place.name for place in program.places]
    run = program.tapped(names, inputs=False, linears=[])(args, kwargs)
    values = [tensor for call in run.calls for _, tensor in call.outputs]
    missing = [
        name
        for name, (tensor, *_) in expected.items()
        if not any(v.shape == tensor.shape and torch.equal(v, tensor) for v in values)
    ]
    assert not missing


def test_another_models_checkpoint_is_refused(llama: tuple[Any, ...], tmp_path: Path) -> None:
    save_file({"a.weight": torch.randn(32, 32)}, tmp_path / "other.safetensors")
    with pytest.raises(OptionError, match=r"None of the \d+ weights .* is in the checkpoint"):
        KIND.program(llama[3] / "frozen.pt", Options(weights=tmp_path / "other.safetensors"))


def test_what_is_frozen_is_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    script = torch.jit.script(model)
    assert is_frozen(torch.jit.freeze(script)) and not is_frozen(script)


def test_checkpoints_are_read_without_running_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    torch.save({"w": Evil()}, tmp_path / "evil.bin")
    with pytest.raises(OptionError, match=r"holds more than tensors.*could run code"):
        open_checkpoint(tmp_path / "evil.bin")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "short.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(OptionError, match=r"short.safetensors' is damaged"):
        open_checkpoint(tmp_path / "short.safetensors")
    with pytest.raises(OptionError, match=r"short.safetensors' is damaged"):
        open_checkpoint(tmp_path)  # it is told which of the folder's files
    with pytest.raises(OptionError, match="does not exist"):
        open_checkpoint(tmp_path / "none.safetensors")
    (tmp_path / "w.txt").touch()
    with pytest.raises(OptionError, match="no checkpoint"):
        open_checkpoint(tmp_path / "w.txt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(OptionError, match="got a list, expected a state_dict"):
        open_checkpoint(tmp_path / "list.pt")


def test_checkpoints_of_several_files_and_nested_ones(tmp_path: Path) -> None:
    save_file({"_orig_mod.a.weight": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b.weight": torch.zeros(3), "b.bias": torch.ones(1)}, tmp_path / "2.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shapes == {"a.weight": (2,), "b.bias": (1,), "b.weight": (3,)}
    assert checkpoint.modules() == {"a": ["weight"], "b": ["bias", "weight"]}
    assert torch.equal(checkpoint.read("b.weight"), torch.zeros(3))
    torch.save({"epoch": 3, "state_dict": {"c.weight": torch.ones(2)}}, tmp_path / "nested.ckpt")
    assert list(open_checkpoint(tmp_path / "nested.ckpt").shapes) == ["c.weight"]
