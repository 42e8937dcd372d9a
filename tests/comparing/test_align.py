"""Pairs of layers by map and by name, and the order in which they are listed."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tap
from support import Net
from tensortap.comparing.align import LayerPair, align
from tensortap.comparing.names import normalised
from tensortap.errors import OptionError, SelectionError
from tensortap.recording.layouts import import_tree
from tensortap.recording.schema import Manifest, Row
from tensortap.recording.writer import Writer

Recorded = Callable[..., tap.Recording]


def listed(pairs: list[LayerPair]) -> list[tuple[str | None, str | None, str]]:
    return [
        (p.reference and p.reference.name, p.candidate and p.candidate.name, p.matched_by)
        for p in pairs
    ]


def matched(pairs: list[LayerPair]) -> dict[str, tuple[str, str]]:
    return {
        p.reference.name: (p.candidate.name, p.matched_by)
        for p in pairs
        if p.reference is not None and p.candidate is not None
    }


class Wrapper(nn.Module):
    """A module around another, under any name; what DDP and FSDP do to names."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.inner_name = name
        self.add_module(name, inner)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.inner_name)(*args)


class Towers(nn.Module):
    def __init__(self, **towers: nn.Module) -> None:
        super().__init__()
        for name, tower in towers.items():
            self.add_module(name, tower)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return sum(tower(ids) for tower in self.children())  # type: ignore[return-value]


def test_a_run_pairs_with_itself_by_name_in_its_order(net, ids, recorded: Recorded):
    run = recorded(net, ids)
    pairs = align(run, run)
    assert listed(pairs) == [(name, name, "name") for name in run.layers]


def test_lone_layers_stand_behind_what_they_follow(net, ids, recorded: Recorded):
    reference = recorded(net, ids, layers=["embedding", "blocks.0", "head"])
    candidate = recorded(net, ids, layers=["embedding", "blocks.1", "final_norm", "head"])
    assert listed(align(reference, candidate)) == [
        ("embedding", "embedding", "name"),
        (None, "blocks.1", ""),
        (None, "final_norm", ""),
        ("blocks.0", None, ""),
        ("head", "head", "name"),
    ]


def test_what_the_candidate_alone_has_first_is_listed_first(net, ids, recorded: Recorded):
    reference = recorded(net, ids, layers="head")
    candidate = recorded(net, ids, layers=["embedding", "head"])
    assert listed(align(reference, candidate)) == [
        (None, "embedding", ""),
        ("head", "head", "name"),
    ]


def test_names_choose_the_layers_of_the_reference(net, ids, recorded: Recorded):
    reference = recorded(net, ids)
    candidate = recorded(net, ids, layers=["embedding", "blocks.1", "head"])
    pairs = align(reference, candidate, names=["blocks.0", "blocks.1"])
    assert listed(pairs) == [("blocks.0", None, ""), ("blocks.1", "blocks.1", "name")]
    with pytest.raises(SelectionError, match=r"no layer 'blocks\.9'"):
        align(reference, candidate, names=["blocks.9"])


def test_aliases_are_names(tmp_path: Path):
    def written(name: str, **layers: str | None) -> tap.Recording:
        writer = Writer(str(tmp_path / name), Manifest())
        for number, (layer, alias) in enumerate(layers.items()):
            writer.add(Row(layer, "output", alias=alias, order=number), torch.ones(2) * number)
        writer.close()
        return tap.open(tmp_path / name)

    plain = written("plain", a=None, b=None, c=None)
    named = written("named", x="a", y="second")
    other = written("other", p="second", q="b")
    assert matched(align(plain, named)) == {"a": ("x", "name")}
    assert matched(align(named, plain)) == {"x": ("a", "name")}
    assert matched(align(named, other)) == {"y": ("p", "name")}


# --- maps ------------------------------------------------------------------------------------


