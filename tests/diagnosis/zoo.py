"""The models of the bench: our demo, a Llama, a Mamba and a BERT, small and with seeded weights.

The models of transformers are built from a config, so nothing is downloaded. Weights are drawn
anew at sizes as trained models have them: with transformers' own standard deviation of 0.02 a
block adds next to nothing to the residual stream, and no bug in it would matter.

`roles` names the layers of a block by what they do, so that one bug can be planted in all models
that have such a layer. `behind` is where a bug in the attention itself shows first: the layer
that takes its result, or, where that result is a layer's own output, that layer.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import decoders
import handmade
import multimodal
import recurrent
import seq2seq
import statespace
import torch
import vision
import wide
from architecture import BLOCKS, HEADS, VOCABULARY, WIDTH, Architecture, padded
from torch import Tensor, nn

from tensortap.demo import DemoModel

__all__ = ["ARCHITECTURES", "BLOCKS", "HEADS", "Architecture", "has_transformers", "make"]


def _demo() -> nn.Module:
    return DemoModel(VOCABULARY, WIDTH, BLOCKS, HEADS)


def _llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=160,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def _mamba() -> nn.Module:
    import transformers

    config = transformers.MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        state_size=8,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def _bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        intermediate_size=160,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa")


_CORE = (
    Architecture(
        "demo",
        _demo,
        "blocks",
        {
            "residual": "",
            "shows_residual": "",
            "norm": "norm1",
            "attention": "attention",
            "behind": "attention.o",
            "v": "attention.v",
            "o": "attention.o",
            "up": "mlp.up",
            "activation": "mlp.activation",
            "down": "mlp.down",
        },
        {"embedding": "embedding", "final_norm": "final_norm", "head": "head"},
    ),
    Architecture(
        "llama",
        _llama,
        "model.layers",
        {
            "residual": "",
            "shows_residual": "",
            "norm": "post_attention_layernorm",
            "attention": "self_attn",
            "behind": "self_attn.o_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "up": "mlp.gate_proj",
            "activation": "mlp.act_fn",
            "down": "mlp.down_proj",
        },
        {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
        sdpa=True,
        takes=padded,
    ),
    Architecture(
        "bert",
        _bert,
        "bert.encoder.layer",
        {
            "residual": "output",
            "shows_residual": "output.LayerNorm",
            "norm": "attention.output.LayerNorm",
            "attention": "attention.self",
            "behind": "attention.self",
            "v": "attention.self.value",
            "o": "attention.output.dense",
            "up": "intermediate.dense",
            "activation": "intermediate.intermediate_act_fn",
            "down": "output.dense",
        },
        {
            "embedding": "bert.embeddings.word_embeddings",
            "final_norm": "cls.predictions.transform.LayerNorm",
            "head": "cls.predictions.decoder",
            "positions": "bert.embeddings.position_embeddings",
        },
        sdpa=True,
        takes=padded,
    ),
    Architecture(
        "mamba",
        _mamba,
        "backbone.layers",
        {
            "residual": "",
            "shows_residual": "",
            "norm": "norm",
            "mixer": "mixer",
            "conv": "mixer.conv1d",
            "dt": "mixer.dt_proj",
            "up": "mixer.in_proj",
            "x": "mixer.x_proj",
            "down": "mixer.out_proj",
        },
        {
            "embedding": "backbone.embeddings",
            "final_norm": "backbone.norm_f",
            "head": "lm_head",
        },
    ),
)
_FAMILIES = (decoders, seq2seq, statespace, vision, recurrent, multimodal)
_SPARE = (wide, handmade)

ARCHITECTURES: dict[str, Architecture] = {
    item.name: item
    for item in (
        *(replace(model, core=True, group="core") for model in _CORE),
        *(model for family in _FAMILIES for model in family.MODELS),
        *(replace(model, spare=True) for family in _SPARE for model in family.MODELS),
    )
}


def has_transformers() -> bool:
    import importlib.util

    return importlib.util.find_spec("transformers") is not None


# What asks and what answers in attention: larger, so that attention looks at few tokens, as in
# trained models. Where all tokens look at all others, they are soon all the same.
_ASKING = ("q", "k", "q_proj", "k_proj", "query", "key", "query_proj", "key_proj")


@functools.lru_cache(maxsize=8)
def make(name: str, seed: int = 0) -> nn.Module:
    """The model with the weights of a seed, in float32; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ARCHITECTURES[name].build().float().eval()
        draw = _draw if ARCHITECTURES[name].core else draw_any
        with torch.no_grad():
            for name, module in model.named_modules():
                draw(module)
                if name.rpartition(".")[2] in _ASKING:
                    module.weight.mul_(1.5)
            for module in model.modules():
                if type(module).__name__ == "T5Attention":  # it does not divide by √width
                    _known(module, "q").weight.div_(4)
    return model.requires_grad_(False)


def _draw(module: nn.Module) -> None:
    """Weights that keep the size of what passes through; biases and gains that can be told."""
    weight, bias = (_parameter(module, name) for name in ("weight", "bias"))
    if isinstance(module, nn.Linear | nn.Conv1d):
        nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
        if bias is not None:
            nn.init.normal_(bias, std=0.2)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)
    elif weight is not None and weight.dim() == 1:  # the norms, whatever their class
        nn.init.normal_(weight, mean=1, std=0.1)
        if bias is not None:
            nn.init.normal_(bias, std=0.1)
    if type(module).__name__ == "MambaMixer":
        nn.init.normal_(_known(module, "D"), mean=1, std=0.3)
        # Time steps from 0.01 to 1, so that the state matters within a few tokens.
        steps = torch.logspace(-2, 0, module.dt_proj.bias.numel())
        module.dt_proj.bias.copy_(steps + torch.log(-torch.expm1(-steps)))


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    return module._parameters.get(name)


def _known(module: Any, name: str) -> Any:
    return getattr(module, name)


def draw_any(module: nn.Module) -> None:
    """The same for layers of every kind, by what their parameters are."""
    _draw(module)
    kind = type(module).__name__
    known = isinstance(module, nn.Linear | nn.Conv1d | nn.Embedding)
    gain = _parameter(module, "weight")
    norm = gain is not None and gain.dim() == 1
    for name, weight in module.named_parameters(recurse=False):
        if known or (norm and name in ("weight", "bias")):
            continue
        last = name.rpartition(".")[2]
        if last == "D":
            nn.init.normal_(weight, mean=1, std=0.3)
        elif last == "A_log":
            continue
        elif last == "dt_bias":
            steps = torch.logspace(-2, 0, weight.numel())
            weight.copy_(steps + torch.log(-torch.expm1(-steps)))
        elif last == "logit_scale":
            weight.fill_(1.0)
        elif "layer_scale" in last:
            nn.init.normal_(weight, mean=0.6, std=0.2)
        elif weight.dim() == 1 and last != "class_embedding":
            nn.init.normal_(weight, std=0.2)
        elif "token" in last or "embedding" in last:
            nn.init.normal_(weight)
        elif kind in ("Conv1D", "ConvTranspose2d"):  # their inputs come first
            nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[0]))
        elif isinstance(module, nn.Conv2d):
            nn.init.normal_(weight, std=1 / math.sqrt(weight[0].numel()))
        else:
            nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[-1]))
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        assert module.running_mean is not None and module.running_var is not None
        nn.init.normal_(module.running_mean, std=0.3)
        nn.init.uniform_(module.running_var, 0.5, 1.5)
