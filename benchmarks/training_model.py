"""A 12-layer GPT of plain torch and its training step, for benchmarks/monitor.py."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["GPT", "Size", "Training", "batches", "build"]


@dataclass(frozen=True)
class Size:
    layers: int = 12
    width: int = 256
    heads: int = 4
    batch: int = 4
    length: int = 128
    vocabulary: int = 1024
    device: str = "cpu"


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = (
            part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(w, dim=2)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).reshape(b, t, w))


class Block(nn.Module):
    """Its output passes an Identity: a selector that takes prefixes can name that one alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.out = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return self.out(x + self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(torch.randn(size.length, size.width) * 0.02)
        self.blocks = nn.ModuleList([Block(size.width, size.heads) for _ in range(size.layers)])
        self.final_norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def build(size: Size, name: str) -> GPT:
    """The model, from one seed, in a class of its own.

    torch.compile shares graphs between the instances of a class, and does not look at hooks when
    it does (`skip_nnmodule_hook_guards`); variants of a benchmark must not meet like that.
    """
    code = GPT.forward.__code__.replace(co_name=name)
    forward = types.FunctionType(code, GPT.forward.__globals__, name)
    own: Any = type(f"GPT_{name}", (GPT,), {"forward": forward})
    torch.manual_seed(0)
    return own(size).to(size.device)


def batches(size: Size, count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and the tokens that follow them."""
    dice = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(0, size.vocabulary, (size.batch, size.length + 1), generator=dice)
        ids = ids.to(size.device)
        found.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    return found


@dataclass
class Training:
    """One variant's model, optimizer and place in the data; calling it is one step.

    `within(n)` is entered around a step, `before_step` runs between backward and the optimizer's
    step and `after_step` at the end: where the watchers of others want to be called.
    """

    model: GPT
    data: Sequence[tuple[torch.Tensor, torch.Tensor]]
    compiled: bool = False
    steps: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.run: Any = (
            torch.compile(self.model, fullgraph=True, dynamic=False)
            if self.compiled
            else self.model
        )

    def within(self, step: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def before_step(self, step: int) -> None: ...

    def after_step(self, step: int) -> None: ...

    def __call__(self) -> None:
        step = self.steps
        ids, targets = self.data[step % len(self.data)]
        with self.within(step):
            logits = self.run(ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            self.before_step(step)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.after_step(step)
        self.losses.append(loss.detach())
        self.steps += 1
        if loss.is_cuda:
            torch.cuda.synchronize()

    def digest(self) -> str:
        """A digest of every parameter's bits."""
        found = hashlib.blake2b(digest_size=16)
        for parameter in self.model.parameters():
            values = parameter.detach().cpu().contiguous()
            found.update(values.view(torch.uint8).numpy().tobytes())
        return found.hexdigest()
