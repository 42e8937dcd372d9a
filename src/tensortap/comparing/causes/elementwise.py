"""An error that follows from one value alone, element by element: another activation function."""

from __future__ import annotations

from torch import Tensor

from .fits import Fit
from .pairs import Pairs

__all__ = ["function"]

_MOST = 1 << 16  # elements that are sorted
_EACH = 8  # elements in a bin, at least
_BINS = 512
_LEFT = 0.05
_STEEP = 2e-3  # what a steep curve may leave of its lines


def function(pairs: Pairs) -> Fit | None:
    """The difference as some function of the layer's input, or of the reference.

    The elements are sorted by that value, and the mean of a few neighbours is the function: what is
    left is how much neighbours differ.
    """
    if pairs.energy <= 0 or pairs.finite is not None or pairs.count < 16 * _EACH:
        return None
    step = -(-pairs.difference.numel() // _MOST)
    d = pairs.difference.reshape(-1)[::step]
    for name, given in (("layer's input", pairs.input), ("reference", pairs.reference)):
        if given is None:
            continue
        left, adjusted = _fitted(given.reshape(-1)[::step], d, pairs, pairs.candidate)
        if adjusted <= _LEFT + pairs.noise:
            text = f"a function of the {name}, element by element (as another activation makes)"
            return Fit("function", left, adjusted, text, 3.5, _LEFT, details={"of": name})
    return None


def _fitted(values: Tensor, d: Tensor, pairs: Pairs, side: Tensor) -> tuple[float, float]:
    """What a function of these values leaves, and the same so that noise leaves all of itself."""
    options = []
    for sloped in (False, True):
        left, free = _left(values, d, sloped=sloped)
        if sloped and (left > _STEEP or _massive(d)):
            continue  # a line through few neighbours takes all of what one massive value makes
        # A small side leaves a difference that is the other one, and a function of it; so does one
        # that has nothing to do with the other.
        size = float((side - side.mean()).square().sum() + 1e-300)
        most = max(left, left * pairs.energy / size)
        options.append((left, min(1.0, most * len(d) / max(1, len(d) - free))))
    return min(options, key=lambda option: option[1])


def _massive(d: Tensor) -> bool:
    """Whether a few values hold most of the error."""
    energy = d.square()
    most = energy.topk(max(1, len(d) // 32)).values
    return float(most.sum()) > 0.5 * float(energy.sum())


def _left(values: Tensor, d: Tensor, *, sloped: bool) -> tuple[float, int]:
    """The part of d² that is left by neighbours' means, or by a line through them.

    Also how many numbers were fitted.
    """
    bins = min(_BINS, len(d) // _EACH)
    order = values.argsort()
    whole = len(d) // bins * bins
    rows, at = (side[order[:whole]].reshape(bins, -1) for side in (d, values))
    total = float(rows.square().sum())
    rest = rows - rows.mean(1, keepdim=True)
    if sloped:
        x = at - at.mean(1, keepdim=True)
        size = x.square().sum(1, keepdim=True)
        slope = (x * rest).sum(1, keepdim=True) / size.clamp_min(1e-300)
        rest = rest - slope * x
    left = float(rest.square().sum())
    return (left / total if total > 0 else 1.0), bins * (2 if sloped else 1)
