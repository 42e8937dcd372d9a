"""Small models and a training loop that the tests of the monitor share."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import tensortap as tap


class Layer(nn.Module):
    """Self-attention that returns a tuple, and a feed-forward net with an in-place activation."""

    def __init__(self, width: int = 8, weights: bool = True) -> None:
        super().__init__()
        self.weights = weights
        self.self_attn = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.ffn = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(x, x, x, need_weights=self.weights)[0]
        return x + self.ffn(x)


class Small(nn.Module):
    def __init__(self, layers: int = 2, width: int = 8, weights: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width, weights) for _ in range(layers)])
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Returns(nn.Module):
    """Gives back what its function makes of the input, inside a layer called `part`."""

    class Part(nn.Module):
        def __init__(self, make: Any) -> None:
            super().__init__()
            self.make = make

        def forward(self, x: torch.Tensor) -> Any:
            return self.make(x)

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.part = self.Part(make)

    def forward(self, x: torch.Tensor) -> Any:
        return self.part(x)


def small(seed: int = 0, **options: Any) -> Small:
    torch.manual_seed(seed)
    return Small(**options)


def batches(count: int = 3, size: int = 4, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 5, 8, generator=generator) for _ in range(count)]


def train(
    model: nn.Module,
    monitor: tap.Monitor | None = None,
    *,
    epochs: Any = (1, 2, 3),
    data: list[torch.Tensor] | None = None,
    after_epoch: Any = None,
) -> list[torch.Tensor]:
    """A plain loop; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for epoch in epochs:
        if monitor is not None:
            monitor.set_epoch(epoch)
        for batch_idx, batch in enumerate(batches() if data is None else data):
            if monitor is not None:
                monitor.set_batch_idx(batch_idx)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
        if after_epoch is not None:
            after_epoch(epoch)
    return losses


def hooks_of(model: nn.Module) -> int:
    from torch.nn.modules import module

    own = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return own + len(module._global_forward_hooks) + len(module._global_forward_pre_hooks)


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", tap.TapWarning)
        yield


def files(folder: Any, pattern: str = "*.pt") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))
