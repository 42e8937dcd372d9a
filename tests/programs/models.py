"""Tiny models for compiled runtimes: (model in eval mode, args, kwargs), weights seeded.

    from programs.models import MODELS      # `models` alone is the name of another folder's file
    model, args, kwargs = MODELS["llama"]()

What is set so that every runtime takes a model at all, and why:

- `use_cache=False`: a cache object among the outputs can be neither traced nor exported.
- A ModelOutput stays one (`return_dict=False` breaks some models of transformers 5); so tracing
  needs `strict=False`, which lets `torch.jit.trace` return a dict.
- `attn_implementation="sdpa"`: what deployments use; T5 has its own attention, eager alone.
- `experts_implementation="batched_mm"` for mixtures: the default, `grouped_mm`, has no ONNX
  operator; `eager` loops over the experts that were chosen, which is a branch on data.
- Mamba: `use_mambapy=False`, so that the slow path, plain torch, is what is traced.
- `initializer_range=0.2`: with transformers' 0.02 a block adds next to nothing to the residual
  stream, and a block's input would pass for its output.
- Decoders get a mask with padding: without one transformers looks for packed sequences
  (`aten::diff`, which OpenVINO has not), and a mask of ones is dropped in eager mode alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Dict, Tuple  # noqa: UP035  (TorchScript knows these spellings)

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "OWN", "SCRIPTABLE", "Awkward", "Branching", "Built", "ResNet"]

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

VOCABULARY, WIDTH, LAYERS, TOKENS, SAMPLES = 67, 32, 2, 9, 2


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The model with weights of its own seed; torch's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)


def _draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _tokens(length: int = TOKENS, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (SAMPLES, length), generator=generator)


# Models of our own.


def demo() -> Built:
    """tensortap.demo's transformer, narrower."""
    from tensortap.demo import DemoModel

    model = _seeded(lambda: DemoModel(VOCABULARY, WIDTH, LAYERS, 4))
    return model, (_tokens(),), {}


class Residual(nn.Module):
    """Two convolutions with batch norms, added to what came in; in place, as torchvision does."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        if stride == 1 and width == out:
            self.shortcut: nn.Module = nn.Identity()
        else:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """A small residual network: stem, three stages, head."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(2)
        self.stages = nn.Sequential(
            Residual(width, width), Residual(width, 2 * width, 2), Residual(2 * width, 2 * width)
        )
        self.average = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.average(self.stages(self.pool(self.stem(pixels))))
        return self.head(self.dropout(torch.flatten(x, 1)))


def resnet() -> Built:
    model = _seeded(ResNet)
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # as after training: fresh ones do next to nothing
            size = (module.num_features,)
            module.running_mean = torch.randn(size, generator=generator) * 0.3
            module.running_var = torch.rand(size, generator=generator) + 0.5
            module.weight.data = torch.rand(size, generator=generator) + 0.5
            module.bias.data = torch.randn(size, generator=generator) * 0.3
    return model, (_draw(SAMPLES, 3, 16, 16),), {}


class Cached(nn.Module):
    """One head of attention with a cache in and out: two of the three results look alike."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)

    def forward(self, x: Tensor, past_k: Tensor, past_v: Tensor) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: UP006
        k = torch.cat([past_k, self.k(x)], dim=1)
        v = torch.cat([past_v, self.v(x)], dim=1)
        scores = torch.matmul(self.q(x), k.transpose(1, 2))
        return torch.matmul(torch.softmax(scores, -1), v), k, v


class Split(nn.Module):
    """Returns a pair of different shapes, the smaller one first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(width, width // 2)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        small = self.narrow(x)
        return small, x - torch.cat([small, small], dim=-1)


class Named(nn.Module):
    """Returns a dict, of which the model reads one entry alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.score = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Dict[str, Tensor]:  # noqa: UP006
        return {"gated": x * torch.sigmoid(self.gate(x)), "scores": self.score(x)}


class Awkward(nn.Module):
    """All that spoils captures, in one model; it can be scripted too."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.same = nn.Identity()
        self.shared = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True)
        self.split = Split(width)
        self.named = Named(width)
        self.cached = Cached(width)
        self.unused = nn.Linear(width, 2)
        self.exit = nn.Linear(width, 5)

    def forward(self, x: Tensor, past: Tuple[Tensor, Tensor]) -> Dict[str, Tensor]:  # noqa: UP006
        y = self.entry(x)
        y += 1.0  # rewrites what `entry` returned
        y = self.same(y)
        y = self.act(self.shared(y))  # and so does this what `shared` returned
        y = self.act(self.shared(y))
        y = self.shared(y)
        small, y = self.split(y)
        y = self.named(y)["gated"] + small.mean()
        self.unused(y)
        y, k, v = self.cached(y, past[0], past[1])
        return {"logits": self.exit(y), "k": k, "v": v}


