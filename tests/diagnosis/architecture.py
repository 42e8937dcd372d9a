"""How a model of the bench is built and called, and which of its layers does what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = [
    "BLOCKS",
    "HEADS",
    "SAMPLES",
    "TOKENS",
    "VOCABULARY",
    "WIDTH",
    "Architecture",
    "ids",
    "image",
    "padded",
]

BLOCKS, WIDTH, HEADS, TOKENS, SAMPLES, VOCABULARY = 4, 64, 4, 24, 2, 101

Inputs = dict[str, Tensor]
Take = Callable[[torch.Generator], Inputs]


def ids(generator: torch.Generator) -> Inputs:
    """Two sentences."""
    return {"input_ids": torch.randint(1, VOCABULARY, (SAMPLES, TOKENS), generator=generator)}


def padded(generator: torch.Generator) -> Inputs:
    """Two sentences, of which the second is shorter."""
    inputs = ids(generator)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, -5:] = 0
    return {**inputs, "attention_mask": mask}


def image(generator: torch.Generator, size: int = 32, name: str = "pixel_values") -> Inputs:
    """Two pictures: smooth, since neighbours in a picture are alike, and with noise on top."""
    rough = torch.randn(SAMPLES, 3, size // 4, size // 4, generator=generator)
    smooth = nn.functional.interpolate(rough, scale_factor=4, mode="bilinear")
    return {name: smooth + 0.3 * torch.randn(SAMPLES, 3, size, size, generator=generator)}


@dataclass(frozen=True)
class Architecture:
    """How a model is built and called, and which of its layers does what.

    `roles` are layers of a block, `outside` layers outside of all blocks, both named by what they
    do. `takes` makes the inputs. `core` models get
    every bug at every depth, the others one depth. `sdpa` says that attention can also be computed
    step by step. `spare` models are run by the bench alone, and not by the tests.
    """

    name: str
    build: Callable[[], nn.Module]
    blocks: str
    roles: Mapping[str, str]
    outside: Mapping[str, str] = field(default_factory=dict)
    takes: Take = ids
    group: str = "transformer"
    core: bool = False
    sdpa: bool = False
    spare: bool = False

    def layer(self, role: str, block: int) -> str:
        """The name of the layer with this role in a block, or of the one outside the blocks.

        What is not a role is the name of a layer itself.
        """
        if role in self.outside:
            return self.outside[role]
        if role not in self.roles:
            return role
        inner = self.roles[role]
        return f"{self.blocks}.{block}.{inner}" if inner else f"{self.blocks}.{block}"

    def inputs(self, seed: int = 0) -> Inputs:
        return self.takes(torch.Generator().manual_seed(1000 + seed))
