"""Tensors of a device on their way to disk: everything about it that needs no device.

`Late` stands for CUDA: its copies to the host are made only when somebody waits for them, as late
as the rules of streams and events allow. Whatever is read too early is wrong in these tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_format import DTYPES, bits, sample

import tensortap as tap
from tensortap.recording import Manifest, Row, Writer, ferry
from tensortap.recording.arena import Arena, size_class, size_within
from tensortap.recording.cuda import Cuda, _driver, relax_captures
from tensortap.recording.ferry import Ferry
from tensortap.recording.parcel import Parcel
from tensortap.recording.schema import Site
from tensortap.recording.stage import Region, Stage


class Event:
    def __init__(self, late: Late) -> None:
        self.late, self.work, self.done = late, [], False

    def record(self, stream: Stream) -> None:
        self.done, self.work = False, stream.work  # all that the stream has been given until now
        stream.work = [*stream.work]

    def query(self) -> bool:
        return self.done or not self.work

    def synchronize(self) -> None:
        time.sleep(self.late.delay)
        with self.late.one_at_a_time:
            for one in self.work:
                one()
        self.done = True


class Stream:
    def __init__(self, key: int) -> None:
        self.cuda_stream, self.work = key, []

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Late(Cuda):
    """A device whose memory is the host's, and whose copies come as late as can be."""

    def __init__(self, pins: bool = True, kernels: bool = True) -> None:
        super().__init__()
        self.kernels = kernels
        self.main, self.side = Stream(0), Stream(-1)
        self.pins, self.pinned, self.allocated = pins, set(), 0
        self.graph, self.delay, self.full, self.sent = False, 0.0, False, []
        self.used: list[int] = []
        self.one_at_a_time = threading.Lock()

    def is_here(self, tensor: torch.Tensor) -> bool:
        return True

    def capturing(self) -> bool:
        return self.graph

    def use(self, device: int) -> None:
        self.used.append(device)

    def stream_key(self, device: int) -> int:
        return self.main.cuda_stream

    def current(self, device: torch.device) -> Any:
        return self.main

    def stream(self, device: torch.device) -> Any:
        return self.side

    def event(self) -> Any:
        return Event(self)

    mark = event

    def on(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        if self.full:
            return None
        self.allocated += nbytes
        with torch.inference_mode(False):
            return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def copy(self, target: int, tensor: torch.Tensor, nbytes: int, stream: int) -> bool:
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return False
        assert stream == self.main.cuda_stream
        ctypes.memmove(target, tensor.data_ptr(), nbytes)
        return True

    def sums_up(self, dtype: torch.dtype) -> bool:
        return self.kernels

    def pin(self, address: int, nbytes: int) -> str | None:
        if not self.pins:
            return "CUDA error 1"
        self.pinned.add(address)
        return None

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)

    def send(self, there: torch.Tensor, here: torch.Tensor, nbytes: int, stream: Stream) -> None:
        once: list[int] = []

        def copy() -> None:
            if not once:
                here[:nbytes].copy_(there[:nbytes])
                once.append(nbytes)

        assert stream is self.side
        self.sent.append(nbytes)
        stream.work.append(copy)

    def used_by(self, memory: torch.Tensor, stream: Any) -> None:
        assert stream in (self.main, self.side)


def open_writer(path: Path, late: Late, **options: Any) -> Writer:
    writer = Writer(str(path), Manifest(), **options)
    writer._ferry = Ferry(writer._arena, rows=not writer.histograms, cuda=late)
    return writer


def add(writer: Writer, order: int, tensor: torch.Tensor, layer: str | None = None) -> int:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    name = f"l{order}" if layer is None else layer
    site = writer.site(Site(name, "output", "", None, "Linear", shape, dtype, "cuda:0"))
    number = writer.take(tensor)
    writer.line(site, (order, 0, 0, 0), number)
    return number


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("histograms", "kernels"), [(False, True), (False, False), (True, True)])
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype, histograms, kernels) -> None:
    torch.manual_seed(0)
    writer = open_writer(tmp_path / "r", Late(kernels=kernels), histograms=histograms)
    shapes = [(), (0,), (1,), (3, 5), (2, 0, 4), (7, 11, 13)]
    tensors = [sample(dtype, shape) for shape in shapes]
    for order, tensor in enumerate(tensors):
        add(writer, order, tensor)
    writer.close()
    assert writer.failure is None
    run = tap.open(tmp_path / "r")
    for order, tensor in enumerate(tensors):
        back = run[f"l{order}"].output
        assert (back.dtype, back.shape) == (dtype, tensor.shape)
        assert bits(back) == bits(tensor)
        found, expected = run[f"l{order}"].records[0].summary, tap.summarize(tensor)
        assert found.count == expected.count and found.zeros == expected.zeros
        assert (found.histogram is not None) == histograms


