"""A module under several names is called by the first of them, as the eager model does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from programs.eager_calls import eager_calls, numbered, run_all
from tensortap.taps.programs.aliases import Module, find_aliases, join_calls, likely_order
from tensortap.taps.programs.base import Options
from tensortap.taps.programs.exported.kind import open_exported


class Several(nn.Module):
    """`first` is called three times, and not by its first name to begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(8, 8)
        self.b = nn.Sequential(self.first, nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.b(self.second(x)))


class Activations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"fc": nn.Linear(8, 8), "act": self.act}) for _ in range(2)]
        )
        self.relu = self.act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(x)
        for layer in self.layers:
            x = layer["act"](layer["fc"](x) - 0.1)
        return self.act(x - 0.1)


class Blocks(nn.Module):
    """A block with parts, held twice, called in order."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.y = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.emb = nn.Embedding(8, 8)
        self.other = nn.Embedding(8, 8)
        self.other.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.y(self.x(self.emb(x) + self.other(x + 1)))


MODELS = {
    Several: torch.randn(3, 8),
    Activations: torch.randn(3, 8),
    Blocks: torch.arange(6),
}


def told(program: Any, args: tuple[Any, ...], eager: Any, *, exact: bool) -> dict[str, list[int]]:
    """The calls of layers that are told as sure; each must be what eager's call returned."""
    sure = {p.name for p in program.places if p.provenance == "scope" and p.gone is None}
    counts: dict[str, int] = {}
    expected = {}
    for layer, leaves in eager:
        expected[layer, counts.get(layer, 0)] = leaves[0][1]
        counts[layer] = counts.get(layer, 0) + 1
    found: dict[str, list[int]] = {}
    for (layer, number), call in numbered(run_all(program, args).calls).items():
        if layer not in sure or layer not in counts:
            continue  # a guess, or a name that eager does not have
        assert (layer, number) in expected, (layer, number)
        value = call.outputs[0][1]
        assert value is not None
        torch.testing.assert_close(
            value, expected[layer, number], rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5
        )
        found.setdefault(layer, []).append(number)
    return found


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("form", ["file", "module"])
@pytest.mark.parametrize("kind", list(MODELS), ids=lambda kind: kind.__name__)
def test_exported_calls_are_numbered_as_eager(
    kind: type[nn.Module], form: str, strict: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, args = kind().eval(), (MODELS[kind],)
    _, eager = eager_calls(model, args)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, args, strict=strict)
        torch.export.save(exported, tmp_path / "m.pt2")
    source = tmp_path / "m.pt2" if form == "file" else exported.module()
    program = open_exported(source, Options())
    found = told(program, args, eager, exact=True)
    inferred = {p.name for p in program.places if p.provenance == "inferred"}
    if form == "file" and strict:  # such an export knows one module from another
        counts = {name: sum(layer == name for layer, _ in eager) for name, _ in eager}
        assert {name: len(numbers) for name, numbers in found.items()} == counts
        assert not inferred
    elif form == "file":
        acts = {"act", "layers.0.act", "layers.1.act"}  # `relu`, called first, may be any of them
        assert inferred == {Several: {"first"}, Activations: acts, Blocks: set()}[kind]
    if kind is Blocks and form == "file":
        assert found["x"] == found["x.0"] == found["x.1"] == [0, 1]
        assert found["emb"] == found["other"] == [0]


def test_what_was_called_in_the_order_of_the_names_is_sure() -> None:
    names = {"a": Module("ReLU", bare=True), "b": Module("ReLU", bare=True)}
    earlier = likely_order(["a", "b"])
    assert find_aliases(names, [("a", 0), ("a", 1), ("b", 0)], earlier).doubts == set()
    assert find_aliases(names, [("a", 0), ("b", 0), ("a", 1)], earlier).doubts == {"a"}
    assert find_aliases(names, [("b", 0), ("a", 0)], earlier).doubts == {"a"}
    other = {**names, "b": Module("GELU", bare=True)}
    assert find_aliases(other, [("b", 0), ("a", 0)], earlier).doubts == set()


def test_an_order_is_told_by_weights_by_numbers_and_by_who_hands_down() -> None:
    earlier = likely_order(["encoder.fc", "decoder.fc"])
    assert earlier("encoder.act", "decoder.act") and not earlier("decoder.act", "encoder.act")
    assert earlier("net.2", "net.10") and not earlier("net.10", "net.2")
    assert earlier("act", "layers.0.act") and not earlier("layers.0.act", "act")
    assert earlier("act", "relu") and earlier("relu", "act")  # nobody knows


def test_joined_calls_are_numbered_as_they_ran() -> None:
    calls = [("b", 0), ("c", 0), ("a", 0), ("c", 1), ("b", 1)]
    assert join_calls(calls, {"b": "a"}) == {
        ("b", 0): ("a", 0),
        ("a", 0): ("a", 1),
        ("b", 1): ("a", 2),
        ("c", 0): ("c", 0),
        ("c", 1): ("c", 1),
    }


class Group(nn.Module):
    """As ALBERT: a layer with parts, called several times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList([nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.groups[0](x)
        return x + 1


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("kind", [*MODELS, Group], ids=lambda kind: kind.__name__)
def test_onnx_calls_are_numbered_as_eager(
    kind: type[nn.Module], dynamo: bool, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from programs.onnx_support import export
    from tensortap.taps.programs.onnx.kind import KIND

    torch.manual_seed(0)
    model, args = kind().eval(), (MODELS.get(kind, torch.randn(3, 8)),)
    _, eager = eager_calls(model, args)
    file = export(model, args, tmp_path / "m.onnx", "dynamo" if dynamo else "torchscript")
    program = KIND.program(file, Options())
    found = told(program, args, eager, exact=False)
    inferred = {p.name for p in program.places if p.provenance == "inferred"}
    if kind is Several:
        assert "first" in inferred and found["b"] == found["b.1"] == [0]
    if kind is Activations:
        assert ("act" in inferred) == dynamo and found.get("act", [0]) == [0]
        assert found["layers.0.fc"] == [0]
    if kind is Blocks:
        assert found["emb"] == found["x.0"][:1] == [0]
    if kind is Group:
        assert "groups.0" in inferred and found["groups.0.0.0"] == [0, 1, 2]
