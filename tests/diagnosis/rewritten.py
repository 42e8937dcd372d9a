"""The same models as somebody else would write them, with the same weights.

Other names, other modules, fused or split projections, pictures with their channels last: nothing
is wrong with any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["REWRITTEN"]


def _linear(*sources: Any) -> nn.Linear:
    """One linear with the rows of several; a Conv1D of transformers has its weight turned."""
    weights = [s.weight.t() if type(s).__name__ == "Conv1D" else s.weight for s in sources]
    made = nn.Linear(weights[0].shape[1], sum(len(w) for w in weights), sources[0].bias is not None)
    made.weight.data.copy_(torch.cat(weights))
    if made.bias is not None:
        made.bias.data.copy_(torch.cat([s.bias for s in sources]))
    return made


def _norm(source: Any) -> nn.LayerNorm:
    made = nn.LayerNorm(len(source.weight), eps=source.eps)
    made.load_state_dict(source.state_dict())
    return made


class RMS(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.gain, self.epsilon = nn.Parameter(source.weight.clone()), source.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, self.epsilon).to(x.dtype) * self.gain


def _split(x: Tensor, *heads: int) -> tuple[Tensor, ...]:
    """A fused projection, to heads."""
    size = x.shape[-1] // sum(heads)
    parts = x.split([h * size for h in heads], -1)
    return tuple(p.unflatten(-1, (-1, size)).transpose(1, 2) for p in parts)


class LlamaBlock(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        a, m = source.self_attn, source.mlp
        self.ln_1, self.ln_2 = RMS(source.input_layernorm), RMS(source.post_attention_layernorm)
        self.wqkv, self.wo = _linear(a.q_proj, a.k_proj, a.v_proj), _linear(a.o_proj)
        self.w13, self.w2 = _linear(m.gate_proj, m.up_proj), _linear(m.down_proj)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        q, k, v = _split(self.wqkv(self.ln_1(x)), 4, 2, 2)
        q, k = (t * turn[0] + torch.cat(_half_turn(t), -1) * turn[1] for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).flatten(-2))
        gate, up = self.w13(self.ln_2(x)).chunk(2, -1)
        return x + self.w2(F.silu(gate) * up)


def _half_turn(t: Tensor) -> tuple[Tensor, Tensor]:
    first, second = t.chunk(2, -1)
    return -second, first


class Llama(nn.Module):
    """Fused projections, and rotations in the root."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        inner = source.model
        self.wte = nn.Embedding.from_pretrained(inner.embed_tokens.weight.clone())
        self.h = nn.ModuleList(LlamaBlock(layer) for layer in inner.layers)
        self.ln_f, self.output = RMS(inner.norm), _linear(source.lm_head)
        self.register_buffer("speed", inner.rotary_emb.inv_freq.clone(), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = input_ids.shape[1]
        angle = torch.outer(torch.arange(tokens), self.speed.float()).repeat(1, 2)
        x = self.wte(input_ids)
        turn = (angle.cos().to(x.dtype), angle.sin().to(x.dtype))
        mask = _causal(tokens) & attention_mask[:, None, None].bool()
        for block in self.h:
            x = block(x, turn, mask)
        return self.output(self.ln_f(x))


def _causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


class GPT2Block(nn.Module):
    """Linears of their own for queries, keys and values."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        fused = _linear(source.attn.c_attn)
        self.norm_a, self.norm_m = _norm(source.ln_1), _norm(source.ln_2)
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        parts = zip(fused.weight.chunk(3), fused.bias.chunk(3), strict=True)
        for made, (weight, bias) in zip((self.query, self.key, self.value), parts, strict=True):
            made.weight.data.copy_(weight)
            made.bias.data.copy_(bias)
        self.project = _linear(source.attn.c_proj)
        self.expand, self.shrink = _linear(source.mlp.c_fc), _linear(source.mlp.c_proj)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm_a(x)
        q, k, v = (
            part(h).unflatten(-1, (4, 16)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.project(y.transpose(1, 2).flatten(-2))
        return x + self.shrink(F.gelu(self.expand(self.norm_m(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        inner = source.transformer
        self.words = nn.Embedding.from_pretrained(inner.wte.weight.clone())
        self.places = nn.Embedding.from_pretrained(inner.wpe.weight.clone())
        self.layers = nn.ModuleList(GPT2Block(block) for block in inner.h)
        self.norm = _norm(inner.ln_f)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = input_ids.shape[1]
        x = self.words(input_ids) + self.places(torch.arange(tokens))
        mask = _causal(tokens) & attention_mask[:, None, None].bool()
        for block in self.layers:
            x = block(x, mask)
        return F.linear(self.norm(x), self.words.weight)


class ViT(nn.Module):
    """PyTorch's own encoder layers."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        inner = source.vit
        found = inner.embeddings
        self.patches = nn.Conv2d(3, 64, 8, 8)
        self.patches.load_state_dict(found.patch_embeddings.projection.state_dict())
        self.cls, self.pos = (
            nn.Parameter(p.clone()) for p in (found.cls_token, found.position_embeddings)
        )
        self.encoder = nn.ModuleList(self._layer(layer) for layer in inner.layers)
        self.norm, self.head = _norm(inner.layernorm), _linear(source.classifier)

    @staticmethod
    def _layer(source: Any) -> nn.Module:
        a = source.attention
        eps = source.layernorm_before.eps
        made = nn.TransformerEncoderLayer(
            64, 4, 160, 0.0, F.gelu, eps, batch_first=True, norm_first=True
        )
        fused = _linear(a.q_proj, a.k_proj, a.v_proj)
        made.self_attn.in_proj_weight.data.copy_(fused.weight)
        made.self_attn.in_proj_bias.data.copy_(fused.bias)
        made.self_attn.out_proj.load_state_dict(a.o_proj.state_dict())
        made.linear1.load_state_dict(source.mlp.fc1.state_dict())
        made.linear2.load_state_dict(source.mlp.fc2.state_dict())
        made.norm1.load_state_dict(source.layernorm_before.state_dict())
        made.norm2.load_state_dict(source.layernorm_after.state_dict())
        return made

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.pos
        for layer in self.encoder:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Last(nn.Module):
    """A convolution over pictures whose channels are last."""

    def __init__(self, source: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.stride, self.padding = source.weight, source.stride, source.padding

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(x.permute(0, 3, 1, 2), self.weight, None, self.stride, self.padding)
        return y.permute(0, 2, 3, 1)


class Scale(nn.Module):
    """A batch norm over the last axis."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.gain, self.offset = (nn.Parameter(p.clone()) for p in (source.weight, source.bias))
        self.register_buffer("mean", source.running_mean.clone())
        self.register_buffer("var", source.running_var.clone())
        self.epsilon = source.eps

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * torch.rsqrt(self.var + self.epsilon) * self.gain + self.offset


class Unit(nn.Module):
    """Convolution and norm."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.conv, self.bn = Last(source.convolution), Scale(source.normalization)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class Residual(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.first, self.second = Unit(source.layer[0]), Unit(source.layer[1])
        short = source.shortcut
        self.short = Unit(short) if hasattr(short, "convolution") else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.first(x)))
        return F.relu(y + (x if self.short is None else self.short(x)))


