"""Summary rows that come from elsewhere, later: their order, flush, close, and what goes wrong."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import tensortap as tap
from tensortap.numerics.summary import WIDTH
from tensortap.recording import Manifest, Writer
from tensortap.recording.schema import Site


class Later:
    """A copy on its way: the table holds nothing of use before somebody has waited for it."""

    def __init__(self, table: torch.Tensor, values: torch.Tensor, delay: float = 0.0) -> None:
        self.table, self.values, self.delay = table, values, delay
        self.waited: list[int] = []

    def synchronize(self) -> None:
        time.sleep(self.delay)
        self.table.copy_(self.values)
        self.waited.append(threading.get_ident())


class Lost:
    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def rows_of(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.tensor([tap.summarize(x).to_row() for x in tensors], dtype=torch.float64)


def open_writer(path: Path, **options) -> Writer:
    return Writer(str(path), Manifest(), **options)


def site(writer: Writer, name: str) -> int:
    return writer.site(Site(name, "output", "", None, "Linear", (3,), "float32", "cuda:0"))


def test_rows_are_waited_for_by_the_writer_and_stand_in_the_order_of_their_moments(tmp_path):
    writer = open_writer(tmp_path / "r")
    xs = [torch.full((3,), float(i)) for i in range(6)]
    table = torch.full((3, WIDTH), math.nan, dtype=torch.float64)
    later = Later(table, rows_of(*xs[1:4]), delay=0.2)
    writer.summarize(site(writer, "l0"), (0, 0, 0, 0), xs[0])
    before = time.perf_counter()
    writer.put_rows([(site(writer, f"l{i}"), (i, 0, 0, 0)) for i in (1, 2, 3)], table, later)
    writer.summarize(site(writer, "l4"), (4, 0, 0, 0), xs[4])
    assert time.perf_counter() - before < 0.15, "the caller waited"
    writer.close()
    assert writer.failure is None
    assert len(later.waited) == 1 and later.waited[0] != threading.get_ident()
    run = tap.open(tmp_path / "r")
    assert run.layers == ["l0", "l1", "l2", "l3", "l4"]
    assert [r.summary.mean for r in run.records] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_flush_waits_for_rows_that_are_on_their_way(tmp_path):
    writer = open_writer(tmp_path / "r", seal_after=60.0)
    table = torch.empty(1, WIDTH, dtype=torch.float64)
    later = Later(table, rows_of(torch.ones(3)), delay=0.3)
    writer.put_rows([(site(writer, "l"), (0, 0, 0, 0))], table, later)
    writer.flush()
    assert later.waited
    (record,) = tap.open(tmp_path / "r").records
    assert record.summary.mean == 1.0
    writer.close()


@pytest.mark.parametrize("waits", [True, False])
def test_the_table_may_be_used_again_once_it_was_taken(tmp_path, waits):
    writer = open_writer(tmp_path / "r", seal_after=60.0)
    table = rows_of(torch.ones(3))
    later = Later(table, rows_of(torch.ones(3))) if waits else None
    writer.put_rows([(site(writer, "l"), (0, 0, 0, 0))], table, later)
    while later is not None and not later.waited:
        time.sleep(0.01)
    time.sleep(0.1 if waits else 0.0)
    table.fill_(7.0)
    writer.close()
    (record,) = tap.open(tmp_path / "r").records
    assert record.summary.mean == 1.0 and record.summary.count == 3


@pytest.mark.parametrize("waits", [True, False])
def test_sketches_come_with_their_rows(tmp_path, waits):
    writer = open_writer(tmp_path / "r", seal_after=60.0)
    table, sketch = rows_of(torch.ones(3), torch.zeros(3)), torch.zeros(3, dtype=torch.float64)
    later = Later(sketch, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)) if waits else None
    if not waits:
        sketch.copy_(torch.tensor([1.0, 2.0, 3.0]))
    lines = [(site(writer, f"l{i}"), (i, 0, 0, 0)) for i in range(2)]
    writer.put_rows(lines, table, later, sketches={1: sketch})
    while later is not None and not later.waited:
        time.sleep(0.01)
    time.sleep(0.1 if waits else 0.0)
    sketch.fill_(9.0)
    writer.close()
    first, second = tap.open(tmp_path / "r").records
    assert first.sketch is None
    assert second.sketch.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("as_array", [True, False])
@pytest.mark.parametrize("present_only", [True, False])
def test_rows_that_count_nothing_are_dropped_when_asked(tmp_path, present_only, as_array):
    writer = open_writer(tmp_path / "r")
    table = rows_of(torch.ones(3), torch.empty(0), torch.zeros(3))
    lines = [(site(writer, f"l{i}"), (i, 0, 0, 0)) for i in range(3)]
    known = np.array([(at, *moment) for at, moment in lines]) if as_array else lines
    writer.put_rows(known, table, present_only=present_only)
    writer.close()
    expected = ["l0", "l2"] if present_only else ["l0", "l1", "l2"]
    run = tap.open(tmp_path / "r")
    assert run.layers == expected
    assert [record.order for record in run.records] == [int(name[1]) for name in expected]


def test_rows_that_are_lost_on_the_way_are_a_failure_and_nobody_hangs(tmp_path):
    writer = open_writer(tmp_path / "r")
    writer.summarize(site(writer, "l0"), (0, 0, 0, 0), torch.ones(3))
    writer.flush()
    table = rows_of(torch.ones(3))
    writer.put_rows([(site(writer, "l1"), (1, 0, 0, 0))], table, Lost())
    writer.flush()
    assert "illegal memory access" in (writer.failure or "")
    writer.put_rows([(site(writer, "l2"), (2, 0, 0, 0))], table)
    writer.close()
    run = tap.open(tmp_path / "r")
    assert run.status == "failed" and run.layers == ["l0"]


def test_a_table_of_another_shape_is_refused(tmp_path):
    writer = open_writer(tmp_path / "r")
    with pytest.raises(tap.TapError, match=rf"\(2, {WIDTH}\) float64"):
        writer.put_rows([(0, (0, 0, 0, 0)), (0, (1, 0, 0, 0))], torch.zeros(1, WIDTH))
    writer.close()


class Holder:
    """Holds rows until the writer asks, as a table on a device does."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.held, self.asked = writer, [], 0
        writer.on_pending(self.hand_over)

    def hold(self, order: int, value: float) -> None:
        self.held.append((order, value))

    def hand_over(self) -> None:
        assert not self.writer._lock.locked()
        self.asked += 1
        held, self.held = self.held, []
        if held:
            lines = [(site(self.writer, "l"), (order, 0, 0, 0)) for order, _ in held]
            table = rows_of(*(torch.full((3,), value) for _, value in held))
            self.writer.put_rows(lines, table, Later(table, table.clone()))


