"""Rows that stay on the device: the same numbers as a summary, whatever is merged in what order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from definitions import DTYPES, FLOATS, assert_defines
from hypothesis import given, settings
from hypothesis import strategies as st
from test_backends import VIEWS
from test_summary_values import HARD, KINDS, from_bytes, noise
from torch.utils._python_dispatch import TorchDispatchMode

from tensortap.errors import OptionError
from tensortap.numerics import device, summarize
from tensortap.numerics.device import (
    accumulate,
    accumulate_many,
    accumulate_on,
    empty_rows,
    merge_into,
    merge_rows,
    reset,
)
from tensortap.numerics.summary import COLUMNS, WIDTH, Summary

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ways = pytest.mark.parametrize("way", [accumulate, accumulate_on])
Way = Callable[[torch.Tensor, torch.Tensor], None]


def row_of(way: Way, *tensors: torch.Tensor) -> Summary:
    row = empty_rows(1, "cpu")[0]
    for tensor in tensors:
        way(tensor, row)
    return Summary.from_row(row.tolist())


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of all; by bytes, since torch concatenates not every dtype."""
    raw = b"".join(bytes(t.contiguous().view(torch.uint8).tolist()) for t in tensors if t.numel())
    return from_bytes(raw, tensors[0].dtype)


@dtypes
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.binary(max_size=300))
def test_any_bytes(dtype: torch.dtype, data: bytes) -> None:
    tensor = from_bytes(data, dtype)
    assert_defines(row_of(accumulate, tensor), tensor)


@ways
@dtypes
def test_parts_make_the_whole(way: Way, dtype: torch.dtype) -> None:
    """Every bit pattern, cut anywhere; the last row is merged into one that holds more."""
    parts = [noise(n, dtype, seed=n) for n in (3, 0, 1, 700, 64, 5)]
    assert_defines(row_of(way, *parts), joined(parts))


