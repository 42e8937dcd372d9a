"""Two towers: CLIP, and a small model that sees and then writes."""

from __future__ import annotations

import torch
from architecture import (
    HEADS,
    SAMPLES,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Architecture,
    Inputs,
    image,
    padded,
)
from torch import nn

__all__ = ["MODELS"]

_TOWER = {
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
}
_EYE = {**_TOWER, "image_size": 32, "patch_size": 8}
PICTURE = VOCABULARY - 1


def _clip() -> nn.Module:
    import transformers

    config = transformers.CLIPConfig(
        text_config={
            **_TOWER,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config=_EYE,
        projection_dim=32,
    )
    model: nn.Module = transformers.CLIPModel._from_config(config, attn_implementation="sdpa")
    return model


def _llava() -> nn.Module:
    import transformers

    text = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_EYE),
        text_config=text,
        image_token_index=PICTURE,
        image_token_id=PICTURE,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        projector_hidden_act="gelu",
    )
    model: nn.Module = transformers.LlavaForConditionalGeneration._from_config(
        config, attn_implementation="sdpa"
    )
    return model


def _both(generator: torch.Generator) -> Inputs:
    return {**padded(generator), **image(generator)}


def _asked(generator: torch.Generator) -> Inputs:
    """A picture of 16 patches before the words."""
    words = torch.randint(3, PICTURE, (SAMPLES, TOKENS), generator=generator)
    words[:, 2:18] = PICTURE
    return {"input_ids": words, "attention_mask": torch.ones_like(words), **image(generator)}


_ROLES = {
    "residual": "",
    "norm": "layer_norm2",
    "attention": "self_attn",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "up": "mlp.fc1",
    "activation": "mlp.activation_fn",
    "down": "mlp.fc2",
}

MODELS = (
    Architecture(
        "clip",
        _clip,
        "vision_model.encoder.layers",
        _ROLES,
        {
            "text_down": "text_model.encoder.layers.1.mlp.fc2",
            "projection": "visual_projection",
            "embedding": "text_model.embeddings.token_embedding",
        },
        _both,
        "multimodal",
        sdpa=True,
    ),
    Architecture(
        "llava",
        _llava,
        "model.language_model.layers",
        {
            "residual": "",
            "norm": "post_attention_layernorm",
            "attention": "self_attn",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "up": "mlp.up_proj",
            "activation": "mlp.act_fn",
            "down": "mlp.down_proj",
        },
        {
            "vision_down": "model.vision_tower.encoder.layers.1.mlp.fc2",
            "projection": "model.multi_modal_projector.linear_1",
            "head": "lm_head",
        },
        _asked,
        "multimodal",
        sdpa=True,
    ),
)
