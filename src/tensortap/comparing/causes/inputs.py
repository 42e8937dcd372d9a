"""What a layer's input tells: a residual that is missing or doubled, a layer that did nothing."""

from __future__ import annotations

from .fits import Fit, number_words
from .pairs import Pairs

__all__ = ["residual", "skipped"]

_NEAR = 0.35  # how far from ±1 the input's factor may be: what else is lost correlates with it


def residual(pairs: Pairs) -> Fit | None:
    """candidate = reference - input, or + input."""
    given = pairs.input
    if given is None or pairs.energy <= 0:
        return None
    if pairs.finite is not None:
        given = given * pairs.finite
    size = float((given * given).sum())
    if not size > 0:
        return None
    share = float((pairs.difference * given).sum()) / size
    if min(abs(share - 1), abs(share + 1)) > _NEAR:
        return None
    sign = 1.0 if share > 0 else -1.0
    left = pairs.left(pairs.reference + sign * given)
    word, symbol = ("doubled", "+") if sign > 0 else ("missing", "-")
    text = f"output = reference {symbol} the layer's input: a residual is {word}"
    details = {"factor": sign, "fitted": float(number_words(share))}
    return Fit("residual", left, left, text, 1.0, 0.5, details=details)


def skipped(pairs: Pairs) -> Fit | None:
    """candidate = input."""
    if pairs.input is None or pairs.energy <= 0:
        return None
    left = pairs.left(pairs.input)
    text = "output = the layer's input: the layer did nothing"
    return Fit("skipped", left, left, text, 1.0, 0.05)
