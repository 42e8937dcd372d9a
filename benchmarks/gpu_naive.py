"""What people write by hand: hooks that copy, hooks that ask for numbers, formulas one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["copying", "empty", "formulas", "hook_all", "pinned", "reading", "six", "statistics"]

Hook = Callable[..., None]


def hook_all(modules: Iterable[nn.Module], make: Callable[[], Hook]) -> None:
    for module in modules:
        module.register_forward_hook(make())


def _tensor(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def empty() -> Hook:
    """The floor of any hook."""
    return lambda module, args, output: None


def reading() -> Hook:
    """The floor of any summary that is launched a tensor at a time: torch reads it once."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        _tensor(output).sum()

    return hook


def copying() -> Hook:
    """`.detach().cpu()`: the host waits at every layer."""
    kept: list[torch.Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        kept[:] = [_tensor(output).detach().cpu()]

    return hook


def six(x: torch.Tensor) -> list[float]:
    return [
        x.mean().item(),
        x.std().item(),
        x.min().item(),
        x.max().item(),
        torch.isnan(x).any().item(),
        torch.isinf(x).any().item(),
    ]


def statistics() -> Hook:
    """Six statistics with `.item()`: the host waits six times at every layer."""
    return lambda module, args, output: _keep(six(_tensor(output).detach()))


def _keep(values: list[float]) -> None: ...


def pinned() -> Callable[[], Hook]:
    """Copies into pinned memory on a side stream: what a careful person writes.

    Not safe: an in-place write to the tensor right behind the layer may come before the copy, and
    nobody says when the buffer may be read or used again. Nothing is written to disk.
    """
    side = torch.cuda.Stream()

    def make() -> Hook:
        buffers: dict[torch.Size, torch.Tensor] = {}

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = _tensor(output).detach()
            buffer = buffers.get(tensor.shape)
            if buffer is None:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                buffers[tensor.shape] = buffer
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                buffer.copy_(tensor, non_blocking=True)
            tensor.record_stream(side)

        return hook

    return make


def formulas(r: torch.Tensor, c: torch.Tensor) -> list[float]:
    """A difference by its metrics' formulas, one by one, in float32."""
    r, c = r.float().flatten(), c.float().flatten()
    d = c - r
    distances = d.abs()
    mse = (d**2).mean()
    relative = distances / (r.abs() + 1e-8)
    rr, cc, rc = r @ r, c @ c, r @ c
    found = [
        d.mean(),
        d.std(),
        distances.mean(),
        distances.max(),
        distances.argmax(),
        mse,
        mse.sqrt(),
        mse / (r**2).mean(),
        distances.mean() / r.abs().mean(),
        relative.max(),
        relative.mean(),
        rc / (rr.sqrt() * cc.sqrt()),
        ((r - r.mean()) @ (c - c.mean())) / (r.std() * c.std() * (r.numel() - 1)),
        10 * torch.log10((r**2).mean() / mse),
        1 - 2 * rc / (rr + cc),
        (~torch.isclose(c, r)).sum(),
        torch.isfinite(r).sum(),
        torch.isfinite(c).sum(),
    ]
    return [value.item() for value in found]
