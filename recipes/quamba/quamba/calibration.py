"""Static scales: what the float model's tensors reach on batches that are not compared later.

Per tensor and symmetric. The SSM input and the scan's state are clipped at a percentile, since a
few outliers would cost all other values their digits; everything else takes its largest magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tensortap.errors import TargetError

from .hadamard import rotate
from .integers import scale_for
from .mixer import Mixer

__all__ = ["Calibration", "Percentile", "Scales", "calibrate"]

Scales = dict[str, Tensor]
CLIPPED = ("u", "state")
_WHAT = {  # in the order of the data
    "in_proj": "input of in_proj",
    "conv1d": "input of conv1d",
    "u": "SSM input",
    "dt_proj": "input of dt_proj",
    "dt": "scan's dt",
    "B": "scan's B",
    "C": "scan's C",
    "z": "scan's z",
    "state": "scan's state",
    "out_proj": "input of out_proj",
}


@dataclass(frozen=True)
class Calibration:
    """The scales of each layer and of the language head's input, for rotated weights or not."""

    layers: list[Scales]
    head: Tensor
    hadamard: bool = False


class Percentile:
    """A percentile of |x| over several tensors, exact, from their largest values alone.

    With linear interpolation, as torch.quantile, which refuses more than 16 M values.
    `calls` is how many tensors of one size will come; 1.0 is the largest magnitude.
    """

    def __init__(self, percentile: float, calls: int) -> None:
        self.percentile, self.calls = percentile, calls
        self.count = 0
        self.largest = torch.empty(0)

    def add(self, x: Tensor) -> None:
        values = x.detach().float().abs().flatten()
        needed = self._needed(values.numel() * self.calls)
        kept = values.topk(min(needed, values.numel())).values
        merged = torch.cat([self.largest, kept])
        self.largest = merged.topk(min(needed, merged.numel())).values
        self.count += values.numel()

    def _needed(self, count: int) -> int:
        return count - math.floor(self.percentile * (count - 1))

    def value(self) -> Tensor:
        if self.count == 0:
            return torch.zeros(())
        position = self.percentile * (self.count - 1)
        below = math.floor(position)
        rank = self.count - 1 - below  # from the largest, which is sorted downwards
        low, high = self.largest[rank], self.largest[max(rank - 1, 0)]
        return low + (high - low) * (position - below)


def calibrate(
    backbone: nn.Module,
    batches: Sequence[Tensor],
    percentile: float,
    *,
    hadamard: bool = False,
) -> Calibration:
    """Run the batches and see what each tensor reaches.

    `backbone` is the float model up to its last norm; the head itself need not run.
    """
    layers: list[dict[str, Percentile]] = []
    handles: list[Any] = []
    segments = -(-batches[0].shape[-1] // _mixers(backbone)[0].scan.segment)

    def watched(found: dict[str, Percentile], name: str) -> Callable[[Tensor], None]:
        calls = len(batches) * (segments if name == "state" else 1)
        found[name] = Percentile(percentile if name in CLIPPED else 1.0, calls)
        return found[name].add

    for mixer in _mixers(backbone):
        found: dict[str, Percentile] = {}
        layers.append(found)
        for name in ("in_proj", "conv1d", "dt_proj", "out_proj"):
            turned = hadamard and name == "out_proj"
            hook = _input_hook(watched(found, name), turned)
            handles.append(getattr(mixer, name).register_forward_pre_hook(hook))
        operands = {name: watched(found, name) for name in ("u", "dt", "B", "C", "z")}
        handles.append(
            mixer.scan.register_forward_pre_hook(_operand_hook(operands), with_kwargs=True)
        )
        handles.append(
            mixer.scan.state.register_forward_pre_hook(_input_hook(watched(found, "state")))
        )
    head = Percentile(1.0, len(batches))
    try:
        with torch.no_grad():
            for ids in batches:
                head.add(backbone(input_ids=ids, use_cache=False).last_hidden_state)
    finally:
        for handle in handles:
            handle.remove()
    for index, layer in enumerate(layers):
        for name, what in _WHAT.items():
            _check_finite(layer[name], f"{what} of layer {index}")
    _check_finite(head, "input of the language head")
    scales = [{name: scale_for(seen.value()) for name, seen in layer.items()} for layer in layers]
    return Calibration(scales, scale_for(head.value()), hadamard)


def _check_finite(seen: Percentile, what: str) -> None:
    """An int8 grid has no code for NaN: quantised, it would look like any other number."""
    if not bool(seen.value().isfinite()):
        raise TargetError(
            f"The float model has NaN or infinities at the {what} in calibration, which int8 "
            "cannot hold and would hide. Save mode fp32 alone, and look where they begin."
        )


def _mixers(backbone: nn.Module) -> list[Mixer]:
    blocks: Any = backbone.get_submodule("layers")
    return [block.mixer for block in blocks]


def _input_hook(add: Callable[[Tensor], None], turned: bool = False) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        add(rotate(args[0]) if turned else args[0])

    return hook


def _operand_hook(adds: dict[str, Callable[[Tensor], None]]) -> Callable[..., None]:
    def hook(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, add in adds.items():
            add(kwargs[name])

    return hook
