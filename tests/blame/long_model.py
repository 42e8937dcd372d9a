"""A model of many small blocks, with a factor in one of them, that counts its runs in a file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from blame_models import Chain
from torch import Tensor, nn

import tensortap as tap

BLOCKS, WRONG = 320, 123


def build(mode: str = "good", count: str = "") -> tap.Target:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = Chain(blocks=BLOCKS, width=8).eval()
    if mode == "wrong":
        with torch.no_grad():
            model.get_submodule(f"blocks.{WRONG}.down").weight *= 1.5
    if count:

        def ran(*_: object) -> None:
            with Path(count).open("ab") as file:
                file.write(b".")
                os.fsync(file.fileno())

        model.register_forward_hook(ran)
    generator = torch.Generator().manual_seed(0)
    x: Tensor = torch.randn(2, 4, 8, generator=generator)
    return tap.Target(model, x)
