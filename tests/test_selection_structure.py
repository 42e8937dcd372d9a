"""Blocks, embedding and final norm, found by structure on the architectures people use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tensortap.demo import DemoModel
from tensortap.selection import structure

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
VISION = {k: v for k, v in SIZES.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 8}


def hf(model: str, config: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options))


def numbered(*prefixes: str, count: int = 3) -> tuple[str, ...]:
    return tuple(f"{prefix}.{i}" for prefix in prefixes for i in range(count))


class Residual(nn.Module):
    """A ResNet's basic block: the first of a stage changes the width."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(out)
        self.down = nn.Sequential(nn.Conv2d(width, out, 1), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn2(self.conv2(self.bn1(self.conv1(x)))) + self.down(x)


class ResNet(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.bn1 = nn.BatchNorm2d(4)
        stages = [
            nn.Sequential(Residual(width, 2 * width), Residual(2 * width, 2 * width))
            for width in (4, 8, 16)
        ]
        if nested:
            self.stages = nn.Sequential(*stages)
        else:
            self.layer1, self.layer2, self.layer3 = stages
        self.fc = nn.Linear(32, 5)


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.block1, self.block2 = Residual(4, 4), Residual(4, 4)


class Pairs(nn.Module):
    """Blocks as bare lists of two parts, which are never called themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.to_patch_embedding = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        self.layers = nn.ModuleList(
            nn.ModuleList([Residual(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])
            for _ in range(2)
        )
        self.mlp_head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))


class ExpertLayer(nn.Module):
    """A mixture whose experts outnumber its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(self.attention(x)) for expert in self.experts)


T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 64}
SEQ2SEQ = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64,
    "decoder_start_token_id": 0, **SPECIAL,
}  # fmt: skip

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], str | None, str | None]] = {
    "demo": (DemoModel, numbered("blocks", count=8), "embedding", "final_norm"),
    "llama": (
        hf("LlamaForCausalLM", "LlamaConfig", **GROUPED),
        numbered("model.layers"), "model.embed_tokens", "model.norm",
    ),
    "llama with one layer": (
        hf("LlamaForCausalLM", "LlamaConfig", **{**GROUPED, "num_hidden_layers": 1}),
        ("model.layers.0",), "model.embed_tokens", "model.norm",
    ),
    "gpt2": (
        hf("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=3, n_head=2, vocab_size=64,
           **SPECIAL),
        numbered("transformer.h"), "transformer.wte", "transformer.ln_f",
    ),
    "bert": (
        hf("BertForMaskedLM", "BertConfig", **SIZES),
        numbered("bert.encoder.layer"), "bert.embeddings.word_embeddings", None,
    ),
    "t5": (
        hf("T5ForConditionalGeneration", "T5Config", **T5, num_layers=2),
        numbered("encoder.block", "decoder.block", count=2), "shared", "decoder.final_layer_norm",
    ),
    "t5 with one layer": (
        hf("T5ForConditionalGeneration", "T5Config", **T5, num_layers=1),
        ("encoder.block.0", "decoder.block.0"), "shared", "decoder.final_layer_norm",
    ),
    "bart": (
        hf("BartForConditionalGeneration", "BartConfig", **SEQ2SEQ),
        numbered("model.encoder.layers", "model.decoder.layers", count=2), "model.shared", None,
    ),
    "whisper": (
        hf("WhisperForConditionalGeneration", "WhisperConfig", **SEQ2SEQ),
        numbered("model.encoder.layers", "model.decoder.layers", count=2),
        "model.decoder.embed_tokens", "model.decoder.layer_norm",
    ),
    "opt, whose norm is defined ahead of its layers": (
        hf("OPTForCausalLM", "OPTConfig", hidden_size=16, num_hidden_layers=3, ffn_dim=32,
           num_attention_heads=2, vocab_size=64, word_embed_proj_dim=16, **SPECIAL),
        numbered("model.decoder.layers"),
        "model.decoder.embed_tokens", "model.decoder.final_layer_norm",
    ),
    "mamba": (
        hf("MambaForCausalLM", "MambaConfig", hidden_size=16, num_hidden_layers=3, vocab_size=64,
           state_size=4),
        numbered("backbone.layers"), "backbone.embeddings", "backbone.norm_f",
    ),
    "mixtral": (
        hf("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=8),
        numbered("model.layers"), "model.embed_tokens", "model.norm",
    ),
    "jamba, with layers of two types": (
        hf("JambaForCausalLM", "JambaConfig", **GROUPED, num_experts=2, attn_layer_period=2,
           attn_layer_offset=1, expert_layer_period=2),
        numbered("model.layers"), "model.embed_tokens", "model.final_layernorm",
    ),
    "vit": (
        hf("ViTModel", "ViTConfig", **VISION),
        numbered("layers"), "embeddings.patch_embeddings", "layernorm",
    ),
    "swin": (
        hf("SwinModel", "SwinConfig", image_size=32, patch_size=4, embed_dim=8, depths=[2, 1],
           num_heads=[2, 2], window_size=2),
        ("encoder.layers.0.blocks.0", "encoder.layers.0.blocks.1", "encoder.layers.1.blocks.0"),
        "embeddings.patch_embeddings", "layernorm",
    ),
    "transformers' resnet": (
        hf("ResNetModel", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2]),
        numbered("encoder.stages.0.layers", "encoder.stages.1.layers", count=2), "embedder", None,
    ),
    "resnet": (
        lambda: ResNet(nested=False),
        numbered("layer1", "layer2", "layer3", count=2), None, None,
    ),
    "resnet with nested stages": (
        lambda: ResNet(nested=True),
        numbered("stages.0", "stages.1", "stages.2", count=2), None, None,
    ),
    "nn.TransformerEncoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32), 3, norm=nn.LayerNorm(16),
            enable_nested_tensor=False,
        ),
        numbered("layers"), None, "norm",
    ),
    "convolutions in sequentials": (
        lambda: nn.Sequential(
            *[nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)],
            nn.Flatten(), nn.Linear(4, 2),
        ),
        ("0", "1", "2"), None, None,
    ),
    "numbered attributes": (Numbered, ("block1", "block2"), None, None),
    "bare pairs": (
        Pairs,
        ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"),
        "to_patch_embedding", "mlp_head.0",
    ),
    "experts in layers": (
        lambda: nn.ModuleDict({"layers": nn.ModuleList(ExpertLayer() for _ in range(3))}),
        numbered("layers"), None, None,
    ),
    "a lone head in a list of its own": (
        lambda: nn.ModuleDict({
            "layers": nn.ModuleList(Residual(4, 4) for _ in range(3)),
            "heads": nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))]),
        }),
        numbered("layers"), None, None,
    ),
    "a plain perceptron": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), (), None, None,
    ),
    "a lazy model": (lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4)), (), None, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_structure(case: str) -> None:
    build, blocks, embedding, norm = CASES[case]
    found = structure(build())
    assert found.blocks == blocks
    assert found.embedding == embedding
    assert found.final_norm == norm


def test_quantised_blocks_are_still_blocks() -> None:
    class Int8(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.zeros(4, 4, dtype=torch.int8))

    layers = nn.ModuleList(nn.Sequential(Int8(), nn.ReLU()) for _ in range(2))
    assert structure(nn.ModuleDict({"layers": layers})).blocks == ("layers.0", "layers.1")


def test_finding_structure_changes_nothing() -> None:
    model = DemoModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    structure(model)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
