"""What a number format does to values: clamps them, rounds them, sets them on a grid."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .fits import Fit, number_words
from .pairs import Pairs

__all__ = ["rounding", "saturation"]

_LEFT = 0.1
_SAMPLE = 1 << 14
# Where a candidate only holds values of a format, what is left is never said to be nothing.
_UNSURE = 0.05

_MAXIMA = {
    448.0: "float8_e4m3fn",
    240.0: "float8_e4m3fnuz",
    57344.0: "float8_e5m2",
    65504.0: "float16",
    127.0: "int8",
    128.0: "int8",
    255.0: "uint8",
    32767.0: "int16",
}


@dataclass(frozen=True)
class _Format:
    """A floating-point format: its name, the largest relative rounding error, how to round."""

    name: str
    unit: float
    dtype: torch.dtype | None

    def rounded(self, values: Tensor) -> Tensor:
        if self.dtype is None:
            return _tf32(values)
        finite = torch.finfo(self.dtype).max
        return values.clamp(-finite, finite).to(self.dtype).to(torch.float64)


# From the coarsest on: the first that holds all of the candidate's values is meant.
_FORMATS = (
    _Format("float8_e5m2", 2.0**-3, torch.float8_e5m2),
    _Format("float8_e4m3fn", 2.0**-4, torch.float8_e4m3fn),
    _Format("bfloat16", 2.0**-8, torch.bfloat16),
    _Format("float16", 2.0**-11, torch.float16),
    _Format("tf32", 2.0**-11, None),
    _Format("float32", 2.0**-24, torch.float32),
)


def _tf32(values: Tensor) -> Tensor:
    """Float32 with ten bits behind the point, rounded to even."""
    fraction, exponent = torch.frexp(values.to(torch.float32).to(torch.float64))
    return torch.ldexp((fraction * 2.0**11).round() * 2.0**-11, exponent)


def saturation(pairs: Pairs) -> Fit | None:
    """The candidate clamped, from above, from below or both."""
    if pairs.energy <= 0 or pairs.count < 4:
        return None
    reference, candidate = pairs.reference, pairs.candidate
    low, high = (float(level) for level in torch.aminmax(candidate))
    upper = _clamped(reference > high, candidate, high, pairs)
    lower = _clamped(reference < low, candidate, low, pairs)
    if not upper and not lower:
        return None
    left = pairs.left(reference.clamp(low if lower else None, high if upper else None))
    low, high = pairs.natural(low), pairs.natural(high)
    details = {
        "low": low if lower else None,
        "high": high if upper else None,
        "clamped": upper + lower,
    }
    if low == high:
        text = f"the candidate is {number_words(low)} everywhere"
        return Fit("saturation", left, left, text, 1.3, _LEFT, details=details)
    text = f"candidate clamped {_levels(low if lower else None, high if upper else None)}"
    return Fit("saturation", left, left, text, 1.3, _LEFT, details=details)


def _clamped(beyond: Tensor, candidate: Tensor, level: float, pairs: Pairs) -> int:
    """How many values stand at a level; 0 unless nearly all that would be beyond it are there."""
    count = int(beyond.sum())
    if not count:
        return 0
    there = int((candidate[beyond] == level).sum())
    enough = 1 if abs(pairs.natural(level)) in _MAXIMA else 2
    return there if there >= enough and there >= 0.9 * count else 0


def _levels(low: float | None, high: float | None) -> str:
    levels = [level for level in (low, high) if level is not None]
    names = {_MAXIMA.get(abs(level)) for level in levels}
    name = names.pop() if len(names) == 1 else None
    about = f", the maximum of {name}" if name else ""
    words = "{:.0f}".format if name else number_words
    if low is None or high is None:
        side = "from below at" if high is None else "at"
        zero = ", as by a ReLU" if high is None and levels[0] == 0 else ""
        return f"{side} {words(levels[0])}{about}{zero}"
    if math.isclose(-low, high, rel_tol=1e-6):
        return f"at ±{words(high)}{about}"
    return f"between {number_words(low)} and {number_words(high)}"


def rounding(pairs: Pairs) -> Fit | None:
    """The candidate holds values of a narrower format, which the reference does not."""
    if pairs.energy <= 0 or pairs.exponent:
        return None  # no format but float64 reaches so far
    own = torch.finfo(pairs.dtypes[0]).eps / 2 if pairs.dtypes[0].is_floating_point else 0.0
    for form in _FORMATS:
        if form.unit <= own:
            return None  # no narrower than what the reference is in
        if _holds(form, pairs.candidate) < 1:
            continue
        if _holds(form, pairs.reference) > 0.5:
            return None  # both sides are in this format, or in a coarser one
        return _rounded(pairs, form)
    return None


def _rounded(pairs: Pairs, form: _Format) -> Fit | None:
    details = {"format": form.name}
    left = pairs.left(form.rounded(pairs.reference))
    if left <= _LEFT:
        text = f"output = reference rounded to {form.name}"
        return Fit("rounding", left, left, text, 1.0, _LEFT, details=details)
    size = pairs.relative
    if not math.isfinite(size):
        return None
    explained = min(1.0, (2 * form.unit / size) ** 2)
    text = (
        f"the candidate holds only values of {form.name}, and the error ({size:.2g}) is of the "
        "size that computing in it makes"
    )
    rest = max(_UNSURE, 1 - explained)
    return Fit("rounding", rest, rest, text, 1.5, 0.5, details={**details, "size": size})


def _holds(form: _Format, values: Tensor) -> float:
    """The share of the values, zeros aside, that the format holds; 0 where they are too few."""
    flat = values.reshape(-1)
    if flat.numel() > _SAMPLE:
        few = flat[:: flat.numel() // _SAMPLE]
        if not bool((form.rounded(few) == few).all()):
            return float((form.rounded(few) == few).double().mean())
    flat = flat[flat != 0]
    if flat.numel() < 8:
        return 0.0
    return float((form.rounded(flat) == flat).double().mean())
