"""Small models that make blame's life hard, and how they are recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tensortap as tap


class Gain(nn.Module):
    """A layer whose output is off by a factor; hidden, so that names stay as they were."""

    def __init__(self, layer: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = [layer], factor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner[0](*args, **kwargs) * self.factor


def gain(model: nn.Module, name: str, factor: float = 1.1) -> nn.Module:
    """A copy of a model in which one layer's output is off by a factor."""
    model = copy.deepcopy(model)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, Gain(model.get_submodule(name), factor))
    return model


class Step(nn.Module):
    """A block with a residual around two linears."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Chain(nn.Module):
    """Blocks in a row."""

    def __init__(self, blocks: int = 4, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Step(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skipping(Chain):
    """As a U-Net: what a block returned is used again far behind it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = []
        for number, block in enumerate(self.blocks):
            if number >= len(self.blocks) // 2:
                x = x + kept.pop()
                x = block(x)
            else:
                x = block(x)
                kept.append(x)
        return self.head(x)


class InPlace(Chain):
    """A residual stream that is written in place between the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            y = block(x)
            x += 0.5
            x = y
        return self.head(x)


class Shared(Chain):
    """The first block runs three times."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.head(x)


class Cache:
    """State that is handed from layer to layer and grows."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class CachedStep(Step):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:  # type: ignore[override]
        assert cache is not None
        cache.seen.append(x)
        return super().forward(x) + 0.1 * len(cache.seen)


class Cached(Chain):
    """A cache goes through all blocks; a layer run on a used one would return something else."""

    def __init__(self, blocks: int = 4, width: int = 16) -> None:
        super().__init__(blocks, width)
        self.blocks = nn.ModuleList(CachedStep(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, cache=cache)
        return self.head(x)


class CountingStep(Step):
    """Returns something else each time it is called in one pass, by a count in the model."""

    count: Tensor

    def forward(self, x: Tensor, clock: list[float] | None = None) -> Tensor:  # type: ignore[override]
        clock = self.clock[0]
        clock.append(1.0)
        return super().forward(x) * (1 + 0.1 * len(clock))


class Counting(Chain):
    """Blocks that look at a list outside of themselves: they cannot be run alone."""

    def __init__(self, blocks: int = 4, width: int = 16) -> None:
        super().__init__(blocks, width)
        self.blocks = nn.ModuleList(CountingStep(width) for _ in range(blocks))
        self.ticks: list[float] = []
        for block in self.blocks:
            block.clock = (self.ticks,)

    def forward(self, x: Tensor) -> Tensor:
        self.ticks.clear()
        return super().forward(x)

    def __deepcopy__(self, memo: dict[int, Any]) -> Counting:
        twin = Counting(len(self.blocks), self.stem.out_features)
        twin.load_state_dict(self.state_dict())
        return twin


class Masked(Chain):
    """The model makes a mask and hands it to every block beside the residual stream."""

    def __init__(self, blocks: int = 4, width: int = 16) -> None:
        super().__init__(blocks, width)
        self.blocks = nn.ModuleList(MaskedStep(width) for _ in range(blocks))
        self.slope = 1.0

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.linspace(0.5, 1.5, x.shape[1])[None, :, None] ** self.slope
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(x)


class MaskedStep(Step):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        assert mask is not None
        return x + self.down(self.act(self.up(self.norm(x) * mask)))


def make(kind: Callable[..., nn.Module], seed: int = 0, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(**options).eval()


def batch(seed: int = 0, rows: int = 3) -> Tensor:
    return torch.randn(rows, 6, 8, generator=torch.Generator().manual_seed(seed))


def recorded(path: Path, model: nn.Module, *batches: Any, **options: Any) -> str:
    """The model on these batches, recorded to be a reference."""
    options = {"layers": "all", "inputs": True, **options}
    with tap.record(model, path, **options) as rec, torch.no_grad():
        for item in batches:
            rec.run(item)
            rec.step()
    return str(path)
