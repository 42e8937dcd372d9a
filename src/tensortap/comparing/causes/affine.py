"""Factors and constants: of the whole, and for each place of an axis."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .fits import Fit, Floats, factor_words, number_words, range_words, ranges
from .pairs import Pairs, Sums

__all__ = [
    "affine",
    "affines",
    "bias",
    "factor",
    "factors",
    "positions",
    "shift",
    "sign",
    "signs",
]

_SIGN = 0.02  # how far from -1 a factor may be to be a sign
_SIMPLE = 0.1  # what a hypothesis with one or two numbers may leave
_CONSTANTS = 0.05  # what a constant for each place may leave: a mean over tokens is in much
_EACH = 8  # values of a place, at least, on average, for two numbers
_ALL = 4  # so many numbers are all said
_SAME = 1e-5  # what may differ of what is the same in all samples
_MANY = 0.2  # what a factor for each place may leave


def factor(pairs: Pairs) -> Fit | None:
    """candidate = a x reference; zero and the sign are called by their names."""
    t = pairs.total
    left, gain = _least(t.dd, t.dr, t.rr)
    if pairs.energy <= 0 or not t.rr[0] > 0:
        return None
    a, rest = 1 + float(gain[0]), float(left[0]) / pairs.energy
    if not np.any(pairs.candidate.numpy()):
        return Fit("factor", 0.0, 0.0, "the candidate is zero", details={"factor": 0.0})
    adjusted = pairs.adjusted(_believed(rest, pairs), t.chance_of_factors())
    if abs(a + 1) < _SIGN and adjusted < _SIGN:
        return _sign_of_all(pairs)
    text = f"output = {factor_words(a)} x reference"
    return Fit("factor", rest, adjusted, text, 1.0, _SIMPLE, details={"factor": a})


def _believed(rest: float, pairs: Pairs, s: Sums | None = None) -> float:
    """What is left of the error, of the candidate, or of what varies in it, whichever is most.

    A candidate that has nothing to do with the reference is best fitted by a factor near zero,
    which takes the reference out of the difference and explains nothing; and a factor or a constant
    brings the means of two tensors together that have nothing else in common. Where the reference
    does not vary (at the places of `s`), there is nothing that they could have but a size.
    """
    t, s = pairs.total, pairs.total if s is None else s
    size, n = float(t.rr[0]), s.n.clip(1)
    own = float(t.rr[0] + 2 * t.dr[0] + t.dd[0])
    left = max(0.0, rest * pairs.energy - pairs.floor**2 * size)  # rounding follows the size
    varied = float((s.rr - s.r**2 / n).clip(0).sum())
    moves = float((s.rr + 2 * s.dr + s.dd - (s.r + s.d) ** 2 / n).clip(0).sum())
    found = max(rest, rest * pairs.energy / own) if own > 0 else rest
    return max(found, left / moves) if varied > 0.05 * left and moves > 0 else found


def _sign_of_all(pairs: Pairs) -> Fit:
    rest = pairs.left(-pairs.reference)
    return Fit("sign", rest, rest, "output = -1 x reference", details={"factor": -1.0})


def shift(pairs: Pairs) -> Fit | None:
    """candidate = reference + b."""
    t = pairs.total
    if pairs.energy <= 0 or pairs.count < 2:
        return None
    left, b = _least(t.dd, t.d, t.n)
    rest = float(left[0]) / pairs.energy
    value = pairs.natural(float(b[0]))
    sign = "+" if value >= 0 else "-"
    text = f"output = reference {sign} {number_words(abs(value))}"
    details = {"shift": value}
    adjusted = pairs.adjusted(_believed(rest, pairs), t.chance_of_constants())
    return Fit("shift", rest, adjusted, text, 1.0, _SIMPLE, details=details)


def affine(pairs: Pairs) -> Fit | None:
    """candidate = a x reference + b."""
    if pairs.energy <= 0 or pairs.count < 4:
        return None
    t = pairs.total
    n, d, r, dd, dr, _, rr = (float(part[0]) for part in t)
    spread = rr - r * r / n
    if not spread > 1e-12 * rr:
        return None
    gain = (dr - d * r / n) / spread
    b = pairs.natural((d - gain * r) / n)
    rest = max(0.0, dd - d * d / n - gain * gain * spread) / dd
    sign = "+" if b >= 0 else "-"
    text = f"output = {factor_words(1 + gain)} x reference {sign} {number_words(abs(b))}"
    details = {"factor": 1 + gain, "shift": b}
    chance = t.chance_of_constants() + t.chance_of_factors()
    adjusted = pairs.adjusted(_believed(rest, pairs), chance)
    return Fit("affine", rest, adjusted, text, 2.0, _SIMPLE, details=details)


def sign(pairs: Pairs) -> Fit | None:
    """The best of the signs: of some channels, tokens, heads or samples."""
    found = [fit for axis in range(len(pairs.shape)) if (fit := signs(pairs, axis)) is not None]
    return min(found, key=lambda fit: fit.adjusted, default=None)


def signs(pairs: Pairs, axis: int) -> Fit | None:
    """Some places of an axis negated."""
    s = pairs.along(axis)
    if len(s.n) < 2 or pairs.energy <= 0:
        return None
    _, gain = _least(s.dd, s.dr, s.rr)
    negated = np.abs(gain + 2) < 10 * _SIGN
    if not negated.any() or negated.all():
        return None
    rest = np.where(negated, s.dd + 4 * s.dr + 4 * s.rr, s.dd).clip(0).sum() / pairs.energy
    if rest > _SIMPLE + pairs.noise:
        return None
    places = [pairs.place(axis, int(place)) for place in np.flatnonzero(negated)]
    name = pairs.axes[axis]
    many = "s" if len(places) > 1 else ""
    text = f"{name}{many} {ranges(places)} (of {pairs.sizes[axis]}) with the sign turned"
    details = {"axis": pairs.axis_given(axis), f"{name}s": places[:256]}
    return Fit("sign", float(rest), float(rest), text, 1.5, 0.1, details=details)


def bias(pairs: Pairs) -> list[Fit]:
    """A constant for each place of an axis: of the channels, but a convolution has them first."""
    found = []
    for axis in range(len(pairs.shape)):
        s = pairs.along(axis)
        if len(s.n) < 2 or pairs.energy <= 0:
            continue
        left, b = _least(s.dd, s.d, s.n)
        b = pairs.naturals(b)
        rest = float(left.sum()) / pairs.energy
        adjusted = pairs.adjusted(_believed(rest, pairs, s), s.chance_of_constants())
        if adjusted > _CONSTANTS + pairs.noise:
            continue
        name = pairs.axes[axis]
        about = f"the same in all {pairs.row_name}s (a bias missing, doubled or another)"
        if name != "channel":
            about = "the same in all else"
        text = f"a constant for each {name}, {about}: {range_words(b)}"
        details = {"axis": pairs.axis_given(axis), "per": name, "constants": b[:256].tolist()}
        cost = 3.0 if name == "channel" else 3.5
        found.append(Fit("bias", rest, adjusted, text, cost, _CONSTANTS, details=details))
    return found


def positions(pairs: Pairs) -> list[Fit]:
    """A difference that is the same in all samples, though the samples are not."""
    if "sample" not in pairs.axes or pairs.energy <= 0 or len(pairs.shape) < 3:
        return []
    axis = pairs.axes.index("sample")
    if pairs.shape[axis] < 2 or pairs.finite is not None:
        return []
    r, d = pairs.reference, pairs.difference
    own = float((r - r.mean(axis, keepdim=True)).square().sum())
    rest = float((d - d.mean(axis, keepdim=True)).square().sum()) / pairs.energy
    if own < 0.01 * float(r.square().sum()) or rest > _SAME + min(0.1, 2 * pairs.noise):
        return []
    text = "the difference is the same in all samples: what is added is lost or another, and does "
    text += "not depend on them, as a table of positions"
    return [Fit("positions", rest, rest, text, 4.2, _SIMPLE, details={"axis": axis})]


def affines(pairs: Pairs) -> list[Fit]:
    """A factor and a constant for each channel, and for each row."""
    found = []
    for s, name in ((pairs.along(-1), "channel"), (pairs.rows(), pairs.row_name)):
        if len(s.n) < 2 or pairs.energy <= 0 or s.n.sum() < _EACH * len(s.n):
            continue
        n = s.n.clip(1)
        spread = s.rr - s.r**2 / n
        varies = spread > 1e-12 * s.rr
        moved = np.where(varies, s.dr - s.d * s.r / n, 0.0)
        gain = moved / np.where(varies, spread, 1.0)
        rest = float((s.dd - s.d**2 / n - gain * moved).clip(0).sum()) / pairs.energy
        chance = s.chance_of_constants() + s.chance_of_factors()
        adjusted = pairs.adjusted(_believed(rest, pairs, s), chance)
        if adjusted > _CONSTANTS + pairs.noise:
            continue
        b, a = pairs.naturals((s.d - gain * s.r) / n), 1 + gain
        details = {"per": name, "factors": a[:256].tolist(), "constants": b[:256].tolist()}
        text = f"a factor and a constant for each {name}: {_each(a, factor_words)} x reference + "
        text += f"{_each(b)}{_norm_words(pairs, name)}"
        found.append(Fit("affine", rest, adjusted, text, 4.0, _CONSTANTS, details=details))
    return found


def _each(values: Floats, words: Callable[[float], str] = number_words) -> str:
    """Some values, or from the least to the greatest of many."""
    if len(values) > _ALL:
        return f"({range_words(values, words)})"
    return f"({', '.join(words(float(value)) for value in values)})"


def _norm_words(pairs: Pairs, name: str) -> str:
    """What makes such an error."""
    if name != "channel":
        return " (as a norm makes of another mean and spread)"
    if len(pairs.along(-1).n) <= _ALL:
        return " (as a mean and a spread that are not applied, or others)"
    return " (as a norm makes with other statistics, or without its weights)"


def factors(pairs: Pairs) -> list[Fit]:
    """A factor for each channel, for each place of another axis, and for each row."""
    found = []
    for axis in range(len(pairs.shape)):
        name = pairs.axes[axis]
        if name not in ("token", "sample", "row", "column", "plane") and pairs.shape[axis] > 1:
            found.append(_factors(pairs, pairs.along(axis), name))
    if len(pairs.rows().n) > 1:
        found.append(_factors(pairs, pairs.rows(), pairs.row_name))
    good = [fit for fit in found if fit is not None]
    return [fit for fit in good if not any(_fewer(other, fit) for other in good)]


def _fewer(other: Fit, fit: Fit) -> bool:
    """Whether the other says about the same with fewer numbers."""
    fewer = 2 * other.details["count"] <= fit.details["count"]
    return bool(fewer and other.adjusted <= 1.5 * fit.adjusted + 1e-6)


def _factors(pairs: Pairs, s: Sums, name: str) -> Fit | None:
    if pairs.energy <= 0 or not np.any(s.rr > 0):
        return None
    left, gain = _least(s.dd, s.dr, s.rr)
    rest = float(left.sum()) / pairs.energy
    values = 1 + gain[s.rr > 0]
    adjusted = pairs.adjusted(_believed(rest, pairs), s.chance_of_factors())
    if adjusted > _MANY + pairs.noise:
        return None
    text = f"a factor for each {name}: {range_words(values, factor_words)}"
    details = {"per": name, "count": len(values), "factors": values[:256].tolist()}
    return Fit("factors", rest, adjusted, text, 3.0, _MANY, details=details)


def _least(dd: Floats, dx: Floats, xx: Floats) -> tuple[Floats, Floats]:
    """min |d - a x|² for each place, and a; 0 where x is nothing."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        a = np.where(xx > 0, dx / np.where(xx > 0, xx, 1.0), 0.0)
    a = np.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0)
    left: Floats = (dd - a * dx).clip(0)
    return left, a
