"""A compiled model's names hung up as modules are chosen as the model itself would be."""

from __future__ import annotations

import pytest
import torch

from programs.models import MODELS
from tensortap.selection import select, structure
from tensortap.selection.sites import sites
from tensortap.taps.programs.base import Place
from tensortap.taps.programs.skeleton import skeleton

_WORDS = ("all", "leaves", "blocks", "first", "last", "embedding", "final_norm", "type:Linear")


def _places(model: torch.nn.Module) -> list[Place]:
    """The places of a model that keeps all of its called modules."""
    called = select(model, "all").layers
    return [Place(site.name, site.type) for site in called]


@pytest.mark.parametrize("name", ["demo", "llama", "mamba", "mixtral", "bert", "vit", "resnet"])
@pytest.mark.parametrize("known", [True, False], ids=["weights known", "weights unknown"])
def test_words_and_patterns_choose_the_same_layers(name: str, known: bool) -> None:
    model, _, _ = MODELS[name]()
    weights = {n: tuple(p.shape) for n, p in model.named_parameters()} if known else None
    tree = skeleton(_places(model), weights)
    for word in _WORDS:
        try:
            expected = set(select(model, word).names)
        except ValueError:
            continue
        assert set(select(tree, word).names) == expected, word
    assert structure(tree).blocks == structure(model).blocks


def test_types_are_those_of_the_places() -> None:
    tree = skeleton([Place("layers.0", "Block"), Place("layers.1", "Block"), Place("", "Net")])
    assert {site.name: site.type for site in sites(tree)}["layers.0"] == "Block"
    assert select(tree, "layers.*").names == ("layers.0", "layers.1")


def test_without_types_what_a_layer_holds_tells_blocks_apart() -> None:
    names = [f"layers.{i}.{part}" for i in range(3) for part in ("norm", "mlp.up", "mlp.down")]
    names += [f"layers.{i}.mlp" for i in range(3)] + [f"layers.{i}" for i in range(3)]
    tree = skeleton([Place(name) for name in ["embed", *names, "head", ""]])
    assert select(tree, "blocks").names == ("layers.0", "layers.1", "layers.2")


def test_a_root_alone_is_a_model() -> None:
    assert select(skeleton([Place("")]), "all").names == ("",)
