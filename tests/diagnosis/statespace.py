"""State spaces, alone and beside attention: Mamba 2, Zamba 2, Jamba."""

from __future__ import annotations

from architecture import HEADS, VOCABULARY, WIDTH, Architecture, padded
from torch import nn

__all__ = ["MODELS"]


def _causal(config: object) -> nn.Module:
    import transformers

    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def _mamba2() -> nn.Module:
    import transformers

    return _causal(
        transformers.Mamba2Config(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=4,
            state_size=16,
            num_heads=8,
            head_dim=16,
            expand=2,
            n_groups=2,
            chunk_size=8,
            use_cache=False,
        )
    )


def _jamba() -> nn.Module:
    import transformers

    return _causal(
        transformers.JambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=8,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
            use_cache=False,
        )
    )


def _zamba2() -> nn.Module:
    import transformers

    return _causal(
        transformers.Zamba2Config(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=96,
            num_hidden_layers=4,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
            hybrid_layer_ids=[1, 3],
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            attention_head_dim=32,
            attention_hidden_size=128,
            mamba_d_state=16,
            mamba_ngroups=1,
            n_mamba_heads=8,
            mamba_headdim=16,
            chunk_size=8,
            num_mem_blocks=1,
            adapter_rank=8,
            max_position_embeddings=64,
            use_mamba_kernels=False,
            use_cache=False,
        )
    )


MODELS = (
    Architecture(
        "mamba2",
        _mamba2,
        "backbone.layers",
        {
            "residual": "",
            "norm": "norm",
            "mixer": "mixer",
            "conv": "mixer.conv1d",
            "up": "mixer.in_proj",
            "inner_norm": "mixer.norm",
            "down": "mixer.out_proj",
        },
        {"embedding": "backbone.embeddings", "final_norm": "backbone.norm_f"},
        padded,
        "state space",
    ),
    Architecture(
        "jamba",
        _jamba,
        "model.layers",
        {"residual": "", "norm": "pre_ff_layernorm"},
        {
            "embedding": "model.embed_tokens",
            "final_norm": "model.final_layernorm",
            "mixer": "model.layers.2.mamba",
            "up": "model.layers.2.mamba.in_proj",
            "down": "model.layers.2.mamba.out_proj",
        },
        padded,
        "state space",
    ),
    Architecture(
        "zamba2",
        _zamba2,
        "model.layers",
        {},
        {
            "embedding": "model.embed_tokens",
            "final_norm": "model.final_layernorm",
            "mixer": "model.layers.2.mamba",
            "norm": "model.layers.2.input_layernorm",
            "up": "model.layers.2.mamba.in_proj",
            "down": "model.layers.2.mamba.out_proj",
        },
        padded,
        "state space",
    ),
)
