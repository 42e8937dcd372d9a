"""Blame of another implementation: the same pairs as compare finds, with no map by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensortap as tap

Recorded = Callable[..., tap.Recording]


class Block(nn.Module):
    """A convolution and a linear over channels, as (batch, channels, height, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(8, 8, 3, padding=1)
        self.mix = nn.Conv2d(8, 8, 1)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.mix(F.gelu(self.spatial(hidden_states)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(pixels)
        for layer in self.layers:
            x = layer(hidden_states=x)
        return {"hidden": x, "logits": self.head(x.mean((2, 3)))}


class LastBlock(nn.Module):
    """The same over (batch, height, width, channels)."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.conv.load_state_dict(block.spatial.state_dict())
        self.fc = nn.Linear(8, 8)
        self.fc.weight.data = block.mix.weight.detach()[:, :, 0, 0].clone()
        self.fc.bias.data = block.mix.bias.detach().clone()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.scale * self.fc(F.gelu(y))


class LastNet(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 1)
        self.embed.load_state_dict(net.stem.state_dict())
        self.tower = nn.ModuleList(LastBlock(block) for block in net.layers)
        self.out = nn.Linear(8, 5)
        self.out.load_state_dict(net.head.state_dict())

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.embed(pixels).permute(0, 2, 3, 1)
        for block in self.tower:
            x = block(x)
        return self.out(x.mean((1, 2)))


def nets() -> tuple[Net, LastNet, torch.Tensor]:
    torch.manual_seed(0)
    net = Net().eval()
    return net, LastNet(net).eval(), torch.randn(2, 3, 6, 10)


def change(layer: nn.Module, gain: float = -1.0) -> None:
    with torch.no_grad():
        layer.weight.mul_(gain)


PLANTED: dict[str, Callable[[LastNet], object]] = {
    "embed": lambda net: change(net.embed, 1.3),
    "tower.1.conv": lambda net: change(net.tower[1].conv),
    "tower.2.fc": lambda net: change(net.tower[2].fc),
    "tower.2": lambda net: setattr(net.tower[2], "scale", 1.5),
    "out": lambda net: change(net.out),
}


@pytest.mark.parametrize("place", PLANTED)
def test_a_bug_in_another_implementation_is_named_without_a_map(
    recorded: Recorded, place: str
) -> None:
    net, other, x = nets()
    reference = recorded(net, x, inputs=True)
    PLANTED[place](other)
    found = tap.blame(reference, other, x)
    assert found.culprit == place
    assert found.share == pytest.approx(1, abs=0.05)
    assert any("paired as compare pairs them" in note for note in found.notes)
    assert not any("--inputs" in note for note in found.notes)  # they were recorded
    assert found.warnings == ()


def test_another_implementation_without_a_bug_is_not_blamed(recorded: Recorded) -> None:
    net, other, x = nets()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    found = tap.blame(recorded(net, x, inputs=True), other, x)
    assert found.culprit is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_the_final_layer_has_either_name_and_its_floor_is_found(recorded: Recorded) -> None:
    net, other, x = nets()
    reference = recorded(net, x, inputs=True)
    noisy = recorded(net, x + 1e-6, inputs=True)
    change(other.tower[1].conv)
    for name in ("layers.2", "tower.2"):
        found = tap.blame(reference, other, x, final=name, floor=noisy)
        assert (found.final, found.culprit) == ("tower.2", "tower.1.conv")
        assert 0 < found.final_floor < 1e-4
        assert not any("no tensor of the final output" in text for text in found.warnings)


def test_equal_names_cost_no_run_more(recorded: Recorded) -> None:
    net, _, x = nets()
    reference = recorded(net, x, inputs=True)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    net.register_forward_pre_hook(count)
    found = tap.blame(reference, net, x)
    assert calls == found.forwards
    assert not any("paired as compare" in note for note in found.notes)
