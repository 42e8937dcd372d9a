"""A small transformer of our own, and bugs to plant in it.

Every step has a module of its own, so that a bug has one right layer. A bug is planted in a copy
of the model; `layer` is where a comparison of all layers must find it, `block` where one of blocks
must.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "AT",
    "BUGS",
    "Bug",
    "Planted",
    "make_inputs",
    "make_model",
    "massive",
    "permuted",
    "plant",
    "split",
]

VOCABULARY = 97
AT = 2
HERE = f"blocks.{AT}"


class Norm(nn.Module):
    """LayerNorm, or RMSNorm when `centred` is off; computed in at least float32."""

    def __init__(self, width: int, centred: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.bias = nn.Parameter(0.1 * torch.randn(width)) if centred else None
        self.centred = centred
        self.epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        result = wide.to(x.dtype) * self.weight
        return result if self.bias is None else result + self.bias


class Positions(nn.Module):
    """Learned positions."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(0.3 * torch.randn(length + 1, width))
        self.first = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[self.first : self.first + x.shape[-2]]


class Rotary(nn.Module):
    """Rotary positions on pairs of halves."""

    def __init__(self) -> None:
        super().__init__()
        self.base = 10000.0
        self.ahead = 0  # of the queries alone: what both are ahead by does not matter
        self.interleaved = False

    def forward(self, x: Tensor, query: bool) -> Tensor:
        length, width = x.shape[-2], x.shape[-1]
        speed = self.base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        places = torch.arange(length, dtype=torch.float32) + (self.ahead if query else 0)
        angles = torch.outer(places, speed)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Core(nn.Module):
    """Softmax attention, heads in and merged tokens out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None
        self.ahead = 0  # how many tokens ahead the mask lets through
        self.heads: list[int] | None = None
        self.stale = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.stale:  # the last token's key and value were not written
            k = torch.cat((k[..., :-1, :], k[..., -2:-1, :]), -2)
            v = torch.cat((v[..., :-1, :], v[..., -2:-1, :]), -2)
        length = q.shape[-2]
        scores = q @ k.transpose(-1, -2) * (self.scale or 1 / math.sqrt(q.shape[-1]))
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1 + self.ahead)
        hidden[0, 0] = False  # the first token always sees itself
        scores = scores.float().masked_fill(hidden, -math.inf)
        mixed = scores.softmax(-1).to(v.dtype) @ v
        if self.heads is not None:
            mixed = mixed[:, self.heads]
        return mixed.transpose(-2, -3).flatten(-2)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.rotary = Rotary()
        self.core = Core()
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for part in (self.q, self.k, self.v)
        )
        return self.o(self.core(self.rotary(q, True), self.rotary(k, False), v))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.activation: nn.Module = nn.GELU()
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = Norm(width, centred=True)
        self.attention = Attention(width, heads)
        self.norm2 = Norm(width, centred=False)
        self.mlp = MLP(width, 4 * width)
        self.residual = True

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.mlp(self.norm2(x))
        return x + y if self.residual else y


class Planted(nn.Module):
    """Embedding, positions, blocks, final norm, head."""

    def __init__(self, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = Positions(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final_norm = Norm(width, centred=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.positions(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def make_model(
    seed: int = 0,
    *,
    width: int = 64,
    heads: int = 4,
    layers: int = 4,
    length: int = 24,
    dtype: torch.dtype = torch.float32,
) -> Planted:
    """The same weights for a seed, whatever the dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Planted(width, heads, layers, length)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
                nn.init.normal_(module.bias, std=0.2)
    return model.to(dtype).eval()


def make_inputs(seed: int = 0, *, samples: int = 2, length: int = 24) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(VOCABULARY, (samples, length), generator=generator)


