"""Two recordings in memory compared by the device and by the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tensortap as tap
from gpu_parts import Row, Setting, Table, measure

__all__ = ["comparing"]

LAYERS, MEGABYTES = 12, 96


class Emit(nn.Module):
    """A layer whose output is a fixed tensor, off by `noise`."""

    def __init__(self, seed: int, rows: int, noise: float) -> None:
        super().__init__()
        self.seed, self.rows, self.noise = seed, rows, noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dice = torch.Generator(device=x.device).manual_seed(self.seed)
        values = torch.randn(self.rows, 1024, device=x.device, generator=dice)
        if self.noise:
            values += self.noise * torch.randn(values.shape, device=x.device, generator=dice)
        return values.to(torch.bfloat16)


def comparing(setting: Setting) -> list[Table]:
    layers, rows = (2, 8) if setting.tiny else (LAYERS, MEGABYTES * 512)
    sides = [setting.memory / name for name in ("compare_a", "compare_b")]
    for path, noise in zip(sides, (0.0, 1e-2), strict=True):
        model = nn.ModuleList(Emit(k, rows, noise) for k in range(layers))
        start = torch.zeros(1, device=setting.device)
        with tap.record(model, path, layers="leaves", strict=True):
            for layer in model:
                layer(start)
    nbytes = 2 * layers * rows * 1024 * 2
    compare: Any = tap.compare
    variants: dict[str, Callable[[], object]] = {
        "cpu": lambda: compare(*sides, device="cpu"),
        "cuda": lambda: compare(*sides, device="cuda"),
    }
    lost = {}
    if not setting.cuda:
        del variants["cuda"]
        lost["cuda"] = "it needs a CUDA device"
    found = measure(variants, seconds=setting.seconds(4), most=5, least=3, warm=1, lost=lost)
    table = Table(
        f"`tensortap compare` of two recordings in memory, {nbytes / 2e9:.1f} GB each in bf16",
        ("of the CPU's time", "speed", "time"),
        tuple(
            Row(
                title,
                (
                    found.ratio(name, "cpu"),
                    found.speed(name, nbytes, "GB/s"),
                    found.milliseconds(name),
                ),
                name == "cuda",
            )
            for name, title in (("cpu", "on the CPU"), ("cuda", "**--device cuda**"))
        ),
    )
    return [table]
