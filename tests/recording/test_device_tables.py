"""Rows of a device on their way to the writer: here the device is the CPU, which has no streams."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensortap.numerics import summarize
from tensortap.numerics.sampling import sample, sample_on
from tensortap.numerics.summary import WIDTH, Summary
from tensortap.recording import device_table
from tensortap.recording.device_table import DeviceTable, DeviceTables

CPU = torch.device("cpu")


class Heard:
    """What a writer would have got, by line."""

    def __init__(self) -> None:
        self.rows: dict[Any, list[float]] = {}
        self.sketches: dict[Any, list[float]] = {}
        self.calls = 0

    def put(self, lines: Any, table: Any, ready: Any = None, *, sketches: Any = None) -> None:
        assert ready is None
        assert len(lines) == len(table)
        self.calls += 1
        for number, (site, *moment) in enumerate(np.array([np.hstack(one) for one in lines])):
            line = (int(site), tuple(int(part) for part in np.ravel(moment)))
            assert line not in self.rows
            self.rows[line] = table[number].tolist()
            if number in (sketches or {}):
                self.sketches[line] = sketches[number].tolist()


@pytest.fixture
def heard() -> Heard:
    return Heard()


def line(number: int) -> Any:
    return (number, (number, 0, 0, 0))


def test_rows_come_over_by_the_table(heard: Heard) -> None:
    table = DeviceTable(CPU, heard.put)
    tensors = [torch.randn(7) + i for i in range(5)]
    for i, tensor in enumerate(tensors):
        table.line(table.take(tensor), line(i))
        tensor.fill_(99.0)  # what is written later does not count
    assert heard.rows == {}
    with table.lock:
        table.send()
    assert heard.calls == 1
    assert [Summary.from_row(heard.rows[line(i)]).count for i in range(5)] == [7] * 5
    assert all(Summary.from_row(row).max < 99 for row in heard.rows.values())


def test_a_full_table_is_sent_and_begins_again(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_table, "ROWS", 4)
    table = DeviceTable(CPU, heard.put)
    for i in range(10):
        table.line(table.take(torch.full((3,), float(i))), line(i))
    with table.lock:
        table.send()
    assert heard.calls == 3
    assert [Summary.from_row(heard.rows[line(i)]).mean for i in range(10)] == [
        *map(float, range(10))
    ]


def test_a_line_may_come_after_its_row_was_sent(heard: Heard) -> None:
    table = DeviceTable(CPU, heard.put)
    outer = table.take(torch.full((2,), 1.0))  # the input of a layer that runs on
    inner = table.take(torch.full((2,), 2.0))
    table.line(inner, line(2))
    with table.lock:
        table.send()
    assert list(heard.rows) == [line(2)]
    other = table.take(torch.full((2,), 3.0))  # in the row where the first one was
    table.line(outer, line(1))
    table.line(other, line(3))
    with table.lock:
        table.send()
    assert {n: Summary.from_row(heard.rows[line(n)]).mean for n in (1, 2, 3)} == {1: 1, 2: 2, 3: 3}


def test_sketches_come_with_their_rows(heard: Heard) -> None:
    table = DeviceTable(CPU, heard.put)
    tensors = [torch.randn(5000) for _ in range(4)]
    tickets = [table.take(tensor, sample_on(tensor, 64)) for tensor in tensors]
    for i in (2, 0):
        table.line(tickets[i], line(i))
    with table.lock:
        table.send()
    for i in (3, 1):
        table.line(tickets[i], line(i))
    for i, tensor in enumerate(tensors):
        assert heard.sketches[line(i)] == sample(tensor, 64).tolist()
        assert Summary.from_row(heard.rows[line(i)]).first == summarize(tensor).first


def test_nothing_is_sent_twice(heard: Heard) -> None:
    tables = DeviceTables(heard.put)
    table = tables.of(CPU)
    assert tables.of(CPU) is table
    table.line(table.take(torch.ones(3)), line(0))
    tables.send()
    tables.send()
    assert heard.calls == 1


def test_a_sample_on_the_device_is_the_sample(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool):
        tensor = torch.randn(30, 200).to(dtype)
        for view in (tensor, tensor.T, tensor[:, ::3], tensor[0, 0], tensor[:0]):
            found = sample_on(view, 100)
            assert found is not None
            assert torch.equal(found, torch.from_numpy(sample(view, 100)))
    assert sample_on(torch.zeros(3, dtype=torch.uint16)) is None


@pytest.mark.parametrize("late", [False, True])
def test_rows_of_a_graph_are_copied_as_they_are(heard: Heard, late: bool) -> None:
    """A graph's rows are written again by its next replay, and may not fit what is left."""
    table = DeviceTable(CPU, heard.put)
    rows = torch.zeros(700, WIDTH, dtype=torch.float64)
    for replay in range(3):
        rows[:, 0] = torch.arange(1.0, 701) + 1000 * replay
        lines = [line(1000 * replay + i) for i in range(1, 701)]
        if late:
            for ticket, one in zip(table.take_rows(rows), lines, strict=True):
                table.line(ticket, one)
        else:
            table.put(rows, lines)
    rows.fill_(-1.0)
    with table.lock:
        table.send()
    assert len(heard.rows) == 2100
    assert all(row[0] == number for (number, _), row in heard.rows.items())


