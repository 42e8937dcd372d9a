"""What rounding does to sums that cancel: the gradient of a bias, and what is made of it.

The gradient of a bias is the sum of the output's gradient over all tokens. Where that sum is zero,
as for the bias of a key projection, which a softmax takes away, only the rounding of its terms is
left, and no two runs have the same. An optimizer that divides by the gradient's size makes steps of
it, these move the parameter, and the parameter moves the output of the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..recording.reader import Layer, Record

__all__ = ["cancelled"]

_Step = tuple[int, int, int]
_TERMS = 4.0  # a sum is off by some units of its terms, as `precision` has it for products


def cancelled(layer: Layer, records: Sequence[Record], unit: float) -> NDArray[np.float64]:
    """The relative error of each record of one site that rounding makes in a sum that cancels.

    `unit` is the rounding of one operation. Zero where the layer has no gradient of its output,
    and for what is not a sum of it.
    """
    port, leaf = records[0].port, records[0].leaf
    found = np.zeros(len(records))
    leaves = {r.leaf for r in layer.port("grad_param")} if port != "output" else {".bias", "bias"}
    if port not in ("grad_param", "update", "param", "output") or (
        port != "output" and leaf not in leaves
    ):
        return found
    for name in (leaf,) if port != "output" else sorted(leaves):
        noise = _Noise(layer, name, unit)
        sizes = [_rms(record) for record in records]
        made = [getattr(noise, port).get(_step(record), 0.0) for record in records]
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(np.array(sizes) > 0, np.array(made) / np.array(sizes), 0.0)
        found = np.maximum(found, relative)
    return found


class _Noise:
    """By step, the absolute rounding of a bias's gradient, of its update, and of what follows."""

    def __init__(self, layer: Layer, leaf: str, unit: float) -> None:
        self.grad_param: dict[_Step, float] = {}
        self.update: dict[_Step, float] = {}
        self.param: dict[_Step, float] = {}
        self.output: dict[_Step, float] = {}
        terms: dict[_Step, float] = {}
        for record in layer.port("grad_output"):
            terms[_step(record)] = terms.get(_step(record), 0.0) + record.summary.l2**2
        grads = {_step(r): r for r in layer.port("grad_param") if r.leaf == leaf}
        updates = {_step(r): r for r in layer.port("update") if r.leaf == leaf}
        params = {_step(r): r for r in layer.port("param") if r.leaf == leaf}
        share = moved = 0.0
        for step, record in sorted(grads.items()):
            self.output[step] = moved
            if step in terms and len(record.shape) == 1:
                noise = _TERMS * unit * math.sqrt(terms[step] / max(1, record.shape[0]))
                self.grad_param[step] = noise
                size = _rms(record)
                share = max(share, min(1.0, noise / size if size > 0 else 1.0))
            if step in updates:
                drift = share * _rms(updates[step])
                moved += drift
                # an update is what a step left of a parameter, whose rounding is in it
                before = _rms(params[step]) if step in params else 0.0
                self.update[step] = drift + 2 * unit * before
            self.param[step] = moved


def _rms(record: Record) -> float:
    return record.summary.rms if record.summary.finite else 0.0


def _step(record: Record) -> _Step:
    return record.rank, record.epoch, record.batch