def massive(model: Planted, kind: str) -> Planted:
    """The model with a few values that dwarf the rest, as residual streams of large models have."""
    with torch.no_grad():
        if kind == "token":
            model.positions.table[0, 9] = 3000
            model.positions.table[0, 40] = -1000
        else:
            model.embedding.weight[:, 3] *= 300
            model.embedding.weight[:, 17] *= -100
    return model


# Other ways to compute the same: what a clean pair may do.


class SplitLinear(nn.Module):
    """A linear whose sum over the inputs is made in parts, each rounded, as across devices."""

    def __init__(self, linear: nn.Linear, parts: int) -> None:
        super().__init__()
        self.weight, self.bias, self.parts = linear.weight, linear.bias, parts

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(x.chunk(self.parts, -1), self.weight.chunk(self.parts, -1), strict=True)
        total = sum(F.linear(a, w) for a, w in pairs)
        return total + self.bias


def split(model: Planted, parts: int = 2) -> Planted:
    """The same model with every sum in parts."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, SplitLinear(child, parts))
    return model


def permuted(model: Planted, seed: int = 0) -> Planted:
    """The same function with hidden units in another order; only what is inside the MLPs moves."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in model.blocks:
            up, down = block.mlp.up, block.mlp.down
            order = torch.randperm(up.out_features, generator=generator)
            up.weight.copy_(up.weight[order].clone())
            up.bias.copy_(up.bias[order].clone())
            down.weight.copy_(down.weight[:, order].clone())
    return model


# Bugs.


