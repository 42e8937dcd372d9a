"""A small transformer and synthetic data: what the examples train, in seconds on a CPU."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TOKENS, LENGTH, WIDTH = 16, 8, 32


class Layer(nn.Module):
    """Self-attention, attention to a memory, and a feed-forward net."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ffn = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width)
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](x + self.self_attn(x, x, x)[0])
        x = self.norms[1](x + self.cross_attn(x, memory, memory)[0])
        return self.norms[2](x + self.ffn(x))


class Encoder(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        return x


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.encoder = Encoder(layers, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        memory = self.embedding(ids) + self.position
        return self.encoder(memory, memory)


class SmallTransformer(nn.Module):
    """Learns to write a sequence backwards; its layers have the names of the document."""

    def __init__(self, layers: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.transformer = Transformer(layers, width)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.transformer(ids))


def make_loader(batches: int = 4, batch_size: int = 16) -> DataLoader:
    """Sequences and the same backwards, always in the same order."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(TOKENS, (batches * batch_size, LENGTH), generator=generator)
    return DataLoader(TensorDataset(ids, ids.flip(1)), batch_size=batch_size)


def make_training(seed: int = 0) -> tuple[SmallTransformer, DataLoader, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = SmallTransformer()
    return model, make_loader(), torch.optim.AdamW(model.parameters(), lr=3e-3)


def loss_of(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