def test_what_is_overwritten_behind_the_hook_is_recorded_as_it_was(tmp_path) -> None:
    late = Late()
    writer = open_writer(tmp_path / "r", late, budget=1 << 20)
    x = torch.zeros(4, 1000)
    for order in range(200):
        x.fill_(order)
        add(writer, order, x)
        x.data.fill_(-1.0)
    writer.close()
    assert writer.failure is None
    assert len(late.sent) > 10, "the pool was never used again: this test shows nothing"
    for order, record in enumerate(tap.open(tmp_path / "r").records):
        assert torch.equal(record.tensor(), torch.full((4, 1000), float(order)))
        assert record.summary.mean == order


def test_views_are_stored_as_they_read(tmp_path) -> None:
    writer = open_writer(tmp_path / "r", Late())
    x = torch.randn(5, 6, dtype=torch.complex64)
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    views = [x.t(), x.conj(), x.imag, x.conj().imag, x[1:, ::2], images, x[2, 3], x.expand(3, 5, 6)]
    for order, view in enumerate(views):
        add(writer, order, view)
    writer.close()
    run = tap.open(tmp_path / "r")
    for order, view in enumerate(views):
        assert torch.equal(run[f"l{order}"].output, view.resolve_conj().resolve_neg())


def test_the_same_content_is_stored_once_wherever_it_comes_from(tmp_path) -> None:
    late = Late()
    writer = open_writer(tmp_path / "r", late)
    x, y = torch.randn(1000), torch.randn(1000)
    add(writer, 0, x)
    late.is_here = lambda tensor: False  # the same values on the CPU
    add(writer, 1, x.clone())
    add(writer, 2, y)
    late.is_here = lambda tensor: True
    add(writer, 3, y.clone())
    add(writer, 4, x.clone())
    writer.flush()
    add(writer, 5, y.clone())
    late.is_here = lambda tensor: False
    add(writer, 6, x)
    writer.close()
    assert writer.failure is None
    records = tap.open(tmp_path / "r").records
    assert len({r.tensor_id for r in records}) == 2
    for record, expected in zip(records, [x, x, y, y, x, y, x], strict=True):
        assert torch.equal(record.tensor(), expected)
        assert record.summary.mean == pytest.approx(float(expected.double().mean()), rel=1e-9)


def test_a_row_may_come_long_after_its_tensor_was_found_to_be_a_copy(tmp_path) -> None:
    writer = open_writer(tmp_path / "r", Late())
    x = torch.randn(100)
    add(writer, 0, x)
    site = writer.site(Site("late", "output", "", None, "", (100,), "float32", "cuda:0"))
    number = writer.take(x.clone())
    for order in range(2000):
        add(writer, 1 + order, torch.full((100,), float(order)), "other")
    writer.flush()
    writer.line(site, (5000, 0, 0, 0), number)
    writer.close()
    (record,) = tap.open(tmp_path / "r")["late"].records
    assert torch.equal(record.tensor(), x)
    assert record.tensor_id == tap.open(tmp_path / "r")["l0"].records[0].tensor_id


def test_streams_have_loads_of_their_own_and_share_the_pool(tmp_path) -> None:
    late = Late()
    streams = [Stream(key) for key in range(6)]
    late.used_by = lambda memory, stream: None
    writer = open_writer(tmp_path / "r", late, budget=4 << 20)
    for order in range(300):
        late.main = streams[order % 6]
        add(writer, order, torch.full((5000,), float(order)))
    assert late.allocated <= 1 << 20
    writer.close()
    assert writer.failure is None
    records = tap.open(tmp_path / "r").records
    assert [float(r.tensor()[0]) for r in records] == list(range(300))


