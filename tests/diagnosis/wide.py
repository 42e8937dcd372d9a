"""Models that are tried less often: one of each family that people port."""

from __future__ import annotations

import torch
from architecture import (
    BLOCKS,
    HEADS,
    SAMPLES,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Architecture,
    Inputs,
    ids,
    image,
    padded,
)
from torch import nn

__all__ = ["MODELS"]

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _made(kind: str, config: str, values: dict[str, object], attention: str = "sdpa") -> nn.Module:
    import transformers

    made = getattr(transformers, config)(**values)
    model: nn.Module = getattr(transformers, kind)._from_config(made, attn_implementation=attention)
    return model


def _gpt_neox() -> nn.Module:
    values = {**_SIZES, "rotary_pct": 0.5, "use_parallel_residual": True, "use_cache": False}
    return _made("GPTNeoXForCausalLM", "GPTNeoXConfig", values)


def _opt() -> nn.Module:
    values = {**_SIZES, "ffn_dim": 160, "word_embed_proj_dim": WIDTH, "use_cache": False}
    values.pop("intermediate_size")
    return _made("OPTForCausalLM", "OPTConfig", values)


def _phi3() -> nn.Module:
    values = {**_SIZES, "num_key_value_heads": 2, "use_cache": False}
    return _made("Phi3ForCausalLM", "Phi3Config", values)


def _gemma3() -> nn.Module:
    values = {
        **_SIZES,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_cache": False,
        "final_logit_softcapping": 5.0,
    }
    return _made("Gemma3ForCausalLM", "Gemma3TextConfig", values)


def _qwen3() -> nn.Module:
    values = {**_SIZES, "num_key_value_heads": 2, "head_dim": 16, "use_cache": False}
    return _made("Qwen3ForCausalLM", "Qwen3Config", values)


def _swin() -> nn.Module:
    values = {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    return _made("SwinForImageClassification", "SwinConfig", values)


def _dinov2() -> nn.Module:
    values = {
        "hidden_size": WIDTH,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
        "image_size": 32,
        "patch_size": 8,
        "mlp_ratio": 2,
    }
    return _made("Dinov2ForImageClassification", "Dinov2Config", values)


def _segformer() -> nn.Module:
    values = {
        "num_encoder_blocks": 2,
        "depths": [2, 2],
        "sr_ratios": [2, 1],
        "hidden_sizes": [16, 32],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [2, 4],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 32,
        "num_labels": 5,
    }
    return _made("SegformerForSemanticSegmentation", "SegformerConfig", values, "eager")


def _detr() -> nn.Module:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    values = {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": backbone,
        "num_queries": 6,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "d_model": WIDTH,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "num_labels": 7,
    }
    return _made("DetrForObjectDetection", "DetrConfig", values, "eager")


def _wav2vec2() -> nn.Module:
    values = {
        **_SIZES,
        "conv_dim": (32, 32, 32),
        "conv_kernel": (10, 3, 3),
        "conv_stride": (5, 2, 2),
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "mask_time_prob": 0.0,
    }
    return _made("Wav2Vec2ForCTC", "Wav2Vec2Config", values)


def _mobilenet() -> nn.Module:
    values = {"depth_multiplier": 0.25, "image_size": 32, "min_depth": 8, "num_labels": 10}
    return _made("MobileNetV2ForImageClassification", "MobileNetV2Config", values, "eager")


def _falcon_mamba() -> nn.Module:
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": BLOCKS,
        "state_size": 8,
        "use_cache": False,
    }
    return _made("FalconMambaForCausalLM", "FalconMambaConfig", values, "eager")


def _rwkv() -> nn.Module:
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "attention_hidden_size": WIDTH,
        "num_hidden_layers": BLOCKS,
        "intermediate_size": 160,
        "use_cache": False,
    }
    return _made("RwkvForCausalLM", "RwkvConfig", values, "eager")


def _modernbert() -> nn.Module:
    values = {
        **_SIZES,
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
        "cls_token_id": 1,
        "sep_token_id": 2,
    }
    return _made("ModernBertForMaskedLM", "ModernBertConfig", values)


_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 160,
    "decoder_ffn_dim": 160,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": 2,
    "scale_embedding": True,
    "use_cache": False,
}


def _marian() -> nn.Module:
    return _made("MarianMTModel", "MarianConfig", _SEQ2SEQ)


def _pegasus() -> nn.Module:
    return _made("PegasusForConditionalGeneration", "PegasusConfig", _SEQ2SEQ)


def _blip() -> nn.Module:
    import transformers

    text = {**_SIZES, "encoder_hidden_size": WIDTH, "is_decoder": True, "sep_token_id": 2}
    eye = {
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "image_size": 32,
        "patch_size": 8,
    }
    text["num_hidden_layers"] = 2
    config = transformers.BlipConfig(text_config=text, vision_config=eye, projection_dim=32)
    model: nn.Module = transformers.BlipForImageTextRetrieval._from_config(
        config, attn_implementation="eager"
    )
    return model


