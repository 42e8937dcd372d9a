"""What a summary is, by exact arithmetic on Python numbers; and every backend that must agree.

Nothing here shares code with what it judges, but for the names of the columns.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from tensortap.numerics.histogram import BUCKETS, Histogram
from tensortap.numerics.native import CODES, core
from tensortap.numerics.reference import ReferenceBackend
from tensortap.numerics.summary import WIDTH, Summary

DTYPES = list(CODES)
FLOATS = [d for d in DTYPES if d.is_floating_point]
INTEGERS = [d for d in DTYPES if not (d.is_floating_point or d.is_complex or d == torch.bool)]


@dataclass(frozen=True)
class NativeAt:
    """The core at one instruction set and number of threads, with nothing in between."""

    isa: int
    threads: int = 1
    name: str = "native"

    def summarize_row(
        self, tensor: torch.Tensor, histogram: bool
    ) -> tuple[Sequence[float], Histogram | None]:
        assert core is not None and tensor.is_contiguous()
        row = array("d", bytes(8 * WIDTH))
        counts = np.zeros(BUCKETS, dtype=np.int64)
        code, parts = CODES[tensor.dtype]
        core.summarize(
            tensor.data_ptr(),
            tensor.numel() * parts,
            code,
            row.buffer_info()[0],
            counts.ctypes.data if histogram else 0,
            self.threads,
            self.isa,
        )
        return row, Histogram(counts) if histogram else None


BACKENDS: dict[str, ReferenceBackend | NativeAt] = {"reference": ReferenceBackend()}
if core is not None:
    BACKENDS |= {name: NativeAt(index) for index, name in enumerate(core.isas())}


def summary_by(backend: str, tensor: torch.Tensor, histogram: bool = True) -> Summary:
    return Summary.from_row(*BACKENDS[backend].summarize_row(tensor, histogram))


def values_of(tensor: torch.Tensor) -> list[float]:
    """The values as Python numbers, in order; integers stay exact."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in INTEGERS:
        return tensor.flatten().tolist()
    return tensor.flatten().to(torch.float64).tolist()


def _root(value: Fraction) -> float:
    """The square root of a fraction that may lie far outside the range of floats."""
    if value == 0:
        return 0.0
    shift = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    scaled = value / Fraction(4) ** shift
    try:
        return math.ldexp(math.sqrt(scaled), shift)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Expected:
    mean: float
    std: float
    l2: float
    mean_abs: float


def expected_moments(values: Sequence[float]) -> Expected:
    """Exact, in integers over one common denominator (floats have powers of two)."""
    ratios = [v.as_integer_ratio() for v in values if math.isfinite(v)]
    unit = max(denominator for _, denominator in ratios)
    whole = [numerator * (unit // denominator) for numerator, denominator in ratios]
    n, total, square = len(whole), sum(whole), sum(v * v for v in whole)
    return Expected(
        mean=float(Fraction(total, n * unit)),
        std=_root(Fraction(n * square - total * total, (n * unit) ** 2)),
        l2=_root(Fraction(square, unit * unit)),
        mean_abs=float(Fraction(sum(map(abs, whole)), n * unit)),
    )


def buckets_of(values: Sequence[float]) -> np.ndarray:
    limit = np.finfo(np.float32).max
    narrow = np.clip(np.array(values, dtype=np.float64), -limit, limit).astype(np.float32)
    return np.bincount(narrow.view(np.uint32) >> 19, minlength=BUCKETS)


def assert_defines(summary: Summary, tensor: torch.Tensor, bound: float = 1e-9) -> None:
    """The summary is this tensor's, to within the bound of the design: a CPU's, or 1e-6."""
    values = values_of(tensor)
    finite = [v for v in values if math.isfinite(v)]
    assert summary.count == len(values)
    assert summary.nan == sum(math.isnan(v) for v in values)
    assert summary.posinf == sum(v == math.inf for v in values)
    assert summary.neginf == sum(v == -math.inf for v in values)
    assert summary.zeros == sum(v == 0 for v in values)
    _assert_format_counts(summary, tensor, finite)
    assert list(map(repr, summary.first)) == [repr(float(v)) for v in values[:10]]
    if summary.histogram is not None:
        assert np.array_equal(summary.histogram.counts, buckets_of(finite))
    if not finite:
        moments = (summary.mean, summary.std, summary.min, summary.max, summary.absmax)
        assert all(map(math.isnan, moments)) and summary.l2 == 0.0
        return
    assert (summary.min, summary.max) == (float(min(finite)), float(max(finite)))
    assert summary.absmax == float(max(map(abs, finite)))
    expected = expected_moments(values)
    tiny = 1e-322  # what rounding to subnormals may cost
    assert abs(summary.mean - expected.mean) <= bound * expected.mean_abs + tiny
    # A mean in float64 is itself rounded; around 1e11 standard deviations away that shows.
    rounding = 4 * np.finfo(np.float64).eps * summary.absmax
    assert abs(summary.std - expected.std) <= bound * expected.std + rounding + tiny
    if expected.l2 > 1.797693e308:  # the last bits decide whether this is infinite
        assert summary.l2 > 1.797693e308
    else:
        assert abs(summary.l2 - expected.l2) <= bound * expected.l2 + tiny


def _assert_format_counts(summary: Summary, tensor: torch.Tensor, finite: Sequence[float]) -> None:
    dtype = torch.view_as_real(tensor.resolve_conj()).dtype if tensor.is_complex() else tensor.dtype
    if dtype == torch.bool:
        assert (summary.subnormal, summary.saturated) == (0, 0)
    elif dtype.is_floating_point:
        info = torch.finfo(dtype)
        assert summary.subnormal == sum(0 < abs(v) < info.smallest_normal for v in finite)
        assert summary.saturated == sum(abs(v) == info.max for v in finite)
    else:
        limits = {torch.iinfo(dtype).max, torch.iinfo(dtype).min or None}
        assert (summary.subnormal, summary.saturated) == (0, sum(v in limits for v in finite))
