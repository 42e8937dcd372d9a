"""The histogram's grid, its quantiles, and exact quantiles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from definitions import BACKENDS, buckets_of, summary_by
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.errors import OptionError
from tensortap.numerics.histogram import BUCKETS, Histogram
from tensortap.numerics.quantiles import exact_quantiles

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
quantiles = st.floats(0, 1)


def histogram_of(values: list[float]) -> Histogram:
    return Histogram(buckets_of(values))


def test_every_value_lies_within_its_bucket() -> None:
    values = np.concatenate([np.geomspace(1e-44, 3.4e38, 3000), -np.geomspace(1e-44, 3.4e38, 3000)])
    values = values.astype(np.float32).astype(np.float64)
    lower, upper = Histogram(np.zeros(BUCKETS)).edges()
    for value in values:
        (key,) = np.flatnonzero(buckets_of([value]))
        assert lower[key] <= value <= upper[key]


def test_a_bucket_is_at_most_a_sixteenth_wide() -> None:
    lower, upper = Histogram(np.zeros(BUCKETS)).edges()
    near, far = np.minimum(abs(lower), abs(upper)), np.maximum(abs(lower), abs(upper))
    normal = (near >= 2.0**-126) & (far < 2.0**127)
    width = (far[normal] - near[normal]) / near[normal]
    assert width.min() > 0 and width.max() <= 1 / 16


@settings(max_examples=200, deadline=None, derandomize=True)
@given(values=st.lists(floats, min_size=1, max_size=50), q=quantiles)
def test_a_quantile_is_right_to_within_a_bucket(values: list[float], q: float) -> None:
    found = histogram_of(values).quantile(q, lo=min(values), hi=max(values))
    ordered = sorted(values)
    position = q * (len(values) - 1)
    below, above = ordered[math.floor(position)], ordered[math.ceil(position)]
    lower, upper = histogram_of(values).edges()
    (first,) = np.flatnonzero(buckets_of([below]))
    (last,) = np.flatnonzero(buckets_of([above]))
    slack = 1e-12 * max(map(abs, values))
    assert max(lower[first], min(values)) - slack <= found
    assert found <= min(upper[last], max(values)) + slack


@settings(max_examples=50, deadline=None, derandomize=True)
@given(a=st.lists(floats, max_size=20), b=st.lists(floats, max_size=20))
def test_merging_is_counting_together(a: list[float], b: list[float]) -> None:
    both = histogram_of(a).merge(histogram_of(b))
    assert both == histogram_of(a + b)
    assert Histogram.from_sparse(*both.sparse()) == both
    assert both.total == len(a) + len(b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_median_of_a_normal_distribution(backend: str) -> None:
    x = 5 + torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    summary = summary_by(backend, x)
    for q in (0.0, 0.01, 0.5, 0.99, 1.0):
        assert summary.quantile(q) == pytest.approx(float(x.quantile(q)), rel=1 / 32, abs=0.05)


def test_filled_buckets_ascend() -> None:
    lower, upper, counts = histogram_of([3.0, -2.0, 0.0, -0.5, 3.1]).buckets()
    assert (lower[1:] >= upper[:-1]).all() and counts.tolist() == [1, 1, 1, 2]


def test_a_histogram_cannot_be_changed_from_outside() -> None:
    counts = np.zeros(BUCKETS, dtype=np.int64)
    histogram = Histogram(counts)
    counts[0] = 7
    assert histogram.total == 0
    with pytest.raises(ValueError, match="read-only"):
        histogram.counts[0] = 1


def test_sentences() -> None:
    with pytest.raises(OptionError, match=r"holds no histogram.*histogram=True"):
        summary_by("reference", torch.ones(3), histogram=False).quantile(0.5)
    with pytest.raises(OptionError, match=r"between 0 and 1, but got 1\.5"):
        summary_by("reference", torch.ones(3)).quantile(1.5)
    with pytest.raises(OptionError, match="8192 counts"):
        Histogram(np.zeros(3))
    with pytest.raises(OptionError, match="numbered 0 to 8191"):
        Histogram.from_sparse([9000], [1])
    with pytest.raises(OptionError, match="between 0 and 1"):
        exact_quantiles(torch.ones(3), [2.0])
    assert math.isnan(summary_by("reference", torch.empty(0)).quantile(0.5))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), q=quantiles)
def test_exact_quantiles_are_those_of_torch(values: list[float], q: float) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    expected = float(torch.quantile(x, q))
    assert exact_quantiles(x, [q]) == [pytest.approx(expected, rel=1e-12, abs=1e-9)]


def test_exact_quantiles_of_other_kinds() -> None:
    x = torch.tensor([4.0, math.nan, 1.0, math.inf, 3.0, 2.0, -math.inf])
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        finite = torch.tensor([4.0, 1.0, 3.0, 2.0]).to(dtype)
        assert exact_quantiles(finite, [0.0, 0.5, 1.0]) == [1.0, 2.5, 4.0]
    assert exact_quantiles(x, [0.5, 0.0]) == [2.5, 1.0]
    assert exact_quantiles(torch.tensor([True, False, False]), [1.0]) == [1.0]
    assert exact_quantiles(torch.tensor([1 + 2j, 3 + 4j]), [0.5]) == [2.5]
    assert exact_quantiles(torch.arange(12).view(3, 4).t(), [0.25]) == [2.75]
    assert math.isnan(exact_quantiles(torch.empty(0), [0.5])[0])
