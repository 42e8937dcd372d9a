"""Causes that depend on what kind of layer it is: the axes of its tensors, and what norms do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tensortap as tap
from tensortap.comparing.causes import explain
from tensortap.comparing.causes.axes import KindAt, axes_of, layout_at

IMAGE = ("sample", "channel", "row", "column")


class Unit(nn.Module):
    """A convolution, a batch norm and an activation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.activation(self.norm(self.convolution(x)))
        return made


def make_images(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 16, 16, generator=generator)


@pytest.fixture(scope="module")
def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(Unit(3, 16), Unit(16, 16), Unit(16, 24)).eval()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
                nn.init.normal_(module.weight, 1, 0.1)
                nn.init.normal_(module.bias, 0, 0.1)
    return model.requires_grad_(False)


def _never_loaded(unit: nn.Module) -> None:
    unit.norm.running_mean.zero_()
    unit.norm.running_var.fill_(1)


def _scaled_channel(unit: nn.Module) -> None:
    unit.convolution.weight[5] *= 1.5


def _no_bias(unit: nn.Module) -> None:
    unit.norm.bias.zero_()


PLANTED: dict[str, tuple[Callable[[nn.Module], object], str, str, str]] = {
    "statistics never loaded": (_never_loaded, "1.norm", "affine", "constant for each channel: ("),
    "training mode": (lambda unit: unit.norm.train(), "1.norm", "affine", "for each channel: ("),
    "epsilon": (lambda u: setattr(u.norm, "eps", 0.1), "1.norm", "affine", "for each channel: ("),
    "bias": (_no_bias, "1.norm", "bias", "a constant for each channel, the same in all places"),
    "channel": (_scaled_channel, "1.convolution", "channels", "channel 5 of 16 alone: output = 1."),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_convolution_has_channels(name: str, net: nn.Sequential, tmp_path: Path) -> None:
    change, layer, kind, words = PLANTED[name]
    candidate = copy.deepcopy(net)
    with torch.no_grad():
        change(candidate[1])
    result = tap.compare(record(net, tmp_path / "a"), record(candidate, tmp_path / "b"))
    first = result.first_divergence
    assert first is not None and first.layer == layer
    blame = tap.blame(tmp_path / "a", candidate, make_images())
    assert blame.culprit == layer
    for causes in (first.causes, blame.causes):
        assert causes[0].kind == kind
        assert words in causes[0].text


@pytest.mark.parametrize("bug", ["normalisation", "colours"])
def test_inputs_that_were_prepared_otherwise(bug: str, net: nn.Sequential, tmp_path: Path) -> None:
    mean, spread = (
        torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.2, 0.3, 0.4])
    )
    x = make_images()
    other = x * spread + mean if bug == "normalisation" else x.flip(1)
    result = tap.compare(record(net, tmp_path / "a"), record(net, tmp_path / "b", other))
    (cause,) = result.first_divergence.causes  # type: ignore[union-attr]
    if bug == "colours":
        assert cause.text == "of its input: channels 0 and 2 (of 3) swapped"
        assert cause.details["axis"] == 1
    else:
        assert cause.kind == "affine"
        assert "(0.2, 0.3, 0.4) x reference + (0.485, 0.456, 0.406)" in cause.text
        assert cause.details["factors"] == pytest.approx([0.2, 0.3, 0.4], rel=1e-4)


def record(model: nn.Module, path: Path, x: Tensor | None = None) -> Path:
    with torch.no_grad(), tap.record(model, path, layers="all", inputs=True):
        model(make_images() if x is None else x)
    return path


def test_axes_exchanged_are_those_that_were_given() -> None:
    reference = torch.randn(2, 5, 8, 8, generator=torch.Generator().manual_seed(1))
    (cause,) = explain(reference, reference.transpose(2, 3), axes=IMAGE)
    assert (cause.kind, cause.text) == ("transpose", "transposed: axes 2 and 3 exchanged")
    nhwc = reference.permute(0, 2, 3, 1).reshape(reference.shape)
    assert explain(reference, nhwc, axes=IMAGE)[0].kind in ("noise", "transpose")


def test_a_number_for_each_channel_is_not_made_of_noise() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        reference = torch.randn(4, 16, 8, 8, generator=generator)
        noise = 0.1 * torch.randn(4, 16, 8, 8, generator=generator)
        assert [c.kind for c in explain(reference, reference + noise, axes=IMAGE)] == ["noise"]
        unrelated = torch.randn(4, 16, 8, 8, generator=generator)
        assert [c.kind for c in explain(reference, unrelated, axes=IMAGE)] == ["noise"]


@pytest.mark.parametrize(
    ("kind", "dims", "axes"),
    [
        ("Conv2d", 4, IMAGE),
        ("Conv2d", 3, IMAGE[1:]),
        ("FrozenBatchNorm2d", 4, IMAGE),
        ("AdaptiveAvgPool2d", 4, IMAGE),
        ("Conv1d", 3, ("sample", "channel", "token")),
        ("ConvTranspose3d", 5, ("sample", "channel", "plane", "row", "column")),
        ("GroupNorm", 4, IMAGE),
        ("Conv1D", 3, None),  # GPT-2's, which is a linear
        ("Linear", 3, ("sample", "token", "channel")),
        ("ReLU", 4, None),
        ("Conv2d", 2, None),
    ],
)
def test_a_kind_tells_its_axes(kind: str, dims: int, axes: tuple[str, ...] | None) -> None:
    assert axes_of(kind, dims) == axes


def test_who_knows_nothing_asks_the_nearest() -> None:
    kinds = [
        KindAt("Conv2d", ((2, 3, 8, 8), (2, 16, 8, 8))),
        KindAt("ReLU", ((2, 16, 8, 8),)),
        KindAt("Block", ((2, 3, 8, 8), (2, 16, 8, 8))),
        KindAt("Linear", ((2, 64, 16), (2, 64, 32))),
        KindAt("GELU", ((2, 64, 32),)),
        KindAt("Attention", ((2, 4, 7, 7),)),
    ]
    assert layout_at(kinds, 1, (2, 16, 8, 8)) == IMAGE
    assert layout_at(kinds, 2, (2, 3, 8, 8)) == IMAGE
    assert layout_at(kinds, 4, (2, 64, 32)) == ("sample", "token", "channel")
    assert layout_at(kinds, 5, (2, 4, 7, 7)) == ("sample", "head", "token", "channel")
