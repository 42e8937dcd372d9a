"""What an instrumented model must return, by the plain way: hooks that copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensortap.taps.instrument import write as writing
from tensortap.taps.instrument.wrapper import Instrumented
from tensortap.taps.leaves import flatten

__all__ = ["Heard", "assert_taps", "heard", "hooks_on", "write"]

Heard = list[tuple[str, str, int, Tensor]]


def heard(model: nn.Module, *args: Any, **kwargs: Any) -> Heard:
    """The plain way, for reference: (layer, leaf, call, a copy) as calls finish."""
    found: Heard = []
    counts: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        def listen(module: nn.Module, inputs: Any, output: Any) -> None:
            call = counts[name] = counts.get(name, -1) + 1
            found.extend(
                (name, leaf, call, t.clone()) for leaf, t in flatten(output) if t is not None
            )

        return listen

    handles = [m.register_forward_hook(hook(n)) for n, m in model.named_modules() if n]
    with torch.no_grad():
        model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return found


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def assert_taps(wrapped: Instrumented, taps: Any, expected: Heard, exact: bool = True) -> None:
    entries = wrapped.manifest.entries
    assert [(e.layer, e.leaf, e.call) for e in entries] == [row[:3] for row in expected]
    assert len(taps) == len(expected) > 0
    for entry, tap, (*_, tensor) in zip(entries, taps, expected, strict=True):
        assert entry.dtype == str(tensor.dtype).removeprefix("torch.")
        assert len(entry.shape) == tensor.dim()
        if exact:
            assert torch.equal(tap, tensor), entry
        else:
            torch.testing.assert_close(tap, tensor, rtol=1e-5, atol=1e-6)


def write(
    model: nn.Module, args: Any, kwargs: Any, path: Path, layers: Any = "blocks", **options: Any
) -> writing.Written:
    """An instrumented model as a file, compiled on these inputs."""
    source = writing.ModuleSource(model, args, kwargs, layers)
    return writing.write(source, path, **options)