def awkward() -> Built:
    past = (_draw(SAMPLES, 3, 16, seed=2), _draw(SAMPLES, 3, 16, seed=3))
    return _seeded(Awkward), (_draw(SAMPLES, 5, 16), past), {}


class Branching(nn.Module):
    """Control flow on data: a layer that runs as often as it must, and one of two branches."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.shrink = nn.Linear(width, width)
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.exit = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        turns = 0
        while bool(x.abs().mean() > 0.2) and turns < 8:
            x = self.shrink(x) * 0.8
            turns += 1
        if bool(x.sum() > 0):
            x = self.left(x)
        else:
            x = self.right(x)
        return self.exit(x)


def branching() -> Built:
    return _seeded(Branching), (_draw(SAMPLES, 16),), {}


# Models of transformers, from their configs: nothing is downloaded.


def _common() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "initializer_range": 0.2,
        "use_cache": False,
        "tie_word_embeddings": False,
    }


def _decoder() -> dict[str, Any]:
    return {
        **_common(),
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "attn_implementation": "sdpa",
    }


def _padded() -> dict[str, Any]:
    tokens = _tokens()
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def _causal(kind: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**settings)
    return _seeded(lambda: getattr(transformers, f"{kind}ForCausalLM")(config))


def llama() -> Built:
    return _causal("Llama", **_decoder()), (), _padded()


def mamba() -> Built:
    model = _causal("Mamba", **_common(), state_size=4, use_mambapy=False)
    return model, (), {"input_ids": _tokens()}


_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def mixtral() -> Built:
    model = _causal("Mixtral", **_decoder(), **_EXPERTS, experts_implementation="batched_mm")
    return model, (), _padded()


def minimax_m2() -> Built:
    model = _causal("MiniMaxM2", **_decoder(), **_EXPERTS, experts_implementation="batched_mm")
    return model, (), _padded()


def bert() -> Built:
    import transformers

    config = transformers.BertConfig(
        **_common(),
        intermediate_size=48,
        num_attention_heads=4,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    model = _seeded(lambda: transformers.BertForMaskedLM(config))
    return model, (), {"input_ids": _tokens()}


def t5() -> Built:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=48,
        num_layers=LAYERS,
        num_heads=4,
        initializer_factor=0.5,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = _seeded(lambda: transformers.T5ForConditionalGeneration(config))
    return model, (), {"input_ids": _tokens(), "decoder_input_ids": _tokens(4, seed=2)}


def vit() -> Built:
    import transformers

    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        num_channels=3,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.2,
        num_labels=5,
        attn_implementation="sdpa",
    )
    model = _seeded(lambda: transformers.ViTForImageClassification(config))
    return model, (), {"pixel_values": _draw(SAMPLES, 3, 16, 16)}


MODELS: dict[str, Callable[[], Built]] = {
    "demo": demo,
    "llama": llama,
    "mamba": mamba,
    "mixtral": mixtral,
    "minimax_m2": minimax_m2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "resnet": resnet,
    "awkward": awkward,
    "branching": branching,
}
OWN = ("demo", "resnet", "awkward", "branching")
SCRIPTABLE = ("resnet", "awkward", "branching")
