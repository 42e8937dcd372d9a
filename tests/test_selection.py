"""The language of patterns, on models whose names we know."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensortap.demo import DemoModel
from tensortap.errors import SelectionError, TapError
from tensortap.selection import select, sites


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.attn(x))


class Body(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Net(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.model = Body(layers)
        self.head = nn.Linear(4, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(ids))


@pytest.fixture(scope="module")
def net() -> Net:
    return Net()


LAYERS = tuple(f"model.layers.{i}" for i in range(6))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("head", ("head",)),
        ("", ("",)),
        ("blocks", LAYERS),
        ("first", LAYERS[:1]),
        ("last", LAYERS[-1:]),
        ("embedding", ("model.embed_tokens",)),
        ("final_norm", ("model.norm",)),
        ("model.layers.*", LAYERS),
        ("model.*", ("model.embed_tokens", "model.norm")),
        ("*", ("model", "head")),
        ("**.attn", tuple(f"{layer}.attn" for layer in LAYERS)),
        ("**.0.**.2", ("model.layers.0.mlp.2",)),
        (
            "model.layers.0.**",
            tuple(f"{LAYERS[0]}{s}" for s in ("", ".attn", ".mlp", ".mlp.0", ".mlp.1", ".mlp.2")),
        ),
        ("model.layers.{0,4-5}", (LAYERS[0], LAYERS[4], LAYERS[5])),
        ("model.layers.{0-999999999999}", LAYERS),
        (
            "model.layers.{1-2}.{attn,mlp}",
            (
                "model.layers.1.attn",
                "model.layers.1.mlp",
                "model.layers.2.attn",
                "model.layers.2.mlp",
            ),
        ),
        ("model.lay?rs.1", ("model.layers.1",)),
        (r"re:model\.layers\.[02]", (LAYERS[0], LAYERS[2])),
        (r"re:model\.layers\.\d{1,2}, head", (*LAYERS, "head")),
        ("{model.norm,head}", ("model.norm", "head")),
        ("model.layers.{0,*}.attn", tuple(f"{layer}.attn" for layer in LAYERS)),
        ("type:Embedding", ("model.embed_tokens",)),
        ("type:{Embedding,LayerNorm}", ("model.embed_tokens", "model.norm")),
        ("type:Layer*", (*LAYERS, "model.norm")),
        ("type:torch.nn.modules.normalization.LayerNorm", ("model.norm",)),
        ("head, model.layers.3,first", ("model.layers.0", "model.layers.3", "head")),
        (["last", "head", "last"], (LAYERS[-1], "head")),
        (["blocks", "!first"], LAYERS[1:]),
        (["!model.layers.{1-5}", "blocks"], LAYERS[:1]),
        (["type:Linear", "!**.mlp.*", "!head"], tuple(f"{layer}.attn" for layer in LAYERS)),
    ],
)
def test_patterns_select(net: Net, patterns: str | list[str], expected: tuple[str, ...]) -> None:
    assert select(net, patterns).names == expected


def test_base_class_counts_as_type() -> None:
    class Quantised(nn.Linear):
        pass

    model = nn.Sequential(Quantised(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert select(model, "type:Linear").names == ("0", "2")
    assert select(model, "type:Quantised").names == ("0",)


def test_all_holds_the_root_and_no_container(net: Net) -> None:
    names = select(net, "all").names
    called = [n for n, m in net.named_modules() if not isinstance(m, nn.ModuleList)]
    assert list(names) == called
    assert names[0] == ""


def test_only_exclusions_exclude_from_all(net: Net) -> None:
    assert set(select(net, "all").names) - set(select(net, "!head").names) == {"head"}


def test_leaves_are_modules_without_children(net: Net) -> None:
    expected = [n for n, m in net.named_modules() if not list(m.children())]
    assert list(select(net, "leaves").names) == expected


def test_leaves_pass_over_what_holds_weights() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.ReLU())
    assert select(model, "leaves").names == ("0", "1")


def test_single_module() -> None:
    model = nn.Linear(2, 2)
    assert select(model, "leaves").names == ("",)
    assert select(model, "all").names == ("",)
    assert select(model, "blocks", default_fallback=True).names == ("",)


class TestExactNameAndWord:
    def test_a_module_named_like_a_word_wins(self) -> None:
        model = nn.ModuleDict({"first": nn.Linear(2, 2), "embedding": nn.Linear(2, 2)})
        assert select(model, "first").names == ("first",)
        assert select(model, "embedding").names == ("embedding",)

    def test_a_list_named_blocks_does_not_hide_the_word(self) -> None:
        names = select(DemoModel(), ["embedding", "blocks", "final_norm"]).names
        assert names == ("embedding", *(f"blocks.{i}" for i in range(8)), "final_norm")

    def test_a_list_of_leaves_named_blocks_is_told(self) -> None:
        model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ReLU(), nn.ReLU()])})
        with pytest.raises(SelectionError, match="no repeated blocks"):
            select(model, "blocks")


class TestNames:
    def test_shared_module_is_one_site_under_all_its_names(self) -> None:
        shared = nn.Linear(2, 2)
        model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())})
        assert [s.names for s in sites(model)] == [("",), ("a", "b.0"), ("b",), ("b.1",)]
        assert select(model, "b.0").names == ("a",)
        assert select(model, ["a", "b.*"]).names == ("a", "b.1")

    def test_a_module_that_holds_its_parent_ends(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].owner = model
        assert [s.name for s in sites(model)] == ["", "0"]

    def test_compiled_names_are_the_plain_names(self, net: Net) -> None:
        compiled = torch.compile(net)
        assert [s.name for s in sites(compiled)] == [s.name for s in sites(net)]
        assert sites(compiled)[0].type == "Net"
        assert select(compiled, "_orig_mod.head").names == ("head",)
        assert select(compiled, "blocks").names == LAYERS

    def test_one_compiled_layer(self) -> None:
        net = Net(3)
        net.model.layers[1] = torch.compile(net.model.layers[1])
        assert select(net, "blocks").names == LAYERS[:3]
        assert select(net, "model.layers.1.attn").names == ("model.layers.1.attn",)

    def test_wrapper_prefix_stays(self, net: Net) -> None:
        wrapped = nn.DataParallel(net)
        assert select(wrapped, "blocks").names == tuple(f"module.{name}" for name in LAYERS)


class TestSentences:
    @pytest.mark.parametrize(
        ("patterns", "words"),
        [
            ("model.layer.3", ["'model.layer.3'", "'model.layers.3'", "--plan"]),
            ("Head", ["'head'"]),
            ("blocs", ["'blocks'"]),
            ("model.layers", ["ModuleList", "'model.layers.*'", "'model.layers.0'"]),
            ("type:Liner", ["'Liner'", "'Linear'"]),
            ("re:model[", ["not a regular expression"]),
            ("model.layers.{0,4", ["brace"]),
            ("model.layers.{4-2}", ["backwards", "'2-4'"]),
            ("model.layers.{}", ["empty item"]),
            ("head,,model", ["empty pattern"]),
            ([], ["at least one pattern"]),
            (["head", "!head"], ["Nothing is left", "'!head'", "'head'"]),
            (["blocks", "!hed"], ["'hed'", "'head'"]),
        ],
    )
    def test_what_matches_nothing_is_told(
        self, net: Net, patterns: str | list[str], words: list[str]
    ) -> None:
        with pytest.raises(SelectionError) as caught:
            select(net, patterns)
        assert isinstance(caught.value, TapError) and isinstance(caught.value, ValueError)
        for word in words:
            assert word in str(caught.value)

    def test_numbers_beyond_the_model_are_noted(self, net: Net) -> None:
        selection = select(net, "model.layers.{4-7}")
        assert selection.names == LAYERS[4:]
        assert any("6, 7" in note for note in selection.notes)
        assert select(net, "model.layers.{4-5}").notes == ()
        assert select(net, "**.{attn,norm}").notes == ()
        (far,) = select(net, "model.layers.{0-1000000}").notes
        assert len(far) < 120

    def test_no_blocks(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        with pytest.raises(SelectionError, match="no repeated blocks"):
            select(model, "blocks")
        selection = select(model, "blocks", default_fallback=True)
        assert selection.names == ("0", "1")
        assert "leaves" in selection.notes[0]

    @pytest.mark.parametrize("word", ["embedding", "final_norm", "first", "last"])
    def test_a_role_that_nobody_has(self, word: str) -> None:
        with pytest.raises(SelectionError, match=word):
            select(nn.Sequential(nn.Linear(2, 2)), word)
