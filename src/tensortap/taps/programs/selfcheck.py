"""Whether a tapped compiled model is still the model, and its layers are what they are called.

Names out of a compiler are hearsay. Two things can be checked on any run: that the model's own
output is the same with taps and without, and that a linear layer's output is its input times the
weight that goes by its name.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..leaves import flatten
from .base import Leaves

__all__ = ["SelfCheck", "check_leaves", "check_linear", "check_output"]

_CLOSE = 1e-5  # of the largest value, where a compiler may fuse otherwise with taps
_ROUNDINGS = 4  # of the output's dtype, which may be coarser than that
_MOST = 1 << 31  # multiplications in float64 that a check of one layer may cost


@dataclass(frozen=True)
class SelfCheck:
    """One thing that was checked, and how it came out: `largest` beside what was `allowed`."""

    layer: str
    check: Literal["output", "linear", "parts"]
    passed: bool
    text: str
    largest: float | None = None
    allowed: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no word for infinite or for NaN."""
        found = asdict(self)
        for key in ("largest", "allowed"):
            if found[key] is not None and not math.isfinite(found[key]):
                found[key] = None
        return found


def check_output(plain: Any, tapped: Any, *, exact: bool, layer: str = "") -> SelfCheck:
    """The model's own output with taps against that without."""
    return check_leaves(flatten(plain), flatten(tapped), exact=exact, layer=layer)


def check_leaves(plain: Leaves, tapped: Leaves, *, exact: bool, layer: str = "") -> SelfCheck:
    """The same, of outputs that were taken apart already."""
    ours = dict(plain)
    theirs = dict(tapped)
    if list(ours) != list(theirs):
        text = (
            f"With taps the model returns {_names(theirs)}, without them {_names(ours)}: what was "
            "recorded may not be what the model computes."
        )
        return SelfCheck(layer, "output", False, text)
    worst, allowed, where = 0.0, 0.0, ""
    largest, within = 0.0, 0.0
    for leaf, left in ours.items():
        right = theirs[leaf]
        problem = _unlike(left, right)
        if problem:
            text = f"The model's output{_at(leaf)} {problem} with taps than without."
            return SelfCheck(layer, "output", False, text)
        if left is None or right is None or left.numel() == 0:
            continue
        distance, scale = _distance(left, right)
        limit = 0.0 if exact else max(_CLOSE, _ROUNDINGS * _eps(left)) * scale
        if distance > limit and distance - limit > worst - allowed:
            worst, allowed, where = distance, limit, leaf
        if distance >= largest:
            largest, within = distance, limit
    if worst > allowed:
        text = (
            f"The model's output{_at(where)} differs by {worst:.3g} with taps and without (allowed "
            f"{allowed:.3g}): what was recorded may not be what the model computes."
        )
        return SelfCheck(layer, "output", False, text, worst, allowed)
    text = "The output is the same with and without taps."
    if largest:
        text = (
            f"The output differs by at most {largest:.3g} with taps and without, which is within "
            f"what another order of the same sums makes (allowed {within:.3g})."
        )
    return SelfCheck(layer, "output", True, text, largest, within)


def check_linear(
    layer: str, weight: Tensor, bias: Tensor | None, operand: Tensor, output: Tensor
) -> SelfCheck | None:
    """A linear layer's output against input times weight; None where that cannot be said.

    Allowed is what rounding can amount to: each product's magnitude, summed, times the precision
    and the number of terms.
    """
    if weight.dim() != 2 or not (operand.is_floating_point() and output.is_floating_point()):
        return None
    fits = operand.shape[-1:] == weight.shape[1:] and output.shape[-1:] == weight.shape[:1]
    rows = operand.numel() // max(1, operand.shape[-1]) if operand.dim() else 0
    if not fits or output.numel() != rows * weight.shape[0]:
        text = (
            f"The layer '{layer}' is no product of its input {list(operand.shape)} and its weight "
            f"{list(weight.shape)}: its output is {list(output.shape)}. Its name may be wrong."
        )
        return SelfCheck(layer, "linear", False, text)
    if rows == 0:
        return None
    take = max(1, min(rows, _MOST // max(1, weight.numel())))
    left = operand.detach().reshape(rows, -1)[:take].double()
    found = output.detach().reshape(rows, -1)[:take].double()
    matrix = weight.detach().double()
    expected = left @ matrix.T
    size = left.abs() @ matrix.T.abs()
    if bias is not None:
        expected = expected + bias.detach().double()
        size = size + bias.detach().double().abs()
    eps = max(_eps(operand), _eps(output), _eps(weight))
    allowed = size * eps * (2 + weight.shape[1])
    distance = (found - expected).abs()
    finite = torch.isfinite(expected)
    both = torch.isfinite(found) & finite
    # A sum that is too large for its dtype on the way is no other product.
    overflown = finite & (size >= min(_most(operand), _most(output), _most(weight)))
    lost = (torch.isfinite(found) != finite) & ~overflown
    distance = torch.where(both, distance, torch.where(lost, torch.inf, 0.0))
    over = torch.where(both | lost, distance - allowed.nan_to_num(0.0, 0.0), -1.0)
    worst = int(over.argmax())
    largest, limit = float(distance.reshape(-1)[worst]), float(allowed.reshape(-1)[worst])
    if bool((over > 0).any()):
        text = (
            f"The output of '{layer}' is not its input times its weight: it differs by "
            f"{largest:.3g} (allowed {limit:.3g}). The name may be wrong, or the tap."
        )
        return SelfCheck(layer, "linear", False, text, largest, limit)
    text = f"The output of '{layer}' is its input times its weight."
    return SelfCheck(layer, "linear", True, text, largest, limit)


def _unlike(left: Tensor | None, right: Tensor | None) -> str:
    if left is None or right is None:
        return "" if left is right else "holds other tensors"
    if left.shape != right.shape:
        return f"has another shape ({list(right.shape)} and not {list(left.shape)})"
    return "" if left.dtype == right.dtype else f"has another dtype ({right.dtype})"


def _distance(left: Tensor, right: Tensor) -> tuple[float, float]:
    """The largest difference, infinite where NaN or Inf stand on one side alone, and the scale."""
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    one, other = left.detach().double(), right.detach().to(left.device).double()
    unequal = ~((one == other) | (one.isnan() & other.isnan()))
    if not bool(unequal.any()):
        return 0.0, 0.0
    difference = (one - other)[unequal].abs()
    finite = one[torch.isfinite(one)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    worst = torch.where(difference.isnan(), torch.inf, difference).max()
    return float(worst), scale


def _eps(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).eps) if tensor.is_floating_point() else 0.0


def _most(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).max) if tensor.is_floating_point() else math.inf


def _names(leaves: dict[str, Any]) -> str:
    return "nothing" if not leaves else ", ".join(leaf or "one tensor" for leaf in list(leaves)[:6])


def _at(leaf: str) -> str:
    return f" {leaf}" if leaf else ""