def test_the_pool_and_the_arena_are_bounds_whatever_the_sizes(tmp_path) -> None:
    late = Late()
    writer = open_writer(tmp_path / "r", late, budget=8 << 20)
    stages = writer._ferry._stages
    torch.manual_seed(0)
    sizes = torch.randint(1, 500_000, (150,)).tolist()
    for order, size in enumerate(sizes):
        add(writer, order, torch.full((size,), float(order)))
        assert writer._arena.owned <= 4 << 20
        assert all(stage.owned <= 2 << 20 for stage in stages.values())
    writer.close()
    assert writer.failure is None
    assert not late.pinned, "memory went back to the system while it was pinned"
    assert all(stage.owned == 0 for stage in stages.values())
    for record, size in zip(tap.open(tmp_path / "r").records, sizes, strict=True):
        assert record.shape == (size,)
        assert bool((record.tensor() == record.order).all())


BUDGETS = st.integers(1 << 20, 64 << 30)


@given(nbytes=st.integers(4096, 1 << 40))
def test_a_size_within_is_the_largest_class_that_fits(nbytes) -> None:
    size = size_within(nbytes)
    assert size <= nbytes and size_class(size) == size
    assert size_class(size + 1) > nbytes or size == nbytes


@given(budget=BUDGETS, share=st.floats(0, 1))
def test_loads_hold_several_tensors_and_several_loads_fit_at_a_time(budget, share) -> None:
    ship = Ferry(Arena(max(1 << 20, budget // 2)), rows=True, cuda=Late())
    pool, limit = min(1 << 30, max(1 << 20, budget // 2) // 2), max(1 << 20, budget // 2)
    nbytes = int(share**4 * ship.largest)  # small ones above all
    size = size_class(ship.size_for(nbytes))
    assert size <= pool, "a tensor that is taken has room in the pool"
    each, beside = nbytes + -nbytes % 64, 64 + ship.most * ferry.ROW_BYTES
    holds = (size - beside) // each if each else ship.most
    assert size >= nbytes + beside
    if nbytes + beside <= ship.shared:
        assert 4 * size <= pool and 8 * size <= limit
        assert size <= 128 << 20
        assert holds >= 8 or 2 * size > ship.shared, "few in a load, with room for more"
    else:
        assert size == size_class(nbytes + beside), "alone, and no larger than it needs"


@settings(max_examples=25, deadline=None)
@given(
    budget=st.integers(1 << 20, 12 << 20),
    sizes=st.lists(st.integers(0, 600_000), min_size=1, max_size=40),
    repeat=st.integers(1, 3),
)
def test_any_sizes_in_any_budget_stay_within_the_bounds(
    tmp_path_factory, budget, sizes, repeat
) -> None:
    path, late = tmp_path_factory.mktemp("any") / "r", Late()
    writer = open_writer(path, late, budget=budget)
    limit = writer._arena.limit
    stages = writer._ferry._stages
    for order, size in enumerate(sizes * repeat):
        add(writer, order, torch.full((size,), order % 251, dtype=torch.uint8))
        assert writer._arena.owned <= limit == max(1 << 20, budget // 2)
        assert all(stage.owned <= limit // 2 for stage in stages.values())
    writer.close()
    assert writer.failure is None and not late.pinned
    records = tap.open(path).records
    assert [tuple(r.shape) for r in records] == [(size,) for size in sizes * repeat]
    assert all(bool((r.tensor() == r.order % 251).all()) for r in records)


def test_tensors_of_one_size_go_over_eight_at_a_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ferry, "_CHUNK", 64 << 10)
    late = Late()
    writer = open_writer(tmp_path / "r", late, budget=64 << 20)
    shared = writer._ferry.shared
    for order in range(40):
        add(writer, order, torch.full((shared // 10,), order, dtype=torch.uint8))
    assert len(late.sent) == 5
    add(writer, 40, torch.ones(shared // 2, dtype=torch.uint8))  # alone, and not waited for
    assert len(late.sent) == 6
    writer.close()
    assert writer.failure is None and len(tap.open(tmp_path / "r").records) == 41


def test_a_slow_disk_holds_the_model_up_and_loses_nothing(tmp_path, monkeypatch) -> None:
    from tensortap.recording.output import SegmentOutput

    written = SegmentOutput._write

    def slowly(self, fd, offset, data) -> None:
        time.sleep(0.01)
        written(self, fd, offset, data)

    monkeypatch.setattr(SegmentOutput, "_write", slowly)
    writer = open_writer(tmp_path / "r", Late(), budget=4 << 20)
    for order in range(100):
        add(writer, order, torch.full((50_000,), float(order)))
        assert writer._arena.owned <= 2 << 20
    writer.close()
    assert writer.failure is None
    records = tap.open(tmp_path / "r").records
    assert [float(r.tensor()[-1]) for r in records] == list(range(100))


def test_memory_that_cannot_be_pinned_is_said_and_the_values_are_right(tmp_path) -> None:
    writer = open_writer(tmp_path / "r", Late(pins=False))
    x = torch.randn(1000)
    add(writer, 0, x)
    writer.close(notes=["something else"])
    run = tap.open(tmp_path / "r")
    assert torch.equal(run["l0"].output, x)
    assert run.notes[0] == "something else" and "could not be pinned (CUDA error 1)" in run.notes[1]


def test_a_device_without_room_is_read_the_slow_way(tmp_path) -> None:
    late = Late()
    late.full = True
    writer = open_writer(tmp_path / "r", late)
    x = torch.randn(1000)
    add(writer, 0, x)
    writer.close()
    assert writer.failure is None
    run = tap.open(tmp_path / "r")
    assert torch.equal(run["l0"].output, x)
    assert any("too little memory" in note for note in run.notes)


def test_nothing_is_taken_while_a_graph_is_captured(tmp_path) -> None:
    late = Late()
    writer = open_writer(tmp_path / "r", late)
    add(writer, 0, torch.ones(3))
    late.graph = True
    assert add(writer, 1, torch.ones(4)) == -1
    assert add(writer, 2, torch.ones(1 << 28)) == -1
    late.graph = False
    add(writer, 3, torch.ones(5))
    writer.close()
    assert tap.open(tmp_path / "r").layers == ["l0", "l3"]


def test_a_device_that_fails_is_the_writers_failure_and_nobody_hangs(tmp_path) -> None:
    late = Late()
    writer = open_writer(tmp_path / "r", late)
    add(writer, 0, torch.ones(3))
    writer.flush()

    def send(*args: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    late.send = send
    add(writer, 1, torch.ones(4))
    writer.flush()
    assert "device-side assert" in (writer.failure or "")
    assert add(writer, 2, torch.ones(5)) == -1
    writer.close()
    run = tap.open(tmp_path / "r")
    assert run.status == "failed" and run.layers == ["l0"]


def test_an_event_that_fails_is_the_writers_failure_and_nobody_hangs(tmp_path, monkeypatch) -> None:
    def lost(self: Event) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    writer = open_writer(tmp_path / "r", Late(), budget=4 << 20)
    add(writer, 0, torch.ones(3))
    writer.flush()
    monkeypatch.setattr(Event, "synchronize", lost)
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    for order in range(100):
        add(writer, 1 + order, torch.full((100_000,), float(order)))
    writer.close()
    assert "illegal memory access" in (writer.failure or "")
    assert tap.open(tmp_path / "r").layers == ["l0"]


def test_a_full_disk_releases_whoever_waits(tmp_path, monkeypatch) -> None:
    from tensortap.recording.output import SegmentOutput

    def full(self, fd, offset, data) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SegmentOutput, "_write", full)
    writer = open_writer(tmp_path / "r", Late(), budget=4 << 20)
    for order in range(200):
        add(writer, order, torch.full((50_000,), float(order)))
    writer.close()
    assert "No space left" in (writer.failure or "")


def test_an_idle_writer_fetches_what_waits_on_the_device(tmp_path) -> None:
    writer = open_writer(tmp_path / "r", Late(), seal_after=0.2)
    add(writer, 0, torch.ones(7))
    end = time.monotonic() + 10
    while not list((tmp_path / "r").glob("segment-*")) and time.monotonic() < end:
        time.sleep(0.02)
    (record,) = tap.open(tmp_path / "r").records
    assert torch.equal(record.tensor(), torch.ones(7))
    writer.close()


def test_the_interpreters_end_keeps_what_waits_on_the_device(tmp_path) -> None:
    writer = open_writer(tmp_path / "r", Late(), seal_after=60.0)
    add(writer, 0, torch.ones(7))
    writer._at_exit()
    assert tap.open(tmp_path / "r").layers == ["l0"]
    writer.close()


def test_many_threads_may_take_and_none_is_lost(tmp_path) -> None:
    late = Late()
    writer = open_writer(tmp_path / "r", late, seal_after=0.1, budget=4 << 20)

    def take(start: int) -> None:
        for order in range(start, start + 50):
            add(writer, order, torch.full((2000,), float(order)), "l")

    threads = [threading.Thread(target=take, args=(50 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert writer.failure is None
    records = tap.open(tmp_path / "r").records
    assert [float(r.tensor()[0]) for r in records] == list(range(200))


def test_add_takes_device_tensors_too(tmp_path) -> None:
    writer = open_writer(tmp_path / "r", Late())
    x = torch.randn(3, requires_grad=True)
    writer.add(Row("l", "output"), x)
    assert x.requires_grad
    writer.close()
    assert torch.equal(tap.open(tmp_path / "r")["l"].output, x.detach())


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("budget", [1 << 20, 1 << 30])
def test_modes_may_change_while_a_region_fills(tmp_path, pins, budget) -> None:
    writer = open_writer(tmp_path / "r", Late(pins=pins), budget=budget)
    expected = []
    for order in range(30):
        with torch.inference_mode(order % 3 == 0), torch.set_grad_enabled(order % 3 == 1):
            x = torch.randn(9000, requires_grad=order % 3 == 1)
            y = x * 2
            add(writer, order, y)
            assert y.requires_grad == (order % 3 == 1)
            expected.append(y.tolist())
    writer.close()
    assert writer.failure is None
    assert [record.tensor().tolist() for record in tap.open(tmp_path / "r").records] == expected


def test_a_region_that_was_copied_out_is_taken_before_a_new_one() -> None:
    late = Late()
    stage = Stage(torch.device("cpu"), 4 << 20, late)
    waited: list[Any] = []
    late.main.wait_event = waited.append

    def hand_over(region: Region) -> None:
        late.side.work.append(lambda: None)
        region.copied = late.event()
        region.copied.record(late.side)
        stage.give(region)

    first, second = stage.take(1 << 20, late.main), stage.take(1 << 20, late.main)
    assert first is not None and second is not None and first is not second
    hand_over(first)
    hand_over(second)
    third = stage.take(1 << 20, late.main)
    assert third not in (first, second), "the others are still on their way"
    first.copied.synchronize()
    assert stage.take(1 << 20, late.main) is first
    fourth = stage.take(1 << 20, late.main)
    assert fourth not in (first, second, third) and stage.owned == 4 << 20 and not waited
    assert stage.take(1 << 20, late.main) is second, "none is left: the stream waits"
    assert waited == [second.copied]
    assert stage.take(1 << 20, late.main) is None, "all are open"


def test_the_quick_way_keeps_what_the_long_way_would(tmp_path) -> None:
    writer = open_writer(tmp_path / "r", Late(), budget=2 << 20)
    count = itertools.count()
    site = writer.site(Site("l", "output", "", None, "", (100, 20), "float32", "cuda:0"))
    quick = 0
    for step in range(200):
        x = (
            torch.full((100, 20), float(step))
            if step % 7
            else torch.full((20, 100), 1.0 * step).t()
        )
        when = (count.__next__, 0, step, lambda: 0)
        if writer.keep_quickly(x, x.nbytes, (-1, 0), site, when):
            quick += 1
        else:
            writer.line(site, (next(count), 0, step, 0), writer.take(x))
    writer.close()
    assert writer.failure is None
    assert 100 < quick < 200 and next(count) == 200
    records = tap.open(tmp_path / "r").records
    assert [float(r.tensor()[0, 0]) for r in records] == [r.batch for r in records]
    assert [r.summary.mean for r in records] == list(range(200))


def test_rows_go_along_with_the_tensors_in_one_parcel(tmp_path) -> None:
    writer = open_writer(tmp_path / "r", Late(), seal_after=60.0)
    site = writer.site(Site("l", "output", "", None, "", (100,), "float32", "cuda:0"))
    put, parcels = writer._spool.put, []
    writer._spool.put = lambda item: (parcels.append(item), put(item))[1]
    count = itertools.count()
    for step in range(1000):
        x = torch.full((100,), float(step))
        when = (lambda step=step: step, 0, 0, lambda: 0)
        if not writer.keep_quickly(x, x.nbytes, (-1, 0), site, when):
            writer.line(site, (step, 0, 0, 0), writer.take(x))
            next(count)
    assert len(parcels) == 3 == next(count) - 1 and all(p.rows_at is not None for p in parcels)
    assert [len(parcel.lines) for parcel in parcels] == [256, 256, 256]
    writer.summarize(site, (1000, 0, 0, 0), torch.ones(100))
    writer.close()
    assert writer.failure is None
    records = tap.open(tmp_path / "r").records
    assert [r.order for r in records] == list(range(1001))
    assert [r.summary.mean for r in records] == [*range(1000), 1]


def test_the_writers_thread_leaves_the_model_alone_while_there_is_room(tmp_path) -> None:
    writer = open_writer(tmp_path / "r", Late(), seal_after=60.0)
    spool, parcel = writer._spool, Parcel(rows_at=-1)

    def naps() -> bool:
        start = time.monotonic()
        spool._nap(parcel)
        return time.monotonic() - start > 0.09

    assert naps()
    writer._arena.pressure = lambda: 0.3
    assert not naps(), "the model waits for room, and the writer for the model"
    del writer._arena.pressure
    spool._hurry.set()
    assert not naps()
    writer.close()


def test_an_interrupted_hand_over_is_made_again(tmp_path) -> None:
    late = Late()
    writer = open_writer(tmp_path / "r", late)
    send = late.send

    def interrupted(*args: Any, **options: Any) -> None:
        late.send = send
        raise KeyboardInterrupt

    late.send = interrupted
    add(writer, 0, torch.ones(3))
    with pytest.raises(KeyboardInterrupt):
        writer.flush()
    add(writer, 1, torch.ones(4))
    writer.close()
    assert writer.failure is None
    run = tap.open(tmp_path / "r")
    assert run.layers == ["l0", "l1"] and run["l0"].output.tolist() == [1, 1, 1]


def test_a_device_has_its_memory_back_when_nothing_was_taken_for_a_while(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(ferry, "_PATIENCE", 0.3)
    writer = open_writer(tmp_path / "r", Late(), seal_after=0.1)
    add(writer, 0, torch.ones(3))
    (stage,) = writer._ferry._stages.values()
    assert stage.owned > 0
    end = time.monotonic() + 10
    while stage.owned and time.monotonic() < end:
        time.sleep(0.02)
    assert stage.owned == 0
    add(writer, 1, torch.ones(4))
    writer.close()
    assert tap.open(tmp_path / "r").layers == ["l0", "l1"]


def test_each_device_has_a_pool_of_its_own(tmp_path, monkeypatch) -> None:
    late = Late()
    writer = open_writer(tmp_path / "r", late, budget=4 << 20)
    monkeypatch.setattr(writer._ferry, "key", lambda tensor: (int(tensor[0]) % 2, 0))
    for order in range(100):
        add(writer, order, torch.full((20_000,), float(order)))
    assert sorted(writer._ferry._stages) == [0, 1]
    assert all(0 < stage.owned <= 1 << 20 for stage in writer._ferry._stages.values())
    writer.close()
    assert writer.failure is None
    records = tap.open(tmp_path / "r").records
    assert [float(r.tensor()[-1]) for r in records] == list(range(100))


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a device")
def test_without_a_driver_everything_says_so_and_nothing_breaks() -> None:
    relax_captures()
    assert isinstance(Cuda().pin(0, 4096), str)
    assert _driver("cuMemcpyNothing", ctypes.c_void_p, ctypes.c_void_p)(0, 0, 0, 0) == -1
