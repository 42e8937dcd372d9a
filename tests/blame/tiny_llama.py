"""A small Llama of transformers with one wrong attention, as a target: `--mode bf16` and so on."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

import tensortap as tap

LAYER = 2
ATTENTION = f"model.layers.{LAYER}.self_attn"
BUGS = ("scale", "base", "interleaved")


def build(bug: str = "", mode: str = "fp32", seed: int = 0) -> tap.Target:
    """The model in fp32 or bf16, with a bug or without, and tokens."""
    model = llama(seed)
    plant(model, bug)
    tokens = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(seed))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[mode]
    return tap.Target(model.to(dtype), {"input_ids": tokens}, mode=mode)


def llama(seed: int = 0) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        for module in model.modules():
            if isinstance(module, nn.Linear):  # weights that keep the size of what goes through
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
    return model.eval().requires_grad_(False)


def plant(model: Any, bug: str) -> None:
    """Spoil one attention: its scale by 2 %, the base of its positions, or how they are paired."""
    attention = model.model.layers[LAYER].self_attn
    if bug == "scale":
        attention.scaling *= 1.02
    if bug in ("", "scale"):
        return
    right = attention.forward

    def forward(self: Any, hidden_states: Any, position_embeddings: Any = None, **more: Any) -> Any:
        made = tuple(_wrong(each, bug, sine) for sine, each in enumerate(position_embeddings))
        return right(hidden_states, position_embeddings=made, **more)

    attention.forward = types.MethodType(forward, attention)


def _wrong(table: torch.Tensor, bug: str, sine: int) -> torch.Tensor:
    half = table.shape[-1] // 2
    if bug == "interleaved":
        return table[..., :half].repeat_interleave(2, -1)
    angles = torch.arange(table.shape[-2])[:, None] / 20000.0 ** (torch.arange(half) / half)
    both = torch.cat([angles, angles], -1)
    return (both.sin() if sine else both.cos())[None].to(table)
