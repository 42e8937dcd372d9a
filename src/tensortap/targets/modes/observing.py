"""Calibration: the range of what layers are given, over the batches of a target.

Ranges are of |x|, because grids are symmetric: the largest value, or a percentile. The percentile
is exact, interpolated as in `torch.quantile`. The first pass counts; of the second only the values
above the percentile are held, 1 in 10,000 for 0.9999, so a calibration needs little memory.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import TargetError
from ...taps.compiled import contains_compiled
from ...taps.isolation import unchanged
from ...taps.patching import leaves_of
from ..failing import model_failed
from ..target import Batch, Target
from .layers import listed, replace_forward, with_operand

__all__ = [
    "AbsMax",
    "Range",
    "TopValues",
    "copied",
    "eagerly",
    "no_fast_path",
    "observe",
    "run_batch",
]


@dataclass(frozen=True)
class Range:
    """What a layer was given: how many values, the largest |x|, and where |x| is clipped."""

    count: int
    absmax: float
    clip: float
    dtype: torch.dtype


class AbsMax:
    """The largest |x| of a stream of tensors."""

    def __init__(self) -> None:
        self.count = 0
        self.absmax = 0.0
        self.dtype = torch.float32
        self.nonfinite = 0

    def update(self, x: Tensor) -> None:
        """Take one more tensor in; one that is empty or holds no floats leaves no trace."""
        if not x.numel() or not x.is_floating_point():
            return
        self.count += x.numel()
        self.dtype = x.dtype
        largest = float(x.detach().abs().amax())  # NaN where there is one
        if math.isfinite(largest):
            self.absmax = max(self.absmax, largest)
        else:
            self.nonfinite += int((~x.detach().isfinite()).sum())


class TopValues:
    """The q-quantile of |x| over a stream whose number of values is known, exactly.

    Holds only what can lie at or above it.
    """

    def __init__(self, count: int, q: float) -> None:
        position = q * (count - 1)
        self._below = min(math.floor(position), count - 1)
        self._share = position - self._below
        self._wanted = count - self._below
        self._count = count
        self._seen = 0
        self._held: list[np.ndarray] = []
        self._size = 0
        self._least = -math.inf

    def update(self, x: Tensor) -> None:
        """Take one more tensor in."""
        if not x.numel() or not x.is_floating_point():
            return
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        values = x.detach().abs().to("cpu", wide).reshape(-1).numpy()
        self._seen += values.size
        if self._least > -math.inf:
            values = values[values >= self._least]
        self._held.append(values)
        self._size += values.size
        if self._size > 2 * self._wanted + 4096:
            self._shrink()

    def _shrink(self) -> None:
        held = np.concatenate(self._held) if self._held else np.empty(0, np.float32)
        if held.size > self._wanted:
            held = np.partition(held, held.size - self._wanted)[held.size - self._wanted :]
            self._least = float(held[0])  # partition puts the least of those that stay here
        self._held, self._size = [held], held.size

    @property
    def quantile(self) -> float:
        """The quantile of what was taken in; NaN where that was not as much as was said."""
        if self._seen != self._count:
            return math.nan
        self._shrink()
        ranked = np.partition(self._held[0], min(1, self._wanted - 1))
        low = float(ranked[0])
        if not self._share:
            return low
        return low * (1 - self._share) + float(ranked[1]) * self._share


def observe(
    target: Target,
    layers: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    percentile: float | None = None,
) -> dict[str, Range]:
    """The range of what each layer is given over these batches; layers that never run are left out.

    What counts is what the layer's own forward gets, after all hooks. The model is as it was
    afterwards, its buffers and the random state too.
    """
    largest = {name: AbsMax() for name in layers}
    _listen(target, layers, batches, {name: seen.update for name, seen in largest.items()})
    bad = [name for name, seen in largest.items() if seen.nonfinite]
    if bad:
        more = f" (and of {len(bad) - 1} more layers)" if len(bad) > 1 else ""
        raise TargetError(
            f"Calibration met {largest[bad[0]].nonfinite} NaN or infinite values in the input of "
            f"{listed(bad[:1])}{more}: no scale can be taken from them. Record the model in fp32 "
            "and look at it with `tensortap check`."
        )
    seen = {name: found for name, found in largest.items() if found.count}
    clips = {name: found.absmax for name, found in seen.items()}
    if percentile is not None and seen:
        top = {name: TopValues(found.count, percentile) for name, found in seen.items()}
        among = {name: layers[name] for name in seen}
        _listen(target, among, batches, {name: values.update for name, values in top.items()})
        clips = {name: values.quantile for name, values in top.items()}
        unlike = [name for name, clip in clips.items() if math.isnan(clip)]
        if unlike:
            raise TargetError(
                f"Calibration ran the model twice, and {listed(unlike)} got another number of "
                "values the second time: a percentile needs a model that does the same thing "
                "twice. Leave the percentile out for min-max ranges, which take one run."
            )
    return {
        name: Range(found.count, found.absmax, clips[name], found.dtype)
        for name, found in seen.items()
    }


def _listen(
    target: Target,
    layers: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    listeners: Mapping[str, Callable[[Tensor], None]],
) -> None:
    with unchanged(target.model), eagerly(target.model):
        for name, layer in layers.items():
            replace_forward(layer, _hearing(listeners[name]))
            layer.register_forward_pre_hook(no_fast_path)  # put away with all else
        for module in target.model.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False
        for index, batch in enumerate(batches):
            run_batch(target, batch, index)


def eagerly(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Run what is compiled as it was written, so that each layer is called."""
    if not contains_compiled(model):  # the other way imports the compiler, which takes seconds
        return contextlib.nullcontext()
    stance: Any = torch.compiler.set_stance
    result: contextlib.AbstractContextManager[Any] = stance("force_eager")
    return result


def run_batch(target: Target, batch: Batch, index: int = 0) -> None:
    """Run a target on a copy of one batch; what the model raises becomes a sentence."""
    try:
        target(copied(batch))
    except Exception as error:  # whatever a user's model does
        raise model_failed(error, index) from error


def _hearing(listener: Callable[[Tensor], None]) -> Callable[..., Any]:
    def heard(operand: Tensor) -> Tensor:
        listener(operand)
        return operand

    def forward(_: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with_operand(heard, args, kwargs)
        return original(*args, **kwargs)

    return forward


def no_fast_path(module: nn.Module, args: Any) -> None:
    """A hook that does nothing: nn.TransformerEncoderLayer calls its layers only if one is there.

    Without, it runs them as one fused operation that reads their weights.
    """


def copied(batch: Batch) -> Batch:
    """A batch that a model may write into (caches) while the original stays."""
    tensors = leaves_of((batch.args, batch.kwargs)).values()
    args, kwargs = copy.deepcopy(
        (batch.args, batch.kwargs), {id(tensor): tensor.detach().clone() for tensor in tensors}
    )
    return Batch(args, kwargs)
