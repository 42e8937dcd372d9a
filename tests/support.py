"""Models and helpers that tests share. Models are small, seeded and of our own making."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """A residual block with an in-place activation: the commonest way to spoil a capture."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(self.drop(self.act(self.up(self.norm(x)))))
        if mask is not None:
            y = y * mask
        return x + y


class Net(nn.Module):
    """Embedding, blocks, final norm, head."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(self.final_norm(x))


def hooked_outputs(model: nn.Module, *args: Any) -> dict[str, list[Any]]:
    """The plain way, for reference: clone every output in a forward hook."""
    found: dict[str, list[Any]] = {}
    handles = [
        module.register_forward_hook(
            lambda m, a, out, name=name: found.setdefault(name, []).append(
                out.detach().clone() if isinstance(out, torch.Tensor) else out
            )
        )
        for name, module in model.named_modules()
    ]
    model(*args)
    for handle in handles:
        handle.remove()
    return found
