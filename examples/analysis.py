"""What can be done with recorded outputs: the functions that document 004 uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def compute_statistics(outputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean, std, least and greatest of each feature over all samples of an epoch."""
    return {
        "mean": torch.mean(outputs, dim=0),
        "std": torch.std(outputs, dim=0),
        "min": torch.min(outputs, dim=0)[0],
        "max": torch.max(outputs, dim=0)[0],
    }


def process_attention_outputs(outputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Averages of attention weights, given per head: a list of [batch, heads, queries, keys]."""
    weights = torch.stack(outputs)
    if weights.dim() == 4:  # averaged over the heads, as nn.MultiheadAttention returns them
        weights = weights.unsqueeze(2)
    return {
        "head_importance": weights.amax(dim=-1).mean(dim=(0, 1, 3)),
        "layer_patterns": weights.mean(dim=(0, 2)),
    }


def plot_attention_patterns(weights: torch.Tensor, path: str | Path | None = None) -> Any:
    """Draw attention weights, averaged over everything but queries and keys."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(weights.float().reshape(-1, *weights.shape[-2:]).mean(dim=0).numpy())
    axes.set(xlabel="key", ylabel="query", title="attention")
    figure.colorbar(image, ax=axes, shrink=0.8)
    if path is not None:
        figure.savefig(path)
    return figure