@ways
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    values=st.lists(st.lists(st.sampled_from(HARD), max_size=9), min_size=1, max_size=4),
    turn=st.integers(0, 3),
)
def test_hard_values_in_any_order(
    way: Way, dtype: torch.dtype, values: list[list[float]], turn: int
) -> None:
    parts = [torch.tensor(v, dtype=torch.float64).to(dtype) for v in values]
    assert_defines(row_of(way, *parts), torch.cat(parts))
    turned = parts[turn:] + parts[:turn]
    assert_defines(row_of(way, *turned), torch.cat(turned))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_constant_has_no_spread(dtype: torch.dtype) -> None:
    for value in (0.1, -3.0, 0.0):
        tensor = torch.full((4097,), value, dtype=torch.float64).to(dtype)
        constant = float(tensor[0].to(torch.float64))
        summary = row_of(accumulate, tensor, tensor[:5], tensor)
        assert (summary.mean, summary.std) == (constant, 0.0)
        assert summary.min == summary.max == constant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_in_chunks(
    dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CHUNK", 4096)
    x = torch.randn(9001, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensor = KINDS[kind](x).to(dtype)
    assert_defines(row_of(accumulate, tensor), tensor)
    assert_defines(row_of(accumulate, tensor[:100], tensor[100:]), tensor)


@pytest.mark.parametrize(
    "values",
    [
        [1.7e308, 1.7e308, 1.6e308],
        [1.7e308, -1.7e308, 1e300],
        [1e-300, 2e-300, -4e-300],
        [5e-324, 0.0, 1e-323],
        [1e200, 1.0],
        [1e15, 1e15 + 1, 1e15 + 2],
    ],
)
def test_extremes_of_float64(values: list[float]) -> None:
    tensor = torch.tensor(values * 100, dtype=torch.float64)
    assert_defines(row_of(accumulate, tensor), tensor)
    assert_defines(row_of(accumulate, *tensor.split(7)), tensor)


@ways
@pytest.mark.parametrize("view", VIEWS)
def test_views_read_as_their_elements(way: Way, view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = VIEWS[view]()
    expected = torch.Tensor(tensor.detach()) if view == "subclass" else tensor
    assert_defines(row_of(way, tensor), expected)
    monkeypatch.setattr(device, "CHUNK", 100)
    assert_defines(row_of(way, tensor), expected)


class NobodyAsks(TorchDispatchMode):
    """Fails on the operations that would wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in str(func) for word in self.WAITS), func
        indices = args[1] if "aten.index" in str(func) and len(args) > 1 else []
        if isinstance(indices, (list, tuple)):
            assert not any(i is not None and i.dtype == torch.bool for i in indices), func
        return func(*args, **kwargs or {})


@dtypes
def test_no_operation_waits_for_the_device(dtype: torch.dtype) -> None:
    tensor, row = noise(64, dtype).view(8, 8)[:, 1:], empty_rows(2, "cpu")
    with NobodyAsks():
        accumulate(tensor, row[0])
        accumulate(tensor, row[0])
        merge_rows(row, row.flip(0))
        reset(row)
    with pytest.raises(AssertionError), NobodyAsks():
        row[0, 0].item()
    with pytest.raises(AssertionError), NobodyAsks():
        row[row > 0]


@ways
def test_looking_changes_nothing(way: Way) -> None:
    tensor = torch.randn(1000, requires_grad=True)
    row = empty_rows(1, "cpu")[0]
    before, version, state = tensor.detach().clone(), tensor._version, torch.get_rng_state()
    result = (tensor * 2).sum()
    with torch.enable_grad():
        way(tensor, row)
        way(result, row)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(tensor, before) and tensor._version == version
    assert row.grad_fn is None and not row.requires_grad
    result.backward()
    assert torch.equal(tensor.grad, torch.full_like(tensor, 2.0))


@ways
def test_rows_may_be_made_and_filled_in_any_mode(way: Way) -> None:
    with torch.inference_mode():
        row = empty_rows(1, "cpu")[0]
        inside = torch.ones(3)
        way(inside, row)
    way(inside, row)
    with torch.inference_mode():
        reset(row)
    way(torch.tensor([2.0]), row)
    assert Summary.from_row(row.tolist()) == summarize(torch.tensor([2.0]))


@ways
def test_whatever_stands_in_an_empty_row_is_forgotten(way: Way) -> None:
    for held in (torch.zeros(WIDTH, dtype=torch.float64), empty_rows(1, "cpu")[0]):
        way(torch.empty(0), held)
        assert held[0] == 0
        way(torch.tensor([math.nan, -3.0]), held)
        assert_defines(Summary.from_row(held.tolist()), torch.tensor([math.nan, -3.0]))
    used = empty_rows(1, "cpu")[0]
    way(torch.randn(50), used)
    reset(used)
    assert torch.equal(used.isnan(), empty_rows(1, "cpu")[0].isnan())
    way(torch.full((3,), math.inf), used)
    assert_defines(Summary.from_row(used.tolist()), torch.full((3,), math.inf))


def test_rows_on_the_host_merge_like_summaries() -> None:
    tensors = [
        torch.empty(0),
        torch.tensor([math.nan, math.inf]),
        torch.tensor([3.0]),
        torch.randn(7) + 1e6,
        torch.randn(100),
        torch.tensor([1.7e308, -1.7e308], dtype=torch.float64),
    ]
    rows = np.array([summarize(t).to_row() for t in tensors])
    pairs = [(a, b) for a in range(len(tensors)) for b in range(len(tensors))]
    expected = [summarize(tensors[a]).merge(summarize(tensors[b])) for a, b in pairs]
    table = np.stack([rows[a] for a, _ in pairs])
    merge_into(table, np.stack([rows[b] for _, b in pairs]))
    for (a, b), whole, together in zip(pairs, expected, table, strict=True):
        alone = rows[a].copy()
        merge_into(alone, rows[b])
        assert alone == pytest.approx(whole.to_row(), rel=1e-14, nan_ok=True)
        assert together == pytest.approx(whole.to_row(), rel=1e-14, nan_ok=True)


def test_without_float64_the_row_is_float32() -> None:
    """As on mps, whose rows are float32: seven digits, and nothing overflows."""
    for values in (torch.randn(5000) + 3, torch.randn(500) * 1e30, torch.randn(500) * 1e-30):
        row = empty_rows(1, "cpu")[0].to(torch.float32)
        accumulate(values[:100], row)
        accumulate(values[100:], row)
        expected = summarize(values)
        found = dict(zip(COLUMNS, row.tolist(), strict=False))
        for name in ("count", "zeros", "std", "min", "max", "absmax", "l2"):
            assert found[name] == pytest.approx(getattr(expected, name), rel=1e-5), name
        assert found["mean"] == pytest.approx(expected.mean, abs=1e-6 * expected.rms)


def test_many_tensors_into_their_rows() -> None:
    tensors = [torch.randn(3, 4), torch.empty(0), torch.arange(5), torch.randn(6, 6).t()]
    rows = empty_rows(len(tensors), "cpu")
    accumulate_many(tensors, rows)
    accumulate_many(tensors, rows)
    for tensor, row in zip(tensors, rows, strict=True):
        assert_defines(Summary.from_row(row.tolist()), torch.cat([tensor.reshape(-1)] * 2))


def test_what_is_no_row_is_refused_in_words() -> None:
    x = torch.ones(3)
    with pytest.raises(
        OptionError, match=r"23 float64 .*got torch.float64 of shape .5,.*empty_rows"
    ):
        accumulate(x, torch.zeros(5, dtype=torch.float64))
    with pytest.raises(OptionError, match=r"got torch.float16"):
        accumulate_on(x, torch.zeros(WIDTH, dtype=torch.float16))
    with pytest.raises(OptionError, match=r"tensor on cpu .* row is on meta"):
        accumulate(x, empty_rows(1, "meta")[0])
    with pytest.raises(OptionError, match=r"for 2 tensors .*\(2, 23\), but got \(1, 23\)"):
        accumulate_many([x, x], empty_rows(1, "cpu"))
    with pytest.raises(OptionError, match=r"tensor\.values\(\)"):
        accumulate(torch.eye(3).to_sparse(), empty_rows(1, "cpu")[0])