class After(nn.Module):
    """A layer whose output is spoiled afterwards."""

    def __init__(self, layer: nn.Module, spoil: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = [layer]  # hidden, so that names and layers stay as they were
        self.spoil = spoil

    def forward(self, *args: Tensor) -> Tensor:
        return self.spoil(self.inner[0](*args))


class Rounded(nn.Module):
    """A linear that computes in a lower precision than its neighbours."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = [linear], dtype

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.inner[0].weight.to(self.dtype), self.inner[0].bias.to(self.dtype)
        return F.linear(x.to(self.dtype), weight, bias).to(x.dtype)


Plant = Callable[[Planted], None]


def _after(name: str, spoil: Callable[[Tensor], Tensor]) -> Plant:
    def plant(model: Planted) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, After(model.get_submodule(name), spoil))

    return plant


def _set(name: str, attribute: str, value: object) -> Plant:
    return lambda model: setattr(model.get_submodule(name), attribute, value)


def _transpose(model: Planted) -> None:
    weight = model.blocks[AT].attention.o.weight
    weight.copy_(weight.t().clone())


def _drop_bias(model: Planted) -> None:
    model.blocks[AT].mlp.up.bias.zero_()


def _swap_q_and_k(model: Planted) -> None:
    attention = model.blocks[AT].attention
    attention.q, attention.k = attention.k, attention.q


def _another_blocks_weights(model: Planted) -> None:
    model.blocks[AT].mlp.load_state_dict(model.blocks[AT - 1].mlp.state_dict())


def _row_never_loaded(model: Planted) -> None:
    generator = torch.Generator().manual_seed(1)
    model.blocks[AT].mlp.up.weight[7].normal_(generator=generator).mul_(0.125)


def _round(dtype: torch.dtype) -> Plant:
    return lambda model: setattr(
        model.blocks[AT].mlp, "up", Rounded(model.blocks[AT].mlp.up, dtype)
    )


def _saturate(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., 5] = x[..., 5].clamp(-0.2, 0.2)
    return x


def _bad_token(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 9] *= 1.3
    return x


def _swap_tokens(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, [11, 12]] = x[:, [12, 11]]
    return x


def _nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[1, 4, 3] = math.nan
    return x


def _infinite(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, -1, 0] = math.inf
    return x


def _negate_a_head(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., :16] *= -1
    return x


@dataclass(frozen=True)
class Bug:
    """A bug and where it is to be found.

    `in_bf16` says whether it shows above bfloat16's own noise: at its layer and at its block
    ("block"), at its layer alone ("layer"), or not at all ("").
    """

    name: str
    layer: str
    plant: Plant
    in_bf16: str = "block"
    block: str = HERE


BUGS = (
    Bug("wrong scale", f"{HERE}.attention.core", _set(f"{HERE}.attention.core", "scale", 1 / 64)),
    Bug("transposed weight", f"{HERE}.attention.o", _transpose),
    Bug("dropped bias", f"{HERE}.mlp.up", _drop_bias),
    Bug("wrong eps", f"{HERE}.norm1", _set(f"{HERE}.norm1", "epsilon", 1e-4), ""),
    Bug("wrong eps of an RMSNorm", f"{HERE}.norm2", _set(f"{HERE}.norm2", "epsilon", 1e-3), ""),
    Bug("mean not subtracted", f"{HERE}.norm1", _set(f"{HERE}.norm1", "centred", False)),
    Bug(
        "head order",
        f"{HERE}.attention.core",
        _set(f"{HERE}.attention.core", "heads", [1, 0, 2, 3]),
    ),
    Bug(
        "a head negated",
        f"{HERE}.attention.v",
        _after(f"{HERE}.attention.v", _negate_a_head),
    ),
    Bug("mask one ahead", f"{HERE}.attention.core", _set(f"{HERE}.attention.core", "ahead", 1)),
    Bug("mask one behind", f"{HERE}.attention.core", _set(f"{HERE}.attention.core", "ahead", -1)),
    Bug("positions off by one", "positions", _set("positions", "first", 1), block="blocks.0"),
    Bug(
        "rotary positions off by one",
        f"{HERE}.attention.rotary",
        _set(f"{HERE}.attention.rotary", "ahead", 1),
    ),
    Bug(
        "wrong rotary base",
        f"{HERE}.attention.rotary",
        _set(f"{HERE}.attention.rotary", "base", 500000.0),
    ),
    Bug(
        "wrong rotary pairing",
        f"{HERE}.attention.rotary",
        _set(f"{HERE}.attention.rotary", "interleaved", True),
    ),
    Bug("saturated channel", f"{HERE}.mlp.down", _after(f"{HERE}.mlp.down", _saturate)),
    Bug("one bad token", f"{HERE}.attention.o", _after(f"{HERE}.attention.o", _bad_token)),
    Bug("two tokens swapped", f"{HERE}.attention.v", _after(f"{HERE}.attention.v", _swap_tokens)),
    Bug("NaN in one element", f"{HERE}.mlp.activation", _after(f"{HERE}.mlp.activation", _nan)),
    Bug("infinity in one element", f"{HERE}.mlp.down", _after(f"{HERE}.mlp.down", _infinite)),
    Bug("2 % gain", f"{HERE}.mlp.down", _after(f"{HERE}.mlp.down", lambda x: x * 1.02), "layer"),
    Bug("swapped q and k", f"{HERE}.attention.q", _swap_q_and_k),
    Bug("missing residual", HERE, _set(HERE, "residual", False)),
    Bug("wrong activation", f"{HERE}.mlp.activation", _set(f"{HERE}.mlp", "activation", nn.SiLU())),
    Bug(
        "approximate activation",
        f"{HERE}.mlp.activation",
        _set(f"{HERE}.mlp", "activation", nn.GELU("tanh")),
        "",
    ),
    Bug("stale cache", f"{HERE}.attention.core", _set(f"{HERE}.attention.core", "stale", True)),
    Bug("row never loaded", f"{HERE}.mlp.up", _row_never_loaded),
    Bug("another block's weights", f"{HERE}.mlp.up", _another_blocks_weights),
    Bug("bf16 in one layer", f"{HERE}.mlp.up", _round(torch.bfloat16), ""),
    Bug("fp16 in one layer", f"{HERE}.mlp.up", _round(torch.float16), ""),
)


def plant(model: Planted, bug: Bug) -> Planted:
    """A copy of the model with the bug in it."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        bug.plant(model)
    return model