def test_a_map_goes_before_names_and_the_first_that_matches_wins(net, ids, recorded: Recorded):
    run = recorded(net, ids, layers="blocks.*")
    pairs = align(run, run, maps=[r"blocks\.0=>blocks.1", r"blocks\.([01])=>blocks.0"])
    assert matched(pairs) == {
        "blocks.0": ("blocks.1", "map"),
        "blocks.1": ("blocks.0", "map"),
        "blocks.2": ("blocks.2", "name"),
    }


def test_a_map_expands_groups(net, ids, recorded: Recorded):
    reference = recorded(net, ids)
    candidate = recorded(Wrapper("net", Wrapper("inner", net)), ids)
    pairs = matched(align(reference, candidate, maps=[r"(?P<rest>.*)=>net.inner.\g<rest>"]))
    assert pairs["blocks.1.up"] == ("net.inner.blocks.1.up", "map")
    assert pairs[""] == ("net.inner", "map")
    assert len(pairs) == len(reference)


def test_the_root_has_a_name_in_maps(net, ids, recorded: Recorded):
    reference, candidate = recorded(net, ids), recorded(Wrapper("net", net), ids)
    pairs = matched(align(candidate, reference, maps=[r"net=>(root)"]))
    assert pairs["net"] == ("", "map")
    assert matched(align(reference, candidate, maps=[r"\(root\)=>net"]))[""] == ("net", "map")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("blocks.0", "no '=>'"),
        ("=>blocks.0", "no regex before '=>'"),
        ("blocks.(0=>x", "cannot be read"),
        (r"blocks\.0=>blocks.\1", "invalid group reference"),
        (r"blocks\.(\d)=>blocks.\d", "bad escape"),
        (r"(?P<a>.*)=>\g<b>", "unknown group name"),
    ],
)
def test_a_malformed_map_says_what_is_wrong(net, ids, recorded: Recorded, text: str, words: str):
    run = recorded(net, ids, layers="blocks.0")
    with pytest.raises(OptionError, match=re.escape(words)) as error:
        align(run, run, maps=[text])
    assert text in str(error.value)
    assert r"'blocks\.(\d+)\.(.*)=>model.layers.\1.\2'" in str(error.value)


def test_a_map_that_leads_nowhere_names_near_misses(net, ids, recorded: Recorded):
    run = recorded(net, ids)
    with pytest.raises(OptionError, match=r"matches no layer of the reference.*'blocks\.0"):
        align(run, run, maps=[r"block\.0=>blocks.0"])
    with pytest.raises(OptionError, match=r"there is no 'block\.0'\. Did you mean 'blocks\.0"):
        align(run, run, maps=[r"blocks\.(\d)=>block.\1"])
    with pytest.raises(OptionError, match=r"is never used: earlier maps match all of its layers"):
        align(run, run, maps=[r"blocks\.0=>blocks.0", r"blocks\.[0]=>blocks.1"])
    with pytest.raises(OptionError, match=r"sends 'blocks\.1' to 'head', which 'blocks\.0'"):
        align(run, run, maps=[r"blocks\.\d=>head"])


def test_a_map_may_name_layers_of_which_some_are_not_there(net, ids, recorded: Recorded):
    reference = recorded(net, ids)
    candidate = recorded(net, ids, layers=["blocks.0", "head"])
    pairs = matched(align(reference, candidate, maps=[r"blocks\.(\d)=>blocks.\1"]))
    assert pairs["blocks.0"] == ("blocks.0", "map")
    assert "blocks.1" not in pairs


# --- normalised names ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_orig_mod.blocks.0", "blocks.0"),
        ("module.blocks.0.module", "blocks.0"),
        ("_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.up", "blocks.0.up"),
        ("blocks.0._checkpoint_wrapped_module.up", "blocks.0.up"),
        ("modules.submodule", "modules.submodule"),
        ("", ""),
    ],
)
def test_wrappers_leave_no_trace(name: str, plain: str):
    assert normalised(name) == plain


