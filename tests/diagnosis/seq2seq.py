"""Encoders with decoders: T5, BART, Whisper."""

from __future__ import annotations

import torch
from architecture import HEADS, SAMPLES, TOKENS, VOCABULARY, WIDTH, Architecture, Inputs, padded
from torch import Tensor, nn

__all__ = ["MODELS"]


def _t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=160,
        num_layers=3,
        num_heads=HEADS,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def _bart() -> nn.Module:
    import transformers

    sides = {f"{side}_layers": 3 for side in ("encoder", "decoder")}
    heads = {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")}
    inner = {f"{side}_ffn_dim": 160 for side in ("encoder", "decoder")}
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        max_position_embeddings=64,
        scale_embedding=True,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
        **sides,
        **heads,
        **inner,
    )
    model: nn.Module = transformers.BartForConditionalGeneration._from_config(
        config, attn_implementation="sdpa"
    )
    return model


def _whisper() -> nn.Module:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=160,
        decoder_ffn_dim=160,
        max_source_positions=32,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        use_cache=False,
    )
    model: nn.Module = transformers.WhisperForConditionalGeneration._from_config(
        config, attn_implementation="sdpa"
    )
    return model


def _answered(generator: torch.Generator) -> Inputs:
    answer = torch.randint(3, VOCABULARY, (SAMPLES, TOKENS * 2 // 3), generator=generator)
    return {**padded(generator), "decoder_input_ids": answer}


def _heard(generator: torch.Generator) -> Inputs:
    sound: Tensor = torch.randn(SAMPLES, 16, 64, generator=generator)
    answer = torch.randint(3, VOCABULARY, (SAMPLES, TOKENS * 2 // 3), generator=generator)
    return {"input_features": sound, "decoder_input_ids": answer}


_BART_ROLES = {
    "residual": "",
    "norm": "self_attn_layer_norm",
    "attention": "self_attn",
    "cross": "encoder_attn",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "up": "fc1",
    "activation": "activation_fn",
    "down": "fc2",
}

MODELS = (
    Architecture(
        "t5",
        _t5,
        "decoder.block",
        {
            "norm": "layer.2.layer_norm",
            "attention": "layer.0.SelfAttention",
            "cross": "layer.1.EncDecAttention",
            "v": "layer.0.SelfAttention.v",
            "o": "layer.0.SelfAttention.o",
            "up": "layer.2.DenseReluDense.wi_1",
            "activation": "layer.2.DenseReluDense.act",
            "down": "layer.2.DenseReluDense.wo",
        },
        {
            "embedding": "encoder.embed_tokens",
            "final_norm": "decoder.final_layer_norm",
            "head": "lm_head",
            "encoder_down": "encoder.block.1.layer.1.DenseReluDense.wo",
            "encoder_norm": "encoder.final_layer_norm",
        },
        _answered,
        "encoder-decoder",
    ),
    Architecture(
        "bart",
        _bart,
        "model.decoder.layers",
        _BART_ROLES,
        {
            "encoder_down": "model.encoder.layers.1.fc2",
            "encoder_norm": "model.encoder.layers.2.final_layer_norm",
        },
        _answered,
        "encoder-decoder",
        sdpa=True,
    ),
    Architecture(
        "whisper",
        _whisper,
        "model.decoder.layers",
        _BART_ROLES,
        {
            "final_norm": "model.decoder.layer_norm",
            "encoder_down": "model.encoder.layers.1.fc2",
            "encoder_norm": "model.encoder.layer_norm",
        },
        _heard,
        "encoder-decoder",
        sdpa=True,
    ),
)
