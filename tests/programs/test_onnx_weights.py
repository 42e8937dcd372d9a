"""Layers without scopes, named by the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx

from programs.onnx_support import Small, assert_right, eager, export, heard, opened, pictures, sure
from tensortap.errors import OptionError


def stripped(path: Path) -> Path:
    """The same model without any name that a module gave."""
    model = onnx.load(path)
    graph = model.graph
    names: dict[str, str] = {value.name: value.name for value in [*graph.input, *graph.output]}
    for tensor in graph.initializer:
        tensor.name = names.setdefault(tensor.name, f"w{len(names)}")
    for index, node in enumerate(graph.node):
        node.name = f"n{index}"
        del node.metadata_props[:]
        for values in (node.input, node.output):
            for place, name in enumerate(values):
                if name:
                    values[place] = names.setdefault(name, f"v{len(names)}")
    del graph.value_info[:]
    del graph.metadata_props[:]
    out = path.with_suffix(".stripped.onnx")
    onnx.save(model, out)
    return out


@pytest.mark.parametrize("style", ["dynamo", "torchscript"])
def test_leaves_are_named_by_their_weights(style: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Small().eval()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    ids = torch.randint(0, 50, (2, 7))
    path = stripped(export(model, (ids,), tmp_path / "m.onnx", style))
    by_node = {place.name: place.provenance for place in opened(path).places if place.name}
    assert set(by_node.values()) == {"value-name"} and "n4" in by_node
    program = opened(path, weights=tmp_path / "weights.safetensors")
    expected = eager(model, ids)
    found = heard(program, ids)
    assert_right(found, expected)
    leaves = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    assert set(found) == leaves
    assert {p.provenance for p in program.places if p.name in leaves} == {"weight"}
    assert set(program.linears()) == leaves - {"emb"}
    gone = {place.name: place.gone for place in program.places if place.gone}
    assert "do not tell what it returns" in gone["norm"]  # a scale says nothing of what follows


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.load_state_dict(self.one.state_dict())
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.emb(ids))
        return self.head(self.one(x) * self.two(x.relu()))


def test_equal_weights_are_not_told_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied().eval()
    with torch.no_grad():
        model.norm.weight.uniform_()
        model.norm.bias.uniform_()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    ids = torch.randint(0, 20, (2, 5))
    path = stripped(export(model, (ids,), tmp_path / "m.onnx", "torchscript"))
    program = opened(path, weights=tmp_path / "w.pt")
    assert_right(heard(program, ids), eager(model, ids))
    gone = {place.name: place.gone for place in program.places if place.gone}
    assert set(gone) == {"emb", "head", "one", "two"}
    assert all("same weights" in (why or "") for why in gone.values())
    assert sure(program) == ["norm"]


@pytest.mark.parametrize("style", ["dynamo", "dynamo-plain", "torchscript"])
def test_a_folded_weight_is_no_ones(style: str, tmp_path: Path) -> None:
    model = pictures()
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    x = torch.randn(2, 3, 8, 8)
    path = stripped(export(model, (x,), tmp_path / "m.onnx", style))
    program = opened(path, weights=tmp_path / "w.safetensors")
    found = heard(program, x)
    assert_right(found, eager(model, x))
    if style == "dynamo-plain":
        assert {"bn", "down.0", "down.1", "fc"} <= set(found)
    else:
        assert set(found) == {"fc"}
        gone = {place.name: place.gone for place in program.places if place.gone}
        assert "not in the model" in (gone["down.0"] or "")


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    path = export(nn.Linear(4, 4), (torch.randn(2, 4),), tmp_path / "m.onnx", "torchscript")
    with pytest.raises(OptionError, match="does not exist"):
        opened(path, weights=tmp_path / "no.safetensors")
