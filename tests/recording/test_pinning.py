"""Buffers that are pinned before they are needed: by another thread, and never beyond the bounds.

`Late` of test_ferry stands for CUDA.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ferry import Late, add, open_writer

import tensortap as tap
from tensortap.recording import arena as arenas
from tensortap.recording.arena import Arena, Buffer, size_class
from tensortap.recording.ferry import Ferry
from tensortap.recording.pinning import Ahead


class Pins(Late):
    """Remembers which thread pinned how much."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pinned_by: list[int] = []

    def pin(self, address: int, nbytes: int) -> str | None:
        self.pinned_by.append(threading.get_ident())
        return super().pin(address, nbytes)

    def here(self) -> int:
        return self.pinned_by.count(threading.get_ident())


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "tensortap-pinning"]


def soon(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threads()
    yield
    assert threads() == before


def always() -> bool:
    return True


def test_the_models_thread_pins_the_first_buffer_alone(tmp_path) -> None:
    cuda = Pins()
    writer = open_writer(tmp_path / "r", cuda, budget=64 << 20, seal_after=60.0)
    arena, size = writer._arena, writer._ferry.shared
    tensor = torch.zeros(writer._ferry.shared // 2 + 1, dtype=torch.uint8)  # each has a load alone
    for order in range(5):
        add(writer, order, tensor + order)
        assert soon(lambda: not arena.lacks(size_class(tensor.nbytes), 2))
    assert cuda.here() == 1 and len(cuda.pinned_by) >= 2
    assert arena.owned <= arena.limit and size <= arena.limit
    assert set(cuda.used) == {-1}, "the thread uses the device of the tensors"
    writer.close()
    assert writer.failure is None and not cuda.pinned and arena.owned == 0
    assert [int(r.tensor()[0]) for r in tap.open(tmp_path / "r").records] == list(range(5))


@settings(max_examples=40, deadline=None)
@given(
    limit=st.integers(1 << 20, 4 << 20),
    steps=st.lists(st.tuples(st.integers(1, 700_000), st.booleans()), min_size=1, max_size=30),
)
def test_the_arena_stays_within_its_limit_and_all_of_it_comes_back(limit, steps) -> None:
    arena, cuda = Arena(limit), Pins()
    ferry = Ferry(arena, rows=True, cuda=cuda)
    held: list[Buffer] = []
    for nbytes, gives in steps:
        buffer = arena.take(nbytes, alive=always, wait=False)
        assert arena.owned <= limit
        if buffer is not None:
            ferry.pin(buffer, 0)
            assert buffer.pinned and buffer.address in cuda.pinned
            held.append(buffer)
        if held and (gives or buffer is None):
            arena.give(held.pop(0))
        assert arena.owned <= limit and 0 <= arena.idle <= arena.owned
    ferry.clear()
    for buffer in held:
        arena.give(buffer)
    assert arena.idle == arena.owned <= limit
    assert sum(len(buffers) for buffers in arena._free.values()) == len(cuda.pinned)
    arena.clear()
    assert arena.owned == arena.idle == 0 and not cuda.pinned


def test_enough_is_enough() -> None:
    arena, cuda = Arena(16 << 20), Pins()
    ahead = Ahead(arena, cuda)
    for _ in range(20):
        ahead.want(0, 1 << 20)
        assert soon(lambda: not arena.lacks(1 << 20, 2))
    ahead.stop()
    assert arena.owned == arena.idle == 2 << 20 and len(cuda.pinned) == 2
    assert arena.take(1 << 20, alive=always).pinned


def test_nothing_is_begun_where_there_is_no_room() -> None:
    arena = Arena(1 << 20)
    ahead = Ahead(arena, Pins())
    assert arena.take(1 << 20, alive=always) is not None
    ahead.want(0, 1 << 20)
    assert not threads()
    ahead.stop()


def test_it_ends_at_once_and_begins_again() -> None:
    arena, cuda = Arena(64 << 20), Pins()
    ahead = Ahead(arena, cuda)
    ahead.stop()
    ahead.want(0, 1 << 20)
    ahead.stop()
    ahead.stop()
    assert not threads() and arena.owned == arena.idle
    ahead.want(1, 2 << 20)
    assert soon(lambda: not arena.lacks(2 << 20, 2))
    ahead.stop()
    assert cuda.used[-1] == 1 and arena.owned == arena.idle <= 6 << 20


def test_threads_may_want_and_stop_it_at_a_time() -> None:
    arena, cuda = Arena(64 << 20), Pins()
    ahead = Ahead(arena, cuda)

    def go(n: int) -> None:
        for i in range(60):
            if i % 4 == n:
                ahead.stop()
            ahead.want(0, (1 + (i + n) % 5) << 12)

    users = [threading.Thread(target=go, args=(n,), daemon=True) for n in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join(30)
    assert not any(user.is_alive() for user in users), "somebody waits for ever"
    ahead.stop()
    assert not threads() and arena.owned == arena.idle


def test_memory_that_cannot_be_pinned_ahead_is_left_to_the_hook(tmp_path) -> None:
    cuda = Pins()
    main, pin = threading.get_ident(), cuda.pin
    cuda.pin = lambda a, n: pin(a, n) if threading.get_ident() == main else "CUDA error 2"
    writer = open_writer(tmp_path / "r", cuda, budget=8 << 20)
    for order in range(20):
        add(writer, order, torch.full((200_000,), float(order)))
        assert writer._arena.owned <= 4 << 20
    assert soon(lambda: writer._ferry._ahead._failed)
    writer.close()
    assert writer.failure is None and not writer.manifest.notes
    assert writer._arena.owned == 0 and not cuda.pinned
    assert [float(r.tensor()[0]) for r in tap.open(tmp_path / "r").records] == list(range(20))


@pytest.mark.parametrize("where", ["use", "_map"])
def test_whatever_fails_there_reaches_nobody(monkeypatch, where) -> None:
    def fails(*args: Any) -> Any:
        raise MemoryError("no more")

    arena, cuda = Arena(16 << 20), Pins()
    monkeypatch.setattr(*((cuda, where) if where == "use" else (arenas, where)), fails)
    ahead = Ahead(arena, cuda)
    ahead.want(0, 1 << 20)
    assert soon(lambda: ahead._failed)
    ahead.want(0, 1 << 20)
    ahead.stop()
    assert arena.owned == arena.idle == 0


def test_memory_that_cannot_be_had_is_not_counted(monkeypatch) -> None:
    arena = Arena(1 << 20)

    def fails(size: int) -> Buffer:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(arenas, "_map", fails)
        with pytest.raises(OSError, match="Cannot allocate"):
            arena.take(1 << 20, alive=always)
    assert arena.owned == 0 and arena.take(1 << 20, alive=always) is not None


def test_the_interpreters_end_ends_it(tmp_path) -> None:
    writer = open_writer(tmp_path / "r", Pins(), seal_after=60.0)
    add(writer, 0, torch.ones(7))
    writer._at_exit()
    assert not threads()
    assert tap.open(tmp_path / "r").layers == ["l0"]
    writer.close()


def test_whoever_waits_for_room_comes_before_what_is_made_ahead() -> None:
    """Else the thread takes the room again that was just made for a hook."""
    limit = 60_000_000
    arena, cuda = Arena(limit), Pins()
    ahead = Ahead(arena, cuda)
    first = arena.take(limit // 2 - (1 << 20), alive=always)
    assert first is not None
    first.pinned = True
    ahead.want(0, first.capacity)
    assert soon(lambda: arena.idle > 0 or arena.owned > first.capacity)
    threading.Timer(0.05, arena.give, [first]).start()
    end = time.monotonic() + 10
    assert arena.take(limit // 2, alive=lambda: time.monotonic() < end) is not None
    ahead.stop()


def test_where_no_thread_can_be_started_hooks_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    arena, cuda = Arena(1 << 26), Pins()
    ferry = Ferry(arena, rows=True, cuda=cuda)
    buffer = arena.take(1 << 20, alive=always)
    assert buffer is not None
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ferry.pin(buffer, 0)
    assert buffer.pinned and cuda.here() == 1
    arena.give(buffer)
    ferry.clear()
