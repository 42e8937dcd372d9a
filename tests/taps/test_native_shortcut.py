"""The core's shortcut from an output to a launch, with a driver of our own in CUDA's place.

The driver is a small C library that keeps what it is asked to launch; tensors are on the CPU, whose
device is -1. On a real device tests/test_gpu_record.py has the whole way.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tensortap.numerics.native import core
from tensortap.taps.in_graph import _Idle

pytestmark = pytest.mark.skipif(
    core is None or shutil.which("cc") is None or sys.platform != "linux",
    reason="needs the compiled core and a C compiler",
)

DRIVER = r"""
#include <stddef.h>
#include <string.h>
unsigned char arguments[64];
size_t argument_bytes;
unsigned grid, block, shared_bytes;
int launches, captured, fails;
void *context = (void *)7;
static const size_t sizes[] = {8, 4, 8, 8, 8, 8}, offsets[] = {0, 8, 16, 24, 32, 40};
int cuCtxGetCurrent(void **found) { *found = context; return 0; }
int cuStreamIsCapturing(void *stream, int *found) { *found = captured; return 0; }
int cuFuncGetParamInfo(void *f, size_t i, size_t *offset, size_t *size) {
  if (i >= 6) return 1;
  *offset = offsets[i]; *size = sizes[i]; return 0;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned bytes, void *stream, void **params, void **extra) {
  if (fails) return 700;
  grid = gx; block = bx; shared_bytes = bytes; ++launches;
  argument_bytes = *(size_t *)extra[3];
  memcpy(arguments, extra[1], argument_bytes);
  return 0;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    library = folder / "libdriver.so"
    build = ["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "driver.c")]
    subprocess.run(build, check=True)
    return ctypes.CDLL(str(library))


def number(driver: Any, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(driver, name)


def words(driver: Any) -> list[int]:
    raw = bytes((ctypes.c_ubyte * 64).in_dll(driver, "arguments"))
    places = ((0, 8), (8, 4), (16, 8), (24, 8), (32, 8), (40, 8))
    return [int.from_bytes(raw[at : at + size], sys.byteorder) for at, size in places]


PARTS, ROOM = 1 << 50, 256


class Table:
    """What the core needs of a DeviceTable: its memory, and what it is asked to do."""

    def __init__(self, rows: int = 4) -> None:
        self.lock = threading.Lock()
        self.state = np.zeros(2, np.int64)
        self.memory = np.full((rows, 5), -1, np.int64)
        self.sent = self.settled = 0

    @property
    def used(self) -> int:
        return int(self.state[0])

    @property
    def lines(self) -> list[list[int]]:
        return self.memory[: self.used].tolist()

    def settle(self) -> None:
        assert self.lock.locked()
        self.settled += 1
        self.state[1] = 0

    def send(self) -> None:
        self.settle()
        self.sent += 1
        self.state[0] = 0


def shortcut(library: str, table: Table, like: torch.Tensor, **changes: Any) -> Any:
    asked: dict[str, Any] = {
        "library": library,
        "function": 99,
        "programs": 17,
        "threads": 128,
        "shared": 256,
        "stream": 5,
        "values": [(8, 1111), (4, 22), (8, 0), (8, 0), (8, 0)],
        "places": (2, 3, 4),
        "type": torch.Tensor,
        "shape": like.shape,
        "dtype": like.dtype,
        "device": -1,
        "stream_of": lambda device: 5,
        "backward": lambda: -1,
        "functions": lambda: 0,
        "dispatches": lambda: 0,
        "table": table,
        "lock": table.lock,
        "state": table.state.ctypes.data,
        "lines": table.memory.ctypes.data,
        "slot": SimpleNamespace(next_call=iter(range(9999)).__next__, seen=0),
        "sink": SimpleNamespace(epoch=0, batch=0),
        "order": iter(range(10_000)).__next__,
        "site": 42,
        "rows": len(table.memory),
        "row_bytes": 184,
        "row_address": 1 << 40,
        "parts": PARTS,
        "parts_bytes": 10 * ROOM,
        "room": ROOM,
    }
    return core.Shortcut(**{**asked, **changes})  # type: ignore[union-attr]


@pytest.fixture
def made(driver: Any) -> Any:
    for name in ("launches", "captured", "fails"):
        number(driver, name).value = 0
    ctypes.c_void_p.in_dll(driver, "context").value = 7
    table, slot = Table(), SimpleNamespace(next_call=iter(range(3, 99)).__next__, seen=10)
    sink = SimpleNamespace(epoch=1, batch=2)
    like = torch.zeros(4, 8)
    streams = [5]
    asked = SimpleNamespace(backward=-1, functions=0, dispatches=0)
    take = shortcut(
        driver._name,
        table,
        like,
        stream_of=lambda device: streams[-1],
        backward=lambda: asked.backward,
        functions=lambda: asked.functions,
        dispatches=lambda: asked.dispatches,
        slot=slot,
        sink=sink,
    )
    state = SimpleNamespace(_sink=sink, _unfinished=None, _compiled=[], _in_graph=None)
    return SimpleNamespace(
        take=lambda output: take(output, state),
        take_for=take,
        table=table,
        slot=slot,
        sink=sink,
        streams=streams,
        asked=asked,
        state=state,
    )


def test_a_launch_gets_its_arguments_and_leaves_a_line(made: Any, driver: Any) -> None:
    tensor = torch.randn(4, 8)
    assert made.take(tensor) is True
    # the last is the compiler's
    assert words(driver) == [1111, 22, PARTS, tensor.data_ptr(), 1 << 40, 0]
    assert number(driver, "grid").value == 17
    assert number(driver, "block").value == 128
    assert number(driver, "shared_bytes").value == 256
    assert made.table.used == 1
    assert made.table.lines == [[42, 0, 1, 2, 3]]
    assert made.slot.seen == 11
    made.sink.batch = 9
    assert made.take(tensor)
    assert words(driver)[2] == PARTS + ROOM
    assert words(driver)[4] == (1 << 40) + 184
    assert made.table.lines[1] == [42, 1, 1, 9, 4]
    assert made.table.state.tolist() == [2, 2 * ROOM]
    assert not made.table.lock.locked()


def test_a_full_table_is_sent_first(made: Any, driver: Any) -> None:
    for _ in range(5):
        assert made.take(torch.zeros(4, 8))
    assert made.table.sent == 1
    assert made.table.used == 1
    assert words(driver)[2:5:2] == [PARTS, 1 << 40]


def test_rows_are_settled_before_what_they_leave_has_no_room(driver: Any) -> None:
    table, like = Table(rows=30), torch.zeros(2, 2)
    number(driver, "fails").value = number(driver, "captured").value = 0
    ctypes.c_void_p.in_dll(driver, "context").value = 7
    take = shortcut(driver._name, table, like)
    state = SimpleNamespace(_sink=0, _unfinished=None, _compiled=[], _in_graph=None)
    places = []
    for _ in range(25):
        assert take(like, state)
        places.append(words(driver)[2] - PARTS)
    assert places == [ROOM * (i % 10) for i in range(25)]
    assert (table.settled, table.sent, table.used) == (2, 0, 25)


def test_whatever_is_out_of_the_ordinary_goes_the_long_way(made: Any, driver: Any) -> None:
    plain = torch.zeros(4, 8)
    base = torch.zeros(100)
    others = [
        plain.double(),
        torch.zeros(8, 4),
        torch.zeros(8, 4).T,
        base[1:33].view(4, 8),  # 4 bytes off
        torch.nn.Parameter(plain),
        torch.zeros(4, 8, dtype=torch.complex64).conj().imag,
        None,
        "text",
        (plain,),
    ]
    assert [made.take(other) for other in others] == [False] * len(others)
    made.streams.append(6)
    assert made.take(plain) is False
    made.streams.pop()
    number(driver, "captured").value = 1
    assert made.take(plain) is False
    number(driver, "captured").value = 0
    ctypes.c_void_p.in_dll(driver, "context").value = 8
    assert made.take(plain) is False
    assert number(driver, "launches").value == 0
    assert made.table.lines == []
    assert made.slot.next_call() == 3


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("asked", "backward", 0),  # a forward that is computed again for a backward pass
        ("asked", "functions", 1),
        ("asked", "dispatches", 1),
        ("state", "_sink", None),
        ("state", "_unfinished", {0: 1}),
        ("state", "_compiled", [1]),
        ("state", "_in_graph", SimpleNamespace(open=True)),
    ],
)
def test_what_is_under_way_is_not_missed(
    made: Any, driver: Any, where: str, name: str, value: Any
) -> None:
    setattr(getattr(made, where), name, value)
    assert made.take(torch.zeros(4, 8)) is False
    assert number(driver, "launches").value == 0


def test_a_graph_that_is_closed_is_no_hindrance(made: Any) -> None:
    made.state._in_graph = SimpleNamespace(open=False)
    assert made.take(torch.zeros(4, 8)) is True


def test_a_compiled_graph_may_take_it(made: Any) -> None:
    assert made.take_for(torch.zeros(4, 8), _Idle(made.sink)) is True
    assert made.table.used == 1


def test_a_launch_that_fails_is_an_error_and_leaves_no_line(made: Any, driver: Any) -> None:
    number(driver, "fails").value = 1
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        made.take(torch.zeros(4, 8))
    assert made.table.lines == []
    assert not made.table.lock.locked()


@pytest.mark.parametrize(
    "values",
    [
        [(8, 0)] * 5,
        [(8, 1), (4, 2), *[(8, 3)] * 5],
        [(8, 0)],
        [(8, 1), (4, 2), (8, 3), (8, 4)],
    ],
)
def test_a_kernel_that_takes_other_arguments_is_refused(driver: Any, values: Any) -> None:
    with pytest.raises(RuntimeError):
        shortcut(driver._name, Table(), torch.zeros(1), values=values)


def test_there_may_be_no_driver() -> None:
    with pytest.raises(RuntimeError, match="driver"):
        shortcut("/no/such/library.so", Table(), torch.zeros(1))


def test_many_threads_leave_every_line_once(driver: Any) -> None:
    for name in ("captured", "fails"):
        number(driver, name).value = 0
    ctypes.c_void_p.in_dll(driver, "context").value = 7
    table = Table(rows=10_000)
    take = shortcut(driver._name, table, torch.zeros(2, 2))
    state = SimpleNamespace(_sink=0, _unfinished=None, _compiled=[], _in_graph=None)
    threads = [
        threading.Thread(target=lambda: [take(torch.zeros(2, 2), state) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line[4] for line in table.lines] == list(range(2000))
    assert sorted(line[1] for line in table.lines) == list(range(2000))
