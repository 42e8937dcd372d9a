"""Bugs of single models: pictures, memory, two towers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from architecture import Architecture
from flaws import Bug, constant, generator, hints, in_config, one, spoiled, swapped, with_global
from planting import around, instead, intercepting
from torch import Tensor, nn

__all__ = ["BUGS"]


def _training(layer: nn.Module) -> None:
    layer.train()


def _never_loaded(norm: Any) -> None:
    norm.running_mean.zero_()
    norm.running_var.fill_(1)


def _left_on(share: float) -> Callable[[Any], None]:
    """Dropout that is still active, with the same random numbers in each run."""

    def plant(layer: Any) -> None:
        def forward(x: Tensor) -> Tensor:
            keep = torch.rand(x.shape, generator=generator()) >= share
            return x * keep / (1 - share)

        instead(layer, forward)

    return plant


def _pixels(change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """Pictures that are prepared otherwise by the model's own forward."""

    def plant(model: Any) -> None:
        def wrap(inner: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                return inner(*args, **{**kwargs, "pixel_values": change(kwargs["pixel_values"])})

            return call

        around(model, wrap)

    return plant


def _padding(mode: str) -> Callable[[Any], None]:
    def plant(conv: Any) -> None:
        conv.padding_mode = mode
        conv._reversed_padding_repeated_twice = [p for p in reversed(conv.padding) for _ in (0, 1)]

    return plant


def _stride_moved(model: Any, conv: Any, architecture: Architecture, block: int) -> None:
    """The second convolution of the block makes up for it, so that shapes fit again."""
    conv.stride = (1, 1)
    model.get_submodule(f"{_STAGE}.0.layer.1.convolution").stride = (2, 2)


def _gates(layer: Any, order: tuple[int, ...], suffix: str = "_l0") -> None:
    """Gates in another order: PyTorch has input, forget, cell, output."""
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        weight = getattr(layer, name + suffix)
        parts = weight.clone().chunk(len(order))
        weight.copy_(torch.cat([parts[i] for i in order]))


def _mean_std(x: Tensor) -> Tensor:
    mean, std = x.new_tensor([0.48, 0.45, 0.40]), x.new_tensor([0.27, 0.26, 0.28])
    return (x - mean.view(3, 1, 1)) / std.view(3, 1, 1)


def _transposed_patches(conv: Any) -> None:
    conv.weight.copy_(conv.weight.transpose(-1, -2).clone())


def _relu_lost(layer: nn.Module) -> None:
    instead(layer, lambda x: x)


_STAGE = "resnet.encoder.stages.1.layers"
_NEXT = "convnext.encoder.stages.1.layers"
_EYE, _READ = "vision_model", "text_model"
_STATISTICS = ("factors", "statistics", "affine", "channels affine", "batch norm")

BUGS: tuple[Bug, ...] = (
    # ViT.
    one("vit", "scale", "attention", constant(scaling=1 / 8), "scale"),
    one(
        "vit", "class token never loaded", "vit.embeddings", lambda e: e.cls_token.zero_(), "tokens"
    ),
    one(
        "vit",
        "positions one further",
        "vit.embeddings",
        lambda e: e.position_embeddings.copy_(e.position_embeddings.roll(1, 1)),
    ),
    one(
        "vit",
        "patches transposed",
        "vit.embeddings.patch_embeddings.projection",
        _transposed_patches,
    ),
    one(
        "vit",
        "gelu, quick",
        "activation",
        lambda a: instead(a, lambda x: x * torch.sigmoid(1.702 * x)),
        "function",
    ),
    one("vit", "mean and std twice", "", _pixels(_mean_std), "affine"),
    one("vit", "colours reversed", "", _pixels(lambda x: x.flip(1)), "permutation"),
    one("vit", "dropout left on", "vit.layers.2.dropout", _left_on(0.1), "dropout"),
    one("vit", "epsilon", "norm", constant(eps=1e-2), "factor", "factors"),
    # ResNet.
    one("resnet", "batch norm in training mode", "batch_norm", _training, *_STATISTICS),
    one("resnet", "statistics never loaded", "batch_norm", _never_loaded, *_STATISTICS),
    one("resnet", "variance epsilon", "batch_norm", constant(eps=0.1), "factors", *_STATISTICS),
    Bug(
        "stride in the second convolution (resnet)",
        f"{_STAGE}.0.layer.0.convolution",
        _stride_moved,
        hints("shape"),
        "?",
        ("resnet",),
        depths=("middle",),
    ),
    one("resnet", "padding mode", "conv", _padding("reflect")),
    one("resnet", "dilation", "conv", constant(dilation=(2, 2), padding=(2, 2))),
    one(
        "resnet",
        "relu lost",
        f"{_STAGE}.1.activation",
        _relu_lost,
        "function",
        "saturation",
        "skipped",
    ),
    one("resnet", "shortcut lost", f"{_STAGE}.0.shortcut", spoiled(lambda x: x * 0), "factor"),
    one(
        "resnet",
        "maximum for mean",
        "resnet.pooler",
        lambda p: instead(p, lambda x: x.amax((2, 3), keepdim=True)),
        "reduction",
    ),
    one("resnet", "colours reversed", "", _pixels(lambda x: x.flip(1)), "permutation"),
    one("resnet", "mean and std twice", "", _pixels(_mean_std), "affine"),
    one("resnet", "kernel turned", "conv", lambda c: c.weight.copy_(c.weight.flip(-1, -2))),
    # ConvNeXt.
    one("convnext", "layer scale lost", f"{_NEXT}.1", lambda b: b.layer_scale_parameter.fill_(1)),
    one("convnext", "kernel turned", "conv", lambda c: c.weight.copy_(c.weight.flip(-1, -2))),
    one("convnext", "padding mode", "conv", _padding("reflect")),
    one(
        "convnext",
        "gelu, quick",
        "activation",
        lambda a: instead(a, lambda x: x * torch.sigmoid(1.702 * x)),
        "function",
    ),
    one("convnext", "epsilon", "norm", constant(eps=1e-2), "factor", "factors"),
    one("convnext", "mean and std twice", "", _pixels(_mean_std), "affine"),
    one(
        "convnext",
        "residual scaled",
        f"{_NEXT}.0",
        lambda b: around(b, lambda inner: lambda x: inner(x) - 0.5 * x),
        "residual",
    ),
    # U-Net.
    one("unet", "mean and std not applied", "", constant(normalise=False), "affine"),
    one("unet", "skip on the other side", "", constant(skips_swapped=True)),
    one("unet", "skip scaled", "", constant(skip=2**-0.5)),
    one("unet", "mean for maximum", "", constant(pool=F.avg_pool2d), "reduction"),
    one("unet", "batch norm in training mode", "batch_norm", _training, *_STATISTICS),
    one("unet", "statistics never loaded", "batch_norm", _never_loaded, *_STATISTICS),
    one("unet", "padding mode", "conv", _padding("replicate")),
    one(
        "unet",
        "leaky relu",
        "down2.act",
        lambda a: instead(a, lambda x: F.leaky_relu(x, 0.1)),
        "function",
    ),
    one("unet", "kernel turned", "up1", lambda c: c.weight.copy_(c.weight.flip(-1, -2))),
    # Diffusion.
    one("denoiser", "cosine first", "embed", constant(flipped=True), "permutation"),
    one("denoiser", "slowest wave", "embed", constant(slowest=10000.0)),
    one("denoiser", "time one further", "", constant(first_step=1)),
    one("denoiser", "factor for shift", "blocks.2", constant(swapped=True)),
    one("denoiser", "factor without one", "blocks.2", constant(one=0.0)),
    one("denoiser", "output scale lost", "", constant(scaling=1.0), "factor"),
    one("denoiser", "groups", "norm", constant(num_groups=8)),
    one("denoiser", "epsilon", "norm", constant(eps=0.05), "factor", "factors"),
    one("denoiser", "padding mode", "conv", _padding("circular")),
    # Memory.
    one("lstm", "gates in another order", "lstm", lambda m: _gates(m, (0, 2, 1, 3))),
    one("lstm", "biases forgotten", "lstm", lambda m: m.bias_hh_l0.zero_()),
    one(
        "lstm",
        "second direction lost",
        "lstm2",
        lambda m: [
            getattr(m, n).copy_(getattr(m, n.replace("_reverse", "")))
            for n in ("weight_ih_l0_reverse", "weight_hh_l0_reverse")
        ],
        "channels",
    ),
    one("lstm", "maximum for mean", "", constant(pooling="max"), "reduction"),
    one("lstm", "last for mean", "", constant(pooling="last"), "reduction"),
    one("lstm", "padding counted", "", constant(masked=False), "reduction"),
    one("lstm", "words hashed into a smaller table", "", constant(buckets=50), "lookup"),
    one(
        "lstm",
        "table reads one further",
        "embedding",
        lambda e: around(e, lambda inner: lambda x: inner((x + 1) % 101)),
        "offset",
        "lookup",
    ),
    one("gru", "state not carried", "", constant(carried=False)),
    one("gru", "gates in another order", "gru", lambda m: _gates(m, (1, 0, 2))),
    one("gru", "batch norm in training mode", "batch_norm", _training, *_STATISTICS),
    one("gru", "statistics never loaded", "batch_norm", _never_loaded, *_STATISTICS),
    one(
        "gru",
        "padding mode",
        "conv",
        lambda c: (
            setattr(c, "padding_mode", "reflect"),
            setattr(c, "_reversed_padding_repeated_twice", [2, 2]),
        ),
    ),
    one(
        "gru",
        "second layer's weights swapped",
        "gru",
        lambda m: swapped(m.weight_hh_l1, slice(0, 40), slice(40, 80)),
    ),
    one("cells", "state forgotten", "", constant(forget=True)),
    one("cells", "gates in another order", "lstm", lambda m: _gates(m, (0, 2, 1, 3), "")),
    one("cells", "reset and update swapped", "gru", lambda m: _gates(m, (1, 0, 2), "")),
    # CLIP.
    one("clip", "logit scale", "", lambda m: m.logit_scale.add_(math.log(2)), "factor"),
    one("clip", "gelu for quick gelu", "activation", lambda a: instead(a, F.gelu), "function"),
    one(
        "clip",
        "pictures 5 % more",
        "vision_model.encoder.layers.1.mlp.fc2",
        spoiled(lambda x: x * 1.05),
        "factor",
    ),
    one("clip", "words 5 % more", "text_down", spoiled(lambda x: x * 1.05), "factor"),
    one("clip", "scale", "attention", constant(scale=1 / 8), "scale"),
    one("clip", "last token for the end token", _READ, constant(eos_token_id=3)),
    one("clip", "colours reversed", "", _pixels(lambda x: x.flip(1)), "permutation"),
    one(
        "clip",
        "features not normalised",
        "",
        with_global("_get_vector_norm", lambda held: lambda x: torch.ones(len(x), 1)),
    ),
    # One that sees and writes.
    one("llava", "last layer for the one before", "model", in_config(vision_feature_layer=-1)),
    one("llava", "picture 5 % more", "vision_down", spoiled(lambda x: x * 1.05), "factor"),
    one(
        "llava",
        "relu in the projector",
        "model.multi_modal_projector.act",
        lambda a: instead(a, F.relu),
        "function",
    ),
    one(
        "llava",
        "patches one further",
        "model",
        lambda m: intercepting(
            m, Tensor.masked_scatter, lambda x, mask, y: x.masked_scatter(mask, y.roll(1, 0))
        ),
    ),
    one("llava", "scale", "attention", constant(scaling=1 / 8), "scale", "tokens"),
    one("llava", "mean and std twice", "", _pixels(_mean_std), "affine"),
)
