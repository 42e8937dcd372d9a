"""Rows that CUDA graphs write to: each graph has its own, whoever captures at the same time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from threading import get_ident

import pytest
import torch

import tensortap as tap
from support import Net
from tensortap.taps.captures import Captures, _Captured

CPU = torch.device("cpu")


@pytest.fixture
def captures(net: Net, tmp_path: Path) -> Iterator[Captures]:
    with tap.record(net, tmp_path / "run", keep="summary") as rec:
        yield rec.tap._captures  # type: ignore[attr-defined]


def borrow(captures: Captures, rows: int) -> _Captured:
    found = _Captured()
    captures._borrow(found, CPU)
    found.rows = rows
    return found


def span(found: _Captured) -> range:
    """The addresses of its rows, as numbers of bytes."""
    assert found.block is not None
    first = found.block[found.first].data_ptr()
    return range(first, first + found.rows * found.block[0].nbytes)


def test_graphs_from_before_are_named_though_every_layer_was_heard(
    net: Net, ids: torch.Tensor, tmp_path: Path
) -> None:
    with tap.record(net, tmp_path / "run", keep="summary") as rec:
        net(ids)
        found: Captures = rec.tap._captures  # type: ignore[attr-defined]
        found.replayed(Captures)  # anything that it did not see captured
        found.replayed(Captures)
    (note,) = [note for note in tap.open(tmp_path / "run").manifest.notes if "CUDA graphs" in note]
    assert "captured before this recording began were replayed 2 times" in note


def test_a_dtype_that_nothing_can_be_cast_to_ends_no_capture(captures: Captures) -> None:
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    if packed is None:
        pytest.skip("this torch has no packed dtype")
    captures._dtypes = [packed, torch.float32]
    found = borrow(captures, 0)
    captures._warm(found)
    assert found.block is not None
    assert found.block[0, 0] == 16  # the other one was summed up


def test_one_capture_behind_the_other_shares_a_block(captures: Captures) -> None:
    one = borrow(captures, 5)
    captures._give_back(one)
    two = borrow(captures, 3)
    captures._give_back(two)
    assert one.block is two.block
    assert span(two).start == span(one).stop


def test_captures_at_the_same_time_share_no_row(captures: Captures) -> None:
    one, two = borrow(captures, 5), borrow(captures, 7)
    captures._give_back(two)
    captures._give_back(one)
    three = borrow(captures, 9)
    spans = sorted([span(one), span(two), span(three)], key=lambda rows: rows.start)
    assert all(a.stop <= b.start for a, b in pairwise(spans))


def test_a_block_that_is_nearly_full_is_left(captures: Captures) -> None:
    one = borrow(captures, 0)
    assert one.block is not None
    one.rows = len(one.block) - captures._room + 1
    captures._give_back(one)
    assert borrow(captures, 1).block is not one.block


def begun(captures: Captures, graph: object, left: int) -> _Captured:
    """A graph that this thread is capturing, which has left a row behind."""
    found = borrow(captures, 1)
    found.parts, found.left = torch.zeros(64, dtype=torch.float64), left
    found.kept += (found.block, found.parts)
    captures._now[get_ident()] = found
    captures._graphs[graph] = found
    return found


class Graph:
    pass


def test_a_capture_that_is_spoilt_ends_no_recording(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is launched in it raises; torch says so, and the model may go on without graphs."""

    def broken(rows: torch.Tensor) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    said: list[Exception] = []
    monkeypatch.setattr(captures, "_fail", said.append)
    monkeypatch.setattr("tensortap.taps.captures._stream", lambda device: 0)
    monkeypatch.setattr("tensortap.taps.captures.on_device.settle", broken)
    graph = Graph()
    found = begun(captures, graph, left=8)
    captures.ends(graph)
    assert not said and graph not in captures._graphs
    block, used = captures._free[CPU]
    assert block is found.block and used == found.first + 1
    captures.replayed(graph)
    assert captures.unknown == 1


def test_rows_are_settled_when_a_capture_ends(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = []
    monkeypatch.setattr("tensortap.taps.captures._stream", lambda device: 0)
    monkeypatch.setattr("tensortap.taps.captures.on_device.settle", settled.append)
    for left in (8, 0):
        graph = Graph()
        found = begun(captures, graph, left)
        parts = weakref.ref(found.parts)
        captures.ends(graph)
        assert graph in captures._graphs
        gc.collect()
        assert (parts() is not None) == bool(left)  # what no launch writes to need not stay
    assert [rows.data_ptr() for rows in settled] == [settled[0].data_ptr()]
    assert len(settled[0]) == 1
