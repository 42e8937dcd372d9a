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
        left, bins = _left(given.reshape(-1)[::step], d)
        # A small candidate leaves a difference that is the reference, and a function of it.
        most = max(left, left * pairs.energy / float(pairs.candidate.square().sum() + 1e-300))
        adjusted = min(1.0, most * len(d) / max(1, len(d) - bins))
        if adjusted <= _LEFT + pairs.noise:
            text = f"a function of the {name}, element by element (as another activation makes)"
            return Fit("function", left, adjusted, text, 3.5, _LEFT, details={"of": name})
    return None


def _left(values: Tensor, d: Tensor) -> tuple[float, int]:
    """The part of d² that the means of neighbours leave, and how many means there are."""
    bins = min(_BINS, len(d) // _EACH)
    order = values.argsort()
    whole = len(d) // bins * bins
    rows = d[order[:whole]].reshape(bins, -1)
    total = float(rows.square().sum())
    rest = float((rows - rows.mean(1, keepdim=True)).square().sum())
    return (rest / total if total > 0 else 1.0), bins
