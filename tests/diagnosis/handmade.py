"""Models by hand whose arithmetic is not in layers, as people write them."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from architecture import SAMPLES, TOKENS, VOCABULARY, Architecture, Inputs, padded
from torch import Tensor, nn

__all__ = ["MODELS"]

_WIDTH, _HEADS, _DEPTH = 32, 4, 3


class Bare(nn.Module):
    """A decoder whose attention, positions and residuals are in the root's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(_WIDTH, 3 * _WIDTH) for _ in range(_DEPTH))
        self.out = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH))
        self.up = nn.ModuleList(nn.Linear(_WIDTH, 2 * _WIDTH) for _ in range(_DEPTH))
        self.down = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH))
        self.gain = nn.Parameter(torch.ones(2 * _DEPTH, _WIDTH))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.epsilon, self.temperature, self.cap, self.scale = 1e-5, 0.7, 8.0, 1.0
        self.factor, self.slow, self.first, self.residual = math.sqrt(_WIDTH), 10000.0, 0, 1.0

    def norm(self, x: Tensor, number: int) -> Tensor:
        size = x.square().mean(-1, keepdim=True) + self.epsilon
        return x * size.rsqrt() * self.gain[number]

    def positions(self, tokens: int) -> Tensor:
        speed = self.slow ** (-torch.arange(0, _WIDTH, 2) / _WIDTH)
        angle = torch.outer(torch.arange(self.first, self.first + tokens).float(), speed)
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)

    def attend(self, qkv: Tensor, mask: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, _HEADS, -1)).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.scale / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~mask, -math.inf)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        tokens = input_ids.shape[1]
        x = self.embed(input_ids) * self.factor
        x = x + self.positions(tokens).to(x.dtype)
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        mask = causal & attention_mask.bool()[:, None, None, :]
        for i in range(_DEPTH):
            x = x * self.residual + self.out[i](self.attend(self.qkv[i](self.norm(x, 2 * i)), mask))
            gate, value = self.up[i](self.norm(x, 2 * i + 1)).chunk(2, -1)
            x = x + self.down[i](F.silu(gate) * value)
        logits = F.linear(x, self.embed.weight) / self.temperature + self.bias
        return {"logits": self.cap * torch.tanh(logits / self.cap)}


class Encoder(nn.Module):
    """torch's own encoder layers, and a mean over the tokens that are real."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.place = nn.Parameter(torch.randn(TOKENS, _WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, _HEADS, 64, 0.0, batch_first=True, norm_first=True)
            for _ in range(_DEPTH)
        )
        self.norm = nn.LayerNorm(_WIDTH)
        self.use_mask = True

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~mask.bool() if self.use_mask else None)
        x = self.norm(x)
        weight = mask.to(x.dtype).unsqueeze(-1)
        return (x * weight).sum(1) / weight.sum(1)


class Siamese(nn.Module):
    """One encoder for two sentences; cosine, a learned scale and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.project = nn.Linear(_WIDTH, 16)
        self.logit_scale, self.logit_bias = nn.Parameter(torch.tensor(1.0)), -0.5

    def forward(self, first: Tensor, second: Tensor, mask: Tensor) -> dict[str, Tensor]:
        a = F.normalize(self.project(self.encoder(first, mask)), dim=-1)
        b = F.normalize(self.project(self.encoder(second, torch.ones_like(second))), dim=-1)
        return {"logits": a @ b.t() * self.logit_scale.exp() + self.logit_bias}


class Tower(nn.Module):
    """A perceptron with norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = (width, 48, 48, 24)
        self.lines = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in sizes[1:])
        self.epsilon_of_end = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        for line, norm in zip(self.lines, self.norms, strict=True):
            x = F.gelu(norm(line(x)))
        return x / (x.norm(dim=-1, keepdim=True) + self.epsilon_of_end)


class Recommender(nn.Module):
    """Two towers of tables and numbers: products of all pairs, a factor for popularity."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 16), nn.Embedding(60, 16)
        self.words = nn.EmbeddingBag(40, 16, mode="mean")
        self.user, self.item = Tower(24), Tower(32)
        self.head = nn.Linear(24 + 3, 1)
        self.popularity, self.log, self.tables = 0.3, True, 60

    def forward(self, user: Tensor, item: Tensor, words: Tensor, numbers: Tensor) -> Tensor:
        shown = torch.log1p(numbers) if self.log else numbers
        u = self.user(torch.cat((self.users(user), shown), -1))
        i = self.item(torch.cat((self.items(item % self.tables), self.words(words)), -1))
        crossed = torch.stack(((u * i).sum(-1), u.sum(-1), i.amax(-1)), -1)
        score = self.head(torch.cat((u * i, crossed), -1)).squeeze(-1)
        return score + self.popularity * shown.mean(-1)


