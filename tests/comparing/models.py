"""The same mathematics, built in two ways: other names, other nesting, fused parts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), None


class GatedMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width)
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads)
        self.mlp = GatedMLP(width)
        self.input_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = x + self.self_attn(self.input_layernorm(x))[0]
        return (x + self.mlp(self.post_attention_layernorm(x)),)


class Decoder(nn.Module):
    """As a library writes it: `model.layers.N.self_attn.q_proj`, tuples, a wrapper with a head."""

    def __init__(self, blocks: int = 3, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(32, width)
        self.model.layers = nn.ModuleList(DecoderLayer(width, heads) for _ in range(blocks))
        self.model.norm = nn.RMSNorm(width, eps=1e-6)
        self.lm_head = nn.Linear(width, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)[0]
        return self.lm_head(self.model.norm(x))


class OwnNorm(nn.Module):
    """RMSNorm again, under a name of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


OwnNorm.__name__ = OwnNorm.__qualname__ = "MyRMSNorm"


class OwnAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class OwnBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = OwnNorm(width)
        self.att = OwnAttention(width, heads)
        self.ln2 = OwnNorm(width)
        # Flattened: no container around the feed-forward part; another order of execution, too.
        self.w3 = nn.Linear(width, 2 * width)
        self.w1 = nn.Linear(width, 2 * width)
        self.w2 = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.att(self.ln1(x))
        y = self.ln2(x)
        up = self.w3(y)
        return x + self.w2(functional.silu(self.w1(y)) * up)


class OwnDecoder(nn.Module):
    """As one writes it oneself: `h.N.att.qkv`, plain tensors."""

    def __init__(self, blocks: int = 3, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, width)
        self.h = nn.ModuleList(OwnBlock(width, heads) for _ in range(blocks))
        self.ln_f = OwnNorm(width)
        self.unembed = nn.Linear(width, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.unembed(self.ln_f(x))

    @torch.no_grad()
    def copy_from(self, other: Decoder) -> OwnDecoder:
        """Take the weights of the other implementation."""
        self.wte.weight.copy_(other.model.embed_tokens.weight)
        self.ln_f.weight.copy_(other.model.norm.weight)
        self.unembed.weight.copy_(other.lm_head.weight)
        for ours, theirs in zip(self.h, other.model.layers, strict=True):
            attention = theirs.self_attn
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            ours.att.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
            ours.att.out.weight.copy_(attention.o_proj.weight)
            ours.ln1.weight.copy_(theirs.input_layernorm.weight)
            ours.ln2.weight.copy_(theirs.post_attention_layernorm.weight)
            for name, layer in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                getattr(ours, name).load_state_dict(getattr(theirs.mlp, layer).state_dict())
        return self


PARTNERS = {
    "self_attn.o_proj": "att.out",
    "self_attn": "att",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    "mlp.gate_proj": "w1",
    "mlp.up_proj": "w3",
    "mlp.down_proj": "w2",
    "": "",
}
"""Layers of a `DecoderLayer` and those of an `OwnBlock` that compute the same."""


def partners(blocks: int = 3) -> dict[str, str]:
    """Layers of a `Decoder` and those of an `OwnDecoder` that compute the same."""
    found = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "unembed", "": ""}
    for n in range(blocks):
        for ours, theirs in PARTNERS.items():
            found[f"model.layers.{n}.{ours}".strip(".")] = f"h.{n}.{theirs}".strip(".")
    return found


def decoders(blocks: int = 3) -> tuple[Decoder, OwnDecoder]:
    """Both implementations with the same weights."""
    torch.manual_seed(0)
    decoder = Decoder(blocks).eval()
    return decoder, OwnDecoder(blocks).eval().copy_from(decoder)
