"""The kernels alone: summaries and differences of 2 GB, against a plain read and the formulas."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import gpu_naive as naive
import tensortap as tap
from gpu_parts import Cell, Measured, Row, Setting, Table, attempt, measure
from tensortap.numerics import device as on_device

__all__ = ["differences", "kernels"]

BYTES = 1 << 31
BURST = 20  # calls a timing: what waits for the device is then once in twenty
SUMMARY_AIM, DIFFERENCE_AIM = 3.6, 3.4
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8")


def values(setting: Setting, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values, 2 GB of them; integers over their whole range."""
    count = (1 << 14 if setting.tiny else BYTES) // dtype.itemsize
    dice = torch.Generator(device=setting.device).manual_seed(seed)
    if not dtype.is_floating_point:
        size, info = (count,), torch.iinfo(dtype)
        return torch.randint(
            info.min, info.max, size, dtype=dtype, device=setting.device, generator=dice
        )
    made = torch.empty(count, dtype=dtype, device=setting.device)
    for part in made.split(1 << 28):  # a narrow type is made from float32, a part at a time
        part.copy_(torch.randn(part.shape, device=setting.device, generator=dice))
    return made


class Burst:
    """A call so many times over, until the device is done; a timing is divided by `times`.

    What takes longer than 20 ms is called once a timing.
    """

    def __init__(self, setting: Setting, call: Callable[[], object], times: int) -> None:
        self.setting, self.call, self.times, self.calls = setting, call, times, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= 2:  # the first compiles
            start = time.perf_counter()
            self.call()
            self.setting.wait()
            if self.calls == 2 and time.perf_counter() - start > 0.02:
                self.times = 1
            return
        for _ in range(self.times):
            self.call()
        self.setting.wait()


def _speeds(
    setting: Setting,
    calls: Mapping[str, Callable[[], object]],
    slow: Mapping[str, Callable[[], object]],
    nbytes: int,
    aims: Mapping[str, float],
) -> dict[str, Cell]:
    """TB/s by name; slow ones have few rounds of one call."""
    quick = {name: Burst(setting, call, BURST) for name, call in calls.items()}
    found = measure(quick, seconds=setting.seconds(0.6), most=15, least=3, warm=3)
    once = {name: Burst(setting, call, 1) for name, call in slow.items()}
    others = measure(once, seconds=setting.seconds(0.3), most=3, least=1, warm=1)

    def cell(of: Measured, name: str, burst: Burst) -> Cell:
        aim = setting.aim(aims[name]) if name in aims else None
        return of.speed(name, burst.times * nbytes, "TB/s", aim)

    return {name: cell(found, name, burst) for name, burst in quick.items()} | {
        name: cell(others, name, burst) for name, burst in once.items()
    }


def kernels(setting: Setting) -> list[Table]:
    columns: list[str] = []
    cells: list[dict[str, Cell]] = []
    row = on_device.empty_rows(1, setting.device)[0]
    for name in DTYPES:
        dtype = getattr(torch, name)
        x = values(setting, dtype)
        for title in (name, "bfloat16 after ReLU") if name == "bfloat16" else (name,):
            if title != name:
                x = torch.relu(x)
            columns.append(title)
            cells.append(_summary_speeds(setting, x, row))
        del x
    names = {
        "read": "plain read: torch's sum of the same bytes as float32",
        "naive": "six statistics in torch, one by one",
        "ours": "**summary kernel (fill_on)**",
    }
    table = Table(
        "The summary of 2 GB, TB/s",
        tuple(columns),
        tuple(
            Row(title, tuple(found[key] for found in cells), key == "ours")
            for key, title in names.items()
        ),
        ("The aim is set for 2 GB in bf16; the other columns are held against the same.",),
    )
    return [table, _launches(setting)]


def _summary_speeds(setting: Setting, x: torch.Tensor, row: torch.Tensor) -> dict[str, Cell]:
    same = x.view(torch.float32)
    wide = x if x.dtype.is_floating_point and x.element_size() > 1 else None

    def six() -> None:
        naive.six(x.to(torch.bfloat16) if wide is None else wide)

    calls: dict[str, Callable[[], object]] = {
        "read": same.sum,
        "ours": lambda: on_device.fill_on(x, row),
    }
    nbytes = x.numel() * x.element_size()
    return _speeds(setting, calls, {"naive": six}, nbytes, {"ours": SUMMARY_AIM})


