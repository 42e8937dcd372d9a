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
static const size_t sizes[] = {8, 4, 8, 8, 8}, offsets[] = {0, 8, 16, 24, 32};
int cuCtxGetCurrent(void **found) { *found = context; return 0; }
int cuStreamIsCapturing(void *stream, int *found) { *found = captured; return 0; }
int cuFuncGetParamInfo(void *f, size_t i, size_t *offset, size_t *size) {
  if (i >= 5) return 1;
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
    places = ((0, 8), (8, 4), (16, 8), (24, 8), (32, 8))
    return [int.from_bytes(raw[at : at + size], sys.byteorder) for at, size in places]


class Table:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.used = 0
        self.lines: list[Any] = []
        self.sent = 0

    def send(self) -> None:
        assert self.lock.locked()
        self.sent += 1
        self.used, self.lines = 0, []


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
    take = core.Shortcut(  # type: ignore[union-attr]
        driver._name, 99, 17, 128, 256, 5, [(8, 1111), (4, 22), (8, 0), (8, 0)], 2, 3,
        torch.Tensor, like.shape, like.dtype, -1, lambda device: streams[-1],
        lambda: asked.backward, lambda: asked.functions, lambda: asked.dispatches, table,
        table.lock,
        slot, sink, iter(range(100)).__next__, 42, 4, 184, 1 << 40,
    )  # fmt: skip
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
    assert words(driver) == [1111, 22, tensor.data_ptr(), 1 << 40, 0]  # the last is the compiler's
    assert number(driver, "grid").value == 17
    assert number(driver, "block").value == 128
    assert number(driver, "shared_bytes").value == 256
    assert made.table.used == 1
    assert made.table.lines == [(0, (42, (0, 1, 2, 3)))]
    assert made.slot.seen == 11
    made.sink.batch = 9
    assert made.take(tensor)
    assert words(driver)[3] == (1 << 40) + 184
    assert made.table.lines[1] == (1, (42, (1, 1, 9, 4)))
    assert not made.table.lock.locked()


def test_a_full_table_is_sent_first(made: Any, driver: Any) -> None:
    for _ in range(5):
        assert made.take(torch.zeros(4, 8))
    assert made.table.sent == 1
    assert made.table.used == 1
    assert words(driver)[3] == 1 << 40


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
    "values", [[(8, 0)] * 4, [(8, 1), (4, 2), (8, 3), (8, 4), (8, 5), (8, 6)], [(8, 0)]]
)
def test_a_kernel_that_takes_other_arguments_is_refused(driver: Any, values: Any) -> None:
    table = Table()
    with pytest.raises(RuntimeError):
        core.Shortcut(  # type: ignore[union-attr]
            driver._name, 1, 1, 1, 1, 1, values, 2, 3, torch.Tensor, torch.Size([1]),
            torch.float32, -1, lambda _: 1, 0, 0, 0, table, table.lock, 0, 0, 0, 0, 1, 1, 1,
        )  # fmt: skip


def test_there_may_be_no_driver() -> None:
    table = Table()
    with pytest.raises(RuntimeError, match="driver"):
        core.Shortcut(  # type: ignore[union-attr]
            "/no/such/library.so", 1, 1, 1, 1, 1, [(8, 0)], 0, 0, torch.Tensor, torch.Size([1]),
            torch.float32, -1, lambda _: 1, 0, 0, 0, table, table.lock, 0, 0, 0, 0, 1, 1, 1,
        )  # fmt: skip


def test_many_threads_leave_every_line_once(driver: Any) -> None:
    for name in ("captured", "fails"):
        number(driver, name).value = 0
    ctypes.c_void_p.in_dll(driver, "context").value = 7
    table, slot = Table(), SimpleNamespace(next_call=iter(range(9999)).__next__, seen=0)
    like, orders = torch.zeros(2, 2), iter(range(10_000))
    take = core.Shortcut(  # type: ignore[union-attr]
        driver._name, 99, 1, 1, 1, 5, [(8, 1), (4, 2), (8, 0), (8, 0)], 2, 3,
        torch.Tensor, like.shape, like.dtype, -1, lambda device: 5,
        lambda: -1, lambda: 0, lambda: 0, table, table.lock,
        slot, SimpleNamespace(epoch=0, batch=0), orders.__next__, 0, 10_000, 184, 0,
    )  # fmt: skip
    state = SimpleNamespace(_sink=0, _unfinished=None, _compiled=[], _in_graph=None)
    threads = [
        threading.Thread(target=lambda: [take(torch.zeros(2, 2), state) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row for row, _ in table.lines] == list(range(2000))
    assert [line[1][3] for _, line in table.lines] == list(range(2000))