class ResNet(nn.Module):
    """Channels last, activations as functions."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        inner = source.resnet
        self.stem = Unit(inner.embedder.embedder)
        layers = [layer for stage in inner.encoder.stages for layer in stage.layers]
        self.body = nn.Sequential(*(Residual(layer) for layer in layers))
        self.fc = _linear(source.classifier[1])

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = F.relu(self.stem(pixel_values.permute(0, 2, 3, 1)))
        x = F.max_pool2d(x.permute(0, 3, 1, 2), 3, 2, 1).permute(0, 2, 3, 1)
        return self.fc(self.body(x).mean((1, 2)))


class Signal(nn.Module):
    """A GRU as two of one layer each."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.front, self.scale = source.conv, source.bn
        self.low, self.high = nn.GRU(32, 40, batch_first=True), nn.GRU(40, 40, batch_first=True)
        for level, made in enumerate((self.low, self.high)):
            for name, weight in made.named_parameters():
                weight.data.copy_(getattr(source.gru, name.replace("_l0", f"_l{level}")))
        self.ln, self.out = _norm(source.norm), _linear(source.head)

    def forward(self, signal: Tensor) -> Tensor:
        x = F.relu(self.scale(self.front(signal))).transpose(1, 2)
        return self.out(self.ln(self.high(self.low(x)[0])[0]))


REWRITTEN: dict[str, Callable[[Any], nn.Module]] = {
    "llama": Llama,
    "gpt2": GPT2,
    "vit": ViT,
    "resnet": ResNet,
    "gru": Signal,
}