def _launches(setting: Setting) -> Table:
    """Microseconds of the host a call, the device left behind."""
    x = torch.randn(128, 48 if setting.tiny else 3072, device=setting.device).to(torch.bfloat16)
    row = on_device.empty_rows(1, setting.device)[0]
    into = torch.empty_like(x)
    lost: dict[str, str] = {}
    calls: dict[str, Callable[[], object]] = {
        "x.sum(), a torch operation that makes a tensor": x.sum,
        "copy_ into a tensor that is there": lambda: into.copy_(x),
        "**fill_on**": lambda: on_device.fill_on(x, row),
    }
    bound = attempt(lambda: _lean(setting, x), lost, "**lean: the launch in a hook**")
    if bound is not None:
        parts = on_device.parts_on(setting.device, bound.room)
        addresses = parts.data_ptr(), x.data_ptr(), row.data_ptr()
        calls["**lean: the launch in a hook**"] = lambda: bound.launch(*addresses)
    rows = []
    for name, call in calls.items():
        rows.append(Row(name, (_host_time(setting, call),), name.startswith("**")))
    rows += [Row(name, (Cell(missing=text),), True) for name, text in lost.items()]
    return Table("Host time of one launch, 128 x 3072 values in bf16", ("µs",), tuple(rows))


def _lean(setting: Setting, x: torch.Tensor) -> Any:
    if not setting.cuda:
        raise RuntimeError("it needs a CUDA device")
    bound = on_device.lean(x, torch.cuda.current_stream().cuda_stream)
    if bound is None:
        raise RuntimeError("Triton cannot launch it here")
    return bound


def _host_time(setting: Setting, call: Callable[[], object]) -> Cell:
    times = 20 if setting.tiny else 300

    def burst() -> None:
        for _ in range(times):
            call()

    found = measure(
        {"host": burst}, seconds=setting.seconds(0.2), most=15, after={"host": setting.wait}
    )
    if found.timings is None or "host" in found.lost:
        return Cell(missing=found.lost.get("host", "it was not run"))
    return Cell(found.timings.median("host") / times * 1e6, unit="µs")


def differences(setting: Setting) -> list[Table]:
    columns = ("bfloat16", "float32")
    cells = []
    for name in columns:
        dtype = getattr(torch, name)
        r = values(setting, dtype)
        c = r + (values(setting, dtype, seed=1) * 0.01).to(dtype)
        left, right = r.view(torch.float32), c.view(torch.float32)

        def read(left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            left.sum(), right.sum()

        calls: dict[str, Callable[[], object]] = {
            "read": read,
            "sums": lambda r=r, c=c: tap.difference(r, c, percentiles=False),
            "all": lambda r=r, c=c: tap.difference(r, c),
        }
        if setting.cuda:
            calls["kernels"] = _difference_kernels(r, c)
        slow = {"naive": lambda r=r, c=c: naive.formulas(r, c)}
        nbytes = 2 * r.numel() * r.element_size()
        aims = {"sums": DIFFERENCE_AIM, "kernels": DIFFERENCE_AIM}
        cells.append(_speeds(setting, calls, slow, nbytes, aims))
        del r, c, left, right, read, calls, slow
    absent = Cell(missing="it needs a CUDA device")
    names = {
        "read": "plain read: torch's sum of both",
        "naive": "the metrics' formulas in torch, one by one, without percentiles",
        "kernels": "**its kernels, one difference behind another, all but percentiles**",
        "sums": "**tap.difference, all but percentiles**",
        "all": "**tap.difference, everything**",
    }
    rows = tuple(
        Row(title, tuple(found.get(key, absent) for found in cells), title.startswith("**"))
        for key, title in names.items()
    )
    note = (
        "Of tap.difference the whole call is timed, from Python to the numbers back on the host; "
        "the kernels' row, like the summary's, is the device's time alone."
    )
    return [Table("The difference of two tensors of 2 GB, TB/s of both", columns, rows, (note,))]


def _difference_kernels(r: torch.Tensor, c: torch.Tensor) -> Callable[[], object]:
    from tensortap.numerics.difference_row import tolerances
    from tensortap.numerics.triton_difference import launch

    limits = tolerances(r.dtype, c.dtype)
    return lambda: launch(r.view(-1), c.view(-1), *limits)
