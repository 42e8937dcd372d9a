"""A training step under `tap.watch`, against a plain one: eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tensortap as tap
from gpu_model import apart
from gpu_parts import Measured, Row, Setting, Table, attempt, measure

__all__ = ["watching"]

SPARSE = "outputs, gradients, parameters, updates, every=10"
WATCHES: dict[str, dict[str, Any]] = {
    "outputs, every step": {"every": 1, "grads": False, "params": False},
    "outputs and gradients, every step": {"every": 1, "params": False},
    SPARSE: {"every": 10, "updates": True},
}
AIMS = {"eager": 1.05, "compiled": 1.02}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Training:
    """A model, its optimizer and its watch, if any; calling it is one step."""

    def __init__(
        self, setting: Setting, name: str, compiled: bool, watch: dict[str, Any] | None
    ) -> None:
        self.setting, self.watcher = setting, None
        blocks, width, batch, length = (2, 16, 2, 4) if setting.tiny else (12, 1024, 16, 512)
        torch.manual_seed(0)
        model = apart(Stack, name)(blocks, width).to(setting.device)
        self.data = torch.randn(batch, length, width, device=setting.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if watch is not None:
            self.watcher = tap.watch(model, setting.disk / name, **watch)
        backend = "inductor" if setting.cuda else "eager"
        self.run: Callable[..., Any] = (
            torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        )

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.setting.device.type, torch.bfloat16):
            loss = self.run(self.data).square().mean()
        loss.backward()
        self.optimizer.step()
        self.setting.wait()

    def close(self) -> None:
        if self.watcher is not None:
            self.watcher.close()
            if self.watcher.failure is not None:
                raise AssertionError(self.watcher.failure)


def watching(setting: Setting) -> list[Table]:
    kinds = ("eager", "compiled")
    found: dict[str, Measured] = {}
    notes: list[str] = []
    for kind in kinds:
        found[kind], said = _steps(setting, kind)
        notes += said
    rows = [
        Row("plain step", tuple(found[kind].milliseconds("plain") for kind in kinds)),
        Row("A/A", tuple(found[kind].ratio("again") for kind in kinds)),
    ]
    for name in WATCHES:
        aims = {kind: setting.aim(AIMS[kind]) for kind in kinds}
        cells = tuple(found[kind].ratio(name, aim=aims[kind]) for kind in kinds)
        rows.append(Row(f"**tap.watch {name}**", cells, True))
    size = "12 blocks of width 1024, 16 x 512 tokens, bf16 autocast, AdamW"
    notes.append("The row of every=10 is a mean over cycles of ten steps.")
    return [Table(f"A training step under a watch: {size}", kinds, tuple(rows), tuple(notes))]


def _steps(setting: Setting, kind: str) -> tuple[Measured, list[str]]:
    lost: dict[str, str] = {}
    runs: dict[str, Training] = {}
    wanted = {"plain": None, **WATCHES}
    if kind == "compiled" and not setting.tiny:  # each of them compiles
        lost = dict.fromkeys((SPARSE,), "left out, since compiling takes so long")
        del wanted[SPARSE]
    for number, (name, watch) in enumerate(wanted.items()):
        made = attempt(
            lambda number=number, watch=watch: Training(
                setting, f"watch_{kind}_{number}", kind == "compiled", watch
            ),
            lost,
            name,
        )
        if made is not None:
            runs[name] = made
    again = {"again": runs["plain"]} if "plain" in runs else {}
    found = measure(
        {**runs, **again},
        seconds=setting.seconds(5),
        most=12,
        warm=3,
        repeat=1 if setting.tiny else 10,
        lost=lost,
    )
    said = []
    for name, one in runs.items():
        wrong: dict[str, str] = {}
        attempt(one.close, wrong, name)
        said += [f"{kind}, {name}: {text}" for text in wrong.values()]
    return found, said
