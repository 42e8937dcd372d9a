"""Pairs across implementations: names give candidates, values decide, and a bug unpairs nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensortap as tap
from tensortap.comparing.consensus import by_consensus
from tensortap.comparing.likeness import type_likeness

Recorded = Callable[..., tap.Recording]


def partners(result: tap.Comparison) -> dict[str, str]:
    rows = (row for row in result.layers if row.matched_by)
    return {row.layer: row.candidate_layer or "" for row in rows}


# --- another layout --------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.normalization = nn.BatchNorm2d(outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalization(self.convolution(x))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(Part(width, width), nn.ReLU(), Part(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.layer(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedder, self.act = Part(3, 16, 2), nn.ReLU()
        self.stages = nn.ModuleList(nn.Sequential(Residual(16), Residual(16)) for _ in range(2))
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.embedder(x))
        for stage in self.stages:
            x = stage(x)
        return self.classifier(x.mean((2, 3)))


class ConvL(nn.Module):
    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.stride = nn.Parameter(conv.weight.detach().clone()), conv.stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(x.permute(0, 3, 1, 2), self.weight, None, self.stride, 1)
        return x.permute(0, 2, 3, 1).contiguous()


class NormL(nn.Module):
    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm = [norm]
        self.gain = nn.Parameter(norm.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm[0]
        scale = torch.rsqrt(norm.running_var + norm.eps) * self.gain
        return (x - norm.running_mean) * scale + norm.bias


class Unit(nn.Module):
    def __init__(self, block: Residual) -> None:
        super().__init__()
        parts = [part for part in block.layer if isinstance(part, Part)]
        self.convs = nn.ModuleList(ConvL(part.convolution) for part in parts)
        self.bns = nn.ModuleList(NormL(part.normalization) for part in parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bns[0](self.convs[0](x)))
        return F.relu(x + self.bns[1](self.convs[1](y)))


class ChannelsLast(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.stem = ConvL(net.embedder.convolution)
        self.stembn = NormL(net.embedder.normalization)
        self.units = nn.ModuleList(Unit(block) for stage in net.stages for block in stage)
        self.fc = copy.deepcopy(net.classifier)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stembn(self.stem(x.permute(0, 2, 3, 1))))
        for unit in self.units:
            x = unit(x)
        return self.fc(x.mean((1, 2)))


def channels_last() -> tuple[Net, ChannelsLast, dict[str, str]]:
    torch.manual_seed(0)
    net = Net().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    names = {
        "embedder.convolution": "stem",
        "embedder.normalization": "stembn",
        "classifier": "fc",
    }
    for number in range(4):
        ours, theirs = f"stages.{number // 2}.{number % 2}", f"units.{number}"
        names[ours] = theirs
        for place, at in enumerate((0, 2)):
            names[f"{ours}.layer.{at}.convolution"] = f"{theirs}.convs.{place}"
            names[f"{ours}.layer.{at}.normalization"] = f"{theirs}.bns.{place}"
    return net, ChannelsLast(net).eval(), names


@pytest.mark.parametrize("size", [32, 64])  # at 32 all extents of a picture are 16
def test_another_layout_pairs_whole_and_blames_nothing(recorded: Recorded, size: int) -> None:
    net, other, names = channels_last()
    x = torch.randn(2, 3, size, size)
    result = tap.compare(recorded(net, x, inputs=True), recorded(other, x, inputs=True))
    found = partners(result)
    assert {name: found.get(name) for name in names} == names
    assert result.same


@pytest.mark.parametrize("layer", ["stem", "units.0.convs.1", "units.1.bns.0", "units.3.convs.0"])
@pytest.mark.parametrize("gain", [1.5, -1.0])
def test_a_bug_in_another_layout_unpairs_nothing(
    recorded: Recorded, layer: str, gain: float
) -> None:
    net, other, names = channels_last()
    with torch.no_grad():
        next(other.get_submodule(layer).parameters()).mul_(gain)
    x = torch.randn(2, 3, 64, 64)
    result = tap.compare(recorded(net, x, inputs=True), recorded(other, x, inputs=True))
    found = partners(result)
    # Where no value agrees, a stage and the last block in it cannot be told apart.
    leaves = {name: partner for name, partner in names.items() if not name[-1].isdigit()}
    assert {name: found.get(name) for name in leaves} == leaves
    first = result.first_divergence
    assert first is not None
    assert (first.candidate_layer, first.origin) == (layer, "made here")


# --- another scheme of names -----------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names = names
        for name, sizes in zip(names, ((16, 40), (16, 40), (40, 16)), strict=True):
            self.add_module(name, nn.Linear(*sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        return down(F.silu(gate(x)) * up(x))


class Tower(nn.Module):
    def __init__(self, blocks: str, norm: str, mlp: str, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp
        self.add_module(blocks, nn.ModuleList())
        self.blocks = [getattr(self, blocks)]
        for _ in range(4):
            self.blocks[0].append(nn.ModuleDict({norm: nn.LayerNorm(16), mlp: Gated(names)}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[0]:
            x = x + block[self.mlp](block[self.norm](x))
        return x


def towers() -> tuple[Tower, Tower]:
    torch.manual_seed(0)
    ours = Tower("layers", "input_norm", "mlp", ("gate_proj", "up_proj", "down_proj"))
    theirs = Tower("h", "ln", "ffn", ("w1", "w3", "w2"))
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    return ours.eval(), theirs.eval()


def test_gate_and_up_swapped_in_one_block_stay_where_they_are(recorded: Recorded) -> None:
    ours, theirs = towers()
    swapped = theirs.h[2]["ffn"]
    swapped.w1, swapped.w3 = swapped.w3, swapped.w1
    x = torch.randn(2, 5, 16)
    result = tap.compare(recorded(ours, x, inputs=True), recorded(theirs, x, inputs=True))
    found = partners(result)
    for number in range(4):
        assert found[f"layers.{number}.input_norm"] == f"h.{number}.ln"
        assert found[f"layers.{number}.mlp.gate_proj"] == f"h.{number}.ffn.w1"
        assert found[f"layers.{number}.mlp.up_proj"] == f"h.{number}.ffn.w3"
    first = result.first_divergence
    assert first is not None
    assert first.layer == "layers.2.mlp.gate_proj"
    assert first.origin == "made here"


def test_most_blocks_decide_and_a_tie_does_not() -> None:
    types = {"m.0": "B", "m.1": "B", "m.2": "B"}
    ours = types | {f"m.{n}.{x}": "L" for n in range(3) for x in "ab"}
    theirs = {f"k.{n}{x}": "L" for n in range(3) for x in ("", ".c", ".d")}
    pairs = {f"m.{n}": f"k.{n}" for n in range(3)}
    pairs |= {f"m.{n}.a": f"k.{n}.c" for n in range(2)} | {f"m.{n}.b": f"k.{n}.d" for n in range(2)}
    crossed = {"m.2.a": "k.2.d", "m.2.b": "k.2.c"}
    found = by_consensus(ours, theirs, pairs | crossed, [])
    assert found == {"m.2.a": "k.2.c", "m.2.b": "k.2.d"}
    assert by_consensus(ours, theirs, pairs, []) == {"m.2.a": "k.2.c", "m.2.b": "k.2.d"}
    assert by_consensus(ours, theirs, pairs | crossed, list(crossed)) == {}
    one = {name: partner for name, partner in pairs.items() if "1" not in name}
    assert by_consensus(ours, theirs, one | crossed, []) == {}


# --- names that mislead ----------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.names = (first, second)
        self.add_module(first, nn.BatchNorm1d(12))
        self.add_module(second, nn.GRU(12, 20, batch_first=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm, rnn = (self.get_submodule(name) for name in self.names)
        result: torch.Tensor = rnn(norm(x.transpose(1, 2)).transpose(1, 2))[0]
        return result


@pytest.mark.parametrize("names", [("b", "a"), ("1", "0")])
def test_a_norm_is_not_paired_with_a_recurrent_layer_of_its_name(
    recorded: Recorded, names: tuple[str, str]
) -> None:
    torch.manual_seed(0)
    ours, theirs = Recurrent(*names[::-1]).eval(), Recurrent(*names).eval()
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    x = torch.randn(2, 7, 12)
    result = tap.compare(recorded(ours, x, inputs=True), recorded(theirs, x, inputs=True))
    found = partners(result)
    assert {found[names[1]], found[names[0]]} == {names[0], names[1]}
    assert found[names[1]] == names[0]
    assert result.same
    row = result[names[1]]
    assert row.matched_by == "content"
    assert "the candidate's layer of this name holds something else" in row.note


def test_types_are_alike_whatever_number_of_axes_they_name() -> None:
    assert type_likeness("BatchNorm2d", "NormL") >= 0.5
    assert type_likeness("Conv2d", "ConvL") >= 0.5
    assert type_likeness("Conv2d", "BatchNorm2d") == 0
    assert type_likeness("GRU", "BatchNorm1d") == 0


class Activated(nn.Module):
    """A convolution, its norm and an activation, which may be a function of the caller's."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        return y if self.act is None else self.act(y)


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = (
            nn.Sequential(Activated(nn.ReLU()), Activated(nn.Identity())),
            nn.ReLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(x) + x)


class Goes(nn.Module):
    def __init__(self, source: Ends) -> None:
        super().__init__()
        self.first, self.second = Activated(), Activated()
        for made, known in zip((self.first, self.second), source.layer, strict=True):
            made.load_state_dict(known.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + x)


def test_a_block_is_not_paired_with_one_that_ends_before_its_activation(
    recorded: Recorded,
) -> None:
    """Its norm holds what that one returns."""
    torch.manual_seed(0)
    ours = nn.Sequential(*(Ends() for _ in range(3))).eval()
    for norm in ours.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight, mean=1, std=0.1)
            nn.init.normal_(norm.running_mean, std=0.3)
    theirs = nn.Sequential(*(Goes(block) for block in ours)).eval()
    x = torch.randn(2, 8, 8, 8)
    result = tap.compare(recorded(ours, x, inputs=True), recorded(theirs, x, inputs=True))
    assert result.same, result.sentence
    assert result["0.layer.0.norm"].candidate_layer == "0.first.norm"
    assert result["0.layer.0"].verdict == "missing"
