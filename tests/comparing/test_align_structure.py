"""Pairs of layers by what they hold and what they are, where names do not help."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import decoders, partners
from torch import nn

import tensortap as tap
from support import Net
from tensortap.comparing.align import align
from tensortap.comparing.likeness import shape_likeness, type_likeness
from tensortap.comparing.paths import best_path, gaps, rising

Recorded = Callable[..., tap.Recording]


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(1))


def matched(reference: tap.Recording, candidate: tap.Recording) -> dict[str, str]:
    return {
        pair.reference.name: pair.candidate.name
        for pair in align(reference, candidate)
        if pair.reference is not None and pair.candidate is not None
    }


def how(reference: tap.Recording, candidate: tap.Recording) -> dict[str, str]:
    return {
        pair.reference.name: pair.matched_by
        for pair in align(reference, candidate)
        if pair.reference is not None and pair.candidate is not None
    }


# --- another implementation of the same ------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"keep": "summary"}, {"inputs": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_renamed_renested_and_fused(
    tokens, recorded: Recorded, dtype: torch.dtype, options: dict[str, Any]
):
    ours, theirs = decoders()
    reference = recorded(ours, tokens, **options)
    candidate = recorded(theirs.to(dtype), tokens, **options)
    assert matched(reference, candidate) == partners()
    back = {b: a for a, b in partners().items()}
    assert matched(candidate, reference) == back
    ways = how(reference, candidate)
    assert {name for name, way in ways.items() if way != "content"} == {""}
    # What is fused on one side has no partner.
    lone = {p.candidate.name for p in align(reference, candidate) if p.reference is None}
    assert lone == {f"h.{n}.att.qkv" for n in range(3)}


def test_tensors_against_summaries(tokens, recorded: Recorded):
    ours, theirs = decoders()
    reference = recorded(ours, tokens)
    candidate = recorded(theirs, tokens, keep="summary")
    assert matched(reference, candidate) == partners()


def test_gradients_alone_can_be_paired(tokens, recorded: Recorded):
    ours, theirs = decoders()

    def run(model: nn.Module) -> tap.Recording:
        call = lambda: model(tokens).square().mean().backward()  # noqa: E731
        return recorded(model, call=call, outputs=False, grads=True)

    found = matched(run(ours), run(theirs))
    assert found.items() <= partners().items()
    assert len(found) >= len(partners()) - 4


@pytest.mark.parametrize("gain", [1.02, 3.0, -1.0])
@pytest.mark.parametrize("layer", ["h.1.w2", "h.1.att.out", "wte", "h.0.ln1", "h.2.w1"])
def test_a_layer_that_diverged_keeps_its_partner(
    tokens, recorded: Recorded, layer: str, gain: float
):
    ours, theirs = decoders()
    reference = recorded(ours, tokens)
    with torch.no_grad():
        theirs.get_submodule(layer).weight.mul_(gain)
    candidate = recorded(theirs, tokens)
    expected = {b: a for a, b in partners().items()}
    found = {b: a for a, b in matched(reference, candidate).items()}
    assert found[layer] == expected[layer]
    wrong = {name for name in found if found[name] != expected.get(name)}
    # Two branches that ran in another order can be told apart by their values alone.
    assert {name.rsplit(".", 1)[-1] for name in wrong} <= {"w1", "w3"}
    assert len(found) >= len(expected) - 2


def test_where_no_value_agrees_types_shapes_and_order_are_left(tokens, recorded: Recorded):
    ours, theirs = decoders()
    with torch.no_grad():
        theirs.wte.weight.normal_()
    found = matched(recorded(ours, tokens), recorded(theirs, tokens))
    wrong = {a: b for a, b in found.items() if partners().get(a) != b}
    assert {b.rsplit(".", 1)[-1] for b in wrong.values()} <= {"w1", "w3"}
    assert found.keys() == partners().keys()
    ways = how(recorded(ours, tokens), recorded(theirs, tokens))
    assert Counter(ways.values()) == {"structure": len(partners()) - 1, "name": 1}


def test_blocks_alone_pair_although_nothing_agrees(tokens, recorded: Recorded):
    ours, theirs = decoders(4)
    with torch.no_grad():
        theirs.wte.weight.normal_()
    reference, candidate = (recorded(model, tokens, layers="blocks") for model in (ours, theirs))
    assert matched(reference, candidate) == {f"model.layers.{n}": f"h.{n}" for n in range(4)}


def test_another_batch_size_still_pairs_by_content(tokens, recorded: Recorded):
    ours, theirs = decoders()
    reference, candidate = recorded(ours, tokens), recorded(theirs, tokens[:1])
    assert matched(reference, candidate) == partners()


def test_channels_last_pairs_by_content(recorded: Recorded):
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3)
            self.relu = nn.ReLU()
            self.pool = nn.AvgPool2d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pool(self.relu(self.conv(x)))

    class Last(nn.Module):
        class Conv(nn.Module):
            def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
                super().__init__()
                self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = nn.functional.conv2d(x.movedim(-1, 1), self.weight, self.bias)
                return y.movedim(1, -1)

        class Pool(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.avg_pool2d(x.movedim(-1, 1), 2).movedim(1, -1)

        def __init__(self, other: First) -> None:
            super().__init__()
            self.c, self.r, self.p = self.Conv(*other.conv.parameters()), nn.ReLU(), self.Pool()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.p(self.r(self.c(x)))

    torch.manual_seed(0)
    model, x = First(), torch.randn(2, 3, 8, 8)
    reference = recorded(model, x)
    candidate = recorded(Last(model), x.movedim(1, -1).contiguous())
    assert matched(reference, candidate) == {"conv": "c", "relu": "r", "pool": "p", "": ""}


# --- containers, duplicates, positions -------------------------------------------------------


def linears(count: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, 6) for _ in range(count)]


def test_containers_do_not_cross_with_their_last_child(recorded: Recorded):
    a, b, c = linears(3)
    flat = nn.Sequential(a, nn.Tanh(), b, nn.Tanh(), c)
    nested = nn.ModuleDict(
        {"stem": nn.Sequential(a, nn.Tanh()), "tail": nn.Sequential(b, nn.Tanh(), c)}
    )
    nested.forward = lambda x: nested["tail"](nested["stem"](x))  # type: ignore[method-assign]
    x = torch.randn(4, 6)
    found = matched(recorded(flat, x), recorded(nested, x))
    assert found == {
        "0": "stem.0",
        "1": "stem.1",
        "2": "tail.0",
        "3": "tail.1",
        "4": "tail.2",
        "": "",
    }


def test_a_container_that_one_side_lacks_stays_alone(recorded: Recorded):
    a, b = linears(2)
    ours = nn.Sequential(nn.Sequential(a, nn.Dropout()), nn.Sequential(nn.Dropout(), b)).eval()
    theirs = nn.Sequential()
    theirs.add_module("first", a)
    theirs.add_module("second", b)
    x = torch.randn(4, 6)
    assert matched(recorded(ours, x), recorded(theirs, x)) == {
        "0.0": "first",
        "1.1": "second",
        "": "",
    }


def test_numbers_move_when_a_layer_is_put_in(recorded: Recorded):
    a, b, c = linears(3)
    ours = nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), c)
    theirs = nn.Sequential(a, nn.Identity(), nn.ReLU(), b, nn.ReLU(), c)
    x = torch.randn(4, 6)
    expected = {"0": "0", "1": "2", "2": "3", "3": "4", "4": "5", "": ""}
    assert matched(recorded(ours, x), recorded(theirs, x)) == expected


def test_a_layer_replaced_in_its_place_pairs_by_its_number(recorded: Recorded):
    a, b = linears(2)
    x = torch.randn(4, 6)
    reference = recorded(nn.Sequential(a, nn.ReLU(), b), x)
    candidate = recorded(nn.Sequential(a, nn.Sigmoid(), b), x)
    assert how(reference, candidate) == dict.fromkeys(["0", "1", "2", ""], "name")
    assert matched(reference, candidate)["1"] == "1"


def test_a_neighbouring_block_is_no_renamed_one(net, ids, recorded: Recorded):
    """Along a residual stream neighbours hold much the same: that is no reason to pair them."""
    reference = recorded(net, ids, layers=["embedding", "blocks.0", "head"])
    candidate = recorded(net, ids, layers=["embedding", "blocks.1", "head"])
    assert matched(reference, candidate) == {"embedding": "embedding", "head": "head"}


def test_shared_modules_that_run_twice(recorded: Recorded):
    class Shared(nn.Module):
        def __init__(self, names: tuple[str, str], layers: list[nn.Linear]) -> None:
            super().__init__()
            self.names = names
            for name, layer in zip(names, layers, strict=True):
                self.add_module(name, layer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = (self.get_submodule(name) for name in self.names)
            return first(second(first(x)))

    layers = linears(2)
    x = torch.randn(4, 6)
    reference = recorded(Shared(("a", "b"), layers), x)
    candidate = recorded(Shared(("u", "v"), layers), x)
    assert matched(reference, candidate) == {"a": "u", "b": "v", "": ""}


def test_equal_layers_pair_in_order(recorded: Recorded):
    """Eight layers that all do nothing: content cannot tell them apart, their order can."""

    def chain(prefix: str) -> nn.Module:
        model = nn.Sequential()
        for n in range(8):
            model.add_module(f"{prefix}{n}", nn.Identity())
        return model

    x = torch.randn(3, 5)
    found = matched(recorded(chain("a"), x), recorded(chain("b"), x))
    assert found == {**{f"a{n}": f"b{n}" for n in range(8)}, "": ""}


def test_constants_prove_nothing(recorded: Recorded):
    """Dead layers hold the same zeros everywhere."""
    a, b = linears(2)
    x = torch.zeros(4, 6)
    with torch.no_grad():
        for layer in (a, b):
            layer.bias.zero_()
    ours = nn.Sequential()
    ours.add_module("a", a)
    theirs = nn.Sequential()
    theirs.add_module("b", nn.Embedding(3, 6))
    theirs.forward = lambda x: theirs.b(x[:, 0].long()) * 0  # type: ignore[method-assign]
    assert matched(recorded(ours, x), recorded(theirs, x)) == {"": ""}


# --- nothing in common -----------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))


def test_unrelated_models_pair_almost_nothing(net, ids, tokens, recorded: Recorded):
    torch.manual_seed(3)
    decoder, _ = decoders()
    perceptron = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 9), nn.Linear(9, 32))
    runs = [
        recorded(decoder, tokens),
        recorded(net, ids),
        recorded(Tiny().eval(), torch.randn(2, 1, 8, 8)),
        recorded(perceptron, tokens.float()),
        recorded(Net(width=12).eval().requires_grad_(False).embedding, ids),
    ]
    for reference in runs:
        for candidate in runs:
            if reference is not candidate:
                assert len(matched(reference, candidate)) <= 1, (reference, candidate)


def test_other_weights_of_another_width_pair_nothing(ids, recorded: Recorded):
    torch.manual_seed(0)
    reference = recorded(Net(width=8).eval(), ids)
    wide = Net(width=12).eval()
    renamed = nn.Module()
    for name, child in wide.named_children():
        renamed.add_module(f"x_{name}", child)
    renamed.forward = lambda ids: wide(ids)  # type: ignore[method-assign]
    assert matched(reference, recorded(renamed, ids)).keys() <= {"", "head"}


def test_a_recording_without_layers_in_common_ports(net, ids, recorded: Recorded):
    ours, theirs = decoders(1)
    tokens = ids % 32
    inputs = recorded(ours, tokens, outputs=False, inputs=True)
    outputs = recorded(theirs, tokens)
    assert set(how(inputs, outputs).values()) <= {"structure", "name"}


# --- many layers -----------------------------------------------------------------------------


def test_many_layers(tmp_path: Path):
    """Two thousand layers under other names, most of them with other values."""
    from tensortap.recording.schema import Manifest, Row
    from tensortap.recording.writer import Writer

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2000, 3, 4, generator=generator)

    def write(path: Path, prefix: str, noise: float) -> tap.Recording:
        writer = Writer(str(path), Manifest())
        for n, value in enumerate(values):
            value = value + noise * torch.randn(3, 4, generator=generator)
            kind = ("Linear", "ReLU", "LayerNorm")[n % 3]
            writer.add(Row(f"{prefix}{n}", "output", type=kind, order=n), value)
        writer.close()
        return tap.open(path)

    reference = write(tmp_path / "a", "old", 0)
    candidate = write(tmp_path / "b", "new", 0.01)
    found = matched(reference, candidate)
    assert found == {f"old{n}": f"new{n}" for n in range(2000)}


def test_windows_keep_huge_recordings_small(
    tokens, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
):
    from tensortap.comparing import structure

    ours, theirs = decoders(6)
    reference, candidate = recorded(ours, tokens), recorded(copy.deepcopy(theirs), tokens)
    monkeypatch.setattr(structure, "_MOST_CELLS", 1000)
    found = matched(reference, candidate)
    assert found.items() <= partners(6).items()
    assert len(found) > 0.8 * len(partners(6))


# --- the parts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "low", "high"),
    [
        ("Linear", "torch.nn.Linear", 1, 1),
        ("Linear", "Conv1D", 1, 1),
        ("RMSNorm", "LlamaRMSNorm", 0.8, 0.8),
        ("GELU", "NewGELUActivation", 0.8, 0.8),
        ("LlamaMLP", "FeedForward", 0.8, 0.8),
        ("LlamaDecoderLayer", "Block", 0.8, 0.8),
        ("Linear", "QuantizedLinear", 0.8, 0.8),
        ("LayerNorm", "Block", 0, 0),
        ("LayerNorm", "RMSNorm", 0.1, 0.8),
        ("Linear", "LayerNorm", 0, 0),
        ("Linear", "", 0.5, 0.5),
    ],
)
def test_type_likeness(ours: str, theirs: str, low: float, high: float):
    assert low <= type_likeness(ours, theirs) <= high
    assert type_likeness(ours, theirs) == type_likeness(theirs, ours)


@pytest.mark.parametrize(
    ("ours", "theirs", "likeness"),
    [
        ((2, 3, 4), (2, 3, 4), 1.0),
        ((2, 3, 8, 8), (2, 8, 8, 3), 0.9),
        ((2, 1, 4), (2, 4), 0.9),
        ((2, 3, 4), (6, 4), 0.7),
        ((8, 3, 4), (2, 3, 4), 0.8),
        ((2, 60, 4), (2, 64, 4), 0.6),
        ((2, 6, 16), (2, 6, 48), 0.0),
        ((2, 3), (5, 7), 0.0),
        ((), (1,), 0.9),
        (None, (2, 3), 0.5),
    ],
)
def test_shape_likeness(ours: Any, theirs: Any, likeness: float):
    assert shape_likeness(ours, theirs) == likeness == shape_likeness(theirs, ours)


def brute_force(scores: np.ndarray, bonus: float) -> float:
    """The best total, by trying everything."""

    def best(i: int, j: int, follows: bool) -> float:
        if i == scores.shape[0] or j == scores.shape[1]:
            return 0.0
        value = max(best(i + 1, j, False), best(i, j + 1, False))
        if scores[i, j] > 0:
            extra = bonus if follows else 0.0
            value = max(value, scores[i, j] + extra + best(i + 1, j + 1, True))
        return value

    return best(0, 0, False)


def test_the_best_path_is_the_best():
    generator = np.random.default_rng(0)
    for _ in range(60):
        n, m = generator.integers(1, 6, size=2)
        scores = generator.integers(-2, 4, size=(n, m)).astype(np.float32)
        path = best_path(scores, bonus=0.25)
        assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(path))
        total = sum(float(scores[i, j]) for i, j in path)
        total += 0.25 * sum((c - a, d - b) == (1, 1) for (a, b), (c, d) in itertools.pairwise(path))
        assert total == pytest.approx(brute_force(scores, 0.25))
        assert all(scores[i, j] > 0 for i, j in path)


def test_rising_keeps_as_many_as_possible():
    assert rising([]) == []
    values = [5, 1, 2, 9, 3, 4]
    kept = [values[i] for i in rising(values)]
    assert kept == [1, 2, 3, 4]


def test_gaps_lie_between_pairs_that_keep_the_order():
    pairs = {2: 3, 3: 4, 5: 1, 7: 8}  # the third crosses and bounds nothing
    found = list(gaps(pairs, [0, 1, 4, 6, 9], [0, 2, 5, 6, 9]))
    assert found == [([0, 1], [0, 2], 1), ([4, 6], [5, 6], 2), ([9], [9], 1)]