class Graph(nn.Module):
    """Messages along the edges, each node divided by the root of its degree."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, _WIDTH)
        self.lines = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH))
        self.own = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_DEPTH))
        self.head = nn.Linear(_WIDTH, 4)
        self.loops, self.power, self.pool = 1.0, 0.5, "mean"

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        edges = edges + self.loops * torch.eye(edges.shape[-1], dtype=edges.dtype)
        degree = edges.sum(-1).clamp_min(1) ** -self.power
        edges = edges * degree[..., :, None] * degree[..., None, :]
        x = F.relu(self.into(nodes))
        for line, own in zip(self.lines, self.own, strict=True):
            x = x + F.relu(torch.einsum("bij,bjc->bic", edges, line(x)) + own(x))
        return self.head(x.mean(1) if self.pool == "mean" else x.amax(1))


class Waves(nn.Module):
    """Causal dilated convolutions with gates, as in WaveNet."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv1d(1, 16, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(4))
        self.skips = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(4))
        self.back = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(4))
        self.out1, self.out2 = nn.Conv1d(16, 16, 1), nn.Conv1d(16, 8, 1)
        self.shifted, self.swapped, self.half, self.mu = 0, False, math.sqrt(0.5), 255.0

    def forward(self, sound: Tensor) -> Tensor:
        x = torch.sign(sound) * torch.log1p(self.mu * sound.abs()) / math.log1p(self.mu)
        x, total = self.into(x), torch.zeros(())
        for i, conv in enumerate(self.dilated):
            room = 2**i
            y = conv(F.pad(x, (room - self.shifted, self.shifted)))
            a, b = y.chunk(2, 1)
            y = torch.tanh(b) * torch.sigmoid(a) if self.swapped else torch.tanh(a) * b.sigmoid()
            total = total + self.skips[i](y)
            x = (x + self.back[i](y)) * self.half
        return self.out2(F.relu(self.out1(F.relu(total))))


class Autoencoder(nn.Module):
    """Pictures to a code and back."""

    def __init__(self) -> None:
        super().__init__()
        self.enc1, self.enc2 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.mean, self.spread = nn.Linear(16 * 16, 12), nn.Linear(16 * 16, 12)
        self.into = nn.Linear(12, 16 * 16)
        self.dec1, self.dec2 = nn.Conv2d(16, 8, 3, 1, 1), nn.Conv2d(8, 3, 3, 1, 1)
        self.half, self.scale, self.mode = 0.5, 1.0 / 127.5, "nearest"
        self.register_buffer("noise", torch.randn(1, 12))

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        x = pixel_values * self.scale - 1
        x = F.silu(self.enc2(F.silu(self.enc1(x)))).flatten(1)
        code = self.mean(x) + (self.half * self.spread(x)).exp() * self.noise
        y = F.silu(self.into(code)).unflatten(1, (16, 4, 4))
        y = F.silu(self.dec1(F.interpolate(y, scale_factor=2, mode=self.mode)))
        y = self.dec2(F.interpolate(y, scale_factor=2, mode=self.mode))
        return {"picture": torch.sigmoid(y), "code": code}


def _two(generator: torch.Generator) -> Inputs:
    first = torch.randint(1, VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    second = torch.randint(1, VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    mask = torch.ones_like(first)
    mask[1, -7:] = 0
    return {"first": first, "second": second, "mask": mask}


def _visits(generator: torch.Generator) -> Inputs:
    return {
        "user": torch.randint(0, 50, (16,), generator=generator),
        "item": torch.randint(0, 60, (16,), generator=generator),
        "words": torch.randint(0, 40, (16, 5), generator=generator),
        "numbers": torch.randn(16, 8, generator=generator).exp(),
    }


def _graph(generator: torch.Generator) -> Inputs:
    edges = (torch.rand(3, 12, 12, generator=generator) < 0.3).float()
    edges = ((edges + edges.transpose(1, 2)) > 0).float() * (1 - torch.eye(12))
    return {"nodes": torch.randn(3, 12, 8, generator=generator), "edges": edges}


def _heard(generator: torch.Generator) -> Inputs:
    return {"sound": torch.randn(SAMPLES, 1, 64, generator=generator).tanh()}


def _bytes(generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.rand(4, 3, 16, 16, generator=generator) * 255}


MODELS = (
    Architecture("bare", Bare, "", {}, {"down": "down.1"}, padded, "by hand"),
    Architecture("siamese", Siamese, "", {}, {"norm": "encoder.norm"}, _two, "by hand"),
    Architecture("recommender", Recommender, "", {}, {"down": "item.lines.1"}, _visits, "by hand"),
    Architecture("graph", Graph, "", {}, {"down": "lines.1"}, _graph, "by hand"),
    Architecture("waves", Waves, "", {}, {"down": "back.1"}, _heard, "by hand"),
    Architecture("autoencoder", Autoencoder, "", {}, {"down": "dec1"}, _bytes, "by hand"),
)