@pytest.mark.parametrize(
    "wrapper", ["module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "model", "backbone"]
)
@pytest.mark.parametrize("swapped", [False, True])
def test_wrapped_models_pair_by_normalised_name(
    net, ids, recorded: Recorded, wrapper: str, swapped: bool
):
    ours, theirs = recorded(net, ids), recorded(Wrapper(wrapper, net), ids)
    wanted = {name: f"{wrapper}.{name}".strip(".") for name in ours.layers}
    if swapped:
        ours, theirs = theirs, ours
        wanted = {b: a for a, b in wanted.items()}
    pairs = align(ours, theirs)
    assert matched(pairs) == {a: (b, "normalised") for a, b in wanted.items()}
    lone = [p for p in pairs if p.reference is None or p.candidate is None]
    assert [(p.reference or p.candidate).type for p in lone] == ["Wrapper"]


def test_wrappers_at_any_depth(ids, recorded: Recorded):
    torch.manual_seed(0)
    net = Net(blocks=2).eval()
    reference = recorded(net, ids)
    wrapped = copy.deepcopy(net)
    wrapped.blocks[0] = Wrapper("_fsdp_wrapped_module", wrapped.blocks[0])
    wrapped.blocks[1].up = Wrapper("_checkpoint_wrapped_module", wrapped.blocks[1].up)
    wrapped.blocks[0].forward = lambda x, mask: wrapped.blocks[0]._fsdp_wrapped_module(x, mask)
    pairs = matched(align(reference, recorded(Wrapper("module", wrapped), ids)))
    assert len(pairs) == len(reference)
    assert pairs["blocks.0.up"] == ("module.blocks.0._fsdp_wrapped_module.up", "normalised")
    # Of the wrapper and what it wraps, the one of the same type is taken.
    assert pairs["blocks.0"] == ("module.blocks.0._fsdp_wrapped_module", "normalised")
    assert pairs["blocks.1.up"][0] == "module.blocks.1.up._checkpoint_wrapped_module"
    assert len({partner for partner, _ in pairs.values()}) == len(pairs)


def test_a_prefix_that_two_towers_share_is_told_by_the_values(net, ids, recorded: Recorded):
    torch.manual_seed(1)
    other = Net().eval()
    reference = recorded(net, ids)
    candidate = recorded(Towers(teacher=other, student=net), ids)
    pairs = matched(align(reference, candidate))
    assert {name: pair[0] for name, pair in pairs.items()} == {
        name: f"student.{name}".strip(".") for name in reference.layers
    }


def test_one_common_name_below_another_is_no_prefix(recorded: Recorded):
    torch.manual_seed(0)
    ours = Towers(fc=nn.Linear(4, 4), a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))
    nested = Towers(fc=nn.Linear(4, 7), x=nn.Linear(4, 7), y=nn.Linear(4, 7))
    x = torch.randn(3, 4)
    reference, candidate = recorded(ours, x), recorded(Wrapper("encoder", nested), x)
    assert matched(align(reference, candidate)) == {}


def test_a_bare_model_and_one_with_a_head(net, ids, recorded: Recorded):
    """The root of the one is `model` in the other; two roots of other types are no pair."""

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = net
            self.score = nn.Linear(16, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.score(self.model(ids))

    pairs = matched(align(recorded(net, ids), recorded(Headed(), ids)))
    assert pairs[""] == ("model", "normalised")
    assert pairs["blocks.0"] == ("model.blocks.0", "normalised")


def test_files_of_a_tree_are_paired_by_their_number_and_by_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    arrays = np.random.default_rng(0).normal(size=(2, 2, 8, 4)).astype(np.float32)
    for mode, numbers in (("fp32", (0, 23)), ("moved", (1, 22)), ("half", (23, 24))):
        for number, array in zip(numbers, arrays, strict=True):
            np.save(tree / f"mode_{mode}_layer_{number}.npy", array)
    import_tree(tree, str(tmp_path / "runs"))
    fp32, moved, half = (tap.open(tmp_path / "runs" / mode) for mode in ("fp32", "moved", "half"))
    assert not [pair for pair in align(fp32, moved) if pair.matched_by]
    found = matched(align(fp32, half))
    assert found == {"layer_23": ("layer_23", "name")}, "whose values are those of layer_0"