def _xlnet() -> nn.Module:
    values = {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "n_layer": 3,
        "n_head": HEADS,
        "d_inner": 160,
        "use_mems_eval": False,
    }
    return _made("XLNetLMHeadModel", "XLNetConfig", values, "eager")


def _sound(generator: torch.Generator) -> Inputs:
    return {"input_values": torch.randn(SAMPLES, 800, generator=generator)}


def _translated(generator: torch.Generator) -> Inputs:
    words = torch.randint(3, VOCABULARY, (SAMPLES, TOKENS - 4), generator=generator)
    return {**padded(generator), "decoder_input_ids": words}


def _asked(generator: torch.Generator) -> Inputs:
    return {**padded(generator), **image(generator)}


_DECODER = {
    "residual": "",
    "norm": "post_attention_layernorm",
    "attention": "self_attn",
    "o": "self_attn.o_proj",
    "down": "mlp.down_proj",
}

MODELS = (
    Architecture(
        "gpt_neox",
        _gpt_neox,
        "gpt_neox.layers",
        {
            "residual": "",
            "norm": "post_attention_layernorm",
            "attention": "attention",
            "o": "attention.dense",
            "down": "mlp.dense_4h_to_h",
            "activation": "mlp.act",
        },
        {"head": "embed_out"},
        padded,
    ),
    Architecture(
        "opt",
        _opt,
        "model.decoder.layers",
        {"residual": "", "norm": "final_layer_norm", "attention": "self_attn", "down": "fc2"},
        {},
        padded,
    ),
    Architecture("phi3", _phi3, "model.layers", _DECODER, {"head": "lm_head"}, padded),
    Architecture("gemma3", _gemma3, "model.layers", _DECODER, {"head": "lm_head"}, padded),
    Architecture("qwen3", _qwen3, "model.layers", _DECODER, {"head": "lm_head"}, padded),
    Architecture(
        "swin",
        _swin,
        "",
        {},
        {"down": "swin.encoder.layers.1.blocks.0.mlp.fc2", "head": "classifier"},
        image,
        "vision",
    ),
    Architecture(
        "dinov2",
        _dinov2,
        "dinov2.encoder.layer",
        {"residual": "", "norm": "norm2", "attention": "attention", "down": "mlp.fc2"},
        {"head": "classifier"},
        image,
        "vision",
    ),
    Architecture(
        "segformer",
        _segformer,
        "",
        {},
        {"down": "segformer.stages.1.blocks.0.mlp.fc2"},
        image,
        "vision",
    ),
    Architecture(
        "detr",
        _detr,
        "",
        {},
        {"down": "model.encoder.layers.1.mlp.fc2"},
        image,
        "vision",
    ),
    Architecture(
        "wav2vec2",
        _wav2vec2,
        "wav2vec2.encoder.layers",
        {"residual": "", "norm": "final_layer_norm", "attention": "attention"},
        {"head": "lm_head"},
        _sound,
        "sound",
    ),
    Architecture("mobilenet", _mobilenet, "", {}, {"head": "classifier"}, image, "vision"),
    Architecture(
        "falcon_mamba",
        _falcon_mamba,
        "backbone.layers",
        {"residual": "", "norm": "norm", "mixer": "mixer", "down": "mixer.out_proj"},
        {"head": "lm_head"},
        ids,
        "state space",
    ),
    Architecture(
        "rwkv",
        _rwkv,
        "rwkv.blocks",
        {
            "residual": "",
            "norm": "ln2",
            "attention": "attention",
            "down": "feed_forward.value",
            "mlp": "feed_forward",
        },
        {"head": "head"},
        ids,
        "state space",
    ),
    Architecture(
        "modernbert",
        _modernbert,
        "model.layers",
        {"residual": "", "norm": "mlp_norm", "attention": "attn", "down": "mlp.Wo", "mlp": "mlp"},
        {"head": "decoder"},
        padded,
    ),
    Architecture("marian", _marian, "model.decoder.layers", {"down": "fc2"}, {}, _translated),
    Architecture("pegasus", _pegasus, "model.decoder.layers", {"down": "fc2"}, {}, _translated),
    Architecture(
        "blip",
        _blip,
        "",
        {},
        {"down": "vision_model.encoder.layers.1.mlp.fc2"},
        _asked,
        "multimodal",
    ),
    Architecture(
        "xlnet",
        _xlnet,
        "transformer.layer",
        {"attention": "rel_attn", "mlp": "ff", "down": "ff.layer_2"},
        {"head": "lm_loss"},
        ids,
    ),
)
