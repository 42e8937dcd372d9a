"""Metrics of others: a name and a function of two tensors, beside those of a difference.

Built-in metrics come from one pass over the tensors and are always there. A metric from here reads
the tensors once more, and does so only where a rule or the caller names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points

import torch

from ..errors import OptionError
from ..numerics.difference import METRICS

__all__ = ["GROUP", "Metric", "added_metrics", "evaluate", "metric_names", "register_metric"]

GROUP = "tensortap.metrics"
Metric = Callable[[torch.Tensor, torch.Tensor], float]
"""Called with reference and candidate, equal in shape; NaN says undefined."""

# What a rule may speak of besides a difference: what only a comparison knows.
_OWN = ("error", "floor_ratio")
_registered: dict[str, Metric] = {}


def register_metric(name: str, metric: Metric) -> None:
    """Make a metric known under a name; packages do so with an entry point in `GROUP`."""
    if not name.isidentifier() or name in ("and", "or"):
        raise OptionError(f"A metric's name is one word, as 'psnr', but got {name!r}.")
    if name in METRICS or name in _OWN:
        raise OptionError(f"There is a metric {name!r} already. Choose another name.")
    _registered[name] = metric


@cache
def _installed() -> dict[str, Metric]:
    return {point.name: point.load() for point in entry_points(group=GROUP)}


def added_metrics() -> dict[str, Metric]:
    """Every metric that is not of a difference, by name."""
    return {**_installed(), **_registered}


def metric_names() -> tuple[str, ...]:
    """What a rule may name."""
    return tuple(sorted({*METRICS, *_OWN, *added_metrics()}))


def evaluate(name: str, reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """The value of an added metric; what it raises is said with its name."""
    metric = added_metrics().get(name)
    if metric is None:
        raise OptionError(
            f"There is no metric {name!r} to add. Added metrics are: "
            f"{', '.join(sorted(added_metrics())) or 'none'} (tap.register_metric)."
        )
    try:
        value = float(metric(reference, candidate))
    except Exception as error:
        raise OptionError(
            f"The metric {name!r} failed on tensors of shape {tuple(reference.shape)}: {error}"
        ) from error
    return math.nan if math.isnan(value) else value
