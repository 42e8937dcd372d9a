"""Bugs of single models, mostly in code between layers: decoders, experts, encoders, state spaces.

Each is modelled on what people report: a scale or a cap that is lost, a mask that is dropped, a
router that does not renormalise, a table that is read one row further.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from flaws import Bug, calling, constant, generator, in_config, one, spoiled, swapped, with_global
from planting import around, instead, intercepting
from torch import Tensor, nn

__all__ = ["BUGS"]

Call = Callable[..., Any]


def _times(**factors: float) -> Callable[[Any], None]:
    """Numbers of a layer that are off by a factor."""
    return lambda layer: constant(**{n: getattr(layer, n) * by for n, by in factors.items()})(layer)


def _buffer(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    return lambda layer: getattr(layer, name).copy_(value(getattr(layer, name)))


def _interleaved(held: Call) -> Call:
    """Rotary pairs that lie side by side instead of half a head apart."""

    def turned(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in (cos, sin))
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + turned(q) * sin, k * cos + turned(k) * sin

    return apply


def _keys_unturned(held: Call) -> Call:
    return lambda q, k, *rest, **more: (held(q, k, *rest, **more)[0], k)


def _drop(*names: str) -> Callable[[nn.Module], None]:
    """Arguments that do not arrive."""
    return calling(lambda kwargs: kwargs.update({name: None for name in names if name in kwargs}))


def _of_other_sample(name: str) -> Callable[[nn.Module], None]:
    """An argument that belongs to the other sample."""
    return calling(lambda kwargs: kwargs.update({name: kwargs[name].flip(0)}))


def _sigmoid_router(layer: Any) -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = F.linear(x, layer.weight).sigmoid().topk(layer.top, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    instead(layer, forward)


def _last_rows(layer: Any) -> None:
    """Expert weights of the router in another order."""
    layer.weight.copy_(layer.weight.roll(1, 0))


def _half_gelu(layer: nn.Module) -> None:
    instead(layer, lambda x: x * torch.sigmoid(1.702 * x))


def _no_mask(layer: Any) -> None:
    layer.causal = False


def _qkv_order(layer: Any) -> None:
    """The fused projection is taken for q, v, k."""
    heads, scale = layer.heads, layer.scale

    def forward(x: Tensor) -> Tensor:
        q, v, k = layer.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return layer.out(y.transpose(1, 2).flatten(-2))

    instead(layer, forward)


def _qkv_by_head(layer: Any) -> None:
    """The fused projection is taken for (q, k, v) of the first head, then of the next."""
    heads, scale = layer.heads, layer.scale

    def forward(x: Tensor) -> Tensor:
        q, k, v = layer.qkv(x).unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return layer.out(y.transpose(1, 2).flatten(-2))

    instead(layer, forward)


def _wrong_expert(layer: Any) -> None:
    """Tokens of expert 1 go to expert 2, and the other way."""
    order = [0, 2, 1, 3, 4, 5]
    around(
        layer,
        lambda inner: lambda x: _reordered(layer, order, inner, x),
    )


def _reordered(layer: Any, order: list[int], inner: Call, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    weights, chosen = layer.router(flat)
    total = torch.zeros_like(flat)
    for index, expert in enumerate(layer.experts):
        token, place = (chosen == order[index]).nonzero(as_tuple=True)
        if len(token):
            total.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
    gate = layer.shared_gate(flat).sigmoid()
    return (total + gate * layer.shared(flat)).view_as(x)


def _weights_of_other_place(layer: Any) -> None:
    """The first expert gets the weight of the second, and the other way."""
    around(layer, lambda inner: lambda x: (lambda w, c: (w.flip(-1), c))(*inner(x)))


def _experts_swapped(layer: Any) -> None:
    for weight in (layer.gate_up_proj, layer.down_proj):
        swapped(weight, slice(1, 2), slice(2, 3))


def _expert_scaled(layer: Any) -> None:
    layer.down_proj[3].mul_(1.5)


def _up_for_gate(layer: Any) -> None:
    half = layer.gate_up_proj.shape[1] // 2
    swapped(layer.gate_up_proj, slice(0, half), slice(half, 2 * half), 1)


def _skip(role_of: str, value: float = 0.0) -> Callable[[nn.Module], None]:
    """What one child makes is weighted by another factor inside its parent's forward."""

    def plant(layer: nn.Module) -> None:
        child = layer.get_submodule(role_of)

        def wrap(inner: Call) -> Call:
            def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                heard: list[Tensor] = []
                hook = child.register_forward_hook(lambda m, i, o: heard.append(o))
                try:
                    result = inner(x, *args, **kwargs)
                finally:
                    hook.remove()
                less = (value - 1) * heard[-1].view_as(x)
                if isinstance(result, tuple):
                    return (result[0] + less, *result[1:])
                return result + less

            return call

        around(layer, wrap)

    return plant


