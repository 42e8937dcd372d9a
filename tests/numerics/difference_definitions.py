"""What a difference is, by exact arithmetic on Python numbers; and every backend that must agree.

Nothing here shares code with what it judges, but for the entry points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from tensortap.numerics import backend as choosing
from tensortap.numerics.difference import Difference, difference, difference_of
from tensortap.numerics.native import CODES, core
from tensortap.numerics.native_difference import NativeDifference, suits_pair

DTYPES = list(CODES)
FLOATS = [d for d in DTYPES if d.is_floating_point]
COMPLEX = [d for d in DTYPES if d.is_complex]
WHOLE = [d for d in DTYPES if not (d.is_floating_point or d.is_complex)]  # integers and bool

# With the core built, every instruction set that the processor has is tested.
ISAS: list[str] = list(core.isas()) if core is not None else []
BACKENDS: list[str] = ["reference", *ISAS]
EPS = float(np.finfo(np.float64).eps)
CPU, GPU = 1e-9, 1e-6  # how far from the truth, as a share of the sum of absolute terms


class use:
    """Within it, one backend computes all differences and profiles of the pairs it can read."""

    def __init__(self, name: str, threads: int = 1) -> None:
        if name == "reference":
            self.backend, self.suits = choosing.REFERENCE, suits_pair
            return
        if name == "triton":  # in its interpreter, unless the tensors are on a device
            from tensortap.numerics.triton_difference import TritonDifference, readable

            self.backend = type("Interpreted", (TritonDifference,), {"name": "triton"})()
            self.suits = lambda r, c: readable(r) and readable(c)
            return
        native = type("At", (NativeDifference,), {"name": "native"})()
        native.isa, native.threads = ISAS.index(name), threads
        self.backend, self.suits = native, suits_pair

    def __enter__(self) -> None:
        self._usual = choosing.pick_pair
        choosing.pick_pair = lambda r, c: self.backend if self.suits(r, c) else choosing.REFERENCE

    def __exit__(self, *_: object) -> None:
        choosing.pick_pair = self._usual


def difference_by(backend: str, *args: torch.Tensor, **options: object) -> Difference:
    with use(backend):
        return difference(*args, **options)  # type: ignore[arg-type]


def difference_of_by(backend: str, pairs: object, **options: object) -> Difference:
    with use(backend):
        return difference_of(pairs, **options)  # type: ignore[arg-type]


def numbers(tensor: torch.Tensor, other: torch.Tensor) -> list[float]:
    """The values in order; beside other integers, integers stay exact; beside complex numbers,
    real ones have a zero imaginary part."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in WHOLE and other.dtype in WHOLE:
        return [int(v) for v in tensor.flatten().tolist()]
    values = tensor.flatten().to(torch.float64).tolist()
    if other.is_complex() and tensor.numel() == other.numel():
        return [part for value in values for part in (value, 0.0)]
    return values


def bytes_of(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return bytes(torch.cat([tensor.reshape(-1), tensor.new_empty(0)]).view(torch.uint8).tolist())


def as_float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def root(value: Fraction) -> float:
    """The square root of a fraction that may lie far outside the range of floats."""
    if value == 0:
        return 0.0
    shift = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(value / Fraction(4) ** shift), shift)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Exact:
    """Floats as integers over one common denominator (theirs are powers of two)."""

    whole: list[int]
    unit: int

    @cached_property
    def total(self) -> int:
        return sum(self.whole)

    @property
    def mean(self) -> Fraction:
        return Fraction(self.total, len(self.whole) * self.unit)

    @property
    def mean_abs(self) -> Fraction:
        return Fraction(sum(map(abs, self.whole)), len(self.whole) * self.unit)

    @cached_property
    def squares(self) -> Fraction:
        return Fraction(sum(v * v for v in self.whole), self.unit**2)

    @property
    def top(self) -> float:
        return as_float(Fraction(max(map(abs, self.whole)), self.unit))

    @property
    def norm(self) -> float:
        return root(self.squares)

    @property
    def std(self) -> float:
        return root(self.centred.squares / len(self.whole))

    @cached_property
    def centred(self) -> Exact:
        n, total = len(self.whole), self.total
        return Exact([n * v - total for v in self.whole], n * self.unit)

    def dot(self, other: Exact) -> tuple[Fraction, Fraction]:
        """The product, and the sum of the absolute terms."""
        products = [a * b for a, b in zip(self.whole, other.whole, strict=True)]
        unit = self.unit * other.unit
        return Fraction(sum(products), unit), Fraction(sum(map(abs, products)), unit)