def test_rows_whose_copy_fails_are_not_lost(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    table = DeviceTable(CPU, heard.put)
    table.line(table.take(torch.ones(3)), line(0))
    with monkeypatch.context() as broken:
        broken.setattr(table, "_copy", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        with table.lock, pytest.raises(RuntimeError):
            table.send()
    with table.lock:
        table.send()
    assert list(heard.rows) == [line(0)]


def test_threads_that_come_at_once_have_one_memory_for_parts(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches are bound to its address: a second one would be given back, and written to."""

    def slow(device: Any, nbytes: int) -> torch.Tensor:
        time.sleep(0.05)
        return torch.zeros(8)

    monkeypatch.setattr(device_table.on_device, "parts_on", slow)
    table = DeviceTable(CPU, heard.put)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: table.make_parts(), range(4)))
    assert {id(parts) for parts in made} == {id(table.parts)}


def test_a_device_without_memory_for_parts_is_asked_once(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def full(device: Any, nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(device_table.on_device, "parts_on", full)
    table = DeviceTable(CPU, heard.put)
    assert table.make_parts() is None and table.make_parts() is None
    assert len(asked) == 1


def test_rows_that_nobody_wrote_have_nothing_left_to_do(heard: Heard) -> None:
    assert not DeviceTable(CPU, heard.put).rows.any()


def test_rows_that_may_not_come_over_are_never_too_many(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_table, "ROWS", 4)
    table = DeviceTable(CPU, heard.put)
    for i in range(3):
        table.line(table.take(torch.full((3,), float(i))), line(i))
    monkeypatch.setattr(table, "_captured", lambda: True)
    with pytest.raises(RuntimeError, match="captured"):
        table.put(torch.zeros(2, WIDTH, dtype=torch.float64), [line(3), line(4)])
    table.line(table.take(torch.full((3,), 3.0)), line(3))
    with pytest.raises(RuntimeError, match="captured"):
        table.take(torch.zeros(3))
    with table.lock:
        assert table.next_row() == -1
    assert table.used == 4 and not heard.rows
    monkeypatch.setattr(table, "_captured", lambda: False)
    with table.lock:
        assert table.next_row() == 0
    assert sorted(heard.rows) == [line(i) for i in range(4)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_rows_that_are_left_half_done_are_complete_when_they_come_over(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real kernels, in Triton's interpreter; parts have room for two rows at a time."""
    kernels = pytest.importorskip("tensortap.numerics.triton_summary")
    if not kernels.INTERPRETED:
        pytest.skip("the kernels run on the device: tests/test_gpu_record.py")
    room = kernels.room_of(1)
    settled: list[int] = []

    def settle(rows: torch.Tensor) -> None:
        settled.append(len(rows))
        kernels.settle(rows)

    monkeypatch.setattr(device_table.on_device, "settle", settle)
    monkeypatch.setattr(device_table, "_PARTS", 2 * room)
    table = DeviceTable(CPU, heard.put)
    parts = table.make_parts()
    assert parts is not None
    tensors = [torch.randn(40) + i for i in range(5)]
    wanted = [summarize(tensor) for tensor in tensors]
    for i, tensor in enumerate(tensors):
        with table.lock:
            row = table.next_row()
            at = (table.room(room) - parts.data_ptr()) // 8
            assert kernels.leave(tensor, table.rows[row], parts[at:]) == room
            table.add(*line(i))
        tensor.fill_(99.0)  # what is written later does not count
    table.line(table.take(torch.ones(3)), line(5))  # one that is whole at once stays as it is
    with table.lock:
        table.send()
    assert settled == [2, 2, 2]  # twice for want of room, and before they came over
    for i, summary in enumerate(wanted):
        found = Summary.from_row(heard.rows[line(i)])
        assert found.mean == pytest.approx(summary.mean) and found.max == summary.max
        assert found.first == summary.first
    assert Summary.from_row(heard.rows[line(5)]).mean == 1.0