def _sees_all(layer: Any) -> None:
    layer.is_causal = False
    _drop("attention_mask")(layer)


def _first_gelus_lost(encoder: nn.Module) -> None:
    """Those after the convolutions; what comes of them has its channels before its places."""
    gelu = F.gelu
    intercepting(encoder, gelu, lambda x: x if x.shape[1] == 64 else gelu(x))


def _left_out(layer: nn.Module) -> None:
    instead(layer, lambda x: x)


def _fresh(layer: Any) -> None:
    """A head that was tied to the embedding has weights of its own that were never loaded."""
    fresh = torch.randn(layer.weight.shape, generator=generator()) / math.sqrt(64)
    layer.weight = nn.Parameter(fresh, requires_grad=False)


def _alibi(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def plant(layer: Any) -> None:
        held = layer.build_alibi_tensor
        layer.build_alibi_tensor = lambda *args, **kwargs: change(held(*args, **kwargs))

    return plant


def _encoder_padding_attended(kwargs: dict[str, Any]) -> None:
    kwargs["encoder_attention_mask"] = None


def _ungated(layer: Any) -> None:
    around(layer, lambda inner: lambda x, gate=None: inner(x, None))


_R, _G, _T5, _B = "model.layers.2", "model.layers.2", "decoder.block.2", "model.decoder.layers.2"
_SELF, _CROSS = f"{_T5}.layer.0.SelfAttention", f"{_T5}.layer.1.EncDecAttention"
_PLACES = ("tokens", "samples", "mask", "padding")
_ALBERT = "albert.encoder.albert_layer_groups.0.albert_layers.0"

BUGS: tuple[Bug, ...] = (
    # A mixture of experts, by hand.
    one("experts", "logit scale lost", "", constant(logit_scale=1.0), "factor"),
    one("experts", "logit soft cap added", "", constant(cap=1.0), "function", "saturation"),
    one("experts", "embedding scaled", "", constant(embedding_scale=8.0)),
    one("experts", "positions one further", "", constant(first_position=1)),
    one("experts", "blocks swapped", "", constant(order=[0, 2, 1, 3])),
    one("experts", "block left out", "", constant(order=[0, 1, 3])),
    one("experts", "attention halved", "blocks.2", constant(factor=0.5)),
    one("experts", "top 1 for top 2", "router", constant(top=1), "shape"),
    one("experts", "top 3 for top 2", "router", constant(top=3), "shape"),
    one("experts", "not renormalised", "router", constant(renormalise=False), "factors"),
    one("experts", "router rows moved", "router", _last_rows),
    one("experts", "sigmoid for softmax", "router", _sigmoid_router),
    one(
        "experts",
        "weights of the other place",
        "router",
        _weights_of_other_place,
        "permutation",
        "affine",
    ),
    one(
        "experts",
        "expert scaled",
        "blocks.2.mixture.experts.3.down",
        spoiled(lambda x: x * 1.5),
        "factor",
    ),
    one("experts", "experts swapped", "mixture", _wrong_expert, shows="mixture"),
    one("experts", "shared gate lost", "mixture", constant(gated=False), "gate"),
    one("experts", "causal mask lost", "attention", _no_mask, *_PLACES),
    one("experts", "scale 2 % off", "attention", _times(scale=1.02), "scale", "tokens"),
    one(
        "experts",
        "scale of the whole width",
        "attention",
        constant(scale=64**-0.5),
        "scale",
        "tokens",
    ),
    one("experts", "q, v, k", "attention", _qkv_order),
    one("experts", "qkv by head", "attention", _qkv_by_head),
    # Qwen 3 MoE.
    one("qwen3_moe", "top 1 for top 2", "router", constant(top_k=1), "shape"),
    one("qwen3_moe", "not renormalised", "router", constant(norm_topk_prob=False), "factors"),
    one("qwen3_moe", "router rows moved", "router", _last_rows, "permutation"),
    one("qwen3_moe", "expert scaled", "experts", _expert_scaled),
    one("qwen3_moe", "experts swapped", "experts", _experts_swapped),
    one("qwen3_moe", "up for gate", "experts", _up_for_gate),
    one(
        "qwen3_moe",
        "scale of the whole width",
        "attention",
        constant(scaling=64**-0.5),
        "scale",
        "tokens",
    ),
    one("qwen3_moe", "scale 2 % off", "attention", _times(scaling=1.02), "scale", "tokens"),
    one(
        "qwen3_moe",
        "rotary pairs side by side",
        "attention",
        with_global("apply_rotary_pos_emb", _interleaved),
        "rotary",
    ),
    one(
        "qwen3_moe",
        "keys not turned",
        "attention",
        with_global("apply_rotary_pos_emb", _keys_unturned),
        "rotary",
    ),
    one(
        "qwen3_moe",
        "rotary base",
        "model.rotary_emb",
        _buffer("inv_freq", lambda f: 500.0 ** (-torch.arange(0, 16, 2) / 16)),
        "rotary",
    ),
    one("qwen3_moe", "padding attended", "model", _drop("attention_mask"), *_PLACES),
    one(
        "qwen3_moe",
        "query norm never loaded",
        f"{_R}.self_attn.q_norm",
        lambda n: n.weight.fill_(1),
        "factors",
    ),
    one("qwen3_moe", "mixture halved", _R, _skip("mlp", 0.5)),
    # Gemma 2.
    one(
        "gemma2", "attention cap lost", "attention", constant(attn_logit_softcapping=None), "scale"
    ),
    one(
        "gemma2",
        "logit cap lost",
        "",
        in_config(final_logit_softcapping=None),
        "function",
        "saturation",
    ),
    one(
        "gemma2",
        "logit cap of another size",
        "",
        in_config(final_logit_softcapping=4.0),
        "function",
        "saturation",
    ),
    one("gemma2", "scale", "attention", _times(scaling=0.5), "scale", "tokens"),
    one(
        "gemma2",
        "window lost",
        "model",
        in_config(layer_types=["full_attention"] * 4),
        "tokens",
        "mask",
    ),
    one(
        "gemma2",
        "embedding scale lost",
        "model.embed_tokens",
        lambda e: e.embed_scale.fill_(1),
        "factor",
    ),
    one(
        "gemma2",
        "norm without one",
        f"{_G}.pre_feedforward_layernorm",
        lambda n: n.weight.sub_(1),
        "factors",
        "factor",
    ),
    one(
        "gemma2",
        "norm after attention left out",
        f"{_G}.post_attention_layernorm",
        _left_out,
        "skipped",
    ),
    one("gemma2", "residual doubled", _G, _skip("post_feedforward_layernorm", 2.0)),
    one("gemma2", "padding attended", "model", _drop("attention_mask"), *_PLACES),
    # GPT-2.
    one("gpt2", "scale lost", "attention", constant(scaling=1.0), "scale", "tokens"),
    one("gpt2", "head not tied", "lm_head", _fresh),
    one("gpt2", "gelu, exact", "activation", lambda layer: instead(layer, F.gelu), "function"),
    one("gpt2", "gelu, quick", "activation", _half_gelu, "function"),
    one(
        "gpt2",
        "weight not transposed",
        "transformer.h.2.attn.c_proj",
        lambda c: c.weight.copy_(c.weight.t().clone()),
    ),
    one(
        "gpt2",
        "positions one further",
        "transformer.wpe",
        lambda e: around(e, lambda inner: lambda x: inner(x + 1)),
        "offset",
    ),
    one("gpt2", "padding attended", "transformer", _drop("attention_mask"), *_PLACES),
    one("gpt2", "attention 10 % more", "transformer.h.2", _skip("attn.c_proj", 1.1)),
    one(
        "gpt2",
        "q and k swapped",
        "transformer.h.2.attn.c_attn",
        lambda c: [swapped(w, slice(0, 64), slice(64, 128), -1) for w in (c.weight, c.bias)],
        "permutation",
    ),
    # BLOOM and Falcon.
    one("bloom", "alibi lost", "attention", constant(beta=0.0)),
    one("bloom", "alibi slopes", "transformer", _alibi(lambda a: a * 0.5)),
    one("bloom", "alibi of heads reversed", "transformer", _alibi(lambda a: a.flip(0))),
    one("bloom", "scale", "attention", _times(inv_norm_factor=0.5), "scale", "tokens"),
    one(
        "bloom",
        "norm of the embedding left out",
        "transformer.word_embeddings_layernorm",
        _left_out,
        "skipped",
    ),
    one(
        "falcon",
        "rotary base",
        "transformer.rotary_emb",
        _buffer("inv_freq", lambda f: 500.0 ** (-torch.arange(0, 16, 2) / 16)),
        "rotary",
    ),
    one(
        "falcon",
        "rotary pairs side by side",
        "attention",
        with_global("apply_rotary_pos_emb", _interleaved),
        "rotary",
    ),
    one("falcon", "gelu, quick", "activation", _half_gelu, "function"),
    # DeBERTa and ALBERT.
    one("deberta", "positions to content lost", "attention", constant(pos_att_type=["c2p"])),
    one("deberta", "buckets", "deberta.encoder", constant(position_buckets=4)),
    one(
        "deberta",
        "padding attended",
        "deberta.encoder",
        lambda e: around(
            e, lambda inner: lambda h, m, *a, **k: inner(h, torch.ones_like(m), *a, **k)
        ),
        *_PLACES,
    ),
    one("deberta", "relative norm left out", "deberta.encoder.LayerNorm", _left_out, "skipped"),
    one("albert", "scale", f"{_ALBERT}.attention", _times(scaling=0.7), "scale"),
    one("albert", "gelu, quick", f"{_ALBERT}.activation", _half_gelu, "function"),
    one(
        "albert", "factors 5 % more", f"{_ALBERT}.ffn_output", spoiled(lambda x: x * 1.05), "factor"
    ),
    one("albert", "one layer too few", "albert.encoder", in_config(num_hidden_layers=3)),
    # T5.
    one(
        "t5",
        "relative bias lost",
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        spoiled(lambda x: x * 0),
        "factor",
    ),
    one(
        "t5",
        "relative buckets",
        "decoder.block.0.layer.0.SelfAttention",
        constant(relative_attention_max_distance=16),
    ),
    one("t5", "scale added", "attention", constant(scaling=0.25), "scale"),
    one("t5", "states of the other sample", "decoder", _of_other_sample("encoder_hidden_states")),
    one(
        "t5",
        "states of the other sample, in one layer",
        "cross",
        _of_other_sample("key_value_states"),
    ),
    one(
        "t5",
        "padding of the encoder attended",
        "decoder",
        calling(_encoder_padding_attended),
        "samples",
        *_PLACES,
    ),
    one("t5", "outputs scaled", "", in_config(scale_decoder_outputs=True)),
    one("t5", "relu for gelu", "activation", lambda layer: instead(layer, F.relu), "function"),
    one(
        "t5",
        "gate lost",
        f"{_T5}.layer.2.DenseReluDense",
        lambda m: instead(m, lambda x: m.wo(m.wi_1(x))),
        "gate",
    ),
    one("t5", "encoder 5 % more", "encoder_down", spoiled(lambda x: x * 1.05), "factor"),
    one(
        "t5", "final norm of the encoder left out", "encoder.final_layer_norm", _left_out, "skipped"
    ),
    # BART and Whisper.
    one(
        "bart",
        "embedding scale lost",
        "model.encoder.embed_tokens",
        constant(embed_scale=1.0),
        "factor",
    ),
    one(
        "bart",
        "positions without offset",
        "model.encoder.embed_positions",
        constant(offset=0),
        "offset",
    ),
    one("bart", "scale of cross attention", "cross", _times(scaling=0.5), "scale"),
    one(
        "bart",
        "states of the other sample",
        "model.decoder",
        _of_other_sample("encoder_hidden_states"),
    ),
    one("bart", "causal mask lost", "attention", _sees_all, *_PLACES),
    one(
        "bart",
        "final bias",
        "",
        lambda m: m.final_logits_bias.normal_(std=0.3, generator=generator()),
        "bias",
        "shift",
    ),
    one("bart", "encoder 5 % more", "encoder_down", spoiled(lambda x: x * 1.05), "factor"),
    one(
        "whisper",
        "gelu after the convolution lost",
        "model.encoder",
        _first_gelus_lost,
    ),
    one(
        "whisper",
        "padding of the convolution",
        "model.encoder.conv1",
        lambda c: (
            setattr(c, "padding_mode", "replicate"),
            setattr(c, "_reversed_padding_repeated_twice", [1, 1]),
        ),
    ),
    one("whisper", "scale of cross attention", "cross", _times(scaling=0.5), "scale"),
    one(
        "whisper",
        "states of the other sample, in one layer",
        "cross",
        _of_other_sample("key_value_states"),
    ),
    one(
        "whisper",
        "positions moved",
        "model.encoder.embed_positions",
        lambda e: e.weight.copy_(e.weight.roll(1, 0)),
        "offset",
        "tokens",
        "permutation",
    ),
    one("whisper", "encoder 5 % more", "encoder_down", spoiled(lambda x: x * 1.05), "factor"),
    # State spaces.
    one("mamba2", "decay too fast", "mixer", lambda m: m.A_log.add_(0.4), "tokens"),
    one("mamba2", "D missing", "mixer", lambda m: m.D.zero_()),
    one("mamba2", "time step bias lost", "mixer", lambda m: m.dt_bias.zero_()),
    one(
        "mamba2",
        "convolution one off",
        "conv",
        lambda c: c.weight.copy_(c.weight.roll(1, -1)),
        shows="?",
    ),
    one("mamba2", "convolution bias dropped", "conv", lambda c: c.bias.zero_()),
    one("mamba2", "gate lost", "inner_norm", _ungated, "gate"),
    one("mamba2", "norm over all groups", "inner_norm", lambda n: n.weight.fill_(1), "factors"),
    one("jamba", "D missing", "mixer", lambda m: m.D.zero_()),
    one("jamba", "decay too fast", "mixer", lambda m: m.A_log.add_(0.4), "tokens"),
    one("jamba", "scale", "model.layers.3.self_attn", _times(scaling=0.7), "scale", "tokens"),
    one("jamba", "expert scaled", "model.layers.1.feed_forward.experts", _expert_scaled),
    one(
        "jamba",
        "norm of the time steps left out",
        "model.layers.2.mamba.dt_layernorm",
        _left_out,
        "skipped",
    ),
    one("jamba", "padding attended", "model", _drop("attention_mask"), *_PLACES),
    one("zamba2", "D missing", "mixer", lambda m: m.D.zero_()),
    one(
        "zamba2",
        "scale",
        "model.layers.1.shared_transformer.self_attn",
        _times(scaling=0.7),
        "scale",
        "tokens",
    ),
    one("zamba2", "time step bias lost", "mixer", lambda m: m.dt_bias.zero_()),
    one(
        "zamba2",
        "linear after the shared block 5 % more",
        "model.layers.3.linear",
        spoiled(lambda x: x * 1.05),
        "factor",
    ),
    # In the models that were here before.
    one(
        "llama",
        "rotary base",
        "model.rotary_emb",
        _buffer("inv_freq", lambda f: 500.0 ** (-torch.arange(0, 16, 2) / 16)),
        "rotary",
    ),
    one(
        "llama",
        "rotary pairs side by side",
        "attention",
        with_global("apply_rotary_pos_emb", _interleaved),
        "rotary",
    ),
    one("llama", "padding attended", "model", _drop("attention_mask"), *_PLACES),
    one("llama", "attention 10 % more", "model.layers.2", _skip("self_attn.o_proj", 1.1)),
    one(
        "llama",
        "gate lost",
        f"{_R}.mlp",
        lambda m: instead(m, lambda x: m.down_proj(m.up_proj(x))),
        "gate",
    ),
    one("bert", "scale", "attention", _times(scaling=0.7), "scale"),
)
