"""Bugs of the models that are tried less often, each modelled on what people report."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from editing import edited
from flaws import Bug, calling, constant, generator, in_config, one, spoiled, with_global
from planting import around, instead
from torch import Tensor, nn

__all__ = ["BUGS"]


def _times(**factors: float) -> Callable[[Any], None]:
    return lambda layer: constant(**{n: getattr(layer, n) * by for n, by in factors.items()})(layer)


def _drop(*names: str) -> Callable[[nn.Module], None]:
    return calling(lambda kwargs: kwargs.update({name: None for name in names if name in kwargs}))


def _given(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """An argument of the forward that is changed before anything else."""
    return calling(lambda kwargs: kwargs.update({name: change(kwargs[name])}))


def _epsilon_everywhere(value: float) -> Callable[[nn.Module], None]:
    def plant(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = value

    return plant


def _weights(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    return lambda layer: getattr(layer, name).copy_(change(getattr(layer, name).clone()))


def _buffer_of(base: float, size: int) -> Callable[[Any], None]:
    return lambda r: r.inv_freq.copy_(base ** (-torch.arange(0, size, 2) / size))


def _windowed(mask: Tensor) -> Tensor:
    """A mask in which each token sees one token less."""
    tokens = mask.shape[-1]
    far = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    near = far < 6
    return mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, -1e9)


def _relu(layer: nn.Module) -> None:
    instead(layer, F.relu)


_PLACES = ("tokens", "samples", "mask", "padding")
_STATISTICS = ("factors", "statistics", "affine", "batch norm")
_NEOX, _PHI, _GEMMA, _QWEN = (
    "gpt_neox.layers.2",
    "model.layers.2",
    "model.layers.2",
    "model.layers.1",
)
_SWIN = "swin.encoder.layers.0.blocks.1"
_SEG = "segformer.stages.0.blocks.1"
_DINO = "dinov2.encoder.layer.2"
_W2V = "wav2vec2.encoder.layers.1"
_BLIP = "text_encoder.encoder.layer.1"

BUGS: tuple[Bug, ...] = (
    # GPT-NeoX.
    one("gpt_neox", "residual not parallel", _NEOX, constant(use_parallel_residual=False)),
    one(
        "gpt_neox",
        "qkv not by head",
        f"{_NEOX}.attention",
        edited(
            "qkv = self.query_key_value(hidden_states).view(hidden_shape).transpose(1, 2)\n"
            "    query_states, key_states, value_states = qkv.chunk(3, dim=-1)",
            "qkv = self.query_key_value(hidden_states).chunk(3, dim=-1)\n"
            "    query_states, key_states, value_states = (t.view(*input_shape, -1, "
            "self.head_size).transpose(1, 2) for t in qkv)",
        ),
    ),
    one("gpt_neox", "scale", f"{_NEOX}.attention", _times(scaling=0.7), "scale", "tokens"),
    one("gpt_neox", "padding attended", "gpt_neox", _drop("attention_mask"), *_PLACES),
    one("gpt_neox", "rotary base", "gpt_neox.rotary_emb", _buffer_of(500.0, 8), "rotary"),
    one(
        "gpt_neox",
        "branch scaled",
        _NEOX,
        edited(
            "mlp_output + attn_output + hidden_states",
            "mlp_output + 0.5 * attn_output + hidden_states",
        ),
    ),
    # OPT.
    one(
        "opt",
        "positions without offset",
        "model.decoder.embed_positions",
        constant(offset=1),
        "offset",
    ),
    one("opt", "scale twice", "model.decoder.layers.2.self_attn", _times(scaling=0.25), "scale"),
    one(
        "opt",
        "norm left out",
        "model.decoder.layers.2",
        edited(
            "hidden_states = self.final_layer_norm(hidden_states)", "hidden_states = hidden_states"
        ),
    ),
    one(
        "opt",
        "residual lost",
        "model.decoder.layers.1",
        edited("(residual + hidden_states).view", "(hidden_states).view"),
        "residual",
    ),
    one(
        "opt",
        "gelu for relu",
        "model.decoder.layers.1",
        edited("self.activation_fn(hidden_states)", "torch.nn.functional.gelu(hidden_states)"),
        "function",
    ),
    # Phi 3.
    one(
        "phi3",
        "gate and up exchanged",
        f"{_PHI}.mlp",
        edited("gate, up_states = up_states.chunk", "up_states, gate = up_states.chunk"),
        "gate",
    ),
    one(
        "phi3",
        "gate not activated",
        f"{_PHI}.mlp",
        edited("self.activation_fn(gate)", "gate"),
        "gate",
    ),
    one("phi3", "padding attended", "model", _drop("attention_mask"), *_PLACES),
    one(
        "phi3",
        "residual before the norm",
        _PHI,
        edited("residual + self.resid_mlp_dropout", "self.resid_mlp_dropout"),
        "residual",
        "source",
    ),
    # Gemma 3.
    one(
        "gemma3",
        "embedding scale lost",
        "model.embed_tokens",
        lambda e: e.embed_scale.fill_(1),
        "factor",
    ),
    one(
        "gemma3",
        "logit cap lost",
        "",
        in_config(final_logit_softcapping=None),
        "function",
        "saturation",
    ),
    one(
        "gemma3",
        "query norm lost",
        f"{_GEMMA}.self_attn",
        edited("self.q_norm(query_states)", "query_states"),
    ),
    one(
        "gemma3",
        "norm without one",
        f"{_GEMMA}.pre_feedforward_layernorm",
        lambda n: n.weight.sub_(1),
        "factors",
        "factor",
    ),
    one(
        "gemma3",
        "window of another size",
        f"{_GEMMA}.self_attn",
        lambda a: around(
            a,
            lambda inner: (
                lambda *x, **k: inner(*x, **{**k, "attention_mask": _windowed(k["attention_mask"])})
            ),
        ),
        *_PLACES,
    ),
    one("gemma3", "gelu, exact", f"{_GEMMA}.mlp.act_fn", lambda a: instead(a, F.gelu), "function"),
    # Qwen 3.
    one(
        "qwen3",
        "keys not normed",
        f"{_QWEN}.self_attn",
        edited(
            "self.k_norm(self.k_proj(hidden_states).view(hidden_shape))",
            "self.k_proj(hidden_states).view(hidden_shape)",
        ),
    ),
    one(
        "qwen3",
        "rotary lost",
        f"{_QWEN}.self_attn",
        with_global("apply_rotary_pos_emb", lambda held: lambda q, k, *r, **m: (q, k)),
        "rotary",
    ),
    one(
        "qwen3",
        "positions start at one",
        "model.rotary_emb",
        lambda r: around(r, lambda inner: lambda x, position_ids: inner(x, position_ids * 2)),
        "rotary",
        "tokens",
    ),
    one(
        "qwen3",
        "head on the states before the norm",
        "model",
        edited("hidden_states = self.norm(hidden_states)", "self.norm(hidden_states)"),
        "skipped",
        "source",
    ),
    one(
        "qwen3",
        "logits divided",
        "",
        edited(
            "logits = self.lm_head(hidden_states)", "logits = self.lm_head(hidden_states) / 0.9"
        ),
        "factor",
    ),
    # Swin.
    one("swin", "windows not shifted", _SWIN, constant(shift_size=0)),
    one("swin", "shift not undone", _SWIN, edited("reverse=True", "reverse=False")),
    one(
        "swin",
        "mask of the shift lost",
        f"{_SWIN}.attention",
        edited("if attention_mask is not None", "if False"),
        "places",
        "tokens",
        "mask",
    ),
    one(
        "swin",
        "relative positions lost",
        f"{_SWIN}.attention.relative_position_bias",
        spoiled(lambda x: x * 0),
        "factor",
    ),
    one("swin", "scale", f"{_SWIN}.attention", _times(scaling=0.5), "scale"),
    one(
        "swin",
        "mean and std twice",
        "",
        _given("pixel_values", lambda x: (x - 0.45) / 0.27),
        "affine",
    ),
    one(
        "swin",
        "merged in another order",
        "swin.encoder.layers.0.downsample",
        lambda m: around(
            m,
            lambda inner: (
                lambda x, d: inner(x.unflatten(1, tuple(d)).transpose(1, 2).flatten(1, 2), d)
            ),
        ),
    ),
    # DINOv2.
    one(
        "dinov2",
        "layer scale lost",
        f"{_DINO}.layer_scale1",
        lambda s: s.lambda1.fill_(1),
        "factors",
        "skipped",
    ),
    one(
        "dinov2",
        "class token of another place",
        "",
        edited("sequence_output[:, 0]", "sequence_output[:, 1]"),
        "channels",
        "source",
        "reduction",
        "heads",
    ),
    one(
        "dinov2",
        "mean of all tokens",
        "",
        edited("patch_tokens.mean(dim=1)", "sequence_output.mean(dim=1)"),
    ),
    one(
        "dinov2",
        "positions rolled",
        "dinov2.embeddings",
        lambda e: e.position_embeddings.copy_(e.position_embeddings.roll(1, 1)),
        "offset",
        "positions",
    ),
    one(
        "dinov2", "colours reversed", "", _given("pixel_values", lambda x: x.flip(1)), "permutation"
    ),
    # SegFormer.
    one(
        "segformer",
        "order of stages",
        "decode_head",
        edited("all_hidden_states[::-1]", "all_hidden_states"),
        "permutation",
    ),
    one(
        "segformer",
        "corners aligned",
        "decode_head",
        edited("align_corners=False", "align_corners=True"),
    ),
    one(
        "segformer",
        "batch norm in training mode",
        "decode_head.batch_norm",
        lambda b: b.train(),
        *_STATISTICS,
    ),
    one(
        "segformer",
        "statistics never loaded",
        "decode_head.batch_norm",
        lambda b: (b.running_mean.zero_(), b.running_var.fill_(1)),
        *_STATISTICS,
    ),
    one(
        "segformer",
        "depthwise left out",
        f"{_SEG}.mlp.dwconv",
        lambda m: around(m, lambda inner: lambda x, *r, **k: x),
        "skipped",
    ),
    one(
        "segformer",
        "colours reversed",
        "",
        _given("pixel_values", lambda x: x.flip(1)),
        "permutation",
    ),
    # DETR.
    one(
        "detr",
        "positions added to values",
        "model.encoder.layers.1.self_attn",
        lambda a: around(
            a,
            lambda inner: (
                lambda hidden_states, position_embeddings=None, **k: inner(
                    hidden_states + position_embeddings, position_embeddings=None, **k
                )
            ),
        ),
    ),
    one(
        "detr",
        "positions lost",
        "model.encoder.layers.1",
        _drop("spatial_position_embeddings"),
        "tokens",
        "missing",
        "positions",
    ),
    one("detr", "boxes not squashed", "", edited(".sigmoid()", ""), "function"),
    one("detr", "scale", "model.decoder.layers.1.encoder_attn", _times(scaling=0.5), "scale"),
    one(
        "detr",
        "final norm lost",
        "model.decoder",
        edited("hidden_states = self.layernorm(hidden_states)", "self.layernorm(hidden_states)"),
        "skipped",
        "source",
    ),
    # wav2vec 2.
    one(
        "wav2vec2",
        "sound not normalised",
        "",
        _given("input_values", lambda x: x * 0.5 + 0.1),
        "affine",
    ),
    one(
        "wav2vec2",
        "position convolution lost",
        "wav2vec2.encoder",
        edited(
            "hidden_states = hidden_states + position_embeddings", "hidden_states = hidden_states"
        ),
        "residual",
        "source",
    ),
    one(
        "wav2vec2",
        "same pad on the other side",
        "wav2vec2.encoder.pos_conv_embed.padding",
        lambda p: instead(p, lambda x: x[:, :, 1:]),
        "offset",
        "permutation",
    ),
    one("wav2vec2", "scale", f"{_W2V}.attention", _times(scaling=0.5), "scale"),
    one("wav2vec2", "relu for gelu", f"{_W2V}.feed_forward.intermediate_act_fn", _relu, "function"),
    # MobileNetV2.
    one(
        "mobilenet",
        "clamped at a half",
        "mobilenet_v2.layer.0.conv_3x3.activation",
        lambda a: instead(a, lambda x: F.relu(x).clamp(max=0.5)),
        "function",
        "saturation",
    ),
    one(
        "mobilenet",
        "residual lost",
        "mobilenet_v2.layer.1",
        constant(use_residual=False),
        "residual",
    ),
    one(
        "mobilenet",
        "statistics never loaded",
        "mobilenet_v2.layer.2.expand_1x1.normalization",
        lambda b: (b.running_mean.zero_(), b.running_var.fill_(1)),
        *_STATISTICS,
    ),
    one(
        "mobilenet",
        "batch norm in training mode",
        "mobilenet_v2.layer.2.expand_1x1.normalization",
        lambda b: b.train(),
        *_STATISTICS,
    ),
    one(
        "mobilenet",
        "padding on both sides",
        "mobilenet_v2.layer.2.conv_3x3",
        lambda m: (
            setattr(m, "config", None),
            m.convolution.__setattr__("padding", (1, 1)),
            setattr(m, "forward", lambda x: m.activation(m.normalization(m.convolution(x)))),
        ),
    ),
    one(
        "mobilenet",
        "epsilon",
        "mobilenet_v2.layer.2.expand_1x1.normalization",
        constant(eps=0.2),
        "factors",
        "affine",
    ),
    # Falcon Mamba.
    one("falcon_mamba", "D missing", "mixer", lambda m: m.D.zero_()),
    one(
        "falcon_mamba",
        "residual in half",
        "backbone.layers.2",
        edited("residual + hidden_states", "0.5 * residual + hidden_states"),
        "residual",
    ),
    # RWKV.
    one("rwkv", "time first lost", "attention", lambda a: a.time_first.zero_()),
    one(
        "rwkv",
        "mix of the other token",
        "mlp",
        edited("shifted * (1 - self.time_mix_key)", "shifted * self.time_mix_key"),
    ),
    one(
        "rwkv",
        "not squared",
        "mlp",
        edited("torch.square(torch.relu(self.key(key)))", "torch.relu(self.key(key))"),
        "function",
    ),
    one(
        "rwkv",
        "gate not squashed",
        "mlp",
        edited("torch.sigmoid(self.receptance(receptance))", "self.receptance(receptance)"),
        "gate",
        "function",
    ),
    one("rwkv", "decay doubled", "attention", lambda a: a.time_decay.add_(math.log(2.0)), "tokens"),
    # ModernBERT.
    one(
        "modernbert",
        "gate and input exchanged",
        "mlp",
        edited("input, gate = ", "gate, input = "),
        "gate",
    ),
    one(
        "modernbert",
        "gate lost",
        "mlp",
        edited("self.act(input) * gate", "self.act(input)"),
        "gate",
    ),
    one("modernbert", "padding attended", "model", _drop("attention_mask"), *_PLACES),
    one(
        "modernbert",
        "scale",
        "attention",
        edited("scaling=self.head_dim**-0.5", "scaling=0.5 * self.head_dim**-0.5"),
        "scale",
    ),
    # Marian and Pegasus.
    one(
        "marian",
        "final bias",
        "",
        lambda m: m.final_logits_bias.normal_(std=0.3, generator=generator()),
        "bias",
        "shift",
    ),
    one(
        "marian",
        "embedding scale lost",
        "model.encoder",
        lambda e: constant(embed_scale=1.0)(e),
        "factor",
        "residual",
    ),
    one(
        "marian",
        "padding of the encoder attended",
        "model.decoder",
        lambda d: around(
            d, lambda inner: lambda *a, **k: inner(*a, **{**k, "encoder_attention_mask": None})
        ),
        "samples",
        *_PLACES,
    ),
    one(
        "marian",
        "positions rolled",
        "model.encoder.embed_positions",
        _weights("weight", lambda w: w.roll(1, 0)),
        "offset",
        "permutation",
    ),
    one(
        "pegasus",
        "final norm left out",
        "model.encoder",
        edited("hidden_states = self.layer_norm(hidden_states)", "self.layer_norm(hidden_states)"),
        "skipped",
        "source",
    ),
    one(
        "pegasus",
        "cross attention scale",
        "model.decoder.layers.1.encoder_attn",
        _times(scaling=0.5),
        "scale",
    ),
    one(
        "pegasus",
        "norm after instead of before",
        "model.decoder.layers.1",
        edited("residual + hidden_states", "hidden_states"),
    ),
    # BLIP.
    one(
        "blip",
        "states of the other sample",
        "text_encoder",
        _given("encoder_hidden_states", lambda x: x.flip(0)),
    ),
    one(
        "blip",
        "class token for the mean",
        "",
        edited("question_embeds[:, 0, :]", "question_embeds.mean(1)"),
        "reduction",
        "source",
    ),
    one(
        "blip",
        "quick gelu in the eye",
        "vision_model.encoder",
        lambda e: [
            instead(m.mlp.activation_fn, lambda x: x * torch.sigmoid(1.702 * x)) for m in e.layers
        ],
    ),
    one("blip", "epsilon of the eye", "vision_model", _epsilon_everywhere(0.3)),
    one(
        "blip",
        "padding attended",
        "text_encoder",
        _given("attention_mask", torch.ones_like),
        *_PLACES,
    ),
    # XLNet.
    one(
        "xlnet",
        "bias of positions lost",
        "attention",
        edited("q_head + self.r_r_bias", "q_head", "rel_attn_core"),
    ),
    one(
        "xlnet",
        "positions not shifted",
        "attention",
        edited(
            "bd = self.rel_shift_bnij(bd, klen=ac.shape[3])",
            "bd = bd[..., : ac.shape[3]]",
            "rel_attn_core",
        ),
    ),
    one("xlnet", "scale", "attention", _times(scale=0.5), "scale"),
    one(
        "xlnet",
        "residual lost",
        "mlp",
        edited("self.layer_norm(output + inp)", "self.layer_norm(output)"),
        "residual",
        "source",
    ),
    # By hand: a decoder in one forward.
    one("bare", "embedding scale lost", "", constant(factor=1.0)),
    one("bare", "positions one further", "", constant(first=1)),
    one("bare", "slowest wave", "", constant(slow=1000.0)),
    one("bare", "temperature lost", "", constant(temperature=1.0), "factor", "function"),
    one("bare", "cap of another size", "", constant(cap=4.0), "function", "saturation"),
    one(
        "bare",
        "cap lost",
        "",
        edited("self.cap * torch.tanh(logits / self.cap)", "logits"),
        "function",
        "saturation",
    ),
    one("bare", "final bias lost", "", lambda m: m.bias.zero_(), "bias", "function"),
    one("bare", "scale 5 % off", "", constant(scale=1.05), "scale", "tokens"),
    one(
        "bare",
        "causal mask lost",
        "",
        edited(
            "causal & attention_mask.bool()[:, None, None, :]",
            "attention_mask.bool()[:, None, None, :]",
        ),
        *_PLACES,
    ),
    one(
        "bare",
        "padding attended",
        "",
        edited("causal & attention_mask.bool()[:, None, None, :]", "causal[None, None]"),
        *_PLACES,
    ),
    one("bare", "residual scaled", "", constant(residual=0.9)),
    one(
        "bare",
        "gate and value exchanged",
        "",
        edited("F.silu(gate) * value", "F.silu(value) * gate"),
        "gate",
    ),
    one("bare", "gate lost", "", edited("F.silu(gate) * value", "value"), "gate"),
    one("bare", "gelu for silu", "", edited("F.silu(gate)", "F.gelu(gate)"), "gate", "function"),
    one(
        "bare",
        "norms exchanged",
        "",
        edited("self.norm(x, 2 * i + 1)", "self.norm(x, 2 * i)"),
        "factors",
    ),
    one(
        "bare",
        "mean subtracted",
        "",
        edited("size = x", "x = x - x.mean(-1, keepdim=True)\n    size = x", "norm"),
    ),
    one(
        "bare",
        "heads before widths",
        "",
        edited(
            "unflatten(-1, (3, _HEADS, -1)).unbind(2)",
            "unflatten(-1, (_HEADS, 3, -1)).unbind(3)",
            "attend",
        ),
    ),
    one(
        "bare", "keys and values exchanged", "", edited("q, k, v = qkv", "q, v, k = qkv", "attend")
    ),
    # By hand: one encoder twice.
    one(
        "siamese",
        "scale not exponential",
        "",
        edited("self.logit_scale.exp()", "self.logit_scale"),
        "factor",
        "affine",
    ),
    one("siamese", "bias lost", "", constant(logit_bias=0.0), "shift"),
    one("siamese", "padding attended", "encoder", constant(use_mask=False), *_PLACES),
    one(
        "siamese",
        "mean over padding",
        "encoder",
        edited("(x * weight).sum(1) / weight.sum(1)", "x.mean(1)"),
        "reduction",
        "samples",
        "tokens",
    ),
    one(
        "siamese",
        "maximum for mean",
        "encoder",
        edited("(x * weight).sum(1) / weight.sum(1)", "x.amax(1)"),
        "reduction",
    ),
    one(
        "siamese",
        "second not normalised",
        "",
        edited(
            "b = F.normalize(self.project(self.encoder(second, torch.ones_like(second))), dim=-1)",
            "b = self.project(self.encoder(second, torch.ones_like(second)))",
        ),
        "factors",
        "affine",
    ),
    one(
        "siamese",
        "first twice",
        "",
        edited(
            "self.encoder(second, torch.ones_like(second))",
            "self.encoder(first, torch.ones_like(second))",
        ),
    ),
    one(
        "siamese",
        "positions lost",
        "encoder",
        edited("self.embed(ids) + self.place[: ids.shape[1]]", "self.embed(ids)"),
        "residual",
        "source",
        "positions",
    ),
    # By hand: two towers.
    one("recommender", "popularity lost", "", constant(popularity=0.0)),
    one(
        "recommender",
        "log lost",
        "",
        constant(log=False),
        "function",
        "channels",
    ),
    one(
        "recommender",
        "items in a smaller table",
        "",
        constant(tables=32),
        "lookup",
        "places",
        "tokens",
    ),
    one(
        "recommender",
        "relu in one tower",
        "user",
        edited("F.gelu(norm(line(x)))", "F.relu(norm(line(x)))"),
        "function",
    ),
    one(
        "recommender",
        "tower not normalised",
        "item",
        edited("x / (x.norm(dim=-1, keepdim=True) + self.epsilon_of_end)", "x"),
        "factors",
    ),
    one("recommender", "words summed", "words", constant(mode="sum"), "factor"),
    one("recommender", "epsilon of a tower", "item", _epsilon_everywhere(0.5)),
    # By hand: messages.
    one("graph", "loops lost", "", constant(loops=0.0)),
    one("graph", "degree not rooted", "", constant(power=1.0)),
    one("graph", "maximum for mean", "", constant(pool="max"), "reduction"),
    one("graph", "residual lost", "", edited("x = x + F.relu", "x = F.relu"), "residual"),
    one("graph", "own state lost", "", edited("line(x)) + own(x))", "line(x)))")),
    # By hand: sound.
    one("waves", "convolution not causal", "", constant(shifted=1), "offset", "permutation"),
    one("waves", "tanh and sigmoid exchanged", "", constant(swapped=True), "gate"),
    one("waves", "residual not halved", "", constant(half=1.0), "factor"),
    one(
        "waves",
        "mu law lost",
        "",
        edited(
            "torch.sign(sound) * torch.log1p(self.mu * sound.abs()) / math.log1p(self.mu)", "sound"
        ),
        "function",
        "source",
    ),
    one(
        "waves",
        "last skip alone",
        "",
        edited("total = total + self.skips[i](y)", "total = self.skips[i](y)"),
        "source",
        "residual",
    ),
    # By hand: pictures to a code.
    one("autoencoder", "pixels not scaled", "", constant(scale=1.0), "affine"),
    one(
        "autoencoder",
        "bytes from 0 to 1",
        "",
        edited("pixel_values * self.scale - 1", "pixel_values / 255"),
        "affine",
    ),
    one("autoencoder", "spread not halved", "", constant(half=1.0)),
    one("autoencoder", "bilinear", "", constant(mode="bilinear"), "reduction"),
    one("autoencoder", "sigmoid lost", "", edited("torch.sigmoid(y)", "y"), "function"),
    one(
        "autoencoder",
        "colours reversed",
        "",
        _given("pixel_values", lambda x: x.flip(1)),
        "permutation",
    ),
    one(
        "autoencoder",
        "channels last flattened",
        "",
        edited(
            "F.silu(self.enc2(F.silu(self.enc1(x)))).flatten(1)",
            "F.silu(self.enc2(F.silu(self.enc1(x)))).permute(0, 2, 3, 1).flatten(1)",
        ),
        "permutation",
        "transpose",
    ),
)