@pytest.mark.parametrize("end", ["flush", "close", "exit"])
def test_what_others_hold_is_asked_for_before_anything_ends(tmp_path, end):
    writer = open_writer(tmp_path / "r", seal_after=60.0)
    holder = Holder(writer)
    holder.hold(0, 5.0)
    if end == "flush":
        writer.flush()
    elif end == "close":
        writer.close()
    else:
        writer._at_exit()
    (record,) = tap.open(tmp_path / "r").records
    assert record.summary.mean == 5.0
    writer.close()


def test_an_idle_writer_asks_others_for_what_they_hold(tmp_path):
    writer = open_writer(tmp_path / "r", seal_after=0.2)
    holder = Holder(writer)
    holder.hold(0, 5.0)
    end = time.monotonic() + 10
    while not list((tmp_path / "r").glob("segment-*")) and time.monotonic() < end:
        time.sleep(0.02)
    (record,) = tap.open(tmp_path / "r").records
    assert record.summary.mean == 5.0
    writer.close()


def test_a_holder_that_raises_is_the_writers_failure_and_not_the_callers(tmp_path):
    writer = open_writer(tmp_path / "r", seal_after=60.0)

    def broken() -> None:
        raise ValueError("a bug of ours")

    writer.on_pending(broken)
    writer.flush()
    writer.close()
    assert "a bug of ours" in (writer.failure or "")
    assert tap.open(tmp_path / "r").status == "failed"


def test_many_threads_may_put_rows_and_none_is_lost(tmp_path):
    writer = open_writer(tmp_path / "r", seal_after=0.1)
    at = site(writer, "l")

    def put(start: int) -> None:
        for order in range(start, start + 50):
            table = rows_of(torch.full((3,), float(order)))
            writer.put_rows([(at, (order, 0, 0, 0))], table, Later(table, table.clone()))

    threads = [threading.Thread(target=put, args=(50 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    records = tap.open(tmp_path / "r").records
    assert np.array_equal([r.summary.mean for r in records], np.arange(200.0))