def exact_sides(finite: Sequence[tuple[float, float]]) -> tuple[Exact, Exact, Exact]:
    """The reference, the candidate and their difference, which is not rounded here."""
    ratios = [(r.as_integer_ratio(), c.as_integer_ratio()) for r, c in finite]
    unit = max(denominator for pair in ratios for _, denominator in pair)
    r, c = ([top * (unit // bottom) for top, bottom in side] for side in zip(*ratios, strict=True))
    return Exact(r, unit), Exact(c, unit), Exact([b - a for a, b in zip(r, c, strict=True)], unit)


class Bound(NamedTuple):
    """A number, and how far a backend may be from it; NaN for what is undefined."""

    value: float
    within: float = 0.0

    def holds(self, found: float) -> bool:
        if math.isnan(self.value):
            return math.isnan(found)
        if math.isinf(self.value) or math.isinf(found):
            # The last bits decide whether a number at the end of the range is infinite.
            return found == self.value or min(abs(found), abs(self.value)) > 1.79769e308
        return abs(found - self.value) <= self.within


def bound(
    value: float, scale: float | None = None, slack: float = 0.0, share: float = CPU
) -> Bound:
    """Within a share of the sum of absolute terms, and what rounding to subnormals may cost."""
    scale = value if scale is None else scale
    return Bound(value, share * abs(scale) + slack + 1e-322)


UNDEFINED = Bound(math.nan)
TOLERANCES = {
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
    "complex32": (1e-3, 1e-5),
    "complex64": (1.3e-6, 1e-5),
    "complex128": (1e-7, 1e-7),
}
PERCENTS = (50, 90, 95, 99)


def subtract(reference: float, candidate: float) -> float:
    """In float64; integers exactly, then rounded."""
    return float(candidate - reference)


def agree(r: float, c: float) -> bool:
    return (math.isnan(r) and math.isnan(c)) or (math.isinf(r) and r == c)


class Definition:
    """What the difference of these pairs is, found out once and held against any backend's."""

    def __init__(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        rtol: float | None = None,
        atol: float | None = None,
        share: float = CPU,
    ) -> None:
        self.share = share
        self.values: list[tuple[float, float]] = []
        self.mismatched = self.borderline = 0
        for reference, candidate in pairs:
            sides = numbers(reference, candidate), numbers(candidate, reference)
            here = list(zip(*sides, strict=True))
            self.values += here
            self._count_mismatches(here, *limits_of(reference, candidate, rtol, atol))
        self.finite = [(r, c) for r, c in self.values if math.isfinite(r) and math.isfinite(c)]
        self.agreeing = sum(agree(r, c) for r, c in self.values)
        self.identical = all(
            r.dtype == c.dtype and r.shape == c.shape and bytes_of(r) == bytes_of(c)
            for r, c in pairs
        )
        self.largest, self.largest_at = -1.0, -1
        for place, (r, c) in enumerate(self.values):
            if math.isfinite(r) and math.isfinite(c) and abs(subtract(r, c)) > self.largest:
                self.largest, self.largest_at = abs(subtract(r, c)), place

    def _count_mismatches(
        self, values: Sequence[tuple[float, float]], rtol: float, atol: float
    ) -> None:
        for r, c in values:
            if not (math.isfinite(r) and math.isfinite(c)):
                self.mismatched += not agree(r, c)
                continue
            distance, limit = abs(subtract(r, c)), atol + rtol * abs(float(r))
            if limit and abs(distance - limit) <= 1e-15 * limit:
                self.borderline += 1  # on the limit to the last bits: either way will do
            else:
                self.mismatched += distance > limit

    def check(self, found: Difference, *, percentiles: bool = True) -> None:
        """To within the bound of the design; `percentiles` says whether they were asked for."""
        odd = len(self.values) - len(self.finite) - self.agreeing
        assert (found.count, found.finite) == (len(self.values), len(self.finite))
        assert (found.agreeing, found.disagreeing) == (self.agreeing, odd)
        assert self.mismatched <= found.mismatched <= self.mismatched + self.borderline
        assert found.identical == self.identical
        for name, expected in self.bounds.items():
            assert expected.holds(getattr(found, name)), (name, getattr(found, name), expected)
        if percentiles:
            self._check_percentiles(found)
        else:
            assert found.percentiles is None and found.histogram is None
            assert not found.percentiles_exact and math.isnan(found.p50)
        if not self.finite:
            assert found.max_abs_index is None and found.max_abs_pair is None
            assert found.grade == found.correlation_grade == "undefined"
            return
        assert found.max_abs == self.largest and found.row.max_abs_at == self.largest_at
        assert found.max_abs_pair == tuple(map(float, self.values[self.largest_at]))
        for name, most in (("cosine", 1.0), ("correlation", 1.0), ("cosine_distance", 2.0)):
            assert not abs(getattr(found, name)) > most, name
        assert not found.cosine_distance < 0

    def _check_percentiles(self, found: Difference) -> None:
        """To the last bit what numpy makes of the float64 values; torch may round another way."""
        assert found.percentiles is not None and found.histogram is not None
        assert found.percentiles_exact and tuple(found.percentiles) == PERCENTS
        for percent, (numpys, torchs) in self.percentiles.items():
            value = found.percentiles[percent]
            assert value == numpys or (math.isnan(value) and math.isnan(numpys)), percent
            assert not abs(value - torchs) > 2 * EPS * value + 1e-322, percent
        assert found.histogram.total == found.finite  # of more than a million, a sample will do

    @cached_property
    def percentiles(self) -> dict[int, tuple[float, float]]:
        if not self.finite:
            return dict.fromkeys(PERCENTS, (math.nan, math.nan))
        distances = np.array([abs(subtract(r, c)) for r, c in self.finite])
        shares = torch.tensor(PERCENTS, dtype=torch.float64) / 100
        found = torch.quantile(torch.from_numpy(distances), shares).tolist()
        return dict(
            zip(PERCENTS, zip(np.percentile(distances, PERCENTS), found, strict=True), strict=True)
        )

    @cached_property
    def bounds(self) -> dict[str, Bound]:
        """Every metric that is a sum, by exact arithmetic."""
        if not self.finite:
            names = "mean std mae max_abs mse rmse relative_mse relative_mae max_relative error rel"
            more = "mean_relative cosine cosine_distance correlation sqnr_db p50 p90 p95 p99"
            return dict.fromkeys(f"{names} {more}".split(), UNDEFINED)
        r, c, d = exact_sides(self.finite)
        mse = d.squares / len(self.finite)
        result = {
            "mae": bound(as_float(d.mean_abs), share=self.share),
            "rmse": bound(root(mse), share=self.share),
        }
        if root(mse) > 1e-150:
            result["mse"] = bound(as_float(mse), share=self.share)
        for prefix, side in (("", d), ("reference_", r), ("candidate_", c)):
            result[f"{prefix}mean"] = bound(
                as_float(side.mean), as_float(side.mean_abs), share=self.share
            )
            # A mean in float64 is itself rounded; 1e11 standard deviations away that shows.
            result[f"{prefix}std"] = bound(side.std, slack=4 * EPS * side.top, share=self.share)
        result |= self._relatives(r, d) | _angles(r, c, d, self.share)
        if any(len({float(v) for v in side}) == 1 for side in zip(*self.finite, strict=True)):
            result["correlation"] = UNDEFINED  # also of large integers that float64 makes equal
        return result

    def _relatives(self, r: Exact, d: Exact) -> dict[str, Bound]:
        each = [abs(subtract(a, b)) / (abs(float(a)) + 1e-8) for a, b in self.finite]
        result = {
            "max_relative": bound(max(each), share=self.share),
            "mean_relative": bound(math.fsum(v / len(each) for v in each), share=self.share),
        }
        if not r.norm:
            names = ("relative_mse", "relative_mae", "sqnr_db", "error")
            return result | dict.fromkeys(names, UNDEFINED)
        coarse = 1e-322 / r.norm  # norms among the subnormals hold few digits
        error = root(d.squares / r.squares)
        result["error"] = bound(error, slack=8 * coarse * max(1.0, error), share=self.share)
        if error > 1e-150:
            square = as_float(d.squares / r.squares)
            result["relative_mse"] = bound(
                square, slack=16 * coarse * max(1.0, square), share=self.share
            )
        mae = as_float(d.mean_abs / r.mean_abs)
        result["relative_mae"] = bound(
            mae, slack=8 * len(each) * coarse * max(1.0, mae), share=self.share
        )
        if not d.norm:
            result["sqnr_db"] = Bound(math.inf)
        elif min(r.norm, d.norm) > 1e-300:
            decibels = 20 * math.log10(r.norm) - 20 * math.log10(d.norm)
            result["sqnr_db"] = Bound(decibels, 10 * self.share * max(1.0, abs(decibels)))
        return result


def _angles(r: Exact, c: Exact, d: Exact, share: float) -> dict[str, Bound]:
    result = {"rel": UNDEFINED, "cosine": UNDEFINED, "cosine_distance": UNDEFINED}
    both, norms = r.squares + c.squares, r.squares * c.squares
    if both:
        result["rel"] = bound(as_float(d.squares / both), slack=1e-321 / root(both), share=share)
    if norms and min(r.norm, c.norm) < 1e-300:
        del result["cosine"], result["cosine_distance"]
    elif norms:
        cosine, terms = _cosine(r, c)
        # Where all terms are almost nothing beside the norms, rounding shows: 1e-16 for 1e-20.
        result["cosine"] = Bound(cosine, share * terms + 1e-14)
        distance = 1 - cosine
        if cosine > 0:  # 1 - cos = (1 - cos²) / (1 + cos), of which the numerator is exact here
            distance = as_float(1 - r.dot(c)[0] ** 2 / norms) / (1 + cosine)
        result["cosine_distance"] = Bound(distance, share * root(d.squares**2 / norms) + 1e-300)
    if not (r.std and c.std):
        result["correlation"] = UNDEFINED
    elif min(r.std, c.std) > 1e-300:
        correlation, terms = _cosine(r.centred, c.centred)
        rounding = EPS * (r.top / r.std + c.top / c.std)
        result["correlation"] = Bound(correlation, share * terms + 8 * rounding + 1e-14)
    return result


def _cosine(one: Exact, two: Exact) -> tuple[float, float]:
    dot, terms = one.dot(two)
    norms = one.squares * two.squares
    return (-1 if dot < 0 else 1) * root(dot * dot / norms), root(terms * terms / norms)


def limits_of(
    reference: torch.Tensor, candidate: torch.Tensor, rtol: float | None, atol: float | None
) -> tuple[float, float]:
    both = []
    for tensor in (reference, candidate):
        name = str(tensor.dtype).removeprefix("torch.")
        usual = TOLERANCES.get(name, (0.0, 0.0))
        both.append((torch.finfo(tensor.dtype).eps, 1e-5) if "float8" in name else usual)
    return (
        max(r for r, _ in both) if rtol is None else rtol,
        max(a for _, a in both) if atol is None else atol,
    )


def check_all(reference: torch.Tensor, candidate: torch.Tensor) -> list[Difference]:
    """Every backend's difference of a pair, each of which is what the definition says."""
    definition = Definition([(reference, candidate)])
    found = []
    for backend in BACKENDS:
        found.append(difference_by(backend, reference, candidate))
        try:
            definition.check(found[-1])
        except AssertionError as error:
            raise AssertionError(f"by {backend}: {error}") from error
    return found
