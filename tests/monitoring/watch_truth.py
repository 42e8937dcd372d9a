"""What a watch should have seen: found by plain torch on a twin of the model, unwatched."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tap
from support import Net

Place = tuple[str, str, str, int, int]
"""layer, port, leaf, batch, call"""

Forward = Callable[[Any], torch.Tensor]


class Stack(nn.Module):
    """Residual layers in a row, no randomness; `reentrant` checkpoints them, in one of two ways."""

    def __init__(self, depth: int = 3, width: int = 6, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Cell(width) for _ in range(depth)])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Cell(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.inner(x)))


def net(blocks: int = 2) -> Net:
    """Blocks with dropout and an in-place activation, about to train."""
    torch.manual_seed(0)
    return Net(blocks=blocks).train()


def tokens(steps: int, per_step: int = 1) -> list[list[torch.Tensor]]:
    """Micro-batches by step."""
    dice = torch.Generator().manual_seed(1)
    return [
        [torch.randint(0, 16, (2, 6), generator=dice) for _ in range(per_step)]
        for _ in range(steps)
    ]


def floats(steps: int, per_step: int = 1, width: int = 6) -> list[list[torch.Tensor]]:
    dice = torch.Generator().manual_seed(1)
    return [[torch.randn(4, width, generator=dice) for _ in range(per_step)] for _ in range(steps)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Sequence[torch.Tensor]],
    run: Any = None,
    before_step: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """A plain loop with gradient accumulation; `run` is called in place of the model."""
    for step in data:
        for batch in step:
            out = (model if run is None else run)(batch)
            (out.square().mean() / len(step)).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def truth(
    model: nn.Module, layers: Sequence[str], data: Sequence[Sequence[torch.Tensor]], seed: int = 5
) -> dict[Place, torch.Tensor]:
    """Train a copy and keep clones of everything that a watch could see, by its place."""
    twin = copy.deepcopy(model)
    twin_data = [[batch.clone() for batch in step] for step in data]
    optimizer = adamw(twin)
    found: dict[Place, torch.Tensor] = {}
    calls: dict[str, int] = {}
    now = 0

    def hook(name: str) -> Callable[..., None]:
        def heard(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            if torch._C._current_graph_task_id() != -1:  # recomputed
                call = calls[name] - 1
            else:
                call = calls.setdefault(name, 0)
                calls[name] += 1
                found[name, "output", "", now, call] = out.detach().clone()
            if out.requires_grad:
                at = (name, "grad_output", "", now, call)
                out.register_hook(lambda grad: found.__setitem__(at, grad.clone()))

        return heard

    for name in layers:
        twin.get_submodule(name).register_forward_hook(hook(name))
    before: dict[str, torch.Tensor] = {}

    def before_step() -> None:
        for name, parameter in twin.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if parameter.grad is not None:
                found[owner, "grad_param", f".{leaf}", now, 0] = parameter.grad.clone()
            before[name] = parameter.detach().clone()

    def after_step() -> None:
        nonlocal now
        for name, parameter in twin.named_parameters():
            owner, _, leaf = name.rpartition(".")
            found[owner, "param", f".{leaf}", now, 0] = parameter.detach().clone()
            found[owner, "update", f".{leaf}", now, 0] = parameter.detach() - before[name]
        calls.clear()
        now += 1

    torch.manual_seed(seed)
    train(twin, optimizer, twin_data, before_step=before_step, after_step=after_step)
    return found


def recorded(path: str | Path) -> dict[Place, tap.Record]:
    """Every record by its place; two at one place fail here."""
    found: dict[Place, tap.Record] = {}
    for record in tap.open(path).records:
        place = (record.layer, record.port, record.leaf, record.batch, record.call)
        assert place not in found, f"two records at {place}"
        found[place] = record
    return found


def assert_same(own: tap.Summary, tensor: torch.Tensor, where: Any, tolerance: float) -> None:
    wanted = tap.summarize(tensor)
    room = tolerance * max(wanted.absmax, 1e-30)

    def close(a: float, b: float) -> bool:
        return a == b or (a != a and b != b) or math.isclose(a, b, rel_tol=tolerance, abs_tol=room)

    for name in ("count", "nan", "posinf", "neginf"):
        assert getattr(own, name) == getattr(wanted, name), (where, name)
    for name in ("mean", "std", "min", "max", "absmax", "l2"):
        a, b = getattr(own, name), getattr(wanted, name)
        assert close(a, b), (where, name, a, b)
    assert len(own.first) == len(wanted.first), where
    assert all(map(close, own.first, wanted.first)), (where, own.first, wanted.first)


def assert_recorded(
    path: str | Path, wanted: dict[Place, torch.Tensor], tolerance: float = 1e-12
) -> None:
    """The recording has exactly these places, each with the summary of the true tensor."""
    own = recorded(path)
    assert set(own) == set(wanted), (
        f"lacking {sorted(set(wanted) - set(own))[:5]}, beyond {sorted(set(own) - set(wanted))[:5]}"
    )
    for place, tensor in wanted.items():
        assert_same(own[place].summary, tensor, place, tolerance)
        assert own[place].shape == tuple(tensor.shape), place


def ports(wanted: dict[Place, torch.Tensor], *names: str) -> dict[Place, torch.Tensor]:
    return {place: tensor for place, tensor in wanted.items() if place[1] in names}


def steps(path: str | Path) -> list[int]:
    return [batch for _, batch in tap.open(path).steps]
