"""What a layer's input tells: a residual that is missing or doubled, a layer that did nothing."""

from __future__ import annotations

from .fits import Fit, factor_words, number_words
from .pairs import Pairs

__all__ = ["branch", "residual", "skipped"]

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


def branch(pairs: Pairs) -> Fit | None:
    """What the layer adds to its input, times a factor: candidate - x = a x (reference - x)."""
    given = pairs.input
    if given is None or pairs.energy <= 0 or pairs.finite is not None:
        return None
    added = pairs.reference - given
    size, own = float((added * added).sum()), float((pairs.candidate - given).square().sum())
    if not size > 0 or not own > 0:
        return None
    gain = float((pairs.difference * added).sum()) / size
    rest = max(0.0, pairs.energy - gain * gain * size) / pairs.energy
    # Near zero, a factor takes the reference out of the difference and explains nothing.
    chance = float((pairs.difference * added).square().sum()) / size
    adjusted = pairs.adjusted(max(rest, rest * pairs.energy / own), chance)
    text = f"what the layer adds to its input = {factor_words(1 + gain)} x the reference's"
    details = {"factor": 1 + gain, "of": "added"}
    return Fit("factor", rest, adjusted, text, 1.3, 0.25, details=details)


def skipped(pairs: Pairs) -> Fit | None:
    """candidate = input."""
    if pairs.input is None or pairs.energy <= 0:
        return None
    left = pairs.left(pairs.input)
    text = (
        "output = the layer's input: the layer did nothing (it was skipped, or its statistics and "
        "scales were never loaded)"
    )
    return Fit("skipped", left, left, text, 1.0, 0.05)
