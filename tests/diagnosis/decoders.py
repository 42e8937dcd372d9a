"""More transformers: soft caps, alibi, relative positions, shared layers, mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from architecture import HEADS, VOCABULARY, WIDTH, Architecture, ids, padded
from torch import Tensor, nn

__all__ = ["MODELS"]

FOUR = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
}


def _causal(config: str, attention: str = "sdpa", **settings: object) -> nn.Module:
    import transformers

    made = getattr(transformers, f"{config}Config")(**{**FOUR, "use_cache": False, **settings})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        made, attn_implementation=attention
    )
    return model


def _gemma2() -> nn.Module:
    return _causal(
        "Gemma2",
        "eager",
        intermediate_size=160,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
        sliding_window=8,
    )


def _gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=4,
        n_head=HEADS,
        n_positions=64,
        use_cache=False,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    )
    return model


def _bloom() -> nn.Module:
    return _causal("Bloom", "eager", n_layer=4, n_head=HEADS)


def _falcon() -> nn.Module:
    return _causal("Falcon", "sdpa", alibi=False, new_decoder_architecture=False, multi_query=True)


def _qwen3_moe() -> nn.Module:
    return _causal(
        "Qwen3Moe",
        intermediate_size=160,
        moe_intermediate_size=48,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
    )


def _deberta() -> nn.Module:
    import transformers

    config = transformers.DebertaV2Config(
        **FOUR,
        intermediate_size=160,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        max_relative_positions=16,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
        type_vocab_size=0,
    )
    model: nn.Module = transformers.AutoModelForMaskedLM.from_config(config)
    return model


def _albert() -> nn.Module:
    import transformers

    config = transformers.AlbertConfig(
        **FOUR, embedding_size=32, intermediate_size=160, num_hidden_groups=1
    )
    model: nn.Module = transformers.AutoModelForMaskedLM.from_config(
        config, attn_implementation="sdpa"
    )
    return model


class Router(nn.Module):
    """Chooses experts for each token."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width))
        self.top, self.renormalise = 2, True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = F.linear(x, self.weight).softmax(-1)
        weights, chosen = chances.topk(self.top, -1)
        return (weights / weights.sum(-1, keepdim=True) if self.renormalise else weights), chosen


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Experts for the tokens that were sent to them, and one that sees all, behind a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = Router(width, 6)
        self.experts = nn.ModuleList(Expert(width, 48) for _ in range(6))
        self.shared, self.shared_gate = Expert(width, 48), nn.Linear(width, 1)
        self.gated = True

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat)
        total = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            if len(token):
                total.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        gate = self.shared_gate(flat).sigmoid()
        if not self.gated:
            gate = torch.ones_like(gate)
        return (total + gate * self.shared(flat)).view_as(x)


class Looking(nn.Module):
    """Causal attention with one fused projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale, self.causal = heads, (width // heads) ** -0.5, True
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(ahead, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class ExpertBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mixture = Looking(width, HEADS), Mixture(width)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.factor * self.attention(self.norm1(x))
        return x + self.mixture(self.norm2(x))


class Experts(nn.Module):
    """A mixture of experts as people write it; what is in no layer is in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(ExpertBlock(WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.logit_scale, self.embedding_scale, self.first_position = 0.5, 1.0, 0
        self.cap: float | None = 4.0
        self.order = [0, 1, 2, 3]

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1]) + self.first_position
        x = self.embedding(input_ids) * self.embedding_scale + self.positions(places)
        for index in self.order:
            x = self.blocks[index](x)
        logits = self.head(self.norm(x)) * self.logit_scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


MODELS = (
    Architecture(
        "gemma2",
        _gemma2,
        "model.layers",
        {
            "residual": "",
            "norm": "pre_feedforward_layernorm",
            "attention": "self_attn",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "up": "mlp.up_proj",
            "activation": "mlp.act_fn",
            "down": "mlp.down_proj",
        },
        {"embedding": "model.embed_tokens", "final_norm": "model.norm"},
        padded,
    ),
    Architecture(
        "gpt2",
        _gpt2,
        "transformer.h",
        {
            "residual": "",
            "norm": "ln_2",
            "attention": "attn",
            "o": "attn.c_proj",
            "activation": "mlp.act",
            "down": "mlp.c_proj",
        },
        {
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "final_norm": "transformer.ln_f",
        },
        padded,
    ),
    Architecture(
        "bloom",
        _bloom,
        "transformer.h",
        {
            "norm": "post_attention_layernorm",
            "attention": "self_attention",
            "o": "self_attention.dense",
            "up": "mlp.dense_h_to_4h",
            "activation": "mlp.gelu_impl",
            "down": "mlp.dense_4h_to_h",
        },
        {"embedding": "transformer.word_embeddings", "final_norm": "transformer.ln_f"},
        padded,
    ),
    Architecture(
        "falcon",
        _falcon,
        "transformer.h",
        {
            "residual": "",
            "norm": "input_layernorm",
            "attention": "self_attention",
            "o": "self_attention.dense",
            "up": "mlp.dense_h_to_4h",
            "activation": "mlp.act",
            "down": "mlp.dense_4h_to_h",
        },
        {"embedding": "transformer.word_embeddings", "final_norm": "transformer.ln_f"},
        sdpa=True,
    ),
    Architecture(
        "deberta",
        _deberta,
        "deberta.encoder.layer",
        {
            "norm": "attention.output.LayerNorm",
            "attention": "attention.self",
            "v": "attention.self.value_proj",
            "o": "attention.output.dense",
            "up": "intermediate.dense",
            "activation": "intermediate.intermediate_act_fn",
            "down": "output.dense",
        },
        {"embedding": "deberta.embeddings.word_embeddings"},
        padded,
    ),
    Architecture(
        "albert",
        _albert,
        "",
        {},
        {
            "norm": "albert.encoder.albert_layer_groups.0.albert_layers.0.full_layer_layer_norm",
            "o": "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.dense",
            "down": "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn_output",
            "up": "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn",
            "embedding": "albert.embeddings.word_embeddings",
        },
        padded,
        "shared",
        sdpa=True,
    ),
    Architecture(
        "qwen3_moe",
        _qwen3_moe,
        "model.layers",
        {
            "residual": "",
            "norm": "post_attention_layernorm",
            "attention": "self_attn",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "router": "mlp.gate",
            "experts": "mlp.experts",
            "mixture": "mlp",
        },
        {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
        padded,
        "experts",
        sdpa=True,
    ),
    Architecture(
        "experts",
        Experts,
        "blocks",
        {
            "residual": "",
            "norm": "norm2",
            "attention": "attention",
            "o": "attention.out",
            "router": "mixture.router",
            "mixture": "mixture",
            "up": "mixture.shared.up",
            "down": "mixture.shared.down",
        },
        {"embedding": "embedding", "final_norm": "norm", "head": "head", "positions": "positions"},
        ids,
        "experts",
    ),
)
