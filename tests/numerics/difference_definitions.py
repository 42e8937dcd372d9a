"""What a difference is, by exact arithmetic on Python numbers; and every backend that must agree.

Nothing here shares code with what it judges, but for the entry points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from tensortap.numerics import backend as choosing
from tensortap.numerics.difference import Difference, difference, difference_of
from tensortap.numerics.native import CODES, core

DTYPES = list(CODES)
FLOATS = [d for d in DTYPES if d.is_floating_point]
COMPLEX = [d for d in DTYPES if d.is_complex]
WHOLE = [d for d in DTYPES if not (d.is_floating_point or d.is_complex)]  # integers and bool

# With the core built, its side of differences must be there: nothing to skip, silently or not.
try:
    from tensortap.numerics.native_difference import NativeDifference

    ISAS: list[str] = list(core.isas()) if core is not None else []
except ImportError:
    ISAS = []
BACKENDS: list[str] = ["reference", *ISAS]
EPS = float(np.finfo(np.float64).eps)


class use:
    """Within it, `difference`, `difference_of` and `profile` are computed by one backend."""

    def __init__(self, name: str, threads: int = 1) -> None:
        if name == "reference":
            self.backend = choosing.REFERENCE
            return
        native = type("At", (NativeDifference,), {"name": "native"})()
        native.isa, native.threads = ISAS.index(name), threads
        self.backend = native

    def __enter__(self) -> None:
        self._usual = choosing.pick_pair
        choosing.pick_pair = lambda reference, candidate: self.backend

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


def kind(value: float) -> str:
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


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

    @property
    def total(self) -> int:
        return sum(self.whole)

    @property
    def mean(self) -> Fraction:
        return Fraction(self.total, len(self.whole) * self.unit)

    @property
    def mean_abs(self) -> Fraction:
        return Fraction(sum(map(abs, self.whole)), len(self.whole) * self.unit)

    @property
    def squares(self) -> Fraction:
        return Fraction(sum(v * v for v in self.whole), self.unit**2)

    @property
    def top(self) -> float:
        return as_float(Fraction(max(map(abs, self.whole)), self.unit))

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


def near(found: float, expected: float, scale: float, slack: float = 0.0) -> bool:
    """Within 1e-9 of the sum of absolute terms, and what rounding to subnormals may cost."""
    if math.isinf(expected) or math.isinf(found):
        # The last bits decide whether a number at the end of the range is infinite.
        return found == expected or min(abs(found), abs(expected)) > 1.79769e308
    return abs(found - expected) <= 1e-9 * abs(scale) + slack + 1e-322


def subtract(reference: float, candidate: float) -> float:
    """In float64; integers exactly, then rounded."""
    return float(candidate - reference)


def assert_defines(
    found: Difference,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    percentiles: bool = True,
) -> None:
    """The difference is the one of these pairs, to within the bound of the design."""
    values: list[tuple[float, float]] = []
    mismatched = borderline = 0
    for reference, candidate in pairs:
        sides = numbers(reference, candidate), numbers(candidate, reference)
        here = list(zip(*sides, strict=True))
        values += here
        sure, unsure = _mismatches(here, *_limits(reference, candidate, rtol, atol))
        mismatched += sure
        borderline += unsure
    finite = [(r, c) for r, c in values if math.isfinite(r) and math.isfinite(c)]
    odd = [(r, c) for r, c in values if not (math.isfinite(r) and math.isfinite(c))]
    agreeing = sum(not math.isfinite(r) and _same_kind(r, c) for r, c in odd)
    assert (found.count, found.finite) == (len(values), len(finite))
    assert (found.agreeing, found.disagreeing) == (agreeing, len(odd) - agreeing)
    assert mismatched <= found.mismatched <= mismatched + borderline
    assert found.identical == all(
        r.dtype == c.dtype and r.shape == c.shape and bytes_of(r) == bytes_of(c) for r, c in pairs
    )
    if not finite:
        _assert_nothing(found)
        return
    _assert_largest(found, values)
    _assert_moments(found, finite)
    if percentiles:
        _assert_percentiles(found, [abs(subtract(r, c)) for r, c in finite])
    else:
        assert found.percentiles is None and found.histogram is None
        assert not found.percentiles_exact


def _same_kind(r: float, c: float) -> bool:
    return not math.isfinite(c) and kind(r) == kind(c)


TOLERANCES = {
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
    "complex32": (1e-3, 1e-5),
    "complex64": (1.3e-6, 1e-5),
    "complex128": (1e-7, 1e-7),
}


def _limits(
    reference: torch.Tensor, candidate: torch.Tensor, rtol: float | None, atol: float | None
) -> tuple[float, float]:
    both = []
    for tensor in (reference, candidate):
        name = str(tensor.dtype).removeprefix("torch.")
        usual = TOLERANCES.get(name, (0.0, 0.0))
        if name.startswith("float8"):
            usual = (torch.finfo(tensor.dtype).eps, 1e-5)
        both.append(usual)
    return (
        max(r for r, _ in both) if rtol is None else rtol,
        max(a for _, a in both) if atol is None else atol,
    )


def _mismatches(values: Sequence[tuple[float, float]], rtol: float, atol: float) -> tuple[int, int]:
    """How many mismatch, and how many more may, standing on the limit to the last bits."""
    sure = unsure = 0
    for r, c in values:
        if not (math.isfinite(r) and math.isfinite(c)):
            sure += not (not math.isfinite(r) and _same_kind(r, c))
            continue
        distance, limit = abs(subtract(r, c)), atol + rtol * abs(float(r))
        if limit and abs(distance - limit) <= 1e-15 * limit:
            unsure += 1
        else:
            sure += distance > limit
    return sure, unsure


def _assert_nothing(found: Difference) -> None:
    undefined = (
        *("mean", "std", "mae", "max_abs", "mse", "rmse", "relative_mse", "relative_mae"),
        *("max_relative", "mean_relative", "cosine", "cosine_distance", "correlation"),
        *("sqnr_db", "rel", "error", "p50", "p90", "p95", "p99"),
    )
    for name in undefined:
        assert math.isnan(getattr(found, name)), name
    assert found.max_abs_index is None and found.max_abs_pair is None
    assert found.grade == found.correlation_grade == "undefined"


def _assert_largest(found: Difference, values: Sequence[tuple[float, float]]) -> None:
    best, at = -1.0, -1
    for place, (r, c) in enumerate(values):
        if math.isfinite(r) and math.isfinite(c) and abs(subtract(r, c)) > best:
            best, at = abs(subtract(r, c)), place
    assert found.max_abs == best
    assert found.row.max_abs_at == at
    assert found.max_abs_pair == tuple(map(float, values[at]))


def _assert_moments(found: Difference, finite: Sequence[tuple[float, float]]) -> None:
    r, c, d = exact_sides(finite)
    n = len(finite)
    mae, mse = as_float(d.mean_abs), d.squares / n
    assert near(found.mae, mae, mae)
    assert near(found.mean, as_float(d.mean), mae)
    assert near(found.rmse, root(mse), root(mse))
    if root(mse) > 1e-150:
        assert near(found.mse, as_float(mse), as_float(mse))
    sides = (
        (found.mean, found.std, d),
        (found.reference_mean, found.reference_std, r),
        (found.candidate_mean, found.candidate_std, c),
    )
    for middle, std, side in sides:
        assert near(middle, as_float(side.mean), as_float(side.mean_abs))
        spread = root(side.centred().squares / n)
        # A mean in float64 is itself rounded; around 1e11 standard deviations away that shows.
        assert near(std, spread, spread, 4 * EPS * side.top)
    _assert_relatives(found, finite, r, d)
    _assert_cosine(found, r, c, d)
    _assert_correlation(found, r, c)


def _assert_relatives(
    found: Difference, finite: Sequence[tuple[float, float]], r: Exact, d: Exact
) -> None:
    relative = [abs(subtract(a, b)) / (abs(float(a)) + 1e-8) for a, b in finite]
    assert near(found.max_relative, max(relative), max(relative))
    expected = math.fsum(v / len(relative) for v in relative)
    assert near(found.mean_relative, expected, expected)
    norm = root(r.squares)
    if not norm:
        for name in ("relative_mse", "relative_mae", "sqnr_db", "error"):
            assert math.isnan(getattr(found, name)), name
        return
    coarse = 1e-322 / norm  # norms among the subnormals hold few digits
    error = root(d.squares / r.squares)
    assert near(found.error, error, error, 8 * coarse * max(1.0, error))
    if error > 1e-150:
        expected = as_float(d.squares / r.squares)
        assert near(found.relative_mse, expected, expected, 16 * coarse * max(1.0, expected))
    expected = as_float(d.mean_abs / r.mean_abs)
    slack = 8 * len(relative) * coarse * max(1.0, expected)
    assert near(found.relative_mae, expected, expected, slack)
    if not any(d.whole):
        assert found.sqnr_db == math.inf
    elif min(norm, root(d.squares)) > 1e-300:
        decibels = 20 * math.log10(norm) - 20 * math.log10(root(d.squares))
        assert abs(found.sqnr_db - decibels) <= 1e-8 * max(1.0, abs(decibels))


def _assert_cosine(found: Difference, r: Exact, c: Exact, d: Exact) -> None:
    both = r.squares + c.squares
    if both:
        expected = as_float(d.squares / both)
        assert near(found.rel, expected, expected, 1e-321 / root(both))
    else:
        assert math.isnan(found.rel)
    norms = r.squares * c.squares
    if not norms:
        assert math.isnan(found.cosine) and math.isnan(found.cosine_distance)
    elif min(root(r.squares), root(c.squares)) > 1e-300:
        dot, terms = r.dot(c)
        cosine = (-1 if dot < 0 else 1) * root(dot * dot / norms)
        assert abs(found.cosine - cosine) <= 1e-9 * root(terms * terms / norms) + 1e-300
        assert -1.0 <= found.cosine <= 1.0 and 0.0 <= found.cosine_distance <= 2.0
        # 1 - cos = (1 - cos²) / (1 + cos), of which the numerator is exact here
        if cosine > 0:
            distance = as_float(1 - dot * dot / norms) / (1 + cosine)
        else:
            distance = 1 - cosine
        scale = root(d.squares * d.squares / norms)
        assert abs(found.cosine_distance - distance) <= 1e-9 * scale + 1e-300


def _assert_correlation(found: Difference, r: Exact, c: Exact) -> None:
    one, two = r.centred(), c.centred()
    norms = one.squares * two.squares
    if not norms:
        assert math.isnan(found.correlation) and found.correlation_grade == "undefined"
        return
    spreads = [root(side.squares / len(r.whole)) for side in (one, two)]
    if min(spreads) < 1e-300:
        return
    dot, terms = one.dot(two)
    correlation = (-1 if dot < 0 else 1) * root(dot * dot / norms)
    rounding = EPS * (r.top / spreads[0] + c.top / spreads[1])
    assert abs(found.correlation - correlation) <= 1e-9 * root(terms**2 / norms) + 8 * rounding
    assert -1.0 <= found.correlation <= 1.0


def _assert_percentiles(found: Difference, distances: Sequence[float]) -> None:
    """To the last bit what numpy makes of the float64 values; torch may round another way."""
    assert found.percentiles is not None and found.histogram is not None
    expected = np.percentile(np.array(distances), [50, 90, 95, 99])
    torchs = torch.quantile(
        torch.tensor(distances, dtype=torch.float64),
        torch.tensor([0.5, 0.9, 0.95, 0.99], dtype=torch.float64),
    )
    for k, percent in enumerate((50, 90, 95, 99)):
        value = found.percentiles[percent]
        assert value == expected[k], percent
        assert abs(value - float(torchs[k])) <= 2 * EPS * value, percent
        assert value == getattr(found, f"p{percent}")
    assert found.percentiles_exact
    total = found.histogram.total
    assert total == found.finite if found.finite <= 1 << 20 else total >= 1 << 18
