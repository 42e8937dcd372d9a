"""Pictures: ViT, ResNet, ConvNeXt, a U-Net and a network that denoises."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from architecture import HEADS, SAMPLES, WIDTH, Architecture, Inputs, image
from torch import Tensor, nn

__all__ = ["MODELS"]


def _vit() -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        intermediate_size=160,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    model: nn.Module = transformers.ViTForImageClassification._from_config(
        config, attn_implementation="sdpa"
    )
    return model


def _resnet() -> nn.Module:
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48],
        depths=[2, 2, 2],
        layer_type="basic",
        num_labels=10,
    )
    return transformers.ResNetForImageClassification(config)


def _convnext() -> nn.Module:
    import transformers

    config = transformers.ConvNextConfig(
        hidden_sizes=[16, 32, 48],
        depths=[2, 2, 2],
        num_stages=3,
        patch_size=2,
        image_size=32,
        num_labels=10,
    )
    return transformers.ConvNextForImageClassification(config)


class Double(nn.Module):
    """Two convolutions, each with its norm."""

    def __init__(self, come: int, go: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(come, go, 3, padding=1, bias=False), nn.BatchNorm2d(go)
        self.conv2, self.bn2 = nn.Conv2d(go, go, 3, padding=1, bias=False), nn.BatchNorm2d(go)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn1(self.conv1(x)))
        return self.act(self.bn2(self.conv2(x)))


class UNet(nn.Module):
    """Down, up, and across; pictures are normalised by the root."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.down3 = Double(3, 8), Double(8, 16), Double(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join2, self.join1 = Double(32, 16), Double(16, 8)
        self.head = nn.Conv2d(8, 5, 1)
        self.register_buffer("mean", torch.tensor([0.4, -0.3, 0.2]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.5, 0.8, 1.5]).view(3, 1, 1))
        self.normalise, self.skips_swapped, self.skip, self.pool = True, False, 1.0, F.max_pool2d

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = (pixel_values - self.mean) / self.std if self.normalise else pixel_values
        first = self.down1(x)
        second = self.down2(self.pool(first, 2))
        x = self.up2(self.down3(self.pool(second, 2)))
        pair = (x, second * self.skip) if self.skips_swapped else (second * self.skip, x)
        x = self.up1(self.join2(torch.cat(pair, 1)))
        return self.head(self.join1(torch.cat((first, x), 1)))


class Timed(nn.Module):
    """A residual block that is told the time: a factor and a shift for each channel."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 3, 1, 1)
        self.time = nn.Linear(width, 2 * channels)
        self.norm2, self.conv2 = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 3, 1, 1)
        self.swapped, self.one = False, 1.0

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        factor, shift = self.time(F.silu(time))[..., None, None].chunk(2, 1)
        if self.swapped:
            factor, shift = shift, factor
        h = self.norm2(h) * (self.one + factor) + shift
        return x + self.conv2(F.silu(h))


class Embedded(nn.Module):
    """Time as sines and cosines."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.slowest, self.flipped = width, 1000.0, False

    def forward(self, step: Tensor) -> Tensor:
        half = self.width // 2
        speed = self.slowest ** (-torch.arange(half) / half)
        angle = step[:, None].to(speed.dtype) * speed
        parts = (angle.cos(), angle.sin()) if self.flipped else (angle.sin(), angle.cos())
        return torch.cat(parts, -1)


class Denoiser(nn.Module):
    """Diffusion in small: what is noise in this picture at this time?"""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedded(32)
        self.time1, self.time2 = nn.Linear(32, 32), nn.Linear(32, 32)
        self.into = nn.Conv2d(3, 16, 3, 1, 1)
        self.blocks = nn.ModuleList(Timed(16, 32) for _ in range(4))
        self.norm, self.out = nn.GroupNorm(4, 16), nn.Conv2d(16, 3, 3, 1, 1)
        self.scaling, self.first_step = 0.18215, 0

    def forward(self, sample: Tensor, step: Tensor) -> Tensor:
        waves = self.embed(step + self.first_step).to(self.time1.weight.dtype)
        time = self.time2(F.silu(self.time1(waves)))
        x = self.into(sample)
        for block in self.blocks:
            x = block(x, time)
        return self.out(F.silu(self.norm(x))) / self.scaling


def _noisy(generator: torch.Generator) -> Inputs:
    return {
        **image(generator, 16, "sample"),
        "step": torch.randint(1, 900, (SAMPLES,), generator=generator),
    }


MODELS = (
    Architecture(
        "vit",
        _vit,
        "vit.layers",
        {
            "residual": "",
            "norm": "layernorm_after",
            "attention": "attention",
            "v": "attention.v_proj",
            "o": "attention.o_proj",
            "up": "mlp.fc1",
            "activation": "mlp.activation_fn",
            "down": "mlp.fc2",
        },
        {"final_norm": "vit.layernorm", "head": "classifier"},
        image,
        "vision",
        sdpa=True,
    ),
    Architecture(
        "resnet",
        _resnet,
        "",
        {},
        {
            "down": "resnet.encoder.stages.1.layers.1.layer.1.convolution",
            "conv": "resnet.encoder.stages.1.layers.0.layer.1.convolution",
            "batch_norm": "resnet.encoder.stages.1.layers.0.layer.0.normalization",
            "head": "classifier.1",
        },
        image,
        "vision",
    ),
    Architecture(
        "convnext",
        _convnext,
        "",
        {},
        {
            "up": "convnext.encoder.stages.1.layers.1.pwconv1",
            "down": "convnext.encoder.stages.1.layers.1.pwconv2",
            "norm": "convnext.encoder.stages.1.layers.1.layernorm",
            "activation": "convnext.encoder.stages.1.layers.1.act",
            "conv": "convnext.encoder.stages.1.layers.0.dwconv",
            "final_norm": "convnext.layernorm",
            "head": "classifier",
        },
        image,
        "vision",
    ),
    Architecture(
        "unet",
        UNet,
        "",
        {},
        {
            "down": "head",
            "conv": "down2.conv1",
            "batch_norm": "down2.bn2",
        },
        image,
        "vision",
    ),
    Architecture(
        "denoiser",
        Denoiser,
        "blocks",
        {"residual": "", "norm": "norm2", "conv": "conv1", "down": "conv2", "time": "time"},
        {"final_norm": "norm", "head": "out"},
        _noisy,
        "vision",
    ),
)
