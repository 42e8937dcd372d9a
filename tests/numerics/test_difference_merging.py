"""Parts in any order and any split, and streams of pairs, are the whole."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch
from difference_definitions import BACKENDS, Definition, difference_by, difference_of_by
from hypothesis import given, settings
from hypothesis import strategies as st
from test_summary_values import HARD

import tensortap.numerics.reference_difference as reference_difference
from tensortap.errors import OptionError
from tensortap.numerics.difference import Difference, difference, difference_of
from tensortap.numerics.difference_row import EMPTY, STATE, State, merge_rows
from tensortap.numerics.histogram import Histogram
from tensortap.numerics.percentiles import from_histogram, weighted

backends = pytest.mark.parametrize("backend", BACKENDS)
SAFE = [value for value in HARD if not 1e300 < abs(value) < math.inf]
value = st.one_of(st.sampled_from(SAFE), st.floats(-1e290, 1e290), st.floats(-10, 10))
near = st.builds(lambda r, e: (r, r + r * e), value, st.sampled_from([0.0, 1e-12, 1e-7, 1e-2]))
pairs = st.lists(st.one_of(st.tuples(value, value), near), max_size=50)


def tensors(values: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.tensor(values, dtype=torch.float64).reshape(-1, 2)
    return table[:, 0].contiguous(), table[:, 1].contiguous()


def cut(draw: st.DrawFn, n: int) -> list[tuple[int, int]]:
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
    return list(zip([0, *cuts], [*cuts, n], strict=True))


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[list[tuple[float, float]]], bool]:
    values = draw(pairs)
    parts = [values[a:b] for a, b in cut(draw, len(values))]
    return [list(part) for part in draw(st.permutations(parts))], draw(st.booleans())


@backends
@settings(max_examples=60, deadline=None, derandomize=True)
@given(partition=partitions(), tree=st.randoms(use_true_random=False))
def test_merging_parts_in_any_order_is_the_whole(
    backend: str, partition: tuple[list[list[tuple[float, float]]], bool], tree: object
) -> None:
    parts, percentiles = partition
    pool = [difference_by(backend, *tensors(part), percentiles=percentiles) for part in parts]
    while len(pool) > 1:
        k = tree.randrange(len(pool) - 1)  # type: ignore[attr-defined]
        pool[k : k + 2] = [pool[k].merge(pool[k + 1])]
    found = pool[0]
    whole = [tensors([pair for part in parts for pair in part])]
    if percentiles and len(parts) > 1:
        assert found.percentiles is not None and not found.percentiles_exact
        assert found.histogram is not None and found.histogram.total == found.finite
    bare = replace(found, percentiles=None, histogram=None, percentiles_exact=False)
    Definition(whole).check(bare, percentiles=False)


@backends
@settings(max_examples=60, deadline=None, derandomize=True)
@given(partition=partitions())
def test_a_stream_of_pairs_is_the_whole(
    backend: str, partition: tuple[list[list[tuple[float, float]]], bool]
) -> None:
    """Percentiles too, and to the last bit."""
    parts, percentiles = partition
    stream = [tensors(part) for part in parts]
    found = difference_of_by(backend, stream, percentiles=percentiles)
    Definition(stream).check(found, percentiles=percentiles)
    again = difference_of_by(backend, lambda: iter(stream), percentiles=percentiles)
    assert repr(again) == repr(found)
    if found.max_abs_index is None:
        assert found.finite == 0
    else:
        number, place = found.max_abs_index
        r, c = stream[number]
        assert found.max_abs_pair == (float(r[place]), float(c[place]))


@backends
def test_a_stream_of_many_shapes_and_dtypes(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    stream = []
    for shape, one, two in (
        ((3, 40), torch.float32, torch.bfloat16),
        ((), torch.float64, torch.float16),
        ((0, 5), torch.int8, torch.int8),
        ((2, 3, 4), torch.int64, torch.int64),
        ((17,), torch.complex64, torch.complex64),
        ((5, 6), torch.float32, torch.float32),
    ):
        x = 9 * torch.randn(shape, generator=generator)
        stream.append((x.to(one), (x + torch.randn(shape, generator=generator)).to(two)))
    stream[0] = (stream[0][0].t(), stream[0][1].t())  # not contiguous
    found = difference_of_by(backend, stream)
    Definition(stream).check(found)
    assert found.dtypes == ("mixed", "mixed")
    assert (found.rtol, found.atol) == (1.6e-2, 1e-5)
    assert found.max_abs_index is not None
    number, *place = found.max_abs_index
    r, c = stream[number]
    assert abs(complex(c[tuple(place)]) - complex(r[tuple(place)])) >= found.max_abs * 0.999
    given_limits = difference_of_by(backend, stream, rtol=0.5, atol=0.25)
    Definition(stream, rtol=0.5, atol=0.25).check(given_limits)


@backends
def test_a_thousand_pieces_keep_the_bound(backend: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x, e = torch.randn(2, 4000, generator=generator, dtype=torch.float64)
    one, two = 1e6 + x, 1e6 + x + 1e-3 * e
    pieces = zip(one.split(4), two.split(4), strict=True)
    found = [difference_by(backend, r, c, percentiles=False) for r, c in pieces]
    for order in (found, found[::-1]):
        total = reduce(Difference.merge, order)
        merged = replace(total, row=total.row._replace(max_abs_at=0.0))
        expected = difference_by(backend, one, two, percentiles=False)
        for name in ("mean", "std", "mae", "mse", "correlation", "cosine_distance", "rel"):
            assert getattr(merged, name) == pytest.approx(getattr(expected, name), rel=1e-9), name


def test_chunks_of_the_reference_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    r = torch.randn(30, 7, 11, generator=generator)
    c = (r + 0.1 * torch.randn(30, 7, 11, generator=generator)).half()
    for one, two in ((r, c), (r[::2], c[::2]), (r.transpose(0, 2), c.transpose(0, 2))):
        definition = Definition([(one, two)])
        for chunk in (3, 10, 100, 1000):
            monkeypatch.setattr(reference_difference, "CHUNK", chunk)
            definition.check(difference_by("reference", one, two))


def test_merging_keeps_the_place_of_the_largest() -> None:
    small = difference(torch.zeros(2, 3), torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    large = difference(torch.zeros(4), torch.tensor([0.0, 0.0, 0.0, -5.0]))
    assert small.merge(large).max_abs_index == large.merge(small).max_abs_index == (3,)
    assert small.merge(large).max_abs_pair == (0.0, -5.0)
    also = difference(torch.zeros(5), torch.tensor([5.0, 0.0, 0.0, 0.0, 0.0]))
    assert large.merge(also).max_abs_index == (3,)  # the first on a tie
    assert also.merge(large).max_abs_index == (0,)
    nothing = difference(torch.tensor([math.nan]), torch.tensor([1.0]))
    assert nothing.merge(small).max_abs_index == small.merge(nothing).max_abs_index == (0, 1)
    assert nothing.merge(nothing).max_abs_index is None


def test_merging_joins_what_is_not_a_number() -> None:
    x = torch.randn(10, generator=torch.Generator().manual_seed(4))
    same, other = difference(x, x.clone()), difference(x.half(), x)
    merged = same.merge(other)
    assert same.merge(same).identical and not merged.identical and not other.merge(same).identical
    assert merged.dtypes == ("mixed", "float32") and same.merge(same).dtypes == same.dtypes
    assert (merged.rtol, merged.atol) == (1e-3, 1e-5)
    assert same.merge(difference(x, x, percentiles=False)).percentiles is None
    assert merged.percentiles is not None and not merged.percentiles_exact


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 400), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_merged_percentiles_are_within_a_bucket(sizes: list[int], seed: int) -> None:
    """A bucket is at most a sixteenth wide; zero stays zero."""
    generator = np.random.default_rng(seed)
    parts = [
        np.round(generator.standard_normal(n) * 10.0 ** generator.integers(-4, 4), 3) for n in sizes
    ]
    found = [difference(torch.zeros(len(part)), torch.from_numpy(part).float()) for part in parts]
    merged = reduce(Difference.merge, found)
    distances = np.abs(np.concatenate(parts).astype(np.float32)).astype(np.float64)
    assert merged.percentiles is not None
    if not distances.size:
        assert all(map(math.isnan, merged.percentiles.values()))
        return
    for percent, value in merged.percentiles.items():
        low = np.percentile(distances, percent, method="lower")
        high = np.percentile(distances, percent, method="higher")
        assert low * (1 - 1 / 15) <= value <= high * (1 + 1 / 15)


def test_a_sample_weighs_what_it_stands_for() -> None:
    """A histogram of some of many values, beside one of all of few."""
    counts = np.zeros(8192, dtype=np.int64)
    counts[2032] = 1000  # around 1
    sample = Histogram(counts)
    grown = weighted(sample, 3_000_001)
    assert grown.total == 3_000_001 and weighted(sample, 1000) == sample
    many = difference(torch.zeros(1), torch.ones(1))
    many = Difference.from_row(
        many.row._replace(count=3e6, finite=3e6), histogram=sample, percentiles={}
    )
    few = difference(torch.zeros(20_000), torch.full((20_000,), 1000.0))
    for merged in (many.merge(few), few.merge(many)):
        assert merged.histogram is not None and merged.histogram.total == 3_020_000
        assert merged.p99 == pytest.approx(1.0, rel=1 / 15)
    assert from_histogram(Histogram(np.zeros(8192, dtype=np.int64)), math.nan).keys() == {
        *(50, 90, 95, 99)
    }


def test_rows_round_trip_and_are_checked() -> None:
    found = difference(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 4.0]]))
    again = Difference.from_row(
        found.row, (1, 2), percentiles=found.percentiles, histogram=found.histogram,
        rtol=found.rtol, atol=found.atol, dtypes=found.dtypes,
    )  # fmt: skip
    assert again == found and hash(again) == hash(found)
    assert STATE[:6] == ("count", "finite", "agreeing", "disagreeing", "mismatched", "identical")
    with pytest.raises(OptionError, match=f"has {len(STATE)} numbers, but got 3"):
        Difference.from_row([1.0, 2.0, 3.0])


def test_nothing_merges_with_anything() -> None:
    row = difference(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0])).row
    assert merge_rows(EMPTY, row) == merge_rows(row, EMPTY) == row
    odd = State(count=3.0, disagreeing=3.0, mismatched=3.0, identical=0.0)
    assert merge_rows(odd, row).max_abs_at == 3.0 and merge_rows(row, odd).max_abs_at == 0.0
    empty = difference_of([])
    assert (empty.count, empty.identical, empty.dtypes) == (0, True, ("", ""))
    assert repr(merge_rows(EMPTY, EMPTY)) == repr(EMPTY)
