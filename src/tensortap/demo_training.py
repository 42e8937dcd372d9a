"""The built-in model, trained for a moment while it is watched: `tensortap demo --train`.

It learns to count in sevens. With `break_at` one weight becomes infinite at that step, as an
overflow or a bad sector would do it, for the watch to find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from .demo import VOCABULARY, build

if TYPE_CHECKING:
    from .monitoring.watch import Watcher

__all__ = ["BROKEN", "train"]

BROKEN = "blocks.4.mlp.down"
_SEQUENCES, _LENGTH, _STRIDE = 8, 24, 7


def train(
    path: str,
    steps: int = 40,
    *,
    break_at: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Watcher:
    """Train the built-in model and watch it; the watch comes back, closed."""
    from .monitoring.watch import watch

    model = build().model
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(0)
    with watch(model, path, **{"every": 5, "updates": True, **options}) as watching:
        for step in range(steps):
            progress(step, steps)
            if step == break_at:
                with torch.no_grad():
                    model.get_submodule(BROKEN).weight[0, 0] = torch.inf
            optimizer.zero_grad()
            start = torch.randint(VOCABULARY, (_SEQUENCES, 1), generator=random)
            tokens = (start + _STRIDE * torch.arange(_LENGTH + 1)) % VOCABULARY
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            torch.autograd.backward(loss)
            watching.log(loss=loss)
            optimizer.step()
    return watching
